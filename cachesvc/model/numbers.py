"""Counts, shares and rates in plain numbers: what a hot path can afford."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

LATENCY_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    30.0,
)
"""Bounds from a call that is a look-up to one that waits for its whole limit, seconds."""

AGE_SECONDS = (1, 5, 15, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 24 * 3600, 7 * 24 * 3600)
"""Bounds from thrashing to idle for a week, seconds."""


class Histogram:
    """Observations by bucket: ``counts[i]`` of those up to ``bounds[i]``, above the one before; the last, the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation, or some of the same. Under a microsecond; one writer at a time."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Count what another one has observed too, within the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        return sum(self.counts)


Column = npt.NDArray[np.int32]
Number = TypeVar("Number", bound=np.integer[Any])


def column(numbers: array[int]) -> Column:
    """An array as NumPy sees it. Keep it no longer than for a moment: meanwhile the array cannot change its length."""
    return np.frombuffer(numbers, np.int32)


def array_of(numbers: npt.NDArray[Any]) -> array[int]:
    """A copy of a column as an array."""
    out = array("i")
    out.frombytes(numbers.astype(np.int32, copy=False).tobytes())
    return out


def union_of(arrays: Sequence[array[int]]) -> Column:
    """The distinct numbers of arrays of distinct numbers, which mostly are one and the same array."""
    parts = [each for each in arrays if each]
    if all(each is parts[0] for each in parts):
        return column(parts[0]) if parts else np.empty(0, np.int32)
    return distinct(np.concatenate([column(each) for each in parts]))


def distinct(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The distinct numbers, rising. NumPy's own ``unique`` takes ten times as long, and loads half of NumPy first.
    Equal ones mostly stand side by side: few are left to sort."""
    return _without_repeats(np.sort(_without_repeats(numbers)))


def _without_repeats(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The numbers but for those that equal the one before."""
    return numbers[np.append(True, numbers[1:] != numbers[:-1])] if len(numbers) else numbers


def among(numbers: Column, others: Column) -> npt.NDArray[np.bool_]:
    """Mask of the numbers that are among ``others``."""
    rising = np.append(np.sort(others), np.iinfo(np.int32).max)
    found: npt.NDArray[np.bool_] = rising[np.searchsorted(rising, numbers)] == numbers
    return found


Party = bytes | tuple[int, int]
"""A process: its uid and pid, or the token of its life connection where the daemon cannot see its pid."""
BACKGROUND: Party = b""
"""The party of what no process has asked for."""

Holder = TypeVar("Holder", bound=Hashable)
Item = TypeVar("Item")


class Rounds(Generic[Holder, Item]):
    """A queue with a row for each party, served round robin: one item of each party before any has two, and within a
    party the first comes first. So what one party has queued delays an item of another one by one item of each party.
    """

    def __init__(self) -> None:
        self._rows: dict[Holder, deque[Item]] = {}  # in the order of their next items; none is empty

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[Item]:
        for row in self._rows.values():
            yield from row

    def add(self, party: Holder, item: Item) -> None:
        """Queue an item behind those of its party."""
        row = self._rows.get(party)
        if row is None:
            self._rows[party] = deque((item,))
        else:
            row.append(item)

    def add_first(self, party: Holder, item: Item) -> None:
        """Queue an item that is the next one."""
        row = self._rows.pop(party, deque())
        row.appendleft(item)
        self._rows = {party: row, **self._rows}

    def take(self) -> Item:
        """The next item. Raises StopIteration where there is none."""
        party = next(iter(self._rows))
        row = self._rows.pop(party)
        item = row.popleft()
        if row:
            self._rows[party] = row
        return item


def count_held(held: dict[Holder, int], holder: Holder, by: int) -> None:
    """Count more or less of what one holds; one that holds nothing is forgotten."""
    left = held.get(holder, 0) + by
    if left:
        held[holder] = left
    else:
        held.pop(holder, None)


def share_of(limit: int, busy: int) -> int:
    """The most that one of ``busy`` may hold: three quarters alone, so that the next one gets in; else its part."""
    return max(1, limit * 3 // 4 if busy == 1 else limit // busy)


def most_of(holder: Holder, held: Mapping[Holder, int], limit: int) -> int:
    """The most that one may hold beside what all hold now: its share, and no more than three quarters of what the
    others have left, so that one that comes new always gets in."""
    others = {each: count for each, count in held.items() if each != holder and count}
    left = limit - sum(others.values())
    return max(1, min(share_of(limit, len(others) + 1), left * 3 // 4))


_CLOCK_GRAIN_S = 1e-6
"""Times are floats: something may go this much before the bucket holds all of it."""


class Bucket:
    """Token bucket of ``rate`` a second, of which ``burst`` can be saved up: by default one second's worth. A rate of 0
    is no limit. What is larger than the burst goes through a full bucket and leaves it in debt."""

    __slots__ = ("burst", "filled_at", "rate", "tokens")

    def __init__(self, rate: int, burst: int | None = None) -> None:
        self.rate = rate
        self.burst = float(rate if burst is None else burst)
        self.tokens = self.burst
        self.filled_at = 0.0

    def fill(self, now: float) -> None:
        self.tokens = min(self.burst, self.tokens + max(now - self.filled_at, 0.0) * self.rate)
        self.filled_at = max(now, self.filled_at)

    def wait_s(self, count: int, now: float) -> float:
        self.fill(now)
        short = min(count, self.burst) - self.tokens
        return 0.0 if short <= _CLOCK_GRAIN_S * self.rate or not self.rate else short / self.rate

    def take(self, count: int, now: float) -> float:
        """0 when ``count`` could be taken, else the seconds until it can."""
        if not self.rate:
            return 0.0  # without a debt: a later limit begins with a full bucket
        seconds = self.wait_s(count, now)
        if not seconds:
            self.tokens -= count
        return seconds

    def charge(self, count: int, now: float) -> None:
        """Take ``count`` whatever is left. The debt is at most one burst, so that it ends."""
        if self.take(count, now):
            self.tokens = max(-self.burst, self.tokens - count)
