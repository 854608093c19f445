"""Learned rates at which requests continue at positions, by class and age.

Ages are in bins of half octaves. For each class and bin it is known how many positions have reached the bin, and at how
many of them a request has continued in it. The share of the two is drawn towards the class's own over all bins, that
towards its kind's, and that towards all. So a bin that no position has reached yet counts as any other: what is
unknown is taken to become rarer with age, by as much as bins become wider.

Positions that leave the index, or wait still, have reached the bins below their age, and half of the one that they are
in. A refit is done in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cachesvc.policy.hazard.ages import BINS, WIDTHS, bin_of
from cachesvc.policy.hazard.rates import DECAY, LEAST_ROWS, PRIOR_LIVES, ROWS_A_STEP, Floats, Ints, density_of

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
