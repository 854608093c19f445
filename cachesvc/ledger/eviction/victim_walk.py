"""Walk over the eviction candidates of one place, in order, as if those taken so far were dropped. Changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import itemgetter

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.orders import SPENT
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK
from cachesvc.ledger.order.class_queues import NO_SEGMENT, QueuedLeaves
from cachesvc.model.numbers.int32s import column
from cachesvc.model.words import ABSENT, READY

FEW = 8
"""Longest run whose rows are read one by one: columns cost as much as some twenty rows, and most paths that hang from a
shared prompt are short."""


class Front:
    """Filed rows, and candidates that have appeared since, lowest entry first."""

    def __init__(self, filed: Iterable[int]) -> None:
        self._filed = iter(filed)
        self._next = next(self._filed, None)
        self._exposed: list[int] = []

    @property
    def first(self) -> int | None:
        """The lowest entry."""
        if self._exposed and (self._next is None or self._exposed[0] < self._next):
            return self._exposed[0]
        return self._next

    def pop(self) -> int | None:
        """Take the lowest entry out and return it."""
        entry = self._next
        if self._exposed and (entry is None or self._exposed[0] < entry):
            return heapq.heappop(self._exposed)
        if entry is not None:
            self._next = next(self._filed, None)
        return entry

    def push(self, entry: int) -> None:
        """Add a further candidate."""
        heapq.heappush(self._exposed, entry)


class Walk:
    """Walk over candidates in the order of their ranks."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self.ledger = ledger
        self.place = place
        self.taken: set[int] = set()
        self._front = Front(place.leaves)
        self._children: dict[int, int] = {}
        self._stamps: dict[int, int] = {}
        self.spent_only = False
        self._goes_by_use = ledger.rank(1, 0, 0) == ledger.rank(1, 1, 1)

    def next(self) -> int | None:
        """The next candidate, or None."""
        row = self._next()
        return None if row is None or (self.spent_only and not self.place.is_spent(row)) else row

    def _next(self) -> int | None:
        entry = self._front.pop()
        return None if entry is None else entry & ROW_MASK

    def take(self, row: int) -> None:
        """Count ``row`` as gone from the place; its parent may become a candidate."""
        index, place = self.ledger.index, self.place
        self.taken.add(row)
        parent = index.parent[row]
        if parent == NO_ROW:
            return
        left = self._children.get(parent, place.children[parent]) - 1
        self._children[parent] = left
        stamp = max(self._stamp(row), self._stamp(parent))
        self._stamps[parent] = stamp
        if left == 0 and self._is_free(parent):
            rank = self.ledger.rank(stamp, index.hits[parent], index.depth[parent])
            if place.is_spent(parent):
                rank -= SPENT
            self._expose(rank << ROW_BITS | parent)

    def run(self, row: int, most: int) -> list[int]:
        """Up to ``most`` rows that come one after another, from ``row`` on, which has come last and can be dropped:
        each the parent of the one before, its only child anywhere, and with no copy anywhere else."""
        return self._climb(row, most, self.ledger.index.children, ABSENT)

    def backed_run(self, row: int, most: int) -> list[int]:
        """Run like ``run``, of rows that another place has whole, so that they stay in the index whatever hangs below
        them there: each is the parent of the one before, and that its only child on this place."""
        index, place = self.ledger.index, self.place
        run = self._climb(row, min(most, FEW), place.children, READY)
        if len(run) < FEW or most == FEW:
            return run
        family, least, most_there = self._family(row)
        path = column(index.last_rows(run.pop(), most - len(run)))[::-1]
        above = path[1:]
        theirs = np.asarray(family)[above]
        fits = (theirs >= least) & (theirs <= most_there) & (np.asarray(place.children)[above] == 1)
        fits &= (np.asarray(place.pins)[above] == 0) & (np.asarray(index.flights)[above] == 0)
        fits &= place.are_ready(above) & place.are_elsewhere(above)
        run += path[: 1 + (len(above) if fits.all() else int(np.argmin(fits)))].tolist()
        return list(takewhile(place.is_spent, run)) if self._goes_first(row) else run

    def _climb(self, row: int, most: int, children: Sequence[int], elsewhere: int) -> list[int]:
        """Up to ``most`` rows from ``row`` on, each the parent of the one before and, by ``children``, of no other; and
        ``elsewhere`` is the state of their copies on other places."""
        index, place = self.ledger.index, self.place
        parent, flights, pins, states = index.parent, index.flights, place.pins, place.states[place.lead]
        others = [
            each.states[each.lead] for each in index.places if each is not place and each.pools[each.lead].capacity
        ]
        column, least, most_there = self._family(row)
        goes_first, run = self._goes_first(row), [row]
        while len(run) < most:
            row = parent[row]
            if row == NO_ROW or children[row] != 1 or pins[row] or flights[row] or states[row] != READY:
                break
            if goes_first and not place.is_spent(row):
                break
            if not least <= column[row] <= most_there or max(map(itemgetter(row), others), default=0) != elsewhere:
                break
            run.append(row)
        return run

    def take_run(self, run: list[int]) -> None:
        """``take`` for each row of a ``run`` or a ``backed_run``."""
        top = run[-1]
        self._stamps[top] = max(map(self._stamp, run))
        self.taken.update(run)
        self.take(top)

    def _goes_first(self, _: int) -> bool:
        """True where a run from a row ends with the blocks that no prompt can go on behind."""
        return self.spent_only

    def _family(self, row: int) -> tuple[Sequence[int], int, int]:
        """A column and the bounds of its values for the next blocks above: none of them is younger than ``row``."""
        stamp, following = self._stamp(row), self._front.first
        is_alone = following is None or following >> ROW_BITS > self.ledger.rank(stamp, 0, 0)
        return self.ledger.index.stamp, 0, stamp if self._goes_by_use and is_alone else -1

    def _expose(self, entry: int) -> None:
        self._front.push(entry)

    def _stamp(self, row: int) -> int:
        return self._stamps.get(row, self.ledger.index.stamp[row])

    def _is_free(self, row: int) -> bool:
        place = self.place
        ready = place.states[place.lead][row] == READY
        return ready and not place.pins[row] and not self.ledger.index.flights[row]


