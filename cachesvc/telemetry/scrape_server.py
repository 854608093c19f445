"""One page over HTTP for scrapers: a GET, an answer, and the connection ends. On a thread and a loop of its own.

Unauthenticated connections get minimal resources: no thread, one of ``MOST_CONNECTIONS`` sockets, ``HEAD_BYTES`` of
memory, ``EXCHANGE_SECONDS`` in all. When the sockets are taken, the oldest connection without a request is closed, so
that silent connections cannot keep a scraper out.

One reading of all metrics: values under the catalogue's names, from which each exporter makes its own format.

Hot paths count in plain integers of their own (an OpenTelemetry instrument costs 17 us an observation,
prometheus-client 1 to 2; measured on CPython 3.11), so neither library's instruments are used. A reading is taken on
the event loop in one go, at the price of models and pools and never of blocks, and is formatted elsewhere: by a custom
collector for Prometheus, as OTLP's data points for a push. Both have histograms that way, which OpenTelemetry's
observable instruments have not.

The page of metrics in prometheus-client's format, over readings of our own.

The server's thread only formats; the reading itself is taken on the event loop (``metric_reader.py`` says why).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from cachesvc.model.errors import CacheError, PermissionDenied, Unauthenticated, Unavailable
from cachesvc.model.numbers import Histogram
from cachesvc.model.text import parse_address
from cachesvc.telemetry import events
from cachesvc.telemetry.catalogue import CATALOGUE, PREFIX, Metric, MetricKind

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
