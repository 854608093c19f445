"""CacheService on the wire: each RPC alone, and the Step stream that carries many operations at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, cache_pb2_grpc

from cachesvc.flows.call import resolve
from cachesvc.flows.core import expedite, ticket_view
from cachesvc.flows.recycle import check_stock, refill_stock
from cachesvc.model.errors import CacheError, InvalidRequest, LimitExceeded
from cachesvc.service.access.auth import caller
from cachesvc.service.access.owners import own_ticket, require_lease
from cachesvc.service.access.quota import Meter, Quotas
from cachesvc.service.calls import CallGate, Context, Repeats, Reply, seconds_left
from cachesvc.service.node import Node
from cachesvc.service.rpc.operations import OPERATIONS
from cachesvc.telemetry.tracing import current_span
from cachesvc.wire.convert import cells_to_proto, ticket_to_proto
from cachesvc.wire.limits import check_fields

KEEP_ANSWERS = 256
MAX_WAITED_TICKETS = 1024
LONGEST_WAIT_SECONDS = 60.0
"""A caller without a deadline holds its place among the calls in flight no longer; it may ask again."""

TURN_OPERATIONS = 64
"""Operations of a step before others get their turn: some 3 ms."""

TAKING = frozenset({"match", "allocate", "swap"})
"""Operations that quotas are held against."""


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """Converts, calls a flow through the node, converts back. ``operations``: those of Steps, by name and outcome."""

    def __init__(self, node: Node, gate: CallGate, operations_per_step: int, quotas: Quotas | None = None) -> None:
        self._node = node
        self._gate = gate
        self._quotas = quotas
        self.operations_per_step = operations_per_step
        self._repeats: dict[str, Repeats] = {}
        self.operations: dict[tuple[str, str], int] = {}

    async def Match(self, request: cache_pb2.MatchRequest, context: Context) -> cache_pb2.MatchResponse:
        return await self._one("match", request, context, cache_pb2.MatchResponse)

    async def Allocate(self, request: cache_pb2.AllocateRequest, context: Context) -> cache_pb2.AllocateResponse:
        return await self._one("allocate", request, context, cache_pb2.AllocateResponse)

    async def Publish(self, request: cache_pb2.PublishRequest, context: Context) -> cache_pb2.PublishResponse:
        return await self._one("publish", request, context, cache_pb2.PublishResponse)

    async def Swap(self, request: cache_pb2.SwapRequest, context: Context) -> cache_pb2.SwapResponse:
        return await self._one("swap", request, context, cache_pb2.SwapResponse)

    async def Recycle(self, request: cache_pb2.RecycleRequest, context: Context) -> cache_pb2.RecycleResponse:
        return await self._one("recycle", request, context, cache_pb2.RecycleResponse)

    async def Release(self, request: cache_pb2.ReleaseRequest, context: Context) -> cache_pb2.ReleaseResponse:
        return await self._one("release", request, context, cache_pb2.ReleaseResponse)

    async def Prefetch(self, request: cache_pb2.PrefetchRequest, context: Context) -> cache_pb2.PrefetchResponse:
        return await self._one("prefetch", request, context, cache_pb2.PrefetchResponse)

    async def _one(self, name: str, request: Any, context: Context, kind: type[Reply]) -> Reply:
        lease_id, request_id = request.lease_id, request.request_id
        if request_id == 0:
            call = partial(self._run, name, lease_id, request, seconds_left(context))
        else:
            call = partial(self._run_once, name, lease_id, request_id, request, seconds_left(context))
        reply = await self._gate.serve(context, call, request)
        assert isinstance(reply, kind)
        return reply

    async def _run_once(
        self, name: str, lease_id: str, request_id: int, request: Message, seconds: float | None
    ) -> Any:
        # With the operation's name: a Release and a Swap of the same fields are the same bytes.
        contents = name.encode() + request.SerializeToString(deterministic=True)
        call = partial(self._run, name, lease_id, request, seconds)
        return await self._repeats_of(lease_id).answer(request_id, contents, call)

    async def _run(self, name: str, lease_id: str, request: Message, seconds: float | None) -> Any:
        operation = OPERATIONS[name]
        require_lease(self._node.core, lease_id)
        if self._quotas is not None and name in TAKING:
            self._quotas.check_operation(lease_id, name, request)
        return operation.reply(await self._node.run_call(lease_id, operation.begin(request), seconds))

    def _repeats_of(self, lease_id: str) -> Repeats:
        """The remembered answers of a live lease of the caller's tenant. Raises LeaseLost, NotFound."""
        require_lease(self._node.core, lease_id)
        leases = self._node.core.ledger.leases
        leases_known = self._repeats.get(lease_id)
        if leases_known is None:
            self._node.core.ledger.lease(lease_id)
            for gone in [known for known in self._repeats if known not in leases]:
                del self._repeats[gone]
            leases_known = self._repeats[lease_id] = Repeats(KEEP_ANSWERS)
        return leases_known

    async def WaitTickets(
        self, request: cache_pb2.WaitTicketsRequest, context: Context
    ) -> cache_pb2.WaitTicketsResponse:
        return await self._gate.serve(context, partial(self._wait_tickets, request, context), request)

    async def _wait_tickets(
        self, request: cache_pb2.WaitTicketsRequest, context: Context
    ) -> cache_pb2.WaitTicketsResponse:
        node = self._node
        if len(request.tickets) > MAX_WAITED_TICKETS:
            raise LimitExceeded("tickets to wait for", len(request.tickets), MAX_WAITED_TICKETS)
        tickets = [own_ticket(node.core, ticket) for ticket in request.tickets]
        if request.wait_ms:
            node.run(partial(expedite, node.core, request.tickets))
        left = seconds_left(context)
        wanted = min(request.wait_ms / 1000, LONGEST_WAIT_SECONDS)
        until = node.now() + (wanted if left is None else min(wanted, left))
        while running := [ticket.id for ticket in tickets if node.core.ledger.tickets.is_running(ticket.id)]:
            if not await node.wait_any(running, until - node.now()):
                break
        return cache_pb2.WaitTicketsResponse(tickets=[ticket_to_proto(ticket_view(ticket)) for ticket in tickets])

    async def Step(
        self, request_iterator: AsyncIterator[cache_pb2.StepRequest], context: Context
    ) -> AsyncIterator[cache_pb2.StepResponse]:
        async for request in request_iterator:
            yield await self._gate.serve(context, partial(self._carry_through, request), is_rated=False)

    async def _carry_through(self, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        """A step whose stream breaks goes on to its end: sent again it must find its answer."""
        return await asyncio.shield(self._step_or_error(request))

    async def _step_or_error(self, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        try:
            if request.request_id == 0:
                raise InvalidRequest("a step needs a request_id above 0, rising within the lease")
            if len(request.operations) > self.operations_per_step:
                raise LimitExceeded("operations of a step", len(request.operations), self.operations_per_step)
            check_fields(request)
            if self._quotas is not None:
                self._admit(self._quotas.meter(caller().acts_for), 1 + len(request.operations))
            contents = b"step" + request.SerializeToString(deterministic=True)
            repeats = self._repeats_of(request.lease_id)
            answer = await repeats.answer(request.request_id, contents, partial(self._step, request))
            assert isinstance(answer, cache_pb2.StepResponse)
            return answer
        except CacheError as error:
            return cache_pb2.StepResponse(request_id=request.request_id, error=_operation_error(error))

    def _admit(self, meter: Meter, operations: int) -> None:
        now = self._node.now()
        meter.admit(now)
        meter.admit_operations(operations, now)

    async def _step(self, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        node = self._node
        lease = resolve(node.core.ledger, request.lease_id, node.now()).lease
        targets = tuple(request.stock_pages)
        if targets:
            check_stock(node.core, lease, targets)  # before any operation is applied
        response = cache_pb2.StepResponse(request_id=request.request_id)
        for number, operation in enumerate(request.operations, start=1):
            response.results.append(await self._operate(request.lease_id, operation))
            if number % TURN_OPERATIONS == 0:
                await asyncio.sleep(0)
        if targets:
            if self._quotas is not None:
                targets = self._quotas.cap_stock(node.core.ledger.lease(request.lease_id), targets)
            call = resolve(node.core.ledger, request.lease_id, node.now())
            granted = node.run(partial(refill_stock, node.core, call, targets))
            response.stock.extend(cells_to_proto(granted))
        return response

    async def _operate(self, lease_id: str, message: cache_pb2.StepOperation) -> cache_pb2.OperationResult:
        name = message.WhichOneof("operation")
        try:
            if name is None:
                raise InvalidRequest("an operation of the step is empty")
            operation, inner = OPERATIONS[name], getattr(message, name)
            check_fields(inner)
            if self._quotas is not None and name in TAKING:
                self._quotas.check_operation(lease_id, name, inner)
            reply = operation.reply(await self._node.run_call(lease_id, operation.begin(inner), None))
            result: dict[str, Any] = {name: reply}
            self._count(name, "OK")
            return cache_pb2.OperationResult(**result)
        except CacheError as error:
            self._count(name or "none", error.code.value)
            return cache_pb2.OperationResult(error=_operation_error(error))

    def _count(self, name: str, code: str) -> None:
        key = (name, code)
        self.operations[key] = self.operations.get(key, 0) + 1
        span = current_span.get()
        if span is not None:
            span.event(name, code=code)


def _operation_error(error: CacheError) -> cache_pb2.OperationError:
    return cache_pb2.OperationError(code=error.code.value, message=str(error))
