"""The page of metrics in prometheus-client's format, over readings of our own.

The server's thread only formats; the reading itself is taken on the event loop (``metric_reader.py`` says why).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING

from cachesvc.model.errors import Unavailable
from cachesvc.telemetry.catalogue import CATALOGUE, PREFIX, Metric, MetricKind
from cachesvc.telemetry.metric_reader import Buckets, MetricReader, Reading, Series
from cachesvc.telemetry.scrape_server import Answer, Page

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


def metrics_page(reader: MetricReader) -> Page:
    """Page that each scrape gets. Raises Unavailable where prometheus-client is missing."""
    try:
        from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
        from prometheus_client.exposition import choose_encoder
    except ImportError as missing:
        raise Unavailable(
            "metrics_listen needs prometheus-client: install cachesvc[prometheus], or leave --metrics-listen out"
        ) from missing
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Collector(reader))

    def page(headers: dict[str, str]) -> Answer:
        encode, content_type = choose_encoder(headers.get("accept", ""))
        try:
            body = encode(registry)
        except (TimeoutError, RuntimeError) as stuck:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, {}, f"the daemon does not answer: {stuck!r}\n".encode())
        answered = {"Content-Type": content_type}
        if "gzip" in headers.get("accept-encoding", ""):
            answered["Content-Encoding"], body = "gzip", gzip.compress(body, compresslevel=1)
        return Answer(HTTPStatus.OK, answered, body)

    return page


class _Collector:
    """Collector that the registry asks at each scrape."""

    def __init__(self, reader: MetricReader) -> None:
        self._reader = reader

    def describe(self) -> list[Family]:
        """Describe nothing: else the registry would take a reading to learn the names."""
        return []

    def collect(self) -> Iterator[Family]:
        """Collect all families, those without a series too, so that dashboards find every name."""
        yield from families(self._reader.read())


def families(reading: Reading) -> Iterator[Family]:
    """A reading as prometheus-client's families."""
    for name, series in reading.series.items():
        yield _family(CATALOGUE[name], series)


def _family(metric: Metric, series: Series) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name = PREFIX + metric.name
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.meaning, labels=metric.labels)
        for labels, value in series.items():
            assert isinstance(value, Buckets)
            names = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
            histogram.add_metric(labels, list(zip(names, accumulate(value.counts), strict=True)), value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(name, metric.meaning, labels=metric.labels)
    for labels, value in series.items():
        assert not isinstance(value, Buckets)
        family.add_metric(labels, value)
    return family
