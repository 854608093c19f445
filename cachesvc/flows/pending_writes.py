"""Choice of the host blocks to write to storage: all that come, or those that were used again.

After a restart a block is of use only with all above it, so a wanted block makes its ancestors wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from cachesvc.flows.core import Core, Count
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.planner import walk_of
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import NO_PAGE, READY

MOST_WANTED = 1 << 16
"""Blocks of a model that wait to be written; more are passed over."""
ABOVE_AT_ONCE = 256
"""Number of ancestors to look at for one block."""
LAST_LOOK = 24
"""Candidates for eviction that are looked at when the host evicts, or is about to."""
NEARLY_FULL = 8
"""The host is about to evict when less than this part of it is free."""


def came_to_host(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Note host copies that have come, and are whole."""
    if core.storage is None:
        return
    host, stored = model.blocks.host, model.stored
    names = map(model.blocks.index.key_of, _root_first(model, _awaited(model, rows)))
    stored.ready.extend(name for name in names if not is_under_way(model, name))
    if host.state_groups:
        want_states(model, [row for row in rows if model.blocks.index.keys[row] in stored.written])
    if stored.ready and core.on_wanted is not None:
        core.on_wanted(model)
    if core.storage.keeps_all:
        want(core, model, rows)
    elif host.pools[host.lead].free * NEARLY_FULL < host.pools[host.lead].capacity:
        is_about_to_leave(core, model)


def want_states(model: Model, rows: Iterable[int], written: Sequence[int] = ()) -> None:
    """Have the states of blocks written that storage has, but for those that are ``written``: pages by group."""
    host, stored = model.blocks.host, model.stored
    for row in rows:
        lacks = (not written or written[group] == NO_PAGE for group in host.state_groups)
        has = (row != NO_ROW and host.states[group][row] == READY for group in host.state_groups)
        if any(here and lacking for here, lacking in zip(has, lacks, strict=True)):
            key = model.blocks.index.key_of(row)
            if key not in stored.keeping and key not in stored.wanted:
                stored.ready.extend((key,))


def did_not_come(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Forget wanted writes of host copies that do not come."""
    given_up = _awaited(model, rows)
    model.stored.staged.difference_update(model.blocks.index.key_of(row) for row in given_up)
    core.count(Count.STORAGE_NOT_KEPT_BLOCKS, len(given_up))


def _awaited(model: Model, rows: Iterable[int]) -> list[int]:
    """Rows that came to the host to be written; the write no longer waits for them."""
    coming, staged, keys = model.stored.coming, model.stored.staged, model.blocks.index.keys
    if not coming and not staged:
        return []
    awaited = [row for row in rows if keys[row] in coming or keys[row] in staged]
    for row in awaited:
        key = keys[row] or b""
        coming.discard(key)
        if key in model.stored.written:
            model.stored.written_staged(key)
    return awaited


def _root_first(model: Model, rows: list[int]) -> dict[int, None]:
    """Rows, each after those above it: evictions bring a path's end first, and its end alone is of no use."""
    parent, left, out = model.blocks.index.parent, set(rows), dict[int, None]()
    for row in rows:
        path: list[int] = []
        above = row
        while above in left:
            left.discard(above)
            path.append(above)
            above = parent[above]
        out |= dict.fromkeys(reversed(path))
    return out


def was_used(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Note blocks that were used again: loaded from the host."""
    if core.storage is not None and core.storage.keeps_used:
        want(core, model, rows)


def is_about_to_leave(core: Core, model: Model) -> None:
    """The host evicts: of those that go next, what was used again is wanted."""
    if core.storage is None or not core.storage.keeps_used:
        return
    walk = walk_of(model.blocks, model.blocks.host)
    rows = [row for _ in range(LAST_LOOK) if (row := walk.next()) is not None]
    want(core, model, [row for row in rows if core.storage.keeps_all or was_used_again(model, row)])


def was_used_again(model: Model, row: int) -> bool:
    """True where a block was used after it was computed: a hit ended at it, went through it, or loaded it."""
    index = model.blocks.index
    return bool(model.blocks.host.used[row]) or index.hits[row] > 1 or index.keys[row] in model.stored.reused


def want(core: Core, model: Model, rows: Iterable[int]) -> None:
    """Have blocks written, with those above them, once there is time."""
    stored = model.stored
    had = bool(stored.wanted)
    for tip in rows:
        if len(stored.wanted) >= MOST_WANTED:  # before the walk: of storage that is slow this is the rule
            break
        stored.wanted.extend(_lacking(model, tip))
    if stored.wanted and not had and core.on_wanted is not None:
        core.on_wanted(model)


def _lacking(model: Model, tip: int) -> list[bytes]:
    """Keys from the first block above ``tip`` on that is neither written nor wanted, root first. Of a long path the
    beginning: its end alone is of no use."""
    index, path, row = model.blocks.index, list[bytes](), tip
    while row != NO_ROW and len(path) < ABOVE_AT_ONCE:
        key = index.key_of(row)
        if is_under_way(model, key):
            break
        path.append(key)
        row = index.parent[row]
    else:
        if row != NO_ROW:
            rows = index.path(tip)
            first = bisect_left(rows, True, key=lambda each: not is_under_way(model, index.key_of(each)))
            return [index.key_of(each) for each in rows[first : first + ABOVE_AT_ONCE]]
    return path[::-1]


def is_under_way(model: Model, key: bytes) -> bool:
    """True where a block is written, or is to be."""
    stored = model.stored
    return key in stored.written or key in stored.wanted or key in stored.keeping or key in stored.ready
