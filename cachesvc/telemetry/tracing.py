"""Spans of calls and of the transfers that they begin, for calls whose caller is traced.

The parent is the W3C ``traceparent`` of a call's metadata. Unless OTEL_TRACES_SAMPLER says otherwise the daemon begins
no trace by itself and follows the caller's sampling, so an untraced call costs a look at its metadata. This
module needs no OpenTelemetry to be imported: ``Tracer`` is given a provider's tracer by ``scrape_server.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from cachesvc.model.words import Transfer, TransferTimes

Metadata = Iterable[tuple[str, str | bytes]]
_HEADERS = ("traceparent", "tracestate")
_SAMPLED = 1


class Span:
    """A recording span of OpenTelemetry, with its ids as the log writes them."""

    __slots__ = ("_span", "span_id", "trace_id")

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.span_id = f"{context.span_id:016x}"

    @property
    def inner(self) -> Any:
        return self._span

    def event(self, name: str, **attributes: str | int | float) -> None:
        """Add an event that happened within it."""
        self._span.add_event(name, attributes)

    def end(self, code: str) -> None:
        """End it; any code but OK marks it as failed."""
        self._span.set_attribute("cachesvc.code", code)
        if code != "OK":
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, code))
        self._span.end()


current_span: ContextVar[Span | None] = ContextVar("cachesvc_span", default=None)
"""The recording span of the call that runs now; None for an untraced call."""


class Tracer:
    """Begins spans, once there is a provider to begin them with; until ``trace_with`` nothing is traced.

    ``begins_traces``: calls without a traced caller may be sampled too.
    """

    def __init__(self) -> None:
        self._tracer: Any = None
        self.begins_traces = False

    def trace_with(self, tracer: Any, *, begins_traces: bool) -> None:
        """Begin spans of a provider's ``tracer`` from now on."""
        self._tracer = tracer
        self.begins_traces = begins_traces

    def parent_of(self, metadata: Metadata | None) -> dict[str, str] | None:
        """Headers that say whose child a call is; None: it is not to be traced."""
        if self._tracer is None or not (metadata or self.begins_traces):
            return None
        found = {key: value for key, value in metadata or () if key in _HEADERS and isinstance(value, str)}
        if self.begins_traces:
            return found
        flags = found.get("traceparent", "").rpartition("-")[2]
        try:
            return found if int(flags, 16) & _SAMPLED else None
        except ValueError:
            return None

    def begin_call(self, method: str, parent: dict[str, str] | None) -> Span | None:
        """A span for a call of ``Service/Method``, or None where it is not sampled."""
        if parent is None:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service, _, name = method.partition("/")
        span = self._tracer.start_span(
            method,
            context=TraceContextTextMapPropagator().extract(parent),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": f"kvcache.v1.{service}", "rpc.method": name},
        )
        return Span(span) if span.is_recording() else None

    def begin(self, transfer: Transfer, size_bytes: int) -> TransferSpan | None:
        """A span for a transfer that the traced call of this context begins; None where there is no such call."""
        call = current_span.get()
        if call is None:
            return None
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            "transfer",
            context=set_span_in_context(call.inner),
            attributes={
                "cachesvc.ticket": transfer.ticket,
                "cachesvc.direction": "p2p" if transfer.source_replica is not None else transfer.direction.value,
                "cachesvc.urgency": transfer.urgency.value,
                "cachesvc.bytes": size_bytes,
                "cachesvc.blocks": max((len(pair.device_pages) for pair in transfer.pages), default=0),
            },
        )
        return TransferSpan(span)


class TransferSpan:
    """One transfer's span; it may outlive the call's."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def ended(self, times: TransferTimes, error: Exception | None) -> None:
        """The transfer has ended; from any thread."""
        began = times.ended if times.began is None else times.began
        late = time.monotonic() - times.ended
        self._span.set_attributes(
            {
                "cachesvc.queued_seconds": began - times.submitted,
                "cachesvc.copy_seconds": times.ended - began,
                "cachesvc.outcome": "done" if error is None else "failed",
            }
        )
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end(time.time_ns() - int(late * 1e9))
