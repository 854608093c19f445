"""Readings and their two formats, and whose calls are traced."""

from __future__ import annotations

import asyncio
import threading

import pytest
from cachesvc_client.wire.connection import trace_headers
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.numbers import Histogram
from cachesvc.telemetry.catalogue import CATALOGUE
from cachesvc.telemetry.scrape_server import LABEL_CHARACTERS, MetricReader, Reading, families, label_text, metrics_data
from cachesvc.telemetry.tracing import Tracer

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def reading_of_three() -> Reading:
    reading = Reading()
    reading.put("hit_tokens", 5, 'a "name"\n', 1, "device")
    reading.put("leases", 2, "live")
    times = Histogram((1, 2))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        times.observe(seconds)
    reading.put_histogram("rpc_seconds", times, "CacheService/Step")
    return reading


class _Fixed:
    """A registry's collector of one reading."""

    def describe(self) -> list[object]:
        return []

    def collect(self) -> object:
        return families(reading_of_three())


def test_the_page_is_what_prometheus_reads() -> None:
    registry = CollectorRegistry()
    registry.register(_Fixed())  # type: ignore[arg-type]
    page = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert page.keys() == {f"cachesvc_{name}" for name in CATALOGUE}
    [hit] = page["cachesvc_hit_tokens"].samples
    assert (hit.name, hit.value) == ("cachesvc_hit_tokens_total", 5)
    assert hit.labels == {"model": 'a "name"?', "model_id": "1", "tier": "device"}
    step = {(s.name, s.labels.get("le")): s.value for s in page["cachesvc_rpc_seconds"].samples}
    name = "cachesvc_rpc_seconds"
    assert step[f"{name}_bucket", "1"] == 2
    assert step[f"{name}_bucket", "2"] == 3
    assert step[f"{name}_bucket", "+Inf"] == step[f"{name}_count", None] == 4
    assert step[f"{name}_sum", None] == 12


def test_the_push_says_the_same() -> None:
    data = metrics_data(reading_of_three(), Resource({}), "1", 7)
    told = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert told.keys() == {"cachesvc_hit_tokens", "cachesvc_leases", "cachesvc_rpc_seconds"}
    [point] = told["cachesvc_rpc_seconds"].data_points
    assert (point.bucket_counts, point.count, point.sum) == ((2, 1, 1), 4, 12)
    assert told["cachesvc_hit_tokens"].is_monotonic


def test_series_under_one_label_are_summed() -> None:
    reading = reading_of_three()
    reading.put("leases", 3, "live")
    assert reading.series["leases"] == {("live",): 5}
    times = Histogram((1, 2))
    times.observe(1.5)
    reading.put_histogram("rpc_seconds", times, "CacheService/Step")
    [summed] = reading.series["rpc_seconds"].values()
    assert not isinstance(summed, float | int)
    assert (summed.counts, summed.total) == ((2, 2, 1), 13.5)


def test_labels_are_short_and_printable() -> None:
    assert label_text("x" * 500) == "x" * LABEL_CHARACTERS
    assert label_text("a\x00b\x1b[31m\u202e") == "a?b?[31m?"


async def test_readings_are_taken_on_the_loop_whoever_asks() -> None:
    threads: list[int] = []

    def gather(reading: Reading) -> None:
        threads.append(threading.get_ident())
        reading.put("draining", 1)

    reader = MetricReader(asyncio.get_running_loop(), gather)
    readings = await asyncio.gather(*(asyncio.to_thread(reader.read) for _ in range(8)))
    assert threads == [threading.get_ident()] * 8
    assert all(reading.series["draining"] == {(): 1} for reading in readings)


async def test_a_reading_that_breaks_tells_who_asked() -> None:
    def gather(_: Reading) -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await asyncio.to_thread(MetricReader(asyncio.get_running_loop(), gather).read)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracer_to(spans: InMemorySpanExporter, *, begins_traces: bool = False) -> Tracer:
    provider = TracerProvider(sampler=None if begins_traces else ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = Tracer()
    tracer.trace_with(provider.get_tracer("test"), begins_traces=begins_traces)
    return tracer


@pytest.mark.parametrize(
    ("headers", "is_traced"),
    [
        ((("traceparent", SAMPLED),), True),
        ((("traceparent", SAMPLED[:-1] + "0"),), False),
        ((("traceparent", "00-zz-01"),), False),
        ((("traceparent", ""),), False),
        ((("traceparent", b"\xff"),), False),
        ((("user-agent", "x"),), False),
        ((), False),
        (None, False),
    ],
)
def test_only_calls_of_traced_callers_have_spans(
    spans: InMemorySpanExporter, headers: tuple[tuple[str, str | bytes], ...] | None, is_traced: bool
) -> None:
    tracer = tracer_to(spans)
    span = tracer.begin_call("CacheService/Match", tracer.parent_of(headers))
    assert (span is not None) == is_traced
    if span is not None:
        assert span.trace_id == SAMPLED.split("-")[1]
        span.end("NOT_FOUND")
    assert len(spans.get_finished_spans()) == is_traced


def test_a_sampler_of_the_environment_may_begin_traces(spans: InMemorySpanExporter) -> None:
    tracer = tracer_to(spans, begins_traces=True)
    span = tracer.begin_call("CacheService/Match", tracer.parent_of(()))
    assert span is not None
    span.end("OK")
    [finished] = spans.get_finished_spans()
    assert finished.parent is None
    assert finished.status.status_code is trace.StatusCode.UNSET


def test_the_client_hands_on_the_span_that_records() -> None:
    assert trace_headers() == ()
    with TracerProvider().get_tracer("engine").start_as_current_span("request"):
        expected: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(expected)
        assert dict(trace_headers()) == expected
        assert expected.keys() == {"traceparent"}
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("engine").start_as_current_span("request"):
        assert trace_headers() == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics_listen": "9464"},
        {"metrics_listen": "host:x"},
        {"metrics_listen": "host:70000"},
        {"otlp_endpoint": "collector:4317"},
        {"otlp_endpoint": "http://user:secret@collector:4317"},
        {"otlp_endpoint": "http://collector:4317/v1/traces"},
    ],
)
def test_bad_addresses_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(settings))):
        Config(**settings)  # type: ignore[arg-type]
