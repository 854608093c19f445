"""Latencies of many processes in bounded memory: log-spaced buckets that add up and give percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

LOWEST_MS = 1e-3
"""Lower edge of the first bucket: one microsecond."""

BUCKETS_PER_DECADE = 50
"""A bucket is 4.7 % wide, so a percentile is right to 2.4 %: closer than two runs of one machine agree."""

DECADES = 9
"""Up to 1e6 ms, a quarter of an hour: beyond every deadline."""

BUCKETS = BUCKETS_PER_DECADE * DECADES


class HistogramDict(TypedDict):
    """A histogram as plain data for JSON: only the buckets that hold something, by their number as text."""

    counts: dict[str, int]
    count: int
    sum_ms: float
    min_ms: float
    max_ms: float


class LatencyHistogram:
    """Counts of latencies in ms, for one writer at a time. All have the same buckets, so any two merge.

    A value beyond the buckets counts in the first or the last one; `min_ms` and `max_ms` are exact.
    """

    __slots__ = ("_counts", "count", "max_ms", "min_ms", "sum_ms")

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.sum_ms = 0.0
        self.min_ms = math.inf
        self.max_ms = 0.0

    def record(self, latency_ms: float) -> None:
        """ValueError for what cannot be a latency: negative, infinite, or no number."""
        if not 0 <= latency_ms < math.inf:
            raise ValueError(f"a latency must be finite and not negative, not {latency_ms} ms")
        self._counts[_bucket(latency_ms)] += 1
        self.count += 1
        self.sum_ms += latency_ms
        self.min_ms = min(self.min_ms, latency_ms)
        self.max_ms = max(self.max_ms, latency_ms)

    def merge(self, other: LatencyHistogram) -> None:
        """Adds what `other` holds to this one; `other` stays as it is."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.sum_ms += other.sum_ms
        self.min_ms = min(self.min_ms, other.min_ms)
        self.max_ms = max(self.max_ms, other.max_ms)

    def percentile_ms(self, percent: float) -> float:
        """The latency that `percent` of the values do not pass (nearest rank), to within half a bucket.

        ValueError where nothing is recorded, or for a percent outside of (0, 100].
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
        if self.count == 0:
            raise ValueError("an empty histogram has no percentiles")
        rank = math.ceil(self.count * percent / 100)
        passed = 0
        for bucket, count in enumerate(self._counts):
            passed += count
            if passed >= rank:
                return min(max(_edge_ms(bucket + 0.5), self.min_ms), self.max_ms)
        raise AssertionError("the buckets hold fewer values than were counted")

    def cumulative(self) -> list[tuple[float, float]]:
        """(upper edge in ms, share of the values below it) of each bucket in use, up to share 1."""
        points: list[tuple[float, float]] = []
        passed = 0
        for bucket, count in enumerate(self._counts):
            if count:
                passed += count
                points.append((min(_edge_ms(bucket + 1), self.max_ms), passed / self.count))
        return points

    def to_dict(self) -> HistogramDict:
        """All of it as plain data, to hand from process to process or to keep in JSON."""
        return HistogramDict(
            counts={str(bucket): count for bucket, count in enumerate(self._counts) if count},
            count=self.count,
            sum_ms=self.sum_ms,
            min_ms=self.min_ms if self.count else 0.0,
            max_ms=self.max_ms,
        )

    @classmethod
    def from_dict(cls, data: HistogramDict) -> LatencyHistogram:
        """The histogram that `to_dict` wrote down. ValueError where the data contradict themselves."""
        histogram = cls()
        _fill(histogram._counts, data["counts"])
        if sum(histogram._counts) != data["count"]:
            raise ValueError(f"the buckets hold {sum(histogram._counts)} values, but {data['count']} are said")
        histogram.count = data["count"]
        if histogram.count:
            histogram.sum_ms = data["sum_ms"]
            histogram.min_ms = data["min_ms"]
            histogram.max_ms = data["max_ms"]
            if not 0 <= histogram.min_ms <= histogram.max_ms < math.inf:
                raise ValueError(f"min_ms {histogram.min_ms} and max_ms {histogram.max_ms} are no range")
        return histogram


def _fill(counts: list[int], sparse: Mapping[str, int]) -> None:
    for name, count in sparse.items():
        bucket = int(name)
        if not 0 <= bucket < BUCKETS or count < 0:
            raise ValueError(f"bucket {name} with {count} values cannot be: there are {BUCKETS} buckets")
        counts[bucket] = count


def _bucket(latency_ms: float) -> int:
    if latency_ms <= LOWEST_MS:
        return 0
    return min(int(math.log10(latency_ms / LOWEST_MS) * BUCKETS_PER_DECADE), BUCKETS - 1)


def _edge_ms(bucket: float) -> float:
    return LOWEST_MS * math.pow(10.0, bucket / BUCKETS_PER_DECADE)
