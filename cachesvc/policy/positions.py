"""Positions at which a request can continue a cached prompt, and how soon requests do so.

A hit ends where the groups with windows or recurrent states have their copies. A position is a row of the index that
has, or had, such copies. Its kind tells how likely a request continues there: the end of a request is far likelier than
a block in its middle. Each kind learns a rate by age from the positions that are known, whether or not their copies are
kept; kinds are split by depth, in octaves.

Time comes in as an argument. All of it is columns by row, and a refit is done in steps.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from cachesvc.policy.hazard_rates import (
    BINS,
    DECAY,
    LANDMARKS_A_STEP,
    LEAST_ROWS,
    PRIOR_LIVES,
    ROWS_A_STEP,
    WIDTHS,
    Floats,
    Ints,
    Lessons,
    begin_of,
    bin_of,
    density_of,
)

NO_CLASS = 0
DEPTH_OCTAVES = 24
REMEMBERED = 8192
"""Positions that are remembered after they have left the index."""


class PositionKind(IntEnum):
    """Kinds of positions.

    MIDDLE: inside of a prompt, where no request has ended or continued. END: a request ended here. PASSED: an END where
    one request has continued. BRANCH: a request continued here beside what had followed before.
    """

    MIDDLE = 0
    END = 1
    PASSED = 2
    BRANCH = 3


class Positions:
    """Columns by row: ``classes`` (NO_CLASS: not a position) and ``since``, seconds of the last request that continued
    or ended there, or of the first copy. ``rates``: what the classes have learned."""

    def __init__(self) -> None:
        self.classes = array("H")
        self.since = array("d")
        self.rates = PositionRates()
        self.requests = 0
        self._kinds: list[PositionKind] = []
        self._gone: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._numbers: dict[tuple[PositionKind, int], int] = {}
        self._lessons = Lessons()
        self.rates.add_class(PositionKind.MIDDLE)  # number 0 is no class
        self._kinds.append(PositionKind.MIDDLE)

    def grow(self, rows: int) -> None:
        more = rows - len(self.classes)
        if more > 0:
            self.classes.frombytes(bytes(2 * more))
            self.since.frombytes(bytes(8 * more))

    def kind(self, row: int) -> PositionKind | None:
        """PositionKind of a position; None for a row that is none."""
        number = self.classes[row]
        return self._kinds[number] if number else None

    # -- what happens ------------------------------------------------------------------------------------------

    def opened(self, row: int, depth: int, now: float) -> None:
        if not self.classes[row]:
            self._begin(row, PositionKind.MIDDLE, depth, now)

    def continued(self, row: int, depth: int, now: float, *, goes_on: bool) -> None:
        number = self.classes[row]
        self.rates.continued(number, now - self.since[row])
        kind = self._kinds[number]
        if goes_on:
            kind = PositionKind.PASSED if kind is PositionKind.END else PositionKind.BRANCH
        self._begin(row, kind, depth, now)

    def ended(self, row: int, depth: int, now: float) -> None:
        if not self.classes[row]:
            self._begin(row, PositionKind.END, depth, now)
        elif self._kinds[self.classes[row]] in (PositionKind.MIDDLE, PositionKind.PASSED):
            self.rates.left(self.classes[row], now - self.since[row])
            self._begin(row, PositionKind.END, depth, now)

    def left(self, row: int, key: bytes, now: float) -> None:
        """The row leaves the index. No-op where it is no position. All but the middles are remembered by their keys:
        what comes too late for the cache tells how soon requests come, too."""
        number = self.classes[row]
        if not number:
            return
        self.classes[row] = NO_CLASS
        if self._kinds[number] is PositionKind.MIDDLE:
            self.rates.left(number, now - self.since[row])
            return
        self._gone[key] = (number, self.since[row])
        if len(self._gone) > REMEMBERED:
            _, (number, since) = self._gone.popitem(last=False)
            self.rates.left(number, now - since)

    def missed(self, key: bytes, now: float) -> bool:
        gone = self._gone.pop(key, None)
        if gone is None:
            return False
        self.rates.continued(gone[0], now - gone[1])
        return True

    def _begin(self, row: int, kind: PositionKind, depth: int, now: float) -> None:
        self.classes[row] = self._class_of(kind, depth)
        self.since[row] = now

    def _class_of(self, kind: PositionKind, depth: int) -> int:
        name = (kind, min((depth + 1).bit_length(), DEPTH_OCTAVES))
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self.rates.add_class(kind)
            self._kinds.append(kind)
        return number

    # -- learning ----------------------------------------------------------------------------------------------

    def request(self, now: float) -> None:
        """Count a request; now and then what has been seen becomes a lesson."""
        self.requests += 1
        if self._lessons.is_due(self.requests):
            self._lessons.begin(self.requests, self.rates.refit(self._waiting(now)))

    def lesson(self) -> Callable[[], bool] | None:
        return self._lessons.take()

    def _waiting(self, now: float) -> Iterator[WaitingPositions]:
        """Positions that wait for a request, some at a time."""
        for first in range(0, len(self.classes), LANDMARKS_A_STEP):
            classes: Ints = np.array(self.classes[first : first + LANDMARKS_A_STEP], np.int64)
            ages: Floats = now - np.array(self.since[first : first + LANDMARKS_A_STEP])
            known = classes > NO_CLASS
            yield WaitingPositions(classes[known], np.maximum(ages[known], 0.0))
        left = list(self._gone.values())
        for first in range(0, len(left), LANDMARKS_A_STEP):
            gone = np.array(left[first : first + LANDMARKS_A_STEP], np.float64).reshape(-1, 2)
            yield WaitingPositions(gone[:, 0].astype(np.int64), np.maximum(now - gone[:, 1], 0.0))

    # -- what is known -----------------------------------------------------------------------------------------

    @property
    def has_learned(self) -> bool:
        return self.rates.has_learned

    def is_middle(self, number: int) -> bool:
        return self._kinds[number] is PositionKind.MIDDLE

    def is_end(self, number: int) -> bool:
        return self._kinds[number] is PositionKind.END

    def density(self, number: int, age: float) -> float:
        return float(self.rates.density[number, bin_of(age)]) if number else 0.0

    def densities(self, number: int, newest: float, oldest: float) -> Iterator[tuple[float, float, float]]:
        density = self.rates.density[number]
        for at in range(bin_of(newest), bin_of(oldest) + 1):
            yield begin_of(at), begin_of(at + 1) if at + 1 < BINS else oldest + 1, float(density[at])

    def end_density(self, depth: int, age: float) -> float:
        return self.density(self._class_of(PositionKind.END, depth), age)

    def copy_worth(self, density: float, saved: int, cost: float) -> float:
        return copy_worth(density, saved, cost)

    def branch_worth(self, requests: Sequence[tuple[float, int]], memory: float) -> float:
        return branch_worth(requests, memory)

    def fallback(self, saved: int, below: int, cost: float, capacity: int) -> float:
        return fallback(saved, below, cost, capacity)


# Learned rates at which requests continue at positions, by class and age.
#
# Ages are in bins of half octaves. For each class and bin it is known how many positions have reached the bin, and at
# how many of them a request has continued in it. The share of the two is drawn towards the class's own over all bins,
# that towards its kind's, and that towards all. So a bin that no position has reached yet counts as any other: what is
# unknown is taken to become rarer with age, by as much as bins become wider.
#
# Positions that leave the index, or wait still, have reached the bins below their age, and half of the one that they
# are in. A refit is done in steps.

LEAST_SHARE = 1e-6
"""Least share of positions of a bin, so that rates stay numbers."""


class WaitingPositions(NamedTuple):
    """Positions that wait for a request: class and age of each."""

    classes: Ints
    ages: Floats


class PositionRates:
    """``density[c, bin]``: requests a second that are expected to continue at a position of class c, over the best
    horizon; all 0 until the first refit has ended."""

    def __init__(self) -> None:
        self.density = np.zeros((LEAST_ROWS, BINS))
        self.classes = 0
        self.has_learned = False
        self._continued = np.zeros((LEAST_ROWS, BINS))
        self._left = np.zeros((LEAST_ROWS, BINS))
        self._kinds = np.zeros(LEAST_ROWS, np.int64)
        self._of_kind: dict[int, Floats] = {}

    def add_class(self, kind: int) -> int:
        """A further class of a kind; returns its number. It is worth what its kind is until a refit has seen it."""
        number = self.classes
        if number == len(self.density):
            more = np.zeros_like(self.density)
            columns = (self.density, self._continued, self._left)
            self.density, self._continued, self._left = (np.concatenate([column, more]) for column in columns)
            self._kinds = np.concatenate([self._kinds, np.zeros(len(more), np.int64)])
        self.classes += 1
        self._kinds[number] = kind
        self.density[number] = self._of_kind.get(kind, 0.0)
        return number

    def continued(self, number: int, age: float) -> None:
        """A request continued at a position of that class and age."""
        self._continued[number, bin_of(age)] += 1

    def left(self, number: int, age: float) -> None:
        """A position of that class and age is no longer known, or has changed its class."""
        self._left[number, bin_of(age)] += 1

    def refit(self, waiting: Iterable[WaitingPositions]) -> Iterator[None]:
        """Learn from all that was seen, then let it fade. To be gone through to its end, a step at a time."""
        count = self.classes
        continued, ended = self._continued[:count].copy(), self._left[:count].copy()
        self._continued *= DECAY
        self._left *= DECAY
        yield
        for classes, ages in waiting:
            known = classes < count
            bins = np.minimum((2 * np.log2(1 + ages[known])).astype(np.int64), BINS - 1)
            ended += np.bincount(classes[known] * BINS + bins, minlength=ended.size).reshape(ended.shape)
            yield
        kinds = self._kinds[:count]
        hazards = _shares(continued, ended, kinds) / WIDTHS
        density = np.empty_like(hazards)
        for first in range(0, len(hazards), ROWS_A_STEP):
            yield
            density[first : first + ROWS_A_STEP] = density_of(hazards[first : first + ROWS_A_STEP])
        self.density[:count] = density[:count]
        self.has_learned = True
        self._of_kind = {kind: density[count + kind] for kind in range(len(density) - count)}


def _shares(continued: Floats, ended: Floats, kinds: Ints) -> Floats:
    """Share of positions at which a request continues in a bin, of those that reach it: by class, then by kind."""
    members = (kinds[None, :] == np.arange(int(kinds.max()) + 1)[:, None]).astype(np.float64)
    events = np.concatenate([continued, members @ continued])
    gone = events + np.concatenate([ended, members @ ended])
    reached = np.cumsum(gone[:, ::-1], axis=1)[:, ::-1] - (gone - events) / 2
    count = len(kinds)
    of_all = (events[count:].sum() + LEAST_SHARE) / (reached[count:].sum() + 1)
    of_kind = _drawn(events[count:].sum(axis=1), reached[count:].sum(axis=1), of_all)
    of_class = np.concatenate(
        [_drawn(events[:count].sum(axis=1), reached[:count].sum(axis=1), of_kind[kinds]), of_kind]
    )
    shares: Floats = np.clip(_drawn(events, reached, of_class[:, None]), LEAST_SHARE, 1 - LEAST_SHARE)
    return -np.log1p(-shares)


def _drawn(events: Floats, reached: Floats, towards: Floats | float) -> Floats:
    drawn: Floats = (events + PRIOR_LIVES * towards) / (reached + PRIOR_LIVES)
    return drawn


# Worth of copies and of blocks per block of memory: requests a second times the blocks that they need not compute.
#
# All sizes are in blocks of the full groups: a state that takes as much memory as three blocks costs 3.


def copy_worth(density: float, saved: int, cost: float) -> float:
    """Worth of copies behind which a prompt goes on: without them a request that continues there, ``density`` a second,
    computes the ``saved`` blocks since the copies above again."""
    return density * saved / cost


def branch_worth(requests: Sequence[tuple[float, int]], memory: float) -> float:
    """Worth of the end of a prompt, blocks and copies together: the ones are of no use without the others.

    ``requests``: of each position with copies, how many a second continue there, and the blocks that they would compute
    again. ``memory``: of all of it, in blocks.
    """
    return sum(density * saved for density, saved in requests) / memory


def fallback(saved: int, below: int, cost: float, capacity: int) -> float:
    """Worth of copies as what is left of a prompt once its end has gone, as a share of that end's.

    The ``below`` blocks down to the next copies free their memory bit by bit, while all of ``capacity`` is replaced
    once. For that part of the time the ``saved`` blocks are hit as before.
    """
    return saved * below / (cost * capacity)
