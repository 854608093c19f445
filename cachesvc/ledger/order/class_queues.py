"""Candidates for eviction in queues, where a policy tells blocks apart by the requests that used them last.

In each queue the oldest comes first. Which queue's head goes next is for the ``EvictionPolicy`` to say; the ledger does
not know why, and without such a policy nothing of this runs. It keeps the segment of each row, the queue in which a row
waits, and the heads in columns, so that one choice is a few operations on arrays of as many numbers as there are
queues.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK, LeafOrder, Rank, SortedEntries
from cachesvc.model.requests import Ended, Parts, Worth

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
NO_SEGMENT = 0
NO_RANK = (1 << 63) - 1
"""Rank of a queue without candidates."""
BEFORE_ALL = -1
"""Rank of a head that goes before those of all other queues: ranks of such leaves take more than 64 bits."""
LEAST_QUEUES = 8


class Path(Protocol):
    """The blocks of a request that comes: all, those known, those resident; by position their keys and segments."""

    blocks: int
    known: int
    resident: int

    def key(self, position: int) -> bytes:
        """Key of a block."""

    def segment(self, position: int) -> int:
        """Segment of a resident block."""


def head_rank(entry: int | None) -> int:
    """Rank of a queue whose first entry is ``entry``, as ``Heads`` has it."""
    return NO_RANK if entry is None else max(entry >> ROW_BITS, BEFORE_ALL)


class Heads:
    """The first candidate of each queue: its rank (``NO_RANK``: none; -1: before all others), segment, depth, and since
    when it ages."""

    def __init__(self, queues: int) -> None:
        self.ranks: Ints = np.full(queues, NO_RANK, np.int64)
        self.since: Floats = np.zeros(queues)
        self.depths: Ints = np.zeros(queues, np.int64)
        self.segments = [NO_SEGMENT] * queues

    def grow(self, queues: int) -> None:
        """Make room for ``queues`` queues."""
        more = Heads(queues - len(self.segments))
        self.ranks = np.concatenate([self.ranks, more.ranks])
        self.since = np.concatenate([self.since, more.since])
        self.depths = np.concatenate([self.depths, more.depths])
        self.segments += more.segments

    def copy(self) -> Heads:
        """Copy of the heads in their current state."""
        out = Heads(0)
        out.ranks, out.since, out.depths = self.ranks.copy(), self.since.copy(), self.depths.copy()
        out.segments = self.segments[:]
        return out


class EvictionPolicy(Protocol):
    """A policy that follows requests: what happens to their blocks, and whose go next."""

    on_moved: Callable[[int], None]

    def govern(self, *, decides: bool, weighs_cost: bool) -> None:
        """Set how it chooses: by what it has learned, or (not ``decides``) the oldest; it goes on learning."""

    def arrived(self, path: Path, now: float, waited: float) -> Parts:
        """A request has come, ``waited`` seconds ago; the resident blocks of its path are in its segments from now
        on."""

    def lesson(self) -> Callable[[], bool] | None:
        """Callable to be called until it says that it is over, while no call is served; None: nothing is new."""

    def grew(self, parts: Parts, new_from: int, blocks: int) -> None:
        """The request has computed its first ``blocks`` blocks; those ``new_from`` on have just come to the index."""

    def taken(self, parts: Parts, owners: Ints, bottom: int) -> None:
        """The request has taken over blocks of its path, the deepest before ``bottom``, of which ``owners`` were the
        segments, deepest first."""

    def takes(self, segment: int, other: int, position: int) -> bool:
        """A running request has computed a block that is in the ``other`` segment: it is in its own ``segment`` from
        now on; False where it stays."""

    def left(self, segment: int, bottom: int, keys: Sequence[bytes]) -> None:
        """The deepest blocks of the segment, which ends before ``bottom``, have left the index; deepest first."""

    def ended(self, parts: Parts, blocks: int, key: bytes, ended: Ended, now: float) -> None:
        """The request holds nothing any more; the last of its ``blocks`` sealed blocks has that key."""

    def queue_of(self, segment: int) -> int:
        """The queue in which candidates of the segment wait."""

    def since(self, segment: int) -> float:
        """Time from which the age of the segment counts, seconds."""

    def let_go(self, segment: int, blocks: int, now: float, *, is_host: bool) -> None:
        """Blocks of the segment leave the host, or a device."""

    def is_worth_saving(self, segment: int, share: float) -> bool:
        """True where blocks like those of the segment are used from the host ``share`` times as often as the mean."""

    def worth(self, segment: int, now: float) -> Worth | None:
        """Known worth of blocks of the segment; None for slot 0."""

    def pick(self, heads: Heads, now: float) -> int:
        """The queue whose head goes next; -1 where there is none."""

    def choose(self, queues: Sequence[int], ages: Sequence[float]) -> int:
        """Index of the queue whose oldest block goes next from storage. ``ages``: of the oldest block of each,
        seconds. From any thread."""


class QueuedLeaves(LeafOrder):
    """See ``LeafOrder``; ``heads`` are those of its queues. ``segments`` and ``depth`` are the index's columns."""

    def __init__(
        self,
        may_go: Callable[[int], bool],
        rank: Callable[[int], Rank],
        chooser: EvictionPolicy,
        segments: array[int],
        depth: array[int],
    ) -> None:
        super().__init__(may_go, rank)
        self.chooser = chooser
        self.heads = Heads(LEAST_QUEUES)
        self.segments = segments
        self._depth = depth
        self._queues: list[SortedEntries] = []
        self._first: list[int] = []
        self._queue_of_row = array("H")
        self._candidate = array("i")  # by segment, one of its candidates: on a closed place there is no other

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""
        super().grow(rows)
        self._queue_of_row.frombytes(bytes(2 * (rows - len(self._queue_of_row))))

    def adopt(self, order: LeafOrder) -> None:
        """Take over its candidates, of the same ranks, into the queue of blocks without a segment."""
        entries = SortedEntries()
        self._filed, self._count = order.filed, len(order)
        entries.take_over(order)
        self._queue_of_row.frombytes(bytes(2 * len(self._filed)))
        self._queues.append(entries)
        first = entries.first
        self._first.append(NO_RANK << ROW_BITS if first is None else first)
        self.show(self.heads, 0, first)

    @property
    def queues(self) -> list[SortedEntries]:
        """Candidates by queue. Not to be written."""
        return self._queues

    def __iter__(self) -> Iterator[int]:
        """Entries in no order. Nothing may be changed meanwhile."""
        for queue in self._queues:
            yield from queue

    @property
    def buckets(self) -> list[list[int]]:
        """Entries in the parts in which they are kept. Not to be written."""
        return [bucket for queue in self._queues for bucket in queue.buckets]

    def requeue(self, segment: int) -> None:
        """The segment waits in another queue from now on."""
        if segment < len(self._candidate):
            row = self._candidate[segment]
            if self.filed[row] and self.segments[row] == segment and self.remove(row):
                self.update(row)

    def _file(self, entry: int) -> None:
        row = entry & ROW_MASK
        segment = self.segments[row]
        number = self.chooser.queue_of(segment)
        while number >= len(self._queues):
            self._queues.append(SortedEntries())
            self._first.append(NO_RANK << ROW_BITS)
            if len(self._queues) > len(self.heads.segments):
                self.heads.grow(2 * len(self.heads.segments))
        if segment >= len(self._candidate):
            self._candidate.frombytes(bytes(4 * max(segment + 1 - len(self._candidate), len(self._candidate))))
        self._candidate[segment] = row
        self._queue_of_row[row] = number
        self._queues[number].insert(entry)
        if entry < self._first[number]:
            self._put_first(number, entry)

    def _file_all(self, entries: list[int]) -> None:
        for entry in entries:
            self._file(entry)

    def _unfile_all(self, entries: list[int]) -> None:
        for entry in entries:
            self._unfile(entry)

    def _unfile(self, entry: int) -> None:
        number = self._queue_of_row[entry & ROW_MASK]
        queue = self._queues[number]
        queue.delete(entry)
        if entry == self._first[number]:
            first = queue.first
            if first is None:
                self._first[number] = NO_RANK << ROW_BITS
                self.heads.ranks[number] = NO_RANK
            else:
                self._put_first(number, first)

    def _put_first(self, number: int, entry: int) -> None:
        self._first[number] = entry
        self.show(self.heads, number, entry)

    def show(self, heads: Heads, number: int, entry: int | None) -> None:
        """``entry`` is the first of a queue, among ``heads``; None: it has none."""
        heads.ranks[number] = head_rank(entry)
        if entry is None:
            return
        row = entry & ROW_MASK
        segment = self.segments[row]
        heads.since[number] = self.chooser.since(segment)
        heads.segments[number] = segment
        heads.depths[number] = self._depth[row]
