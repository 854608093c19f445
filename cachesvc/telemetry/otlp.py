"""OpenTelemetry's protocol: spans as they end, and readings every so often, to one collector.

The SDK reads the usual OTEL_* variables itself: headers, timeout, certificate, sampler, resource attributes, intervals.
OTEL_TRACES_EXPORTER=none and OTEL_METRICS_EXPORTER=none leave one of the two out. A collector that is away costs what
is not told: exports happen on threads of their own, and queues are bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from cachesvc.model.errors import Unavailable
from cachesvc.telemetry import events
from cachesvc.telemetry.catalogue import CATALOGUE, PREFIX, Metric, MetricKind
from cachesvc.telemetry.scrape_server import Buckets, MetricReader, Reading, Series
from cachesvc.telemetry.tracing import Tracer

SCOPE = "cachesvc"
CLOSE_SECONDS = 2.0
PUSH_SECONDS = 60.0
"""OpenTelemetry's own default of OTEL_METRIC_EXPORT_INTERVAL."""


class Otlp:
    """The connection to a collector at ``endpoint``. ``environment``: the process's, as the root read it."""

    def __init__(self, endpoint: str, version: str, environment: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._version = version
        self._environment = environment
        self._provider: Any = None
        self._push: _Push | None = None

    def start_tracing(self, tracer: Tracer) -> None:
        """Send the spans of ``tracer`` to the collector, unless the environment wants none. Raises Unavailable."""
        if self._environment.get("OTEL_TRACES_EXPORTER") == "none":
            return
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
        except ImportError as missing:
            raise _not_installed() from missing
        chosen = bool(self._environment.get("OTEL_TRACES_SAMPLER"))
        sampler = None if chosen else ParentBased(ALWAYS_OFF)
        provider = TracerProvider(sampler=sampler, resource=self._resource(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=self._endpoint)))
        self._provider = provider
        tracer.trace_with(provider.get_tracer(SCOPE, self._version), begins_traces=chosen)

    def start_metrics(self, reader: MetricReader) -> None:
        """Push readings from now on, unless the environment wants none. Raises Unavailable."""
        if self._environment.get("OTEL_METRICS_EXPORTER") == "none":
            return
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        except ImportError as missing:
            raise _not_installed() from missing
        milliseconds = self._environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")
        seconds = int(milliseconds) / 1000 if milliseconds.isdigit() and int(milliseconds) else PUSH_SECONDS
        exporter = OTLPMetricExporter(endpoint=self._endpoint)
        self._push = _Push(exporter, reader, self._resource(), self._version, seconds)
        self._push.start()

    def close(self) -> None:
        """Send what is left, for a bounded while. Idempotent."""
        if self._push is not None:
            self._push.close()
            self._push = None
        if self._provider is not None:  # a thread, because the exporter goes on trying, even after a shutdown
            last = threading.Thread(target=self._provider.shutdown, name="otlp-last", daemon=True)
            last.start()
            last.join(CLOSE_SECONDS)
            self._provider = None

    def _resource(self) -> Any:
        from opentelemetry.sdk.resources import Resource

        named = {} if self._environment.get("OTEL_SERVICE_NAME") else {"service.name": SCOPE}
        return Resource.create({"service.version": self._version, **named})


def _not_installed() -> Unavailable:
    return Unavailable("otlp_endpoint needs OpenTelemetry: install cachesvc[otel], or leave --otlp-endpoint out")


class _Push:
    """A thread that sends a reading every ``seconds``."""

    def __init__(self, exporter: Any, reader: MetricReader, resource: Any, version: str, seconds: float) -> None:
        self._exporter = exporter
        self._reader = reader
        self._resource = resource
        self._version = version
        self._seconds = seconds
        self._began_ns = time.time_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="otlp-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._exporter.shutdown(CLOSE_SECONDS * 1000)
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                self._exporter.export(metrics_data(self._reader.read(), self._resource, self._version, self._began_ns))
            except Exception as error:  # noqa: BLE001 - a thread's root: the next push may do better
                events.warning("metrics_push_failed", reason=str(error) or type(error).__name__)


def metrics_data(reading: Reading, resource: Any, version: str, began_ns: int) -> Any:
    """A reading as OpenTelemetry's data points; families without a series are left out."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    told = [_metric(CATALOGUE[name], series, began_ns, now_ns) for name, series in reading.series.items() if series]
    scope = ScopeMetrics(InstrumentationScope(SCOPE, version), told, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(metric: Metric, series: Series, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    points: list[Any] = []
    unknown: Any = None  # least and largest
    for values, value in series.items():
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(value, Buckets):
            points.append(
                export.HistogramDataPoint(
                    labels,
                    began_ns,
                    now_ns,
                    sum(value.counts),
                    value.total,
                    value.counts,
                    value.bounds,
                    unknown,
                    unknown,
                )
            )
        else:
            points.append(export.NumberDataPoint(labels, began_ns, now_ns, value))
    cumulative = export.AggregationTemporality.CUMULATIVE
    data: Any = export.Gauge(points)
    if metric.kind is MetricKind.HISTOGRAM:
        data = export.Histogram(points, cumulative)
    elif metric.kind is MetricKind.COUNTER:
        data = export.Sum(points, cumulative, is_monotonic=True)
    return export.Metric(PREFIX + metric.name, metric.meaning, "s" if metric.name.endswith("_seconds") else "", data)
