"""CacheService: each call alone, and the Step stream that carries many operations at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvcache.v1 import cache_pb2, cache_pb2_grpc
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.flows.transfer.transfers import expedite, ticket_view
from cachesvc.model.errors import ErrorCode, InvalidRequest, LimitExceeded
from cachesvc.questions.owned import own_ticket
from cachesvc.service.access.admission import CallKind, Slot
from cachesvc.service.calls.dispatcher import INTERNAL, Ask, ServiceCall
from cachesvc.service.rpc.edge import Context, Edge, end_with
from cachesvc.service.rpc.operations import ALLOCATE, MATCH, PREFETCH, PUBLISH, RECYCLE, RELEASE, SWAP
from cachesvc.service.rpc.steps import StepRun
from cachesvc.wire.columns import count_entries
from cachesvc.wire.convert import ticket_to_proto

MAX_WAITED_TICKETS = 1024
LONGEST_WAIT_SECONDS = 60.0
"""Longest wait of a call without a deadline, seconds; its caller may ask again."""

ENDS_STREAM = frozenset({INTERNAL, ErrorCode.UNAUTHENTICATED.value})
"""Refusals of a step that end its stream: the daemon has met a defect, or the caller is to prove itself anew."""


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """``operations``: those of Steps, by name and outcome."""

    def __init__(self, edge: Edge, operations_per_step: int) -> None:
        self._edge = edge
        self._dispatcher = edge.dispatcher
        self.operations_per_step = operations_per_step
        self.operations: dict[tuple[str, str], int] = {}
        self.match, self.allocate, self.publish, self.swap = MATCH, ALLOCATE, PUBLISH, SWAP
        self.recycle, self.release, self.prefetch = RECYCLE, RELEASE, PREFETCH
        self.wait_tickets = ServiceCall(name="CacheService/WaitTickets", handle=self._wait_tickets, kind=CallKind.WAITS)
        self.step = ServiceCall(name="CacheService/Step", handle=self._step, is_repeatable=True, is_of_lease=True)

    async def Match(self, request: cache_pb2.MatchRequest, context: Context) -> cache_pb2.MatchResponse:
        return await self._edge.answer(self.match, request, context)

    async def Allocate(self, request: cache_pb2.AllocateRequest, context: Context) -> cache_pb2.AllocateResponse:
        return await self._edge.answer(self.allocate, request, context)

    async def Publish(self, request: cache_pb2.PublishRequest, context: Context) -> cache_pb2.PublishResponse:
        return await self._edge.answer(self.publish, request, context)

    async def Swap(self, request: cache_pb2.SwapRequest, context: Context) -> cache_pb2.SwapResponse:
        return await self._edge.answer(self.swap, request, context)

    async def Recycle(self, request: cache_pb2.RecycleRequest, context: Context) -> cache_pb2.RecycleResponse:
        return await self._edge.answer(self.recycle, request, context)

    async def Release(self, request: cache_pb2.ReleaseRequest, context: Context) -> cache_pb2.ReleaseResponse:
        return await self._edge.answer(self.release, request, context)

    async def Prefetch(self, request: cache_pb2.PrefetchRequest, context: Context) -> cache_pb2.PrefetchResponse:
        return await self._edge.answer(self.prefetch, request, context)

    async def WaitTickets(
        self, request: cache_pb2.WaitTicketsRequest, context: Context
    ) -> cache_pb2.WaitTicketsResponse:
        return await self._edge.answer(self.wait_tickets, request, context)

    async def Step(
        self, request_iterator: AsyncIterator[cache_pb2.StepRequest], context: Context
    ) -> AsyncIterator[cache_pb2.StepResponse]:
        """Steps of one stream are carried out one after another. A refused one is an answer, and the stream goes on."""
        async with self._edge.stream(self.step.name, context):
            parent = self._edge.parent(context)
            async for request in request_iterator:
                await self._edge.require_read(self.step, context)
                served = self._edge.serve(self.step, request, context, parent)
                # Where the stream breaks the step goes on: sent again it must find its answer.
                outcome = await asyncio.shield(served) if isinstance(served, asyncio.Future) else served
                if not isinstance(outcome, OperationError):
                    yield outcome
                elif outcome.code in ENDS_STREAM:
                    await end_with(context, outcome)
                else:
                    yield cache_pb2.StepResponse(request_id=request.request_id, error=outcome)

    # -- what they do ------------------------------------------------------------------------------------------

    def _wait_tickets(
        self, ask: Ask, request: cache_pb2.WaitTicketsRequest
    ) -> cache_pb2.WaitTicketsResponse | asyncio.Future[Any]:
        node = self._dispatcher.node
        if len(request.tickets) > MAX_WAITED_TICKETS:
            raise LimitExceeded("tickets to wait for", len(request.tickets), MAX_WAITED_TICKETS)
        tickets = [own_ticket(node.core, ask.who.acts_for, ticket) for ticket in request.tickets]

        def running() -> list[int]:
            return node.running(ticket.id for ticket in tickets)

        def answer() -> cache_pb2.WaitTicketsResponse:
            return cache_pb2.WaitTicketsResponse(tickets=[ticket_to_proto(ticket_view(ticket)) for ticket in tickets])

        async def wait_out(_: Slot) -> cache_pb2.WaitTicketsResponse:
            until = min(ask.deadline, ask.began + min(request.wait_ms / 1000, LONGEST_WAIT_SECONDS))
            while awaited := running():
                if not await node.wait_any(awaited, until - node.now(), ask.holder.process):
                    break
            return answer()

        if not request.wait_ms or not running():
            return answer()
        later = self._dispatcher.later(ask, CallKind.WAITS, wait_out)
        node.run(expedite, node.core, request.tickets)
        return later

    def _step(self, ask: Ask, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse | asyncio.Future[Any]:
        count = len(request.operations) + count_entries(request.columns)
        if ask.holder.meter is not None:  # what is refused for its size has cost its reading, too
            ask.holder.meter.admit_operations(1 + min(count, self.operations_per_step), ask.began)
        if request.request_id == 0:
            raise InvalidRequest("a step needs a request_id above 0, rising within the lease")
        if count > self.operations_per_step:
            raise LimitExceeded("operations of a step", count, self.operations_per_step)
        return StepRun(ask, request, self.operations).begin()
