"""Candidates for eviction in the order of their ranks: exactly the rows that may go now, each once.

Nothing is lazy and nothing is ever rebuilt, so that no single call pays for all candidates. Entries lie sorted in
buckets of a few hundred; an insertion or a removal bisects twice and shifts two short lists, and a planner of evictions
reads on in order and changes nothing.

Invariant, held between any two calls of the ledger: a row is filed when, and only when, it may go, under the rank that
its columns give now. So a change of a column that ranks are made of takes the row out first (``BlockIndex``), and a
change of whether a row may go calls ``update`` or ``remove`` afterwards (``BlockLedger``).
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

import numpy as np

from cachesvc.ledger.change_log import Moment
from cachesvc.model.answers import Ended, Parts, Path, Worth
from cachesvc.model.errors import LedgerBroken

Rank = int
"""One number; the lowest goes first. Between equal ranks the lower row goes first."""

ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
BUCKET = 512


class SortedEntries:
    """``rank << ROW_BITS | row`` of rows, lowest first."""

    def __init__(self) -> None:
        self._buckets: list[list[int]] = []
        self._bounds: list[int] = []  # no entry of a bucket is above its bound, and all of the next one are

    def __iter__(self) -> Iterator[int]:
        """Entries, lowest first. Nothing may be changed meanwhile."""
        for bucket in self._buckets:
            yield from bucket

    @property
    def buckets(self) -> list[list[int]]:
        """Entries in the parts in which they are kept. Not to be written."""
        return self._buckets

    @property
    def first(self) -> int | None:
        return self._buckets[0][0] if self._buckets else None

    def entries_after(self, entry: int | None) -> list[int]:
        """A copy of some entries above ``entry`` (None: of the first), lowest first; empty when there are none."""
        first = 0 if entry is None else bisect_left(self._bounds, entry)
        for bucket in self._buckets[first : first + 2]:
            if found := bucket[0 if entry is None else bisect_right(bucket, entry) :]:
                return found
        return []

    @property
    def last(self) -> int | None:
        return self._buckets[-1][-1] if self._buckets else None

    def beyond(self, entry: int) -> Iterator[int]:
        """Entries above ``entry``, lowest first. Nothing may be changed meanwhile."""
        first = bisect_left(self._bounds, entry)
        for at in range(first, len(self._buckets)):
            bucket = self._buckets[at]
            yield from islice(bucket, bisect_right(bucket, entry) if at == first else 0, None)

    def take_over(self, other: SortedEntries) -> None:
        """Take over all entries of another list, which is of no use afterwards."""
        self._buckets, self._bounds = other._buckets, other._bounds

    def insert(self, entry: int) -> None:
        """Put an entry in, which is not there yet."""
        bounds, buckets = self._bounds, self._buckets
        at = bisect_left(bounds, entry)
        if at == len(bounds):  # above all others
            if not buckets or len(buckets[-1]) >= BUCKET:
                buckets.append([entry])
                bounds.append(entry)
            else:
                buckets[-1].append(entry)
                bounds[-1] = entry
            return
        bucket = buckets[at]
        insort(bucket, entry)
        if len(bucket) > BUCKET:
            upper = bucket[BUCKET // 2 :]
            del bucket[BUCKET // 2 :]
            buckets.insert(at + 1, upper)
            bounds.insert(at, bucket[-1])

    def delete(self, entry: int) -> None:
        """Take an entry out. Raises LedgerBroken where it is not there."""
        at = bisect_left(self._bounds, entry)
        bucket = self._buckets[at] if at < len(self._buckets) else []
        place = bisect_left(bucket, entry)
        if place == len(bucket) or bucket[place] != entry:
            raise LedgerBroken(f"row {entry & ROW_MASK} is not filed under its rank {entry >> ROW_BITS}")
        del bucket[place]
        if len(bucket) < BUCKET // 4:
            self._join(at)

    def insert_all(self, entries: list[int]) -> None:
        """``insert`` for rising entries. Where they lie in a row, as a prompt's windows do, one look is enough."""
        if len(entries) < 2 or not self._insert_run(entries):
            for entry in entries:
                self.insert(entry)

    def delete_all(self, entries: list[int]) -> None:
        """``delete`` for rising entries, a bucket's at a time where they lie in a row. See ``insert_all``."""
        done = 0
        while done < len(entries):
            at = bisect_left(self._bounds, entries[done])
            bucket = self._buckets[at] if at < len(self._buckets) else []
            place = bisect_left(bucket, entries[done])
            run = min(len(bucket) - place, len(entries) - done)
            if run < 2 or bucket[place : place + run] != entries[done : done + run]:
                self.delete(entries[done])
                done += 1
                continue
            del bucket[place : place + run]
            done += run
            if len(bucket) < BUCKET // 4:
                self._join(at)

    def _insert_run(self, entries: list[int]) -> bool:
        """Insert rising entries where all go above the others, or between the same two of them and into their bucket;
        False where they do not."""
        bounds, buckets = self._bounds, self._buckets
        at = bisect_left(bounds, entries[0])
        if len(entries) > BUCKET:
            return False
        if at == len(bounds):
            if not buckets or len(buckets[-1]) + len(entries) > BUCKET:
                buckets.append(entries)
                bounds.append(entries[-1])
            else:
                buckets[-1] += entries
                bounds[-1] = entries[-1]
            return True
        bucket = buckets[at]
        place = bisect_left(bucket, entries[0])
        following = bucket[place] if place < len(bucket) else bounds[at]
        if len(bucket) + len(entries) > BUCKET or entries[-1] > following:
            return False
        bucket[place:place] = entries
        return True

    def _join(self, at: int) -> None:
        """Join a bucket that has become small with a neighbour that is small too; drop it when it is empty."""
        buckets, bounds = self._buckets, self._bounds
        if not buckets[at]:
            del buckets[at], bounds[at]
            return
        for left in (at - 1, at):
            if 0 <= left < len(buckets) - 1 and len(buckets[left]) + len(buckets[left + 1]) <= BUCKET // 2:
                buckets[left] += buckets[left + 1]
                bounds[left] = bounds[left + 1]
                del buckets[left + 1], bounds[left + 1]
                return


