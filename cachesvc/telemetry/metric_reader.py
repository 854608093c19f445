"""One reading of all metrics: values under the catalogue's names, from which each exporter makes its own format.

Hot paths count in plain integers of their own (an OpenTelemetry instrument costs 17 us an observation,
prometheus-client 1 to 2; measured on CPython 3.11), so neither library's instruments are used. A reading is taken on
the event loop in one go, at the price of models and pools and never of blocks, and is formatted elsewhere: by a custom
collector for Prometheus, as OTLP's data points for a push. Both have histograms that way, which OpenTelemetry's
observable instruments have not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.model.numbers.histogram import Histogram
from cachesvc.telemetry.catalogue import CATALOGUE, MetricKind

WAIT_SECONDS = 5.0
"""A loop that does not answer for so long is stuck: the scrape then fails, which is what tells it."""

LABEL_CHARACTERS = 64


class Buckets(NamedTuple):
    """A histogram as it was when it was read: counts by bucket, not summed up."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Series = dict[tuple[str, ...], float | Buckets]


class Reading:
    """Values by metric name and label values."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {name: {} for name in CATALOGUE}

    def put(self, name: str, value: float, *labels: object) -> None:
        """Add to a counter or gauge, under its labels' values in the catalogue's order."""
        metric = CATALOGUE[name]
        assert metric.kind is not MetricKind.HISTOGRAM, f"{name} is a histogram"
        assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}"
        series = self.series[name]
        key = tuple(map(label_text, labels))
        before = series.get(key, 0)
        assert not isinstance(before, Buckets)
        series[key] = before + value

    def put_histogram(self, name: str, histogram: Histogram, *labels: object) -> None:
        """Add a histogram; several under the same labels are summed, bucket by bucket."""
        metric = CATALOGUE[name]
        assert metric.kind is MetricKind.HISTOGRAM, f"{name} is no histogram"
        assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}"
        key = tuple(map(label_text, labels))
        before = self.series[name].get(key)
        counts, total = tuple(histogram.counts), histogram.total
        if isinstance(before, Buckets):
            counts = tuple(one + other for one, other in zip(before.counts, counts, strict=True))
            total += before.total
        self.series[name][key] = Buckets(histogram.bounds, counts, total)


def label_text(value: object) -> str:
    """A label's value: callers choose models' names, so they are cut and kept printable."""
    text = str(value)[:LABEL_CHARACTERS]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


class MetricReader:
    """Takes readings on the event loop for other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gather: Callable[[Reading], None]) -> None:
        self._loop = loop
        self._gather = gather
        self._lock = threading.Lock()

    def read(self) -> Reading:
        """A fresh reading; called from any thread but the loop's. Raises TimeoutError, RuntimeError (loop closed)."""
        answer: concurrent.futures.Future[Reading] = concurrent.futures.Future()
        with self._lock:  # scrapers that come at once wait for one another, and not for the loop
            self._loop.call_soon_threadsafe(self._take, answer, time.monotonic())
            return answer.result(WAIT_SECONDS)

    def _take(self, answer: concurrent.futures.Future[Reading], asked: float) -> None:
        try:
            reading = Reading()
            reading.put("loop_lag_seconds", time.monotonic() - asked)
            self._gather(reading)
        except Exception as error:  # noqa: BLE001 - the root of a callback: the caller gets the error
            answer.set_exception(error)
        else:
            answer.set_result(reading)
