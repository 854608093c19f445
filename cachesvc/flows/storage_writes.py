"""Keep: write wanted host blocks to storage, in the background and within its budget.

Nothing is held up for it: a block that is evicted before its turn came is not written.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np

from cachesvc.flows.core import Core, Count
from cachesvc.flows.loads import back_up
from cachesvc.flows.stored import note_stored, want, want_states, was_used_again
from cachesvc.flows.transfers import unstage
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.storage_state import Keep
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import READY
from cachesvc.storage.seam import Outcome

KEPT_A_TURN = 8
"""Blocks whose writing begins in one turn, some 15 us each."""
STAGED_AT_ONCE = 64
"""Blocks that are on the host only to be written: what else lies there gives room for no more."""
MOST_COMING = 1 << 16
"""Keys that are written once they come to the host; more are passed over."""


def pump(core: Core, model: Model) -> bool:
    """Begin to write what is wanted, a turn's worth; True when no more can be begun now."""
    storage, stored, host = core.storage, model.stored, model.blocks.host
    if storage is None:  # the daemon ends
        return True
    room, size_bytes = storage.room(), _block_bytes(model)
    unsaved = array("i")
    for key in [*islice(stored.ready, KEPT_A_TURN), *islice(stored.wanted, KEPT_A_TURN)]:
        row = model.blocks.index.rows.get(key, NO_ROW)
        is_here = row != NO_ROW and host.states[host.lead][row] == READY
        if row != NO_ROW and (size_bytes > room or not (is_here or len(stored.staged) + len(unsaved) < STAGED_AT_ONCE)):
            _save(core, model, unsaved)
            return True
        stored.take_wanted(key)
        if row == NO_ROW:  # evicted before its turn came
            stored.staged.discard(key)
            core.count(Count.STORAGE_NOT_KEPT_BLOCKS)
        elif is_here:
            _begin(core, model, key, row)
            room -= size_bytes
        else:
            unsaved.append(row)
    _save(core, model, unsaved)
    return not stored.waiting


def _begin(core: Core, model: Model, key: bytes, row: int) -> None:
    assert core.storage is not None
    keep = Keep(model.blocks, row, states_alone=key in model.stored.written and bool(model.layout.state_groups))
    model.stored.keeping[key] = keep
    index = model.blocks.index
    keep.out = core.storage.keep(model, key, keep.pages, index.key_of(index.parent[row]))
    if not keep.out:
        _end(core, model, key, keep)


def _save(core: Core, model: Model, rows: array[int]) -> None:
    """Back up what is to be written and is on a device alone. It is written when it has come to the host: by this, or
    in time by its eviction from the device."""
    if not rows:
        return
    stored, keys = model.stored, model.blocks.index.keys
    if len(stored.coming) < MOST_COMING:
        stored.coming.update(key for row in rows if (key := keys[row]) is not None)
    for replica in model.replicas:
        if (ticket := back_up(core, model, replica, rows)) is not None:
            stored.staged.update(key for row in ticket.rows if (key := keys[row]) is not None)


def kept(core: Core, model_id: int, key: bytes, outcomes: Sequence[Outcome | None]) -> bool:
    """Objects of a block that is being written have ended, or their waits have. True where that was the last one: the
    ledger alone holds its host pages again."""
    model = core.ledger.models.get(model_id)
    keep = None if model is None else model.stored.keeping.get(key)
    if model is None or keep is None:
        return False
    for outcome in outcomes:
        keep.out -= outcome is not Outcome.LATE
        keep.is_good &= outcome is Outcome.OK
    if keep.out:
        return False
    _end(core, model, key, keep)
    if model.stored.waiting:
        begin_soon(core, model)
    return True


def _end(core: Core, model: Model, key: bytes, keep: Keep) -> None:
    stored = model.stored
    del stored.keeping[key]
    keep.let_go()
    core.count(Count.STORAGE_KEPT_BLOCKS if keep.is_good else Count.STORAGE_NOT_KEPT_BLOCKS)
    if keep.is_good:
        note_stored(model, key)
        want_states(model, [model.blocks.index.rows.get(key, NO_ROW)], keep.pages)
    stored.written_staged(key)
    unstage(model, key)


def pump_all(core: Core) -> None:
    """Time has passed: what waits for its share of the budget may be written."""
    for model in core.ledger.models.values():
        if model.stored.waiting:
            begin_soon(core, model)


def begin_soon(core: Core, model: Model) -> None:
    """Write what is wanted as a background task."""
    core.later(model.id, partial(pump, core, model))


def _block_bytes(model: Model) -> int:
    layout = model.layout
    return sum(layout.page_bytes(group) * layout.host_ranks(group) for group in range(len(layout.groups)))


def begin_flush(core: Core, capacity_bytes: int) -> int:
    """Want the blocks worth keeping, in the order of their worth: the number of uses, then the last one. No more than
    storage can hold (0: any). Returns how many blocks wait to be written."""
    if core.storage is None or not core.storage.keeps_used:
        return waiting(core)
    left = capacity_bytes or 1 << 62
    for model in core.ledger.models.values():
        layout = model.layout
        block_bytes = sum(layout.page_bytes(g) * layout.host_ranks(g) for g in layout.full_groups)
        for row in _best(core, model):
            before = len(model.stored.wanted)
            want(core, model, [row])
            left -= (len(model.stored.wanted) - before) * block_bytes
            if left <= 0:
                return waiting(core)
    return waiting(core)


def go_on(core: Core) -> int:
    """Time has passed: write on. What could not be saved to the host, or not be written, is tried again. Returns how
    many blocks are left."""
    for model in core.ledger.models.values():
        stored = model.stored
        if stored.coming and not (stored.waiting or stored.keeping or stored.staged):
            coming, stored.coming = stored.coming, set()
            rows = [row for key in coming if (row := model.blocks.index.rows.get(key, NO_ROW)) != NO_ROW]
            want(core, model, rows)
        if stored.waiting:
            begin_soon(core, model)
    return waiting(core)


def waiting(core: Core) -> int:
    """Number of blocks that are to be written, or are being."""
    stored = [model.stored for model in core.ledger.models.values()]
    return sum(len({*each.wanted, *each.ready, *each.keeping, *each.coming, *each.staged}) for each in stored)


def _best(core: Core, model: Model) -> list[int]:
    assert core.storage is not None
    index = model.blocks.index
    rows = np.array(list(index.rows.values()), np.int64)
    order = np.lexsort((np.array(index.stamp)[rows], np.array(index.hits)[rows]))[::-1]
    best: list[int] = rows[order].tolist()
    return best if core.storage.keeps_all else [row for row in best if was_used_again(model, row)]
