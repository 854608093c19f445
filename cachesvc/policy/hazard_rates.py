"""Learned rates of reuse of each class of blocks: hazards by age, and the worth that follows from them.

A row stands for one class of one table. For each row and bin of ages it has ``events`` (landmarks that were touched
again), the seconds that these had spent in their last bin (``within``), and the seconds of those that were forgotten
untouched (``censored``). A refit makes hazards of them: each class is drawn towards its group, and each group towards
all of its table, by ``PRIOR_LIVES`` lives. From the hazards follows the density: expected hits per block-second over
the best horizon, by age.

A refit is done in steps of some 0.2 ms each, so that no call waits for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import log2
from typing import NamedTuple

import numpy as np

BINS = 30
EDGES = np.array([2 ** (k / 2) - 1 for k in range(BINS)])
"""Beginnings of the bins, in seconds."""
WIDTHS = np.append(np.diff(EDGES), 1e5)
"""Seconds of each bin; the last one has no end."""

_EDGES: list[float] = EDGES.tolist()


def bin_of(age: float) -> int:
    """The bin of an age in seconds; one below 0 counts as 0."""
    return min(int(2 * log2(1 + age)), BINS - 1) if age > 0 else 0


def begin_of(number: int) -> float:
    return _EDGES[number]


def exposure(age: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds spent in each bin until ``age``."""
    spent: np.ndarray[tuple[int], np.dtype[np.float64]] = np.clip(age - EDGES, 0.0, _SPENT_MOST)
    return spent


_SPENT_MOST = np.append(np.diff(EDGES), np.inf)


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

TABLES = 2
PRIOR_LIVES = 8.0
DECAY = 0.95
ROWS_A_STEP = 12
LANDMARKS_A_STEP = 2048
LEAST_ROWS = 64
_TRIANGLE = np.arange(BINS)[:, None] <= np.arange(BINS)[None, :]


class Open(NamedTuple):
    """Landmarks that were not touched again yet: row, age in seconds and weight of each."""

    rows: Ints
    ages: Floats
    weights: Floats


class Rates:
    """``density[row, bin]``: what is known of each class; all 0 until the first refit has ended."""

    def __init__(self) -> None:
        self.density = np.zeros((LEAST_ROWS, BINS))
        self.reused_before = np.zeros(BINS)
        self._events, self._within, self._censored = (np.zeros((LEAST_ROWS, BINS)) for _ in range(3))
        self._tables = np.zeros(LEAST_ROWS, np.int64)
        self._groups = np.zeros(LEAST_ROWS, np.int64)
        self._group_numbers: dict[tuple[int, ...], int] = {}
        self._by_group = np.zeros((0, BINS))
        self._by_table = np.zeros((TABLES, BINS))
        self.rows = 0

    def add_row(self, table: int, group: tuple[int, ...]) -> int:
        """A further class of a table, in a group of it; returns its number. It is worth what its group is, or else its
        table, until a refit has seen it."""
        row = self.rows
        if row == len(self.density):
            self._grow()
        self.rows += 1
        number = self._group_numbers.setdefault((table, *group), len(self._group_numbers))
        self._tables[row], self._groups[row] = table, number
        self.density[row] = self._by_group[number] if number < len(self._by_group) else self._by_table[table]
        return row

    def _grow(self) -> None:
        more = np.zeros((len(self.density), BINS))
        self._events, self._within, self._censored, self.density = (
            np.concatenate([column, more]) for column in (self._events, self._within, self._censored, self.density)
        )
        short = np.zeros(len(more), np.int64)
        self._tables, self._groups = (np.concatenate([column, short]) for column in (self._tables, self._groups))

    def touched(self, row: int, age: float, weight: float) -> None:
        """A landmark of that class was touched again at ``age`` seconds."""
        at = bin_of(age)
        self._events[row, at] += weight
        self._within[row, at] += weight * (max(age, 0.0) - begin_of(at))

    def forgotten(self, row: int, age: float, weight: float) -> None:
        """A landmark of that class was untouched until ``age`` and is no longer followed."""
        if age > 0:
            self._censored[row] += weight * exposure(age)

    def refit(self, open_landmarks: Iterable[Open]) -> Iterator[None]:
        """Learn from all that was seen, then let it fade. To be gone through to its end, a step at a time; each takes
        ``LANDMARKS_A_STEP`` landmarks at most from ``open_landmarks``."""
        rows = self.rows
        events = self._events[:rows].copy()
        exposed = self._censored[:rows] + self._within[:rows]
        tables, groups = self._tables[:rows].copy(), self._groups[:rows].copy()
        self._fade(events[tables == 0].sum(axis=0))
        yield
        outlived = events.copy()  # bins that were lived through to their end, by the one that came after
        for each in open_landmarks:
            _expose(each, outlived, exposed)
            yield
        exposed[:, :-1] += WIDTHS[:-1] * np.cumsum(outlived[:, :0:-1], axis=1)[:, ::-1]
        yield
        hazards = _hazards(events, exposed, tables, groups)
        density = np.empty_like(hazards)
        for first in range(0, len(hazards), ROWS_A_STEP):
            yield
            density[first : first + ROWS_A_STEP] = density_of(hazards[first : first + ROWS_A_STEP])
        self.density[:rows], self._by_group, self._by_table = density[:rows], density[rows:-TABLES], density[-TABLES:]

    def _fade(self, events: Floats) -> None:
        self.reused_before = (np.cumsum(events) - events) / (events.sum() + 1.0)
        self._events *= DECAY
        self._within *= DECAY
        self._censored *= DECAY


