"""Positions at which a request can continue a cached prompt, and how soon requests do so.

A hit ends where the groups with windows or recurrent states have their copies. A position is a row of the index that
has, or had, such copies. Its kind tells how likely a request continues there: the end of a request is far likelier than
a block in its middle. Each kind learns a rate by age from the positions that are known, whether or not their copies are
kept; kinds are split by depth, in octaves.

Time comes in as an argument. All of it is columns by row, and a refit is done in steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np

from cachesvc.policy.hazard.ages import bin_of
from cachesvc.policy.hazard.rates import LANDMARKS_A_STEP, Floats, Ints
from cachesvc.policy.positions.rates import PositionRates, Waiting
from cachesvc.policy.positions.worth import copy_worth, end_worth, fallback

NO_CLASS = 0
FIRST_FIT, LONGEST_PERIOD = 20, 400
"""Requests before the first refit, and the most between two."""
DEPTH_OCTAVES = 24


class Kind(IntEnum):
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
        self._kinds: list[Kind] = []
        self._numbers: dict[tuple[Kind, int], int] = {}
        self._next_fit = FIRST_FIT
        self._refit: Iterator[None] | None = None
        self._has_lesson = False
        self.rates.add_class(Kind.MIDDLE)  # number 0 is no class
        self._kinds.append(Kind.MIDDLE)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""
        more = rows - len(self.classes)
        if more > 0:
            self.classes.frombytes(bytes(2 * more))
            self.since.frombytes(bytes(8 * more))

    def kind(self, row: int) -> Kind | None:
        """Kind of a position; None for a row that is none."""
        number = self.classes[row]
        return self._kinds[number] if number else None

    # -- what happens ------------------------------------------------------------------------------------------

    def opened(self, row: int, depth: int, now: float) -> None:
        """A row has its first copy. No-op for a position."""
        if not self.classes[row]:
            self._begin(row, Kind.MIDDLE, depth, now)

    def continued(self, row: int, depth: int, now: float, *, goes_on: bool) -> None:
        """A request continues at a position; ``goes_on``: it has blocks behind it."""
        number = self.classes[row]
        self.rates.continued(number, now - self.since[row])
        kind = self._kinds[number]
        if goes_on:
            kind = Kind.PASSED if kind is Kind.END else Kind.BRANCH
        self._begin(row, kind, depth, now)

    def ended(self, row: int, depth: int, now: float) -> None:
        """A request has ended, and this is its last position."""
        if not self.classes[row]:
            self._begin(row, Kind.END, depth, now)
        elif self._kinds[self.classes[row]] in (Kind.MIDDLE, Kind.PASSED):
            self.left(row, now)
            self._begin(row, Kind.END, depth, now)

    def left(self, row: int, now: float) -> None:
        """The row is no longer known. No-op where it is no position."""
        number = self.classes[row]
        if number:
            self.rates.left(number, now - self.since[row])
            self.classes[row] = NO_CLASS

    def _begin(self, row: int, kind: Kind, depth: int, now: float) -> None:
        self.classes[row] = self._class_of(kind, depth)
        self.since[row] = now

    def _class_of(self, kind: Kind, depth: int) -> int:
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
        if self._refit is None and self.requests >= self._next_fit:
            self._next_fit = self.requests + min(LONGEST_PERIOD, max(FIRST_FIT, self.requests // 10))
            self._refit = self.rates.refit(self._waiting(now))
            self._has_lesson = True

    def lesson(self) -> Callable[[], bool] | None:
        """Callable to be called until it returns True, while no call is served; None: nothing is new."""
        if not self._has_lesson:
            return None
        self._has_lesson = False
        return self._learn

    def _learn(self) -> bool:
        if self._refit is not None and next(self._refit, self) is self:
            self._refit = None
        return self._refit is None

    def _waiting(self, now: float) -> Iterator[Waiting]:
        """Positions that wait for a request, some at a time."""
        for first in range(0, len(self.classes), LANDMARKS_A_STEP):
            classes: Ints = np.array(self.classes[first : first + LANDMARKS_A_STEP], np.int64)
            ages: Floats = now - np.array(self.since[first : first + LANDMARKS_A_STEP])
            known = classes > NO_CLASS
            yield Waiting(classes[known], np.maximum(ages[known], 0.0))

    # -- what is known -----------------------------------------------------------------------------------------

    def is_end(self, number: int) -> bool:
        """True for the classes of ends, whose copies go with their blocks."""
        return self._kinds[number] is Kind.END

    def density(self, number: int, age: float) -> float:
        """Requests a second that are expected to continue at a position of a class and age."""
        return float(self.rates.density[number, bin_of(age)]) if number else 0.0

    def end_density(self, depth: int, age: float) -> float:
        """``density`` of a request's end of that depth and age."""
        return self.density(self._class_of(Kind.END, depth), age)

    def copy_worth(self, density: float, saved: int, cost: float) -> float:
        """See ``worth.py``."""
        return copy_worth(density, saved, cost)

    def end_worth(self, density: float, saved: int, freed: int, cost: float) -> float:
        """See ``worth.py``."""
        return end_worth(density, saved, freed, cost)

    def fallback(self, saved: int, below: int, cost: float, capacity: int) -> float:
        """See ``worth.py``."""
        return fallback(saved, below, cost, capacity)
