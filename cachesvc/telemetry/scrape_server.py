"""One page over HTTP for scrapers: a GET, an answer, and the connection ends. On a thread and a loop of its own.

Unauthenticated connections get minimal resources: no thread, one of ``MOST_CONNECTIONS`` sockets, ``HEAD_BYTES`` of
memory, ``EXCHANGE_SECONDS`` in all. When the sockets are taken, the oldest connection without a request is closed, so
that silent connections cannot keep a scraper out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from cachesvc.model.errors import CacheError, PermissionDenied, Unauthenticated, Unavailable
from cachesvc.model.numbers import Histogram
from cachesvc.model.text import parse_address
from cachesvc.telemetry import events
from cachesvc.telemetry.catalogue import CATALOGUE, PREFIX, Metric, MetricKind
from cachesvc.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


MOST_CONNECTIONS = 32
HEAD_BYTES = 16 << 10
EXCHANGE_SECONDS = 10.0
PATH = "/metrics"
_BEARER = "bearer "
_STATUS_OF = {Unauthenticated: HTTPStatus.UNAUTHORIZED, PermissionDenied: HTTPStatus.FORBIDDEN}


class Answer(NamedTuple):
    """Response: a status, headers beside those of its length and end, and the body."""

    status: HTTPStatus
    headers: dict[str, str]
    body: bytes


Page = Callable[[dict[str, str]], Answer]
"""The page for a request's headers, by their names in lower case; made on the server's thread."""
Admit = Callable[[str], None]
"""Check of a request's bearer token (empty: none). Raises Unauthenticated, PermissionDenied."""


class ScrapeServer:
    """Serves ``page`` at ``PATH`` of one address.

    ``admit``: None lets in every request that names the host by an address or by its own name. A foreign page whose
    name was rebound to this address, in a user's browser, does neither.
    """

    def __init__(
        self, address: str, page: Page, admit: Admit | None = None, exchange_seconds: float = EXCHANGE_SECONDS
    ) -> None:
        """``exchange_seconds``: that a connection may last, from its begin to the end of the answer."""
        self._address = address
        self._page = page
        self._admit = admit
        self._exchange_seconds = exchange_seconds
        self._asking: dict[asyncio.StreamWriter, None] = {}
        self._connections = 0
        self._began: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._end: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> int:
        """Listen and serve; returns the port. Raises Unavailable for an address that cannot be had."""
        self._thread.start()
        try:
            return self._began.result()
        except OSError as error:
            self._thread.join()
            raise Unavailable(f"cannot serve metrics on {self._address}: {error}; choose another address") from error

    def close(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        address = parse_address("metrics_listen", self._address)
        try:
            server = await asyncio.start_server(
                self._serve, address.host, address.port, limit=HEAD_BYTES, backlog=MOST_CONNECTIONS
            )
        except OSError as error:
            self._began.set_exception(error)
            return
        ending = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, ending.set)
        self._began.set_result(int(server.sockets[0].getsockname()[1]))
        await ending.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MOST_CONNECTIONS and not self._make_room():
            writer.transport.abort()
            return
        self._connections += 1
        self._asking[writer] = None
        try:
            async with asyncio.timeout(self._exchange_seconds):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                finally:
                    self._asking.pop(writer, None)
                writer.transport.set_write_buffer_limits(0)  # so that drain waits until all was sent
                writer.write(_encoded(self._answer(head)))
                await writer.drain()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()
        except Exception:  # noqa: BLE001 - the root of a task
            events.failure("scrape_failed")
            writer.transport.abort()
        finally:
            self._connections -= 1
            writer.close()

    def _make_room(self) -> bool:
        """End the oldest connection that has not asked for anything yet; False where all have."""
        oldest = next(iter(self._asking), None)
        if oldest is None:
            return False
        del self._asking[oldest]
        oldest.transport.abort()
        return True

    def _answer(self, head: bytes) -> Answer:
        line, *rest = head.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        if method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
        if target.partition(" ")[0].partition("?")[0] != PATH:
            return _plain(HTTPStatus.NOT_FOUND, f"the page is {PATH}")
        if self._admit is None:
            if not is_own_host(headers.get("host", ""), self._address):
                return _plain(HTTPStatus.MISDIRECTED_REQUEST, "ask by an address, or by the name of --metrics-listen")
            return self._page(headers)
        said = headers.get("authorization", "")
        try:
            self._admit(said[len(_BEARER) :].strip() if said.lower().startswith(_BEARER) else "")
        except CacheError as refusal:
            status = _STATUS_OF.get(type(refusal), HTTPStatus.FORBIDDEN)
            return _plain(status, str(refusal), {"WWW-Authenticate": "Bearer"})
        return self._page(headers)


def is_own_host(host: str, address: str) -> bool:
    """True for a Host header that no foreign name can be behind: a literal address, localhost, the machine's own name,
    or that of the ``address`` served on."""
    name = _without_port(host).lower()
    if name in ("localhost", os.uname().nodename.lower(), _without_port(address).lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]")


def _plain(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}, f"{text}\n".encode())


def _encoded(answer: Answer) -> bytes:
    headers = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        *(f"{name}: {it}" for name, it in headers.items()),
    ]
    return "\r\n".join([*head, "", ""]).encode() + answer.body


# One reading of all metrics: values under the catalogue's names, from which each exporter makes its own format.
#
# Hot paths count in plain integers of their own (an OpenTelemetry instrument costs 17 us an observation,
# prometheus-client 1 to 2; measured on CPython 3.11), so neither library's instruments are used. A reading is taken on
# the event loop in one go, at the price of models and pools and never of blocks, and is formatted elsewhere: by a
# custom collector for Prometheus, as OTLP's data points for a push. Both have histograms that way, which
# OpenTelemetry's observable instruments have not.

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


# The page of metrics in prometheus-client's format, over readings of our own.
#
# The server's thread only formats; the reading itself is taken on the event loop (``MetricReader`` says why).


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


# OpenTelemetry's protocol: spans as they end, and readings every so often, to one collector.
#
# The SDK reads the usual OTEL_* variables itself: headers, timeout, certificate, sampler, resource attributes,
# intervals. OTEL_TRACES_EXPORTER=none and OTEL_METRICS_EXPORTER=none leave one of the two out. A collector that is away
# costs what is not told: exports happen on threads of their own, and queues are bounded.

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
