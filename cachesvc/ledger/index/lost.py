"""Contents of a place whose memory is gone: forgotten in slices, and hidden from all flows from the moment of the loss.

The place is none of ``BlockIndex.places`` any more, so nothing copies from it, counts it or trusts it. Followers of the
journal still know of its copies, and get an event for each that goes. A row leaves the index with its last copy, unless
others hang below it: then it stays bare, so that what the host has below it is a hit again once it is recomputed.
"""

from __future__ import annotations

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.model.numbers.int32s import Column, column
from cachesvc.model.words import ABSENT, Tier

LOOKED_AT = 4096
"""Rows that are looked at in one go, some 10 us."""
LOOKS_A_TURN = 16


class LostCopies:
    """A pass over the rows of a lost place, from the last one up: mostly children before their parents."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self._ledger = ledger
        self._place = place
        self._end = len(ledger.index.keys)

    def forget_some(self, most: int) -> bool:
        """Forget up to ``most`` copies that nothing moves or holds. True when the pass is over; what is moved or held
        now is for another one."""
        for _ in range(LOOKS_A_TURN):
            if most <= 0 or not self._end:
                break
            first = max(0, self._end - LOOKED_AT)
            rows = self._idle(first, self._end)[-most:]
            self._end = int(rows[0]) if len(rows) == most else first
            most -= len(rows)
            self._forget(rows[::-1])
        return not self._end

    def _idle(self, first: int, end: int) -> Column:
        """Rows from ``first`` to ``end`` that the place has, and of which nothing moves or holds a copy there."""
        place, index = self._place, self._ledger.index
        here = np.frombuffer(place.states[place.lead], np.uint8)[first:end]
        rows = (first + np.flatnonzero(here)).astype(np.int32)
        is_busy = (column(place.pins)[rows] != 0) | (np.frombuffer(index.flights, np.uint16)[rows] != 0)
        for pins in place.window_pins.values():
            is_busy |= column(pins)[rows] != 0
        idle: Column = rows[~is_busy]
        return idle

    def _forget(self, rows: Column) -> None:
        ledger, place = self._ledger, self._place
        index, parents = ledger.index, ledger.index.parent
        is_there = np.zeros(len(rows), np.bool_)
        for each in index.told:
            if each is not place:
                for states in each.states:
                    is_there |= np.frombuffer(states, np.uint8)[rows] != ABSENT
        for group in range(len(place.states)):
            place.lose(group, rows)
        for row, stays in zip(rows.tolist(), is_there.tolist(), strict=True):
            parent, stamp = parents[row], index.stamp[row]
            ledger.let_go(place, (row,))
            if not stays:
                ledger.leave_index(row, Tier.DEVICE)
            if parent != NO_ROW:
                index.inherit(parent, stamp)


def is_empty(place: Place) -> bool:
    """True where a lost place has no copies any more, and nothing holds any there."""
    return not place.residents and not place.counts.pinned


def forget_bare(ledger: BlockLedger, most: int) -> bool:
    """Forget up to ``most`` bare rows below which nothing hangs any more, and in turn those above them. True when none
    is left."""
    index = ledger.index
    while index.childless and most > 0:
        row = index.childless.pop()
        most -= 1
        if not index.bare[row] or index.children[row]:
            continue
        if index.has_copy(row):
            index.bare[row] = 0  # it was computed again
        elif not index.is_on_lost(row):
            ledger.leave_segments((row,), (index.keys[row] or b"",))
            index.remove(row)
    return not index.childless
