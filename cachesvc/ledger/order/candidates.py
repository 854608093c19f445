"""Candidates for eviction in the order of their ranks: exactly the rows that may go now, each once.

Nothing is lazy and nothing is ever rebuilt, so that no single call pays for all candidates. Entries lie sorted in
buckets of a few hundred; an insertion or a removal bisects twice and shifts two short lists, and a planner of evictions
reads on in order and changes nothing.

Invariant, held between any two calls of the ledger: a row is filed when, and only when, it may go, under the rank that
its columns give now. So a change of a column that ranks are made of takes the row out first (``BlockIndex``), and a
change of whether a row may go calls ``update`` or ``remove`` afterwards (``BlockLedger``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

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
        """The lowest entry."""
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
        """The highest entry."""
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
        """Make room for ``rows`` rows."""
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
        """None is one."""
        return False

    def remove_all(self, rows: Iterable[int]) -> None:
        """None is one."""

    def add_all(self, rows: Collection[int]) -> None:
        """None may go."""


NO_LEAVES = NoLeaves()
