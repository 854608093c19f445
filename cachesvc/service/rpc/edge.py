"""gRPC's way to the dispatcher: facts of a call from its context, and outcomes as statuses. Nothing is decided here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.model.errors import CacheError, LimitExceeded
from cachesvc.service.access.admission import CallerKey, CallKind
from cachesvc.service.access.auth import caller, credentials_of, unread
from cachesvc.service.calls.dispatcher import (
    INTERNAL,
    Dispatcher,
    Operation,
    Outcome,
    Parent,
    Q,
    R,
    Served,
    ServiceCall,
)
from cachesvc.telemetry.tracing import Tracer
from cachesvc.wire.status import GRPC_CODES, refusal, status_metadata

Context = grpc.aio.ServicerContext[Any, Any]

_STATUSES = {code.value: status for code, status in GRPC_CODES.items()} | {INTERNAL: grpc.StatusCode.INTERNAL}


class Edge:
    """Hands calls to the dispatcher. ``tracer``: finds the parent of a call that is traced. ``calls``: that came."""

    def __init__(self, dispatcher: Dispatcher, tracer: Tracer | None = None) -> None:
        self.dispatcher = dispatcher
        self.calls = 0
        self._tracer = tracer

    async def answer(self, operation: Operation[Q, R], request: Q, context: Context) -> R:
        """A call of one message: its answer. Ends the call with its status where it is refused, and gives it up where
        its caller is gone."""
        if (error := unread()) is not None:
            await end_with(context, self.dispatcher.refuse(operation.name, error))
        served = self.serve(operation, request, context, self.parent(context), context.time_remaining())
        outcome: Outcome[R] = await served if isinstance(served, asyncio.Future) else served
        if isinstance(outcome, OperationError):
            await end_with(context, outcome)
        return outcome

    @asynccontextmanager
    async def stream(self, name: str, context: Context) -> AsyncIterator[None]:
        """A place among the open streams; ends the call where its caller has its share of them."""
        admission = self.dispatcher.admission
        holder = admission.holder(self._process(context), caller().acts_for)
        try:
            admission.streams.require(holder)
        except LimitExceeded as error:
            await end_with(context, self.dispatcher.refuse(name, error))
        admission.streams.count(holder, 1)
        try:
            yield
        finally:
            admission.streams.count(holder, -1)

    async def ask(self, context: Context, name: str, request: Q, call: Callable[[], Awaitable[R]]) -> R:
        """A call under no lease of no service's table: an operator's, of any length, carried out as WORK."""
        later = self.dispatcher.later
        operation: ServiceCall[Q, R] = ServiceCall(
            name=name, names_lease=False, handle=lambda ask, _: later(ask, CallKind.WORK, lambda _: call())
        )
        return await self.answer(operation, request, context)

    async def require_read(self, operation: Operation[Q, R], context: Context) -> None:
        """Ends the stream whose message at hand could not be read."""
        if (error := unread()) is not None:
            await end_with(context, self.dispatcher.refuse(operation.name, error))

    def serve(
        self, operation: Operation[Q, R], request: Q, context: Context, parent: Parent, seconds: float | None = None
    ) -> Served[R]:
        """Serve one message of a call, of any shape."""
        self.calls += 1
        process = partial(self._process, context)
        return self.dispatcher.serve(caller(), operation, request, process=process, seconds=seconds, parent=parent)

    def parent(self, context: Context) -> Parent:
        return None if self._tracer is None else self._tracer.parent_of(context.invocation_metadata())

    def _process(self, context: Context) -> CallerKey:
        """Caller: a process that the life socket knows, else the other end of the connection."""
        _, token = credentials_of(context.invocation_metadata())
        return token if self.dispatcher.node.knows(token) else context.peer()


async def refuse(context: Context, error: CacheError) -> NoReturn:
    """End the call with the error's status."""
    await end_with(context, refusal(error))


async def end_with(context: Context, error: OperationError) -> NoReturn:
    """End the call with a refusal's status, and its name in the trailing metadata; a defect has none."""
    if error.code != INTERNAL:
        context.set_trailing_metadata(status_metadata(error))
    await context.abort(_STATUSES[error.code], error.message)