def _expose(landmarks: Open, outlived: Floats, exposed: Floats) -> None:
    """Count the bins that open landmarks are in, and the seconds that they have spent there, by class. Those of classes
    that have come since the refit began are left to the next."""
    rows, ages, weights = landmarks
    if len(rows) and rows.max() >= len(outlived):
        is_known = rows < len(outlived)
        rows, ages, weights = rows[is_known], ages[is_known], weights[is_known]
    ages = np.maximum(ages, 0.0)
    bins = np.minimum((2 * np.log2(1 + ages)).astype(np.int64), BINS - 1)
    cells = rows * BINS + bins
    outlived += np.bincount(cells, weights, outlived.size).reshape(outlived.shape)
    exposed += np.bincount(cells, weights * (ages - EDGES[bins]), exposed.size).reshape(exposed.shape)


def _hazards(events: Floats, exposed: Floats, tables: Ints, groups: Ints) -> Floats:
    """Hazards of each class, then of each group, then of each table."""

    def summed(numbers: Ints, count: int) -> tuple[Floats, Floats]:
        members = (numbers[None, :] == np.arange(count)[:, None]).astype(np.float64)
        return members @ events, members @ exposed

    all_events, all_exposed = summed(tables, TABLES)
    by_table = (all_events + 0.02) / (all_exposed + 60.0)
    group_events, group_exposed = summed(groups, int(groups.max()) + 1)
    table_of_group = np.zeros(len(group_events), np.int64)
    table_of_group[groups] = tables
    by_group = _drawn(group_events, group_exposed, by_table[table_of_group])
    return np.concatenate([_drawn(events, exposed, by_group[groups]), by_group, by_table])


def _drawn(events: Floats, exposed: Floats, towards: Floats) -> Floats:
    prior = PRIOR_LIVES / (towards + 1 / WIDTHS)
    return (events + prior * towards) / (exposed + prior)


def density_of(hazards: Floats) -> Floats:
    """Hits per second of the best horizon from each age on. Sums are taken from the far end, where they are small."""
    risk = hazards * WIDTHS
    alive = np.exp(risk - np.cumsum(risk, axis=1))
    hits = alive * -np.expm1(-risk)
    hits_after, seconds_after = (
        np.pad(np.cumsum(each[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1))) for each in (hits, hits / hazards)
    )
    gained = hits_after[:, :-1, None] - hits_after[:, None, 1:]
    spent = seconds_after[:, :-1, None] - seconds_after[:, None, 1:]
    worth = np.divide(gained, spent, out=np.zeros_like(gained), where=_TRIANGLE & (spent > 0))
    best: Floats = worth.max(axis=2)
    return best


FIRST_FIT, LONGEST_PERIOD = 20, 400
"""Requests before the first lesson, and the most between two."""


class Lessons:
    """One lesson at a time. Each is an iterator that does a step of some 0.2 ms whenever it is advanced."""

    def __init__(self) -> None:
        self._next = FIRST_FIT
        self._steps: Iterator[None] | None = None
        self._is_new = False

    def is_due(self, requests: int) -> bool:
        """True where a lesson is to begin after this number of requests."""
        return self._steps is None and requests >= self._next

    def begin(self, requests: int, steps: Iterator[None]) -> None:
        """Begin a lesson. The next one is due a tenth of all requests later."""
        self._next = requests + min(LONGEST_PERIOD, max(FIRST_FIT, requests // 10))
        self._steps = steps
        self._is_new = True

    def take(self) -> Callable[[], bool] | None:
        """Callable to be called until it returns True, while no call is served; None: nothing is new."""
        if not self._is_new:
            return None
        self._is_new = False
        return self._learn

    def _learn(self) -> bool:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        return self._steps is None
