"""Traces from an engine's span through the daemon's calls to the transfers that they begin, at a real OTLP receiver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanContext

from cachesvc.telemetry.catalogue import CATALOGUE
from tests.e2e.engine import PLAIN, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.scraping import ready_line


class Receiver:
    """An OTLP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[str, object] = {}
        self.resource: dict[str, str] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)  # type: ignore[no-untyped-call]
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        for each in request.resource_spans:
            self._receiver.resource = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            for scope in each.scope_spans:
                self._receiver.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object) -> object:
        for each in request.resource_metrics:
            for scope in each.scope_metrics:
                self._receiver.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def traced(receiver: Receiver) -> Iterator[Node]:
    with running_node(["--otlp-endpoint", receiver.endpoint]) as node:
        yield node


def attributes(span: Span) -> dict[str, object]:
    """A span's attributes, as Python has them."""
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in span.attributes}


def is_below(span: Span, context: SpanContext) -> bool:
    """True where a span is a child of the engine's."""
    return span.trace_id.hex() == f"{context.trace_id:032x}" and span.parent_span_id.hex() == f"{context.span_id:016x}"


def test_a_request_is_followed_down_to_its_transfers(traced: Node, receiver: Receiver) -> None:
    tracer = TracerProvider().get_tracer("engine")
    with Engine(traced.socket, device_pages=4, host_pages=16) as engine:
        for seed in range(2):
            engine.serve(prompt(seed, 4))  # calls without a trace
        with tracer.start_as_current_span("request") as request:
            assert engine.serve(prompt(0, 4)).host == 4
        context = request.get_span_context()

        def loads() -> list[Span]:
            return [span for span in receiver.named("transfer") if attributes(span)["cachesvc.direction"] == "load"]

        wait_until(lambda: bool(loads()) and bool(receiver.named("CacheService/Release")), "spans have come")
        spans = {span.name: span for span in receiver.spans if span.name != "transfer"}
        assert spans.keys() >= {"CacheService/Match", "CacheService/Allocate", "CacheService/Release"}
        assert all(is_below(span, context) for span in spans.values())
        [load] = loads()
        assert load.parent_span_id == spans["CacheService/Allocate"].span_id
        began = spans["CacheService/Allocate"].start_time_unix_nano
        assert began <= load.start_time_unix_nano <= load.end_time_unix_nano
        told = attributes(load)
        assert (told["cachesvc.bytes"], told["cachesvc.blocks"]) == (4 * PLAIN.page_bytes(0), 4)
        assert (told["cachesvc.outcome"], told["cachesvc.urgency"]) == ("done", "awaited")
        times = [told["cachesvc.queued_seconds"], told["cachesvc.copy_seconds"]]
        assert all(isinstance(seconds, float) and 0 <= seconds < 60 for seconds in times)
    assert receiver.resource["service.name"] == "cachesvc"
    assert receiver.resource["deployment.environment"] == "test"


def test_each_step_has_a_span_with_its_operations_and_the_log_has_its_ids(traced: Node, receiver: Receiver) -> None:
    tracer = TracerProvider().get_tracer("engine")
    with Engine(traced.socket, device_pages=8) as engine, tracer.start_as_current_span("decode") as decode:
        lease = engine.client.open_lease(engine.registration)
        with engine.lease.step() as stream:
            for _ in range(2):
                batch = stream.batch()
                batch.match(engine.keys(prompt(0, 2)))
                batch.prefetch(b"ragged")
                stream.submit(batch)[0].release()
        lease.close()
        wait_until(lambda: len(receiver.named("CacheService/Step")) >= 2, "spans have come")
    context = decode.get_span_context()
    steps = [span for span in receiver.named("CacheService/Step") if span.events]
    assert len(steps) == 2
    for step in steps:
        assert is_below(step, context)
        told = [(event.name, event.attributes[0].value.string_value) for event in step.events]
        assert told == [("match", "OK"), ("prefetch", "INVALID")]
    lines = [json.loads(line) for line in traced.log().splitlines()]
    opened = [line for line in lines if line["event"] == "lease_opened"]
    assert [line.get("trace_id") for line in opened] == [None, f"{context.trace_id:032x}"]


def test_what_nobody_samples_has_no_span(traced: Node, receiver: Receiver) -> None:
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("engine")
    sampled = TracerProvider().get_tracer("engine")
    with Engine(traced.socket, device_pages=8) as engine:
        engine.serve(prompt(0, 2))
        with unsampled.start_as_current_span("request"):
            engine.serve(prompt(1, 2))
        with sampled.start_as_current_span("last") as last:
            engine.lease.match(b"").release()
        wait_until(lambda: bool(receiver.named("CacheService/Release")), "the last span has come")
    assert all(is_below(span, last.get_span_context()) for span in receiver.spans)


SILENT = {
    "cachesvc_recomputed_tokens",
    "cachesvc_step_operations",
    "cachesvc_lost_hit_tokens",  # of layouts with windows or states
    "cachesvc_compared_tokens",  # of policies that learn
    "cachesvc_compared_hit_tokens",
}
"""Metrics of which there is nothing to tell here; those of a storage tier, of which there is none, beside them."""


def test_metrics_are_pushed_too(traced: Node, receiver: Receiver) -> None:
    with Engine(traced.socket, device_pages=4, host_pages=16) as engine:
        for seed in (0, 1, 0):
            engine.serve(prompt(seed, 4))
        of_tiers = {name for name, each in CATALOGUE.items() if name.startswith("storage_") and "tier" in each.labels}
        names = {f"cachesvc_{name}" for name in CATALOGUE.keys() - of_tiers} - SILENT
        wait_until(lambda: receiver.metrics.keys() >= names, f"all came but {names - receiver.metrics.keys()}")


def test_a_collector_that_is_away_harms_nobody() -> None:
    with running_node(["--otlp-endpoint", "http://127.0.0.1:9"]) as node, Engine(node.socket, device_pages=8) as engine:
        with TracerProvider().get_tracer("engine").start_as_current_span("request"):
            engine.serve(prompt(0, 4))
        assert engine.serve(prompt(0, 4)).device == 4
        assert ready_line(node)["metrics_port"] == 0
