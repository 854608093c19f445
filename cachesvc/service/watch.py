"""Watches calls from outside: their times, their outcomes, and spans for those that are traced.

A watched servicer is handed to gRPC in place of the real one, so services know nothing of it and an unwatched daemon
pays nothing. Of a stream both ways each message is watched: its request comes, and the answer to it is the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from cachesvc.model.histogram import Histogram
from cachesvc.service.calls import Context
from cachesvc.telemetry.tracing import Span, Tracer, current_span
from cachesvc.wire.status import ERROR_METADATA_KEY

OK = "OK"
OTHER = "other"
Parent = dict[str, str] | None


class CallWatch:
    """Counts by method; used on the event loop alone."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.codes: dict[tuple[str, str], int] = {}
        self._names: set[str] = set()
        self._tracer = tracer
        self._clock = clock

    def watched(self, service: Any, servicer: Any) -> Any:
        """A servicer that behaves like ``servicer``, whose ``service`` descriptor says which methods it has."""
        wrapped = {}
        for method in service.methods:
            name = f"{service.name}/{method.name}"
            self._names.add(name)
            serve = getattr(servicer, method.name)
            self.seconds[name] = Histogram()
            if method.client_streaming and method.server_streaming:
                wrapped[method.name] = self._stream(name, serve, "error" in method.output_type.fields_by_name)
            elif not method.server_streaming:
                wrapped[method.name] = self._unary(name, serve)
            else:
                wrapped[method.name] = serve  # lives as long as its subscriber does
        return SimpleNamespace(**wrapped)

    def refused(self, path: str, code: str) -> None:
        """A call that was let past to no service. Whoever sends it chooses ``path``: only known ones are told apart."""
        name = path.removeprefix("/kvcache.v1.")
        key = (name if name in self._names else OTHER, code)
        self.codes[key] = self.codes.get(key, 0) + 1

    def _unary(self, name: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Context) -> Any:
            began = self._clock()
            span = self._begin(name, self._parent(context))
            code = OK
            try:
                return await serve(request, context)
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                self._end(name, began, span, code)

        return call

    def _stream(self, name: str, serve: Callable[..., Any], tells_errors: bool) -> Callable[..., Any]:
        async def call(request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            parent = self._parent(context)
            began: float | None = None
            span: Span | None = None

            async def requests() -> AsyncIterator[Any]:
                nonlocal began, span
                async for request in request_iterator:
                    began = self._clock()
                    span = self._begin(name, parent)
                    yield request

            try:
                async for answer in serve(requests(), context):
                    code = answer.error.code if tells_errors and answer.HasField("error") else OK
                    self._end(name, began or self._clock(), span, code)
                    began = None
                    yield answer
            except BaseException as error:
                if began is not None:
                    self._end(name, began, span, _code_of(error, context))
                raise

        return call

    def _parent(self, context: Context) -> Parent:
        return self._tracer.parent_of(context.invocation_metadata())

    def _begin(self, name: str, parent: Parent) -> Span | None:
        span = self._tracer.begin_call(name, parent)
        current_span.set(span)
        return span

    def _end(self, name: str, began: float, span: Span | None, code: str) -> None:
        self.seconds[name].observe(self._clock() - began)
        key = (name, code)
        self.codes[key] = self.codes.get(key, 0) + 1
        if span is not None:
            current_span.set(None)
            span.end(code)


def _code_of(error: BaseException, context: Context) -> str:
    """What the caller was told: the daemon's own code, or gRPC's words for what is no refusal."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED"
    for key, value in context.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return str(value)
    return "INTERNAL"
