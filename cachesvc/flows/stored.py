"""Choice of the host blocks to write to storage: all that come, or those that were used again.

After a restart a block is of use only with all above it, so a wanted block makes its ancestors wanted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from cachesvc.flows.core import Core, Count, next_slice
from cachesvc.ledger.change_log import STORAGE, Cause, Kind, packed
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.planner import walk_of
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import NO_PAGE, READY
from cachesvc.storage.seam import Use

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


# Storage presence hints, published to event subscribers. Never counted as hits.

FORGOTTEN_A_TURN = 256
"""Blocks, some 2 us each."""


def note_stored(model: Model, key: bytes) -> None:
    """A block of the index was written to storage, or came from there."""
    is_new, journal = key not in model.stored.written, model.blocks.journal
    model.stored.wrote(key, journal.now)
    if is_new:
        row = model.blocks.index.rows[key]
        for group in model.layout.full_groups:
            journal.note(packed(Kind.TIER_CHANGED, Cause.STORED, present=True, group=group, place=STORAGE), row)


def note_unstored(model: Model, key: bytes) -> None:
    """Withdraw a hint, and publish that. An unknown key changes nothing."""
    if model.stored.written.pop(key, None) is None:
        return
    for group in model.layout.full_groups:
        code = packed(Kind.TIER_CHANGED, Cause.UNSTORED, present=False, group=group, place=STORAGE)
        model.blocks.journal.note_gone(code, key)


def forget(core: Core, model_id: int, keys: Iterable[bytes]) -> None:
    """Storage has let go of blocks; they may be written again. What takes more than a turn goes on as a chore."""
    model = core.ledger.models.get(model_id)
    if model is not None:
        core.begin(model_id, partial(next_slice, _forgetting(model, list(keys))))


def forget_all(core: Core, model: Model) -> None:
    """Storage has let go of all that it had of a model, as ``forget``. What is written meanwhile may be forgotten too,
    and is written once more. Uses of before do not count: they would have blocks written again that an operator has
    removed a moment ago."""
    model.stored.used.clear()
    core.begin(model.id, partial(next_slice, _forgetting(model, _oldest(model.stored.written))))


def _oldest(written: OrderedDict[bytes, float]) -> Iterator[bytes]:
    """Yield the oldest key, as often as there are keys now; the caller removes each before it asks for the next."""
    for _ in range(len(written)):
        if not written:
            return
        yield next(iter(written))


def _forgetting(model: Model, keys: Iterable[bytes]) -> Iterator[None]:
    for count, key in enumerate(keys, 1):
        note_unstored(model, key)
        if count % FORGOTTEN_A_TURN == 0:
            yield


# Uses of blocks in memory, passed down to storage in batches: recency of the copy below, and what is worth writing.
#
# A call notes the deepest block that it uses, in constant time; the rest is a background task. Storage is asked by
# bisection how much of the path it has: its copy of the deepest of these blocks is as recently used. What it lacks is
# wanted at its second further use, or at once where all is kept.

MOST_USED = 1 << 16
"""Paths whose use is still to be passed down; further ones are passed over."""
PATHS_A_TURN = 4
BLOCKS_A_TURN = 128
"""Blocks of a path that are looked at in one turn, 1 us each."""
SECOND_USE = 2


def note_hit(core: Core, model: Model, row: int) -> None:
    if core.storage is not None and row != NO_ROW:
        used, key = model.stored.used, model.blocks.index.key_of(row)
        if key in used or len(used) < MOST_USED:
            used[key] = used.get(key, 0) + 1


def note_end(core: Core, model: Model, row: int) -> None:
    """A sequence ends that was sealed down to a row."""
    if core.storage is not None and row != NO_ROW and len(model.stored.used) < MOST_USED:
        model.stored.used.setdefault(model.blocks.index.key_of(row), 0)


def spread_all(core: Core) -> None:
    """Time has passed: pass uses down as a background task."""
    for model in core.ledger.models.values():
        if model.stored.used:
            slices = spread(core, model)
            core.later_once((spread, model.id), model.id, partial(next_slice, slices))


def spread(core: Core, model: Model) -> Iterator[None]:
    """Pass down what was used, turn by turn."""
    batch, model.stored.used = model.stored.used, {}
    uses: list[Use] = []
    for number, (key, hits) in enumerate(batch.items()):
        storage = core.storage
        if storage is None:  # the daemon ends
            return
        row = model.blocks.index.rows.get(key, NO_ROW)
        if row == NO_ROW:
            uses.append(Use(key))
            continue
        path = model.blocks.index.path(row)
        stored = _stored_blocks(core, model, path)
        if stored:
            deepest, chooser = path[stored - 1], model.blocks.chooser
            queue = 0 if chooser is None else chooser.queue_of(model.blocks.index.segments[deepest])
            uses.append(Use(model.blocks.index.key_of(deepest), queue, hits))
            note_stored(model, model.blocks.index.key_of(deepest))
        if storage.keeps_all or (hits and storage.keeps_used):
            yield from _want_more(core, model, key, stored, hits)
        if number % PATHS_A_TURN == PATHS_A_TURN - 1:
            yield
    if core.storage is not None and uses:
        core.storage.used(model, uses)


def _stored_blocks(core: Core, model: Model, path: array[int]) -> int:
    """Number of leading rows that storage has, by bisection."""
    assert core.storage is not None
    key_of, has = model.blocks.index.key_of, core.storage.has
    low, middle, high = 0, 1, len(path)  # most paths have nothing there: the first is asked for first
    while low < high:
        if has(model, key_of(path[middle - 1])):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) >> 1
    return low


def _want_more(core: Core, model: Model, key: bytes, first: int, hits: int) -> Iterator[None]:
    """Want blocks of a path from ``first`` on that were used often enough."""
    assert core.storage is not None
    stored, index = model.stored, model.blocks.index
    while (row := index.rows.get(key, NO_ROW)) != NO_ROW and first <= index.depth[row]:
        path = index.path(row)[first : first + BLOCKS_A_TURN]
        due = []
        for each in path:
            name = index.key_of(each)
            if is_under_way(model, name):
                continue
            if core.storage.keeps_all or hits >= SECOND_USE or name in stored.reused:
                due.append(each)
            else:
                stored.note_reuse(name)
        want(core, model, due)
        first += len(path)
        yield
