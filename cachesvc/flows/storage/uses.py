"""Uses of blocks in memory, passed down to storage in batches: recency of the copy below, and what is worth writing.

A call notes the deepest block that it uses, in constant time; the rest is a background task. Storage is asked by
bisection how much of the path it has: its copy of the deepest of these blocks is as recently used. What it lacks is
wanted at its second further use, or at once where all is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial

from cachesvc.flows.context.core import Core, StoredUse
from cachesvc.flows.context.turns import Chore
from cachesvc.flows.storage.presence import note_stored
from cachesvc.flows.transfer.pending_writes import is_under_way, want
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model

MOST_USED = 1 << 16
"""Paths whose use is still to be passed down; further ones are passed over."""
PATHS_A_TURN = 4
BLOCKS_A_TURN = 128
"""Blocks of a path that are looked at in one turn, 1 us each."""
SECOND_USE = 2


def note_hit(core: Core, model: Model, row: int) -> None:
    """A hit ends at a row."""
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
    uses: list[StoredUse] = []
    for number, (key, hits) in enumerate(batch.items()):
        storage = core.storage
        if storage is None:  # the daemon ends
            return
        row = model.blocks.index.rows.get(key, NO_ROW)
        if row == NO_ROW:
            uses.append(StoredUse(key, 0))
            continue
        path = model.blocks.index.path(row)
        stored = _stored_blocks(core, model, path)
        if stored:
            deepest = path[stored - 1]
            uses.append(StoredUse(model.blocks.index.key_of(deepest), _queue_of(model, deepest), hits))
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
