"""The scrape endpoint: prometheus-client's server and format over readings of our own.

Its threads only format; the reading itself is taken on the event loop (``reading.py`` says why).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cachesvc.model.errors import Unavailable
from cachesvc.telemetry.catalogue import CATALOGUE, PREFIX, Kind, Metric
from cachesvc.telemetry.metric_reader import Buckets, Reader, Reading, Series

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


class MetricsServer:
    """Serves ``/metrics`` on one address, in threads of its own."""

    def __init__(self, address: str, reader: Reader) -> None:
        self._address = address
        self._reader = reader
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen and serve; returns the port. Raises Unavailable (no prometheus-client, address in use)."""
        try:
            from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, start_http_server
        except ImportError as missing:
            raise Unavailable(
                "metrics_listen needs prometheus-client: install cachesvc[prometheus], or leave --metrics-listen out"
            ) from missing
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(_Collector(self._reader))
        host, _, port = self._address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {self._address}: {error}; choose another address") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        assert self._thread is not None
        self._thread.join()
        self._server = None


class _Collector:
    """What the registry asks at each scrape."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def describe(self) -> list[Family]:
        """Nothing: else the registry would take a reading to learn the names."""
        return []

    def collect(self) -> Iterator[Family]:
        """All families, those without a series too, so that dashboards find every name."""
        yield from families(self._reader.read())


def families(reading: Reading) -> Iterator[Family]:
    """A reading as prometheus-client's families."""
    for name, series in reading.series.items():
        yield _family(CATALOGUE[name], series)


def _family(metric: Metric, series: Series) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name = PREFIX + metric.name
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.meaning, labels=metric.labels)
        for labels, value in series.items():
            assert isinstance(value, Buckets)
            names = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
            histogram.add_metric(labels, list(zip(names, accumulate(value.counts), strict=True)), value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(name, metric.meaning, labels=metric.labels)
    for labels, value in series.items():
        assert not isinstance(value, Buckets)
        family.add_metric(labels, value)
    return family
