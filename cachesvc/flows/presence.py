"""Storage presence hints, published to event subscribers. Never counted as hits."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from cachesvc.flows.core import Chore, Core, begin
from cachesvc.flows.pending_writes import is_under_way, want
from cachesvc.ledger.change_log import STORAGE, Cause, Kind, packed
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.storage.seam import Use

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
        begin(core.chores, model_id, partial(_forget_some, model, iter(list(keys))))


def forget_all(core: Core, model: Model) -> None:
    """Storage has let go of all that it had of a model, as ``forget``. What is written meanwhile may be forgotten too,
    and is written once more. Uses of before do not count: they would have blocks written again that an operator has
    removed a moment ago."""
    model.stored.used.clear()
    begin(core.chores, model.id, partial(_forget_some, model, _oldest(model.stored.written)))


def _oldest(written: OrderedDict[bytes, float]) -> Iterator[bytes]:
    """Yield the oldest key, as often as there are keys now; the caller removes each before it asks for the next."""
    for _ in range(len(written)):
        if not written:
            return
        yield next(iter(written))


def _forget_some(model: Model, keys: Iterator[bytes]) -> bool:
    """A turn of it; True when none is left."""
    count = 0
    for key in islice(keys, FORGOTTEN_A_TURN):
        note_unstored(model, key)
        count += 1
    return count < FORGOTTEN_A_TURN


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
        if model.stored.used and not model.stored.is_spreading:
            model.stored.is_spreading = True
            turns = spread(core, model)
            core.chores.append(Chore(model.id, partial(_go_on, model, turns), gives_back=False))


def _go_on(model: Model, turns: Iterator[None]) -> bool:
    model.stored.is_spreading = False  # first: a defect in what follows ends it, and not for good
    is_over = next(turns, turns) is turns
    model.stored.is_spreading = not is_over
    return is_over


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
            deepest = path[stored - 1]
            uses.append(Use(model.blocks.index.key_of(deepest), _queue_of(model, deepest), hits))
            note_stored(model, model.blocks.index.key_of(deepest))
        if storage.keeps_all or (hits and storage.keeps_used):
            yield from _want_more(core, model, key, stored, hits)
        if number % PATHS_A_TURN == PATHS_A_TURN - 1:
            yield
    if core.storage is not None and uses:
        core.storage.used(model, uses)


def _queue_of(model: Model, row: int) -> int:
    chooser = model.blocks.chooser
    return 0 if chooser is None else chooser.queue_of(model.blocks.index.segments[row])


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