class LeafOrder(SortedEntries):
    """The candidates of a place. ``may_go(row)`` and ``rank(row)`` read the ledger's columns."""

    def __init__(self, may_go: Callable[[int], bool], rank: Callable[[int], Rank]) -> None:
        super().__init__()
        self.may_go = may_go
        self.rank = rank
        self._filed = bytearray()
        self._count = 0
        self._later: list[int] | None = None

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: int) -> bool:
        return bool(self._filed[row])

    @property
    def filed(self) -> bytearray:
        """1 for each row that is a candidate. Not to be written."""
        return self._filed

    def grow(self, rows: int) -> None:
        self._filed.extend(bytes(rows - len(self._filed)))

    def update(self, row: int) -> None:
        """Make ``row`` a candidate if it may go, and none if it may not. While it is filed its rank never changes."""
        if not self.may_go(row):
            self.remove(row)
        elif self._later is not None:
            self._later.append(row)
        elif not self._filed[row]:
            self._filed[row] = 1
            self._count += 1
            self._file(self.rank(row) << ROW_BITS | row)

    @contextmanager
    def filing_later(self) -> Iterator[None]:
        """While many leave, leaf first: file new candidates at the end, if they are candidates still."""
        self._later = []
        try:
            yield
        finally:
            later, self._later = self._later, None
            for row in later:
                self.update(row)

    def remove(self, row: int) -> bool:
        """Make ``row`` no candidate; True if it was one. Call it before its rank changes."""
        if not self._filed[row]:
            return False
        self._unfile(self.rank(row) << ROW_BITS | row)
        self._filed[row] = 0
        self._count -= 1
        return True

    def remove_all(self, rows: Iterable[int]) -> None:
        """``remove`` for each of the distinct ``rows``."""
        filed, rank = self._filed, self.rank
        entries = sorted([rank(row) << ROW_BITS | row for row in rows if filed[row]])
        self._unfile_all(entries)
        for entry in entries:
            filed[entry & ROW_MASK] = 0
        self._count -= len(entries)

    def add_all(self, rows: Collection[int]) -> None:
        """``update`` for each of the distinct ``rows``, of which none is a candidate."""
        if self._later is not None:
            self._later.extend(rows)
            return
        filed, may_go, rank = self._filed, self.may_go, self.rank
        entries = sorted([rank(row) << ROW_BITS | row for row in rows if may_go(row)])
        for entry in entries:
            filed[entry & ROW_MASK] = 1
        self._count += len(entries)
        self._file_all(entries)

    def _file(self, entry: int) -> None:
        self.insert(entry)

    def _file_all(self, entries: list[int]) -> None:
        self.insert_all(entries)

    def _unfile_all(self, entries: list[int]) -> None:
        self.delete_all(entries)

    def _unfile(self, entry: int) -> None:
        self.delete(entry)


