"""One page-id space: which pages are free, private, sealed, in flight or quarantined. Hands out runs.

A page is in exactly one state at any moment; ``counts`` adds up to the pages that were added. Some of the free pages
may be reserved (``reservations.py``): they are free, and nobody takes them before the reservation gives them back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.int32s import Column
from cachesvc.model.words import NO_PAGE, PageState, runs_of

FREE, PRIVATE, SEALED, IN_FLIGHT, QUARANTINED = PageState

LEGAL_PAGE_MOVES = frozenset(
    {
        (PRIVATE, SEALED),  # published
        (PRIVATE, QUARANTINED),  # its lease was lost while a process may still write
        (PRIVATE, IN_FLIGHT),  # a preempted sequence's page goes out
        (IN_FLIGHT, PRIVATE),
        (IN_FLIGHT, SEALED),  # a load or write-back arrived
        (IN_FLIGHT, QUARANTINED),  # it did not come, but its bytes may still
        (SEALED, IN_FLIGHT),  # a write-back that frees this page began
        (PRIVATE, FREE),
        (SEALED, FREE),
        (IN_FLIGHT, FREE),
        (QUARANTINED, FREE),
    }
)
_BUCKETS = 40
AT_ONCE = 32
"""From so many pages on, columns are moved whole instead of page by page: a call of NumPy costs as much as some ten."""
FEW = 8
"""Up to here a run is numbered page by page."""
_ONE = np.uint32(1)
_MAY_BECOME = np.array([[(source, target) in LEGAL_PAGE_MOVES for source in PageState] for target in PageState])


class PagePool:
    """``count`` pages of one group on one place, from ``first`` on among the ``pages`` of a slab where other groups
    have the rest. The first ``withheld`` of them are the engines' own and never usable: ``first`` is the one behind
    them, and ``capacity`` counts those from there on. Pages become usable through ``add``."""

    def __init__(self, name: str, count: int, withheld: int = 0, *, first: int = 0, pages: int = 0) -> None:
        pages = max(pages, first + count)
        self.name = name
        self.pages = pages
        self.first = first + withheld
        self.withheld = withheld
        self.capacity = count - withheld
        self.states = bytearray(pages)
        self.generations = array("I", bytes(4 * pages))
        self.counts = [0] * len(PageState)
        self.usable = 0
        self.reserved = 0
        self.stuck = array("i")  # in quarantine for good: copies to them never ended
        self._added = bytearray(pages)
        self._state_column = np.frombuffer(self.states, np.uint8)
        self._generation_column = np.frombuffer(self.generations, np.uint32)
        self._added_column = np.frombuffer(self._added, np.bool_)
        self._count_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._buckets: list[dict[int, None]] = [{} for _ in range(_BUCKETS)]
        self._filled = 0  # a bit for each bucket that has a run: to look at all takes longer than to take pages

    @property
    def free(self) -> int:
        """Pages that nobody holds, reserved ones too."""
        return self.counts[FREE]

    @property
    def unreserved(self) -> int:
        """Pages that can be taken now."""
        return self.counts[FREE] - self.reserved

    def add(self, first: int, count: int) -> None:
        """Make pages usable (their memory has arrived). Raises LedgerBroken for a page that is there already."""
        last = first + count
        is_new = self._added.find(1, first, last) < 0
        if count < 1 or first < self.first or last > self.first + self.capacity or not is_new:
            raise LedgerBroken(f"{self.name}: pages {first}+{count} are not new pages of this pool")
        self._added[first : first + count] = b"\x01" * count
        self.usable += count
        self.counts[FREE] += count
        self._give_back(first, count)

    def take(self, count: int, state: PageState) -> array[int]:
        """``count`` free pages in as few runs as can be had cheaply. Raises LedgerBroken where fewer are unreserved:
        the caller has seen to it."""
        if count > self.unreserved:
            raise LedgerBroken(
                f"{self.name}: {count} pages wanted, {self.counts[FREE]} free, {self.reserved} of them reserved"
            )
        pages = array("i")
        while len(pages) < count:
            start, length = self._best_run(count - len(pages))
            used = min(length, count - len(pages))
            if used == length:
                self._remove_run(start, length)
            else:
                self._shorten_run(start, length, used)
            self.states[start : start + used] = bytes((state,)) * used
            if used < FEW:
                pages.extend(range(start, start + used))
                for page in range(start, start + used):
                    self.generations[page] = (self.generations[page] + 1) & 0xFFFFFFFF
            else:
                pages.frombytes(np.arange(start, start + used, dtype=np.int32).tobytes())
                generations = self._generation_column[start : start + used]
                generations += _ONE
        self.counts[FREE] -= count
        self.counts[state] += count
        return pages

    def move(self, page: int, target: PageState) -> None:
        """Change one page's state. Raises IllegalMove against the table."""
        source = self.states[page]
        if (source, target) not in LEGAL_PAGE_MOVES:
            raise IllegalMove(f"{self.name} page {page}", PageState(source), target)
        self.shift(page, PageState(source), target)

    def shift(self, page: int, source: PageState, target: PageState) -> None:
        """``move`` for a caller with a table of its own, which says what the page is now. Raises IllegalMove."""
        if page < 0 or self.states[page] != source or not self._added[page]:
            raise IllegalMove(f"{self.name} page {page}", source, target)
        self.states[page] = target
        self.counts[source] -= 1
        self.counts[target] += 1
        if target == FREE:
            self._give_back(page, 1)

    def shift_all(self, pages: Sequence[int], source: PageState, target: PageState) -> None:
        """``shift`` for each of distinct pages, none of which becomes free. Raises IllegalMove before anything has
        moved."""
        states, before, after = self.states, int(source), int(target)
        if pages and (min(pages) < 0 or {states[page] for page in pages} != {before}):
            page = next(each for each in pages if each < 0 or states[each] != before)
            raise IllegalMove(f"{self.name} page {page}", source, target)
        for page in pages:
            states[page] = after
        self.counts[before] -= len(pages)
        self.counts[after] += len(pages)

    def move_all(self, pages: Iterable[int], target: PageState) -> None:
        """``move`` for each page; of those that become free whole runs come back at a time. Raises IllegalMove before
        anything has moved."""
        pages = pages if isinstance(pages, array) else sorted(pages)
        if len(pages) < AT_ONCE:
            self._move_few(sorted(pages), target)
            return
        column = np.sort(np.asarray(pages, np.int32))
        gaps = np.diff(column)
        if column[0] < 0 or column[-1] >= self.pages or not gaps.all():
            raise IllegalMove(
                f"{self.name}: {len(pages)} pages", "pages that are not distinct pages of the pool", target
            )
        sources = self._state_column[column]
        legal = _MAY_BECOME[target][sources] & self._added_column[column]
        if not legal.all():
            page = int(column[int(np.argmin(legal))])
            raise IllegalMove(f"{self.name} page {page}", PageState(self.states[page]), target)
        for source, count in enumerate(np.bincount(sources, minlength=len(PageState)).tolist()):
            self.counts[source] -= count
        self.counts[target] += len(pages)
        self._state_column[column] = target
        if target == FREE:
            starts = [0, *(np.flatnonzero(gaps != 1) + 1).tolist()]
            firsts = column[starts].tolist()
            for first, start, end in zip(firsts, starts, [*starts[1:], len(pages)], strict=True):
                self._give_back(first, end - start)

    def _move_few(self, pages: list[int], target: PageState) -> None:
        states, added = self.states, self._added
        before = -1
        for page in pages:
            if page <= before or (states[page], target) not in LEGAL_PAGE_MOVES or not added[page]:
                raise IllegalMove(f"{self.name} page {page}", PageState(states[page]), target)
            before = page
        for page in pages:
            self.counts[states[page]] -= 1
            states[page] = target
        self.counts[target] += len(pages)
        for run in runs_of(pages) if target == FREE else ():
            self._give_back(run.first, run.count)

    def keep_back(self, pages: Sequence[int]) -> None:
        """Bytes may still come to pages in flight, and nobody can say until when. Raises IllegalMove."""
        self.move_all(pages, QUARANTINED)
        self.stuck.extend(pages)

    def are_private(self, pages: Column) -> npt.NDArray[np.bool_]:
        """Which of the pages are private; NO_PAGE is not."""
        found: npt.NDArray[np.bool_] = (self._state_column[pages] == PRIVATE) & (pages != NO_PAGE)
        return found

    def owns(self, page: int, generation: int) -> bool:
        """True when ``page`` is private and still in the generation that was granted."""
        return 0 <= page < self.pages and self.states[page] == PRIVATE and self.generations[page] == generation

    def problems(self) -> list[str]:
        """What does not add up; empty when the pool is whole."""
        out: list[str] = []
        free_in_runs = sum(self._count_at.values())
        if free_in_runs != self.counts[FREE]:
            out.append(f"{self.name}: runs hold {free_in_runs} pages, {self.counts[FREE]} are counted free")
        for start, count in self._count_at.items():
            if any(self.states[start : start + count]) or not all(self._added[start : start + count]):
                out.append(f"{self.name}: run {start}+{count} holds pages that are not free")
            if start + count in self._count_at or self._start_before.get(start + count) != start:
                out.append(f"{self.name}: run {start}+{count} is not joined with its neighbour")
        if self._filled != sum(1 << bucket for bucket, runs in enumerate(self._buckets) if runs):
            out.append(f"{self.name}: of some lengths it is not known whether there are runs")
        if not 0 <= self.reserved <= self.counts[FREE]:
            out.append(f"{self.name}: {self.reserved} pages are reserved, {self.counts[FREE]} are free")
        if any(self._added[: self.first]) or any(self._added[self.first + self.capacity :]):
            out.append(f"{self.name}: pages are usable that are others', or the engines' own")
        if sum(self.counts) != self.usable:
            out.append(f"{self.name}: counts {self.counts} do not add up to {self.usable}")
        for state in PageState:
            seen = self.states.count(state)
            expected = self.counts[state] + (self.pages - self.usable if state == FREE else 0)
            if seen != expected:
                out.append(f"{self.name}: {seen} pages are {state.name}, {expected} are counted")
        return out

    def free_runs(self) -> tuple[list[int], list[int]]:
        """First pages and lengths of all runs of free pages."""
        return list(self._count_at), list(self._count_at.values())

    @property
    def added(self) -> bytearray:
        """1 for each page that has come. Not to be written."""
        return self._added

    def _give_back(self, start: int, count: int) -> None:
        after = self._count_at.get(start + count)
        if after is not None:
            self._remove_run(start + count, after)
            count += after
        before = self._start_before.get(start)
        if before is not None:
            length = self._count_at[before]
            self._remove_run(before, length)
            start, count = before, count + length
        self._insert_run(start, count)

    def _insert_run(self, start: int, count: int) -> None:
        bucket = count.bit_length()
        self._count_at[start] = count
        self._start_before[start + count] = start
        self._buckets[bucket][start] = None
        self._filled |= 1 << bucket

    def _remove_run(self, start: int, count: int) -> None:
        bucket = count.bit_length()
        runs = self._buckets[bucket]
        del self._count_at[start]
        del self._start_before[start + count]
        del runs[start]
        if not runs:
            self._filled &= ~(1 << bucket)

    def _shorten_run(self, start: int, count: int, used: int) -> None:
        """The first ``used`` pages of a run are taken. As if the run were removed and its rest inserted."""
        before, after = count.bit_length(), (count - used).bit_length()
        del self._count_at[start], self._buckets[before][start]
        start += used
        count -= used
        self._count_at[start] = count
        self._start_before[start + count] = start
        self._buckets[after][start] = None
        if before != after:
            self._filled |= 1 << after
            if not self._buckets[before]:
                self._filled &= ~(1 << before)

    def _best_run(self, wanted: int) -> tuple[int, int]:
        own = wanted.bit_length()
        if self._buckets[own]:
            start = self._newest(self._buckets[own])
            if self._count_at[start] >= wanted:
                return start, self._count_at[start]
        if not self._filled:
            raise LedgerBroken(f"{self.name}: no free run")
        longer = self._filled >> own + 1
        least = own + (longer & -longer).bit_length() if longer else self._filled.bit_length() - 1
        start = self._newest(self._buckets[least])
        return start, self._count_at[start]

    @staticmethod
    def _newest(bucket: dict[int, None]) -> int:
        """The run that came last: to find the first one, a dict would pass over all that have left before it."""
        start, _ = bucket.popitem()
        bucket[start] = None
        return start