class QueueWalk(Walk):
    """Head by head of the queues, as their policy chooses. What is chosen goes on with the block above it while that is
    free and of the same segment, and no prompt can go on behind it where none can behind what was chosen: all such
    blocks go before others."""

    def __init__(self, ledger: BlockLedger, place: Place, leaves: QueuedLeaves) -> None:
        super().__init__(ledger, place)
        self._leaves = leaves
        self._chooser = leaves.chooser
        self._now = ledger.clock.seconds
        self._heads = leaves.heads.copy()
        self._fronts: dict[int, Front] = {}
        self._above = NO_ROW
        self._segment = NO_SEGMENT
        self._took_spent = False

    def _next(self) -> int | None:
        if self._above != NO_ROW:
            row, self._above = self._above, NO_ROW
            return row
        number = self._chooser.pick(self._heads, self._now)
        if number < 0:
            return None
        front = self._front_of(number)
        entry = front.pop()
        assert entry is not None, f"queue {number} has a head and no candidate"
        self._leaves.show(self._heads, number, front.first)
        return entry & ROW_MASK

    def take(self, row: int) -> None:
        """See ``Walk``."""
        self._segment, self._took_spent = self._leaves.segments[row], self._goes_first(row)
        super().take(row)

    def _goes_first(self, row: int) -> bool:
        return self.spent_only or self.place.is_spent(row)

    def _family(self, row: int) -> tuple[Sequence[int], int, int]:
        """Rows of the same segment."""
        segments = self._leaves.segments
        return segments, segments[row], segments[row]

    def _expose(self, entry: int) -> None:
        row = entry & ROW_MASK
        segment = self._leaves.segments[row]
        if segment == self._segment and not (self._took_spent and not self.place.is_spent(row)):
            self._above = row
            return
        number = self._chooser.queue_of(segment)
        if number >= len(self._heads.segments):
            self._heads.grow(2 * number)
        front = self._front_of(number)
        front.push(entry)
        self._leaves.show(self._heads, number, front.first)

    def _front_of(self, number: int) -> Front:
        front = self._fronts.get(number)
        if front is None:
            queues = self._leaves.queues
            front = self._fronts[number] = Front(queues[number] if number < len(queues) else ())
        return front


def walk_of(ledger: BlockLedger, place: Place, *, spent_only: bool = False) -> Walk:
    """The candidates of a place, in the order of its policy. ``spent_only``: as long as no prompt can go on behind
    them, because windowed groups have no copies there; these come first."""
    leaves = place.leaves
    walk = QueueWalk(ledger, place, leaves) if isinstance(leaves, QueuedLeaves) else Walk(ledger, place)
    walk.spent_only = spent_only
    return walk