class NoLeaves(LeafOrder):
    """Order of a place whose memory is gone: nothing is ever a candidate there."""

    def __init__(self) -> None:
        super().__init__(lambda _: False, lambda _: 0)

    def __contains__(self, row: int) -> bool:
        return False

    def update(self, row: int) -> None:
        """None may go."""

    def remove(self, row: int) -> bool:  # noqa: ARG002 - as of any order
        return False

    def remove_all(self, rows: Iterable[int]) -> None:
        """None is one."""

    def add_all(self, rows: Collection[int]) -> None:
        """None may go."""


NO_LEAVES = NoLeaves()


# Candidates for eviction in queues, where a policy tells blocks apart by the requests that used them last.
#
# In each queue the oldest comes first. Which queue's head goes next is for the ``EvictionPolicy`` to say; the ledger
# does not know why, and without such a policy nothing of this runs. It keeps the segment of each row, the queue in
# which a row waits, and the heads in columns, so that one choice is a few operations on arrays of as many numbers as
# there are queues.

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
NO_SEGMENT = 0
NO_RANK = (1 << 63) - 1
"""Rank of a queue without candidates."""
BEFORE_ALL = -1
"""Rank of a head that goes before those of all other queues: ranks of such leaves take more than 64 bits."""
LEAST_QUEUES = 8


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


# Idle copies of windows and recurrent states in queues, where a policy compares them with blocks of the same pool.
#
# In each queue the oldest position comes first. A queue has the positions of one class of the policy, by the distance
# to the copies above, in octaves. The distance is looked up when a copy comes to the head of its queue, and not before:
# when copies above are dropped it only grows, so that the queue tells the least that a copy is worth.

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


# Converts access sequence numbers to ages in seconds.
#
# The service marks the time now and then; between two marks the time is not known better than that. The ledger decides
# nothing by it: operators see it.

MARKS_KEPT = 4096
"""Marks a second apart cover the last hour to the second; older ones are thinned out, so that days fit too."""


class Ages:
    """Times at which access numbers were reached."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stamps: list[int] = []
        self._times: list[float] = []

    def mark(self, stamp: int, now: float) -> None:
        """Note that ``stamp`` was the last access number at ``now`` (seconds)."""
        self.now = now
        if self._stamps and self._stamps[-1] == stamp:
            return
        self._stamps.append(stamp)
        self._times.append(now)
        if len(self._stamps) > MARKS_KEPT:
            half = MARKS_KEPT // 2
            del self._stamps[1:half:2], self._times[1:half:2]

    def age(self, stamp: int) -> float:
        """Seconds since the access, as of the last mark; one since then is 0 old."""
        at = bisect_left(self._stamps, stamp)
        return self.now - self._times[at] if at < len(self._times) else 0.0

    def age_of_use(self, stamp: int) -> float | None:
        """``age``; None for 0, under which a block counts as never used."""
        return self.age(stamp) if stamp else None


class Clock:
    """The daemon's time; or, while all engines of a model report another one, theirs: that of a trace that they replay,
    as fast as they can. It never goes back while it is reported. An engine cannot report it beside others that use the
    daemon's time, so that no engine makes others' blocks look old.

    ``is_own``: requests use the daemon's time."""

    __slots__ = ("_ahead", "_moment", "_told", "is_own")

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._told: float | None = None
        self.is_own = False
        self._ahead = 0.0

    @property
    def is_told(self) -> bool:
        return self._told is not None

    @property
    def seconds(self) -> float:
        return self._moment.seconds + self._ahead if self._told is None else self._told

    def tell(self, seconds: float) -> bool:
        """Set the time for its reporters; False where other engines use the daemon's time."""
        if self.is_own:
            return False
        self._told = seconds if self._told is None else max(self._told, seconds)
        return True

    def begin_anew(self) -> None:
        """No request uses this clock any more; the next one may set it."""
        self.is_own = False

    def keep_own(self) -> None:
        """A request uses the daemon's time: from now on all do."""
        if not self.is_own:
            self.is_own = True
            self._ahead = 0.0 if self._told is None else max(0.0, self._told - self._moment.seconds)
            self._told = None
