"""Choice of the host blocks to write to storage: all that come, or those that were used again.

After a restart a block is of use only with all above it, so a wanted block makes its ancestors wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.ledger.eviction.victim_walk import walk_of
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model

MOST_WANTED = 1 << 16
"""Blocks of a model that wait to be written; more are passed over."""
ABOVE_AT_ONCE = 256
"""Number of ancestors to look at for one block."""
LAST_LOOK = 16
"""Candidates for eviction that are looked at when the host evicts."""


def came_to_host(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Note host copies that have come, and are whole."""
    if core.storage is None:
        return
    awaited = _awaited(model, rows)
    if core.storage.keeps_all:
        want(core, model, rows)
    elif awaited:
        want(core, model, awaited)


def did_not_come(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Forget wanted writes of host copies that do not come."""
    if given_up := len(_awaited(model, rows)):
        core.count(Count.STORAGE_NOT_KEPT_BLOCKS, given_up)


def _awaited(model: Model, rows: Iterable[int]) -> list[int]:
    """Rows that came to the host to be written; the write no longer waits for them."""
    coming, keys = model.stored.coming, model.blocks.index.keys
    if not coming:
        return []
    awaited = [row for row in rows if keys[row] in coming]
    coming.difference_update(key for row in awaited if (key := keys[row]) is not None)
    return awaited


def was_used(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Note blocks that were used again: loaded from the host."""
    if core.storage is not None and core.storage.keeps_used:
        want(core, model, rows)


def is_about_to_leave(core: Core, model: Model) -> None:
    """The host evicts: of those that go next, what was used again is wanted."""
    if core.storage is None or not core.storage.keeps_used:
        return
    host, hits = model.blocks.host, model.blocks.index.hits
    walk = walk_of(model.blocks, host)
    rows = [row for _ in range(LAST_LOOK) if (row := walk.next()) is not None]
    want(core, model, [row for row in rows if core.storage.keeps_all or host.used[row] or hits[row] > 1])


def want(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Have blocks written, with those above them, once there is time."""
    stored, index = model.stored, model.blocks.index
    had = bool(stored.wanted)
    for tip in rows:
        if len(stored.wanted) >= MOST_WANTED:  # before the walk: of storage that is slow this is the rule
            break
        path: list[bytes] = []
        row = tip
        while row != NO_ROW and len(path) < ABOVE_AT_ONCE:
            key = index.keys[row]
            assert key is not None, "rows are of blocks"
            if key in stored.written or key in stored.wanted or key in stored.keeping:
                break
            path.append(key)
            row = index.parent[row]
        stored.wanted |= dict.fromkeys(reversed(path))
    if stored.wanted and not had and core.on_wanted is not None:
        core.on_wanted(model)
