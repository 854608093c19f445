"""One page-id space: the state of each page (free, private, sealed, in flight or quarantined). Hands out runs.

Which pages are free is a column of bytes. A search for many pages looks at columns as a whole, so that pages that lie
one by one cost no more than runs. Where runs were last seen is kept as a hint, which may be stale.

A page is in exactly one state at any moment; ``counts`` adds up to the pages that were added. Some of the free pages
may be reserved (``Reservation``): they are free, but not granted before the reservation gives them back.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.numbers import AGE_SECONDS, Column, Histogram, array_of
from cachesvc.model.words import NO_PAGE, CopyState, PageState

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
AT_ONCE = 32
"""Number of pages from which on columns are looked at whole instead of page by page: a call of NumPy costs as much as
some ten."""
MOVED_AT_ONCE = 160
"""The same for moves: a page costs 0.35 us, and the calls that sort and check a column 50 us together."""
MOST_HINTS = 1024
HINTS_LOOKED_AT = 8
"""Possible beginnings of a run of many pages, and the number of them to try before all columns are searched."""
BACKWARDS = 4096
"""Largest distance before a hint at which its run may begin."""
FEW_RUNS = 16
PAGES_A_PAGE, LEAST_PART, MOST_PART = 16, 1 << 12, 1 << 16
"""Pages to search in one go: this number for each wanted page, within these bounds."""
_ONE = np.uint32(1)
_MAY_BECOME = np.array([[(source, target) in LEGAL_PAGE_MOVES for source in PageState] for target in PageState])


class PagePool:
    """``pages`` pages of one group on one place, or of several groups (``shared_pool.py``). The first ``withheld`` of
    them are the engines' own and never usable: ``first`` is the one behind them, and ``capacity`` counts those from
    there on. Pages become usable through ``add``."""

    def __init__(self, name: str, pages: int, withheld: int = 0) -> None:
        self.name = name
        self.pages = pages
        self.first = withheld
        self.withheld = withheld
        self.capacity = pages - withheld
        self.states = bytearray(pages)
        self.generations = array("I", bytes(4 * pages))
        self.counts = [0] * len(PageState)
        self.usable = 0
        self.reserved = 0
        self.stuck = array("i")  # permanently quarantined: their copies never completed
        self._added = bytearray(pages)
        self._state_column = np.frombuffer(self.states, np.uint8)
        self._generation_column = np.frombuffer(self.generations, np.uint32)
        self._added_column = np.frombuffer(self._added, np.bool_)
        self._free = bytearray(pages)
        self._free_column = np.frombuffer(self._free, np.bool_)
        self._hints: deque[int] = deque(maxlen=MOST_HINTS)  # free pages when they were noted, the newest last
        self._part = 0  # where pages were last looked for

    @property
    def free(self) -> int:
        return self.counts[FREE]

    @property
    def unreserved(self) -> int:
        return self.counts[FREE] - self.reserved

    @property
    def own_counts(self) -> list[int]:
        return self.counts

    def add(self, first: int, count: int) -> None:
        """Make pages usable (their memory has arrived). Raises LedgerBroken for a page that is there already."""
        last = first + count
        is_new = self._added.find(1, first, last) < 0
        if count < 1 or first < self.first or last > self.first + self.capacity or not is_new:
            raise LedgerBroken(f"{self.name}: pages {first}+{count} are not new pages of this pool")
        self._added[first : first + count] = b"\x01" * count
        self.usable += count
        self.counts[FREE] += count
        self._free[first:last] = b"\x01" * count
        self._hints.append(first)

    def take(self, count: int, state: PageState) -> array[int]:
        """``count`` free pages in as few runs as can be had cheaply. Raises LedgerBroken where fewer are unreserved:
        the caller has seen to it."""
        if count > self.unreserved:
            raise LedgerBroken(
                f"{self.name}: {count} pages wanted, {self.counts[FREE]} free, {self.reserved} of them reserved"
            )
        pages = self._take_few(count, state) if count < AT_ONCE else self._take_many(count, state)
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
            self._free[page] = 1
            self._hints.append(page)

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
        if len(pages) < MOVED_AT_ONCE:
            self._move_few(sorted(pages), target)
            return
        column = self._rising(np.asarray(pages, np.int32))
        if column is None:
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
            self._free_column[column] = True
            starts = np.flatnonzero(np.append(True, np.diff(column) != 1))
            longest = int(np.argmax(np.diff(starts, append=len(column))))
            self._hints.extend(column[[*starts[-HINTS_LOOKED_AT:], starts[longest]]].tolist())

    def _rising(self, pages: Column) -> Column | None:
        """Pages in their order; None where they are not distinct pages of the pool."""
        if int(pages.min()) < 0 or int(pages.max()) >= self.pages:
            return None
        if (pages[1:] > pages[:-1]).all():  # as searches find them
            return pages
        if len(pages) * PAGES_A_PAGE < self.pages:
            rising = np.sort(pages)
            return rising if np.diff(rising).all() else None
        named = np.zeros(self.pages, np.bool_)  # a sort takes three times as long
        named[pages] = True
        rising = np.flatnonzero(named).astype(np.int32)
        return rising if len(rising) == len(pages) else None

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
        if target == FREE:
            for page in pages:
                self._free[page] = 1
            self._hints.extend(pages)

    def keep_back(self, pages: Sequence[int]) -> None:
        """Quarantine pages in flight to which bytes may still come at any time. Raises IllegalMove."""
        self.move_all(pages, QUARANTINED)
        self.stuck.extend(pages)

    def are_private(self, pages: Column) -> npt.NDArray[np.bool_]:
        """Mask of the private pages; NO_PAGE is not private."""
        found: npt.NDArray[np.bool_] = (self._state_column[pages] == PRIVATE) & (pages != NO_PAGE)
        return found

    def owns(self, page: int, generation: int) -> bool:
        """True when ``page`` is private and still in the generation that was granted."""
        return 0 <= page < self.pages and self.states[page] == PRIVATE and self.generations[page] == generation

    def problems(self) -> list[str]:
        """Inconsistencies; empty when the pool is whole."""
        out: list[str] = []
        found = self._free_column & (self._state_column == FREE) & self._added_column
        if self._free.count(1) != self.counts[FREE] or int(found.sum()) != self.counts[FREE]:
            out.append(
                f"{self.name}: {self._free.count(1)} pages can be taken, {int(found.sum())} of them free pages; "
                f"{self.counts[FREE]} are counted free"
            )
        if not 0 <= self.reserved <= self.counts[FREE]:
            out.append(f"{self.name}: {self.reserved} pages are reserved, {self.counts[FREE]} are free")
        if any(self._added[: self.first]):
            out.append(f"{self.name}: pages are usable that are the engines' own")
        if sum(self.counts) != self.usable:
            out.append(f"{self.name}: counts {self.counts} do not add up to {self.usable}")
        for state in PageState:
            seen = self.states.count(state)
            expected = self.counts[state] + (self.pages - self.usable if state == FREE else 0)
            if seen != expected:
                out.append(f"{self.name}: {seen} pages are {state.name}, {expected} are counted")
        return out

    def free_runs(self) -> tuple[Column, Column]:
        """First pages and lengths of all runs of free pages."""
        return _runs_in(self._free_column)

    @property
    def added(self) -> bytearray:
        """Column with 1 for each page that was added. Read-only."""
        return self._added

    def _take_few(self, count: int, state: PageState) -> array[int]:
        free, states, generations = self._free, self.states, self.generations
        pages = array("i")
        while len(pages) < count:
            start = self._newest_run()
            end = free.find(0, start, start + count - len(pages))
            if end < 0:
                end = min(start + count - len(pages), self.pages)
            for page in range(start, end):
                free[page], states[page] = 0, state
                generations[page] = (generations[page] + 1) & 0xFFFFFFFF
            pages.extend(range(start, end))
            if end < self.pages and free[end]:
                self._hints.append(end)
        return pages

    def _take_many(self, count: int, state: PageState) -> array[int]:
        start = self._long_run(count)
        found = self._search(count) if start is None else np.arange(start, start + count, dtype=np.int32)
        for taken in _parts_of(found) if start is None else (slice(start, start + count),):
            self._free_column[taken] = False
            self._state_column[taken] = state
            self._generation_column[taken] += _ONE
        end = int(found[-1]) + 1
        if end < self.pages and self._free[end]:
            self._hints.append(end)
        return array_of(found)

    def _newest_run(self) -> int:
        """Beginning of a run that was freed recently. There is one."""
        hints, free = self._hints, self._free
        while hints:
            page = hints.pop()
            if free[page]:
                return self._run_before(page)
        page = free.find(1, self._part)
        if page < 0:
            page = free.find(1)
        if page < 0:
            raise LedgerBroken(f"{self.name}: no free page is found")
        self._part = page
        return page

    def _run_before(self, page: int) -> int:
        """The first page of the run that ``page`` is in, as far as that is looked for."""
        least = max(0, page - BACKWARDS)
        return max(least, self._free.rfind(0, least, page) + 1)

    def _long_run(self, count: int) -> int | None:
        """The first of ``count`` pages of one run that a hint leads to."""
        hints, free = self._hints, self._free
        for _ in range(min(len(hints), HINTS_LOOKED_AT)):
            page = hints.pop()
            if not free[page]:
                continue
            start = self._run_before(page)
            if start + count <= self.pages and free.find(0, page, start + count) < 0:
                return start
            hints.appendleft(page)  # good enough for few
        return None

    def _search(self, count: int) -> Column:
        """``count`` free pages, of as few runs as there are where enough are found. There are as many."""
        found: list[Column] = []
        size, left = min(max(LEAST_PART, PAGES_A_PAGE * count), MOST_PART), count
        parts = -(-self.pages // size)
        for part in range(self._part // size, self._part // size + parts):
            first = part % parts * size
            free = self._free_column[first : first + size]
            has = int(np.count_nonzero(free))
            here = min(left, has)
            if here:
                pages = np.flatnonzero(free).astype(np.int32) if here == has else _longest(free, here)
                found.append(pages + np.int32(first))
                left -= here
            if not left:
                self._part = first
                return np.concatenate(found)
        raise LedgerBroken(f"{self.name}: {left} of {count} free pages are not found")


def _runs_in(free: npt.NDArray[np.bool_]) -> tuple[Column, Column]:
    """Beginnings and lengths of runs of free pages."""
    edges = np.flatnonzero(np.diff(free.view(np.int8), prepend=np.int8(0), append=np.int8(0))).astype(np.int32)
    return edges[::2], edges[1::2] - edges[::2]


def _parts_of(pages: Column) -> Sequence[slice | Column]:
    """Pages as slices where they lie in few runs: these are written faster than single pages."""
    ends = np.flatnonzero(pages[1:] - pages[:-1] != 1)
    if len(ends) >= FEW_RUNS:
        return [pages]
    bounds = [0, *(ends + 1).tolist(), len(pages)]
    return [slice(int(pages[first]), int(pages[last - 1]) + 1) for first, last in pairwise(bounds)]


def _longest(free: npt.NDArray[np.bool_], count: int) -> Column:
    """``count`` of the free pages, rising: those of the shortest run that has as many, else of the longest runs."""
    starts, lengths = _runs_in(free)
    enough = np.flatnonzero(lengths >= count)
    if len(enough):
        start = int(starts[enough[int(np.argmin(lengths[enough]))]])
        return np.arange(start, start + count, dtype=np.int32)
    by_length = np.bincount(lengths) * np.arange(int(lengths.max()) + 1)
    longer = np.cumsum(by_length[::-1])  # pages in runs of the greatest length, and of the next ones
    least = len(by_length) - 1 - int(np.searchsorted(longer, count))
    chosen = lengths >= least
    starts, lengths = starts[chosen], lengths[chosen]
    offsets = np.repeat(starts - np.append(0, np.cumsum(lengths)[:-1]), lengths)
    return (offsets + np.arange(len(offsets)))[:count].astype(np.int32)


# Free pages that are kept for a call that waits for more, so that no other call takes them before it runs again.
#
# A call that must wait reserves what is free of what it wants, and when a transfer that it started has freed pages it
# reserves those, up to what it wants. So a reservation never holds a page that is not free, two calls that wait can
# never hold each other up for good (each waits for transfers, and is refused or goes on once they have ended), and a
# later call pays with evictions of its own. It ends with its call, its sequence or its lease, and by a deadline.
#
# Where many pages are wanted they are taken ahead, some in each turn of the call, once all are there: they are the
# sequence's own, in no table yet. If its call is given up meanwhile, its next one begins with them, and gives back
# those that it does not want.


class Reservation:
    """Pages that one call waits for on one place: ``wanted[g]`` pages, of which ``held[g]`` are free and kept for it.

    ``line``: all reservations of the place that have not ended. ``until``: seconds, monotonic; then it ends anyhow.
    ``own[g]``: pages that the requester already owns; ``ahead[g]``: those of them that were taken ahead.
    """

    __slots__ = ("_line", "_own", "_pools", "ahead", "held", "until", "wanted")

    def __init__(self, line: dict[Reservation, None], pools: Sequence[PagePool], own: Sequence[set[int]] = ()) -> None:
        self._line = line
        self._pools = pools
        self._own = own
        self.ahead = [array("i") for _ in pools]
        self.wanted = [0] * len(pools)
        self.held = [0] * len(pools)
        self.until = 0.0

    @property
    def is_open(self) -> bool:
        """False before it has been kept for the first time, and once it has ended."""
        return self in self._line

    def keep(self, wanted: Sequence[int], until: float) -> None:
        """The call waits for ``wanted`` pages from now on, ``until`` at the latest."""
        self.give_back()
        self.wanted = list(wanted)
        self.until = until
        self._line[self] = None
        self.top_up()

    def top_up(self) -> None:
        """Reserve what is free now, up to what is wanted. Nothing where it has ended."""
        if not self.is_open:
            return
        for group, pool in enumerate(self._pools):
            more = min(self.wanted[group] - self.held[group], pool.unreserved)
            if more > 0:
                self.held[group] += more
                pool.reserved += more

    def take_ahead(self, wanted: Sequence[int], most: int) -> bool:
        """Take up to ``most`` pages of each group towards ``wanted[g]``, for which there is room, or give back as many
        that a larger call before has taken; True when there are ``wanted[g]``."""
        is_whole = True
        for count, ahead, own, pool in zip(wanted, self.ahead, self._own, self._pools, strict=True):
            missing = count - len(ahead)
            if missing < 0:
                spare = ahead[max(count, len(ahead) - most) :]
                del ahead[len(ahead) - len(spare) :]
                own.difference_update(spare)
                pool.move_all(spare, PageState.FREE)
            pages = pool.take(max(0, min(missing, most)), PageState.PRIVATE)
            ahead.extend(pages)
            own.update(pages)
            is_whole &= abs(missing) <= most
        return is_whole

    def hand_over(self, counts: Sequence[int]) -> list[array[int]]:
        """Take up to ``counts[g]`` pages of each group out of those taken ahead; they are no longer kept for a call."""
        pages = [ahead[:count] for ahead, count in zip(self.ahead, counts, strict=True)]
        for ahead, count in zip(self.ahead, counts, strict=True):
            del ahead[:count]
        return pages

    def give_back(self) -> None:
        """Release the held pages to its call, which runs. What it started still frees pages for it."""
        for group, pool in enumerate(self._pools):
            pool.reserved -= self.held[group]
            self.held[group] = 0

    def shorten(self, until: float) -> None:
        self.until = min(self.until, until)

    def release(self) -> None:
        self.give_back()
        self._line.pop(self, None)


def expire(line: dict[Reservation, None], now: float) -> None:
    """Drop expired reservations of calls that disappeared."""
    for reservation in [each for each in line if each.until < now]:
        reservation.release()


class PlaceCounts:
    """Counts of one place, in blocks, for operators.

    ``states``: blocks by state of their full groups. ``pinned``: blocks that pins protect, each counted once for each
    pin above which it lies. ``left``: blocks that were dropped, ``left_unused`` those of them that were not used since
    they came: no hit on a device, no load from the host. ``windows_left``: windowed copies dropped by themselves.
    """

    __slots__ = ("ages", "left", "left_unused", "pinned", "states", "windows_left")

    def __init__(self) -> None:
        self.states = [0] * len(CopyState)
        self.pinned = 0
        self.left = 0
        self.left_unused = 0
        self.windows_left = 0
        self.ages = Histogram(AGE_SECONDS)

    def leave(self, age_seconds: float | None, blocks: int, unused: int) -> None:
        """``blocks`` blocks are dropped ``age_seconds`` after their last access; None: they count as never used."""
        if age_seconds is not None:
            self.ages.observe(age_seconds, blocks)
        self.left += blocks
        self.left_unused += unused

    def add_left(self, other: PlaceCounts) -> None:
        """Count what has left another place too."""
        self.left += other.left
        self.left_unused += other.left_unused
        self.windows_left += other.windows_left
        self.ages.add(other.ages)
