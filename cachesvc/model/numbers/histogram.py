"""A histogram in plain integers: what a hot path can afford to count. Its readers make metrics of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

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
        """Observations in all."""
        return sum(self.counts)
