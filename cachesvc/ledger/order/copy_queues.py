"""Idle copies of windows and recurrent states in queues, where a policy compares them with blocks of the same pool.

In each queue the oldest position comes first. A queue has the positions of one class of the policy, by the distance to
the copies above, in octaves. The distance is looked up when a copy comes to the head of its queue, and not before: when
copies above are dropped it only grows, so that the queue tells the least that a copy is worth.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK, LeafOrder, Rank, SortedEntries

NO_QUEUE = 0
"""Queue of the class that no position has."""
OCTAVES = 16
"""Queues of a class: distances to the copies above of 1, 2 to 3, 4 to 7 blocks and so on."""


class PositionRule(Protocol):
    """A policy that learns at which positions requests continue: what happens there, and what copies are worth."""

    classes: array[int]
    since: array[float]

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""

    def opened(self, row: int, depth: int, now: float) -> None:
        """A row has its first copy. No-op for a position."""

    def continued(self, row: int, depth: int, now: float, *, goes_on: bool) -> None:
        """A request continues at a position; ``goes_on``: it has blocks behind it."""

    def ended(self, row: int, depth: int, now: float) -> None:
        """A request has ended, and this is its last position."""

    def left(self, row: int, key: bytes, now: float) -> None:
        """The row of ``key`` leaves the index."""

    def missed(self, key: bytes, now: float) -> bool:
        """A request would continue at the position of ``key``, if that is one that has left; True where it is."""

    def request(self, now: float) -> None:
        """Count a request."""

    def lesson(self) -> Callable[[], bool] | None:
        """Callable to be called until it returns True, while no call is served; None: nothing is new."""

    @property
    def has_learned(self) -> bool:
        """True once densities are known."""

    def is_middle(self, number: int) -> bool:
        """True for the classes of positions where no request has ended or continued."""

    def is_end(self, number: int) -> bool:
        """True for the classes of ends, whose copies go with their blocks."""

    def density(self, number: int, age: float) -> float:
        """Requests a second that are expected to continue at a position of a class and age."""

    def densities(self, number: int, newest: float, oldest: float) -> Iterator[tuple[float, float, float]]:
        """Parts of the ages between two: from, to, and the ``density`` of positions of a class there."""

    def end_density(self, depth: int, age: float) -> float:
        """``density`` of a request's end of that depth and age."""

    def copy_worth(self, density: float, saved: int, cost: float) -> float:
        """Worth of copies without which ``saved`` blocks are computed again; ``cost``: their memory, in blocks."""

    def branch_worth(self, requests: Sequence[tuple[float, int]], memory: float) -> float:
        """Worth of blocks and copies that go together: of each copy, requests a second and the blocks they save."""

    def fallback(self, saved: int, below: int, cost: float, capacity: int) -> float:
        """Worth of copies once the ``below`` blocks behind them have gone, as a share of that of the end there."""


class CopyQueues(LeafOrder):
    """Candidates of one group; see the module. ``class_of(row)``: class of the position that a row's copy serves.
    ``serves``: of a window's rows the position at its end (-1: each row its own). ``on_grow``: called with the rows.
    ``is_middle(class)``: True where no request has ended or continued."""

    def __init__(
        self,
        may_go: Callable[[int], bool],
        rank: Callable[[int], Rank],
        class_of: Callable[[int], int],
        serves: array[int],
        on_grow: Callable[[int], None],
        is_middle: Callable[[int], bool],
    ) -> None:
        super().__init__(may_go, self._rank_when_filed)
        self._rank_now = rank
        self._filed_rank = array("q")
        self._class_of = class_of
        self._serves = serves
        self._on_grow = on_grow
        self._is_middle = is_middle
        self._queue_of_row = array("H")
        self.queues: dict[int, SortedEntries] = {}

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""
        super().grow(rows)
        self._queue_of_row.frombytes(bytes(2 * (rows - len(self._queue_of_row))))
        self._filed_rank.frombytes(bytes(8 * (rows - len(self._filed_rank))))
        self._serves.frombytes(b"\xff" * (4 * (rows - len(self._serves))))
        self._on_grow(rows)

    def serve(self, rows: Iterable[int], position: int) -> None:
        """The copies of ``rows``, none of them a candidate, are those that a position needs."""
        for row in rows:
            self._serves[row] = position

    def __iter__(self) -> Iterator[int]:
        """Entries, the oldest position first. Nothing may be changed meanwhile."""
        return heapq.merge(*self.queues.values())

    def is_of_middle(self, row: int) -> bool:
        """True where a row's copy is of a position where no request has ended or continued."""
        return self._is_middle(self._class_of(row))

    def middles(self) -> Iterator[int]:
        """Entries of positions where no request has ended or continued, the oldest first."""
        return heapq.merge(*(queue for number, queue in self.queues.items() if self._is_middle(number // OCTAVES)))

    @property
    def buckets(self) -> list[list[int]]:
        """Entries in the parts in which they are kept. Not to be written."""
        return [bucket for queue in self.queues.values() for bucket in queue.buckets]

    def put_farther(self, row: int, distance: int) -> None:
        """Move a candidate to the queue of its ``distance`` to the copies above."""
        if self.filed[row]:
            entry = self.rank(row) << ROW_BITS | row
            self._unfile(entry)
            self._file_at(entry, queue_number(self._class_of(row), distance))

    def _rank_when_filed(self, row: int) -> Rank:
        """Rank that a candidate was filed under: that of its position may have changed since, as when its row left."""
        if not self._queue_of_row[row]:
            self._filed_rank[row] = self._rank_now(row)
        return self._filed_rank[row]

    def _file(self, entry: int) -> None:
        self._file_at(entry, queue_number(self._class_of(entry & ROW_MASK), 1))

    def _file_at(self, entry: int, number: int) -> None:
        queue = self.queues.get(number)
        if queue is None:
            queue = self.queues[number] = SortedEntries()
        queue.insert(entry)
        self._queue_of_row[entry & ROW_MASK] = number

    def _unfile(self, entry: int) -> None:
        self.queues[self._queue_of_row[entry & ROW_MASK]].delete(entry)
        self._queue_of_row[entry & ROW_MASK] = NO_QUEUE

    def _file_all(self, entries: list[int]) -> None:
        for entry in entries:
            self._file(entry)

    def _unfile_all(self, entries: list[int]) -> None:
        for entry in entries:
            self._unfile(entry)


def queue_number(number: int, distance: int) -> int:
    """The queue of a class and a distance."""
    return number * OCTAVES + min(distance.bit_length(), OCTAVES) - 1


def least_distance(queue: int) -> int:
    """Least distance of copies in a queue."""
    return 1 << queue % OCTAVES
