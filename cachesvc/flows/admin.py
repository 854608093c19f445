"""What operators ask: look-ups that change nothing, and the few that do (drain, evict). Listings have limits."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from cachesvc.flows.core import Core
from cachesvc.flows.transfers import remember_dropped
from cachesvc.ledger.journal import Cause
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.reuse import Miss
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import CopyState, PageState, Tier

MAX_LISTED = 4096


class PoolLine(NamedTuple):
    """One page-id space: counts by state."""

    model: int
    place: str
    group: str
    capacity: int
    counts: dict[PageState, int]
    page_bytes: int


class CopyLine(NamedTuple):
    """One copy of a block."""

    place: str
    group: str
    state: str
    page: int


class BlockLine(NamedTuple):
    """One block of the index."""

    key: bytes
    parent_key: bytes
    position: int
    children: int
    pins: int
    hits: int
    stamp: int
    copies: tuple[CopyLine, ...]


class TreeLine(NamedTuple):
    """One node of a subtree, in depth-first order; ``descendants`` counts the blocks below it."""

    key: bytes
    position: int
    depth: int
    children: int
    tiers: str
    descendants: int


def pools(core: Core) -> list[PoolLine]:
    """Every pool of every model."""
    out: list[PoolLine] = []
    for model in core.ledger.models.values():
        for place in model.blocks.index.places:
            for group, pool in enumerate(place.pools):
                counts = {state: pool.counts[state] for state in PageState}
                name = model.layout.groups[group].name
                out.append(PoolLine(model.id, place.name, name, pool.capacity, counts, model.layout.page_bytes(group)))
    return out


def blocks(core: Core, model_id: int, keys: bytes, limit: int) -> tuple[list[BlockLine], bool]:
    """The blocks of packed ``keys`` (those resident), or the most recently used; and whether more are there."""
    model = core.ledger.model(model_id)
    index = model.blocks.index
    limit = min(limit or 64, MAX_LISTED)
    if len(keys) % KEY_BYTES:
        raise InvalidRequest(f"keys has {len(keys)} bytes, which is no multiple of {KEY_BYTES}")
    if keys:
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        rows = [index.rows[key] for key in wanted if key in index.rows]
    else:
        rows = heapq.nlargest(limit + 1, index.rows.values(), key=lambda row: (index.stamp[row], index.depth[row]))
    return [block_line(model, row) for row in rows[:limit]], len(rows) > limit


def block_line(model: Model, row: int) -> BlockLine:
    """One block as operators see it."""
    index = model.blocks.index
    copies = tuple(
        CopyLine(place.name, model.layout.groups[group].name, CopyState(states[row]).name, place.pages[group][row])
        for place in index.places
        for group, states in enumerate(place.states)
        if states[row]
    )
    parent = index.parent[row]
    return BlockLine(
        index.keys[row] or b"",
        (index.keys[parent] or b"") if parent != NO_ROW else b"",
        index.depth[row],
        index.children[row],
        sum(place.pins[row] for place in index.places),
        index.hits[row],
        index.stamp[row],
        copies,
    )


def tree(core: Core, model_id: int, key: bytes, depth: int, limit: int) -> tuple[list[TreeLine], bool]:
    """The index below ``key`` (or what begins so; empty: the root), the biggest subtrees first; and if all is told.

    Walks the whole index once. Raises NotFound for a key that is not resident, InvalidRequest for several.
    """
    model = core.ledger.model(model_id)
    index = model.blocks.index
    top = NO_ROW
    if key:
        top = _row_of(model, key)
    children: dict[int, list[int]] = {}
    below: dict[int, int] = {}
    for row in sorted(index.rows.values(), key=lambda row: -index.depth[row]):
        parent = index.parent[row]
        children.setdefault(parent, []).append(row)
        below[parent] = below.get(parent, 0) + below.get(row, 0) + 1
    limit = min(limit or 256, MAX_LISTED)
    deepest = depth or 8
    out: list[TreeLine] = []
    stack = [(top, 0)] if top != NO_ROW else [(row, 0) for row in _largest_last(children.get(NO_ROW, []), below)]
    truncated = False
    while stack:
        row, level = stack.pop()
        if len(out) >= limit:
            return out, True
        out.append(_node(model, row, level, below.get(row, 0)))
        if level + 1 < deepest:
            stack.extend((child, level + 1) for child in _largest_last(children.get(row, []), below))
        else:
            truncated = truncated or bool(children.get(row))
    return out, truncated


def _row_of(model: Model, prefix: bytes) -> int:
    """The row of the one resident key that begins with ``prefix``."""
    rows = model.blocks.index.rows
    if prefix in rows:
        return rows[prefix]
    found = [row for key, row in rows.items() if key.startswith(prefix)]
    if not found:
        raise NotFound("block", prefix.hex(), "it is not resident, or belongs to another model")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} resident keys begin with {prefix.hex()}; give more of it")
    return found[0]


def _largest_last(rows: list[int], below: dict[int, int]) -> list[int]:
    return sorted(rows, key=lambda row: below.get(row, 0))


def _node(model: Model, row: int, level: int, descendants: int) -> TreeLine:
    index = model.blocks.index
    tiers = "+".join(
        (Tier.HOST if place is model.blocks.host else Tier.DEVICE).value
        for place in reversed(index.places)
        if place.states[place.lead][row]
    )
    return TreeLine(index.keys[row] or b"", index.depth[row], level, index.children[row], tiers, descendants)


def drain(core: Core) -> int:
    """Open nothing new from now on; returns how many leases are still live."""
    core.ledger.draining = True
    return sum(lease.state is LeaseState.LIVE for lease in core.ledger.leases.values())


def evict(core: Core, model_id: int, tier: str, count: int) -> int:
    """Drop up to ``count`` (0: all) unpinned blocks of a model from a tier, in eviction order, without saving them."""
    model = core.ledger.model(model_id)
    ledger = model.blocks
    if tier == Tier.HOST.value:
        places = [ledger.host]
    elif tier == Tier.DEVICE.value:
        places = [replica.place for replica in model.replicas]
    else:
        raise InvalidRequest(f"tier {tier!r} is neither 'device' nor 'host'")
    evicted = 0
    for place in places:
        wanted = (count - evicted) if count else len(ledger.index)
        if wanted <= 0:
            break
        if place is ledger.host:
            plan, _ = model.evictor.plan_host(wanted)
        else:
            plan, _ = model.evictor.plan_device(place, wanted, to_host=False)
            plan.drains.clear()
            plan.host_drops.clear()
        plan.cause = Cause.OPERATOR
        model.evictor.carry_out(plan)
        evicted += len(plan.drops)
    remember_dropped(core, model, Miss.OPERATOR)
    return evicted
