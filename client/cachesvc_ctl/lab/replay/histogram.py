"""Latencies of many processes in bounded memory: a histogram with buckets so narrow that it gives percentiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from cachesvc.model.numbers.histogram import Histogram

LOWEST_MS = 1e-3
"""Upper edge of the first bucket: one microsecond."""

BUCKETS_PER_DECADE = 50
"""A bucket is 4.7 % wide, so a percentile is right to 2.4 %: closer than two runs of one machine agree."""

DECADES = 9
"""Decades up to 1e6 ms, a quarter of an hour: beyond every deadline."""

EDGES_MS = tuple(LOWEST_MS * 10 ** (step / BUCKETS_PER_DECADE) for step in range(BUCKETS_PER_DECADE * DECADES + 1))


class LatencyHistogram(Histogram):
    """Latencies in ms, for one writer at a time. All have the same buckets, so any two merge.

    A value beyond the buckets counts in the first or the last one; ``min_ms`` and ``max_ms`` are exact.
    """

    __slots__ = ("max_ms", "min_ms")

    def __init__(self) -> None:
        super().__init__(EDGES_MS)
        self.min_ms = math.inf
        self.max_ms = 0.0

    def record(self, latency_ms: float) -> None:
        """Count one. Raises ValueError for what cannot be a latency: negative, infinite, or not a number."""
        if not 0 <= latency_ms < math.inf:
            raise ValueError(f"a latency must be finite and not negative, not {latency_ms} ms")
        self.observe(latency_ms)
        self.min_ms = min(self.min_ms, latency_ms)
        self.max_ms = max(self.max_ms, latency_ms)

    def merge(self, other: LatencyHistogram) -> None:
        """Add the counts of ``other`` to this one; ``other`` does not change."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.min_ms = min(self.min_ms, other.min_ms)
        self.max_ms = max(self.max_ms, other.max_ms)

    def percentile_ms(self, percent: float) -> float:
        """The latency that ``percent`` of the values do not pass (nearest rank), to within half a bucket.

        Raises ValueError where nothing is recorded, or for a percent outside of (0, 100].
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
        if not self.count:
            raise ValueError("an empty histogram has no percentiles")
        rank = math.ceil(self.count * percent / 100)
        bucket = bisect_left(list(accumulate(self.counts)), rank)
        middle = LOWEST_MS * 10 ** ((bucket - 0.5) / BUCKETS_PER_DECADE)
        return min(max(middle, self.min_ms), self.max_ms)

    def cumulative(self) -> list[tuple[float, float]]:
        """(upper edge in ms, share of the values up to it) of each bucket in use, up to share 1."""
        points: list[tuple[float, float]] = []
        passed, whole = 0, self.count
        for edge_ms, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            if count:
                passed += count
                points.append((min(edge_ms, self.max_ms), passed / whole))
        return points
