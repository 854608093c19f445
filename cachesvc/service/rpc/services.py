"""CacheService: each call alone, and the Step stream that carries many operations at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvcache.v1 import cache_pb2, cache_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, lease_pb2, lease_pb2_grpc
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.flows.leases import attach, close_lease, detach, find_lease, open_lease, pause_write_backs
from cachesvc.flows.registration import Budget, PoolRequest, Registered, RegisterRequest
from cachesvc.flows.transfers import expedite, ticket_view
from cachesvc.ledger.ledger import first_id
from cachesvc.memory.interface import DeviceMemory, Handle
from cachesvc.model.answers import Wait
from cachesvc.model.errors import ErrorCode, InvalidRequest, LimitExceeded
from cachesvc.model.layout import device_geometry
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.questions.view import own_ticket, require_model, require_no_others
from cachesvc.service.access.admission import CallerKey, CallKind, Slot
from cachesvc.service.access.auth import is_of_another_epoch, shown_id
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import INTERNAL, Ask, ServiceCall
from cachesvc.service.calls.registrar import Registrar
from cachesvc.service.host.device_health import require_working
from cachesvc.service.rpc.edge import Context, Edge, end_with
from cachesvc.service.rpc.steps import OPERATIONS, StepRun
from cachesvc.telemetry import events
from cachesvc.wire.columns import count_entries
from cachesvc.wire.convert import layout_from_proto, placements_to_proto, ticket_to_proto

MAX_WAITED_TICKETS = 1024
LONGEST_WAIT_SECONDS = 60.0
"""Longest wait of a call without a deadline, seconds; its caller may ask again."""

ENDS_STREAM = frozenset({INTERNAL, ErrorCode.UNAUTHENTICATED.value})
"""Refusals of a step that end its stream: the daemon has met a defect, or the caller is to prove itself anew."""


def _one_answer(name: str) -> Any:
    """A servicer's method for a call of one message and one answer, carried out by its operation ``name``."""

    async def answer(self: Any, request: Any, context: Context) -> Any:
        return await self._edge.answer(getattr(self, name), request, context)

    return answer


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """``operations``: those of Steps, by name and outcome."""

    def __init__(self, edge: Edge, operations_per_step: int) -> None:
        self._edge = edge
        self._dispatcher = edge.dispatcher
        self.operations_per_step = operations_per_step
        self.operations: dict[tuple[str, str], int] = {}
        row = OPERATIONS.__getitem__
        self.match, self.allocate, self.publish, self.swap = map(row, ("match", "allocate", "publish", "swap"))
        self.recycle, self.release, self.prefetch = map(row, ("recycle", "release", "prefetch"))
        self.wait_tickets = ServiceCall(name="CacheService/WaitTickets", handle=self._wait_tickets, kind=CallKind.WAITS)
        self.step = ServiceCall(name="CacheService/Step", handle=self._step, is_repeatable=True, is_of_lease=True)

    Match, Allocate, Publish, Swap = map(_one_answer, ("match", "allocate", "publish", "swap"))
    Recycle, Release, Prefetch = map(_one_answer, ("recycle", "release", "prefetch"))
    WaitTickets = _one_answer("wait_tickets")

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
            weight = 1 + min(count, self.operations_per_step)
            ask.holder.meter.admit("operations_per_second", weight, ask.began)
        if request.request_id == 0:
            raise InvalidRequest("a step needs a request_id above 0, rising within the lease")
        if count > self.operations_per_step:
            raise LimitExceeded("operations of a step", count, self.operations_per_step)
        return StepRun(ask, request, self.operations).begin()


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Register, Attach, Detach. ``registrar``: closes before the memory does. ``peer_address``: where this node lends;
    empty: nowhere."""

    def __init__(
        self,
        edge: Edge,
        backend: DeviceMemory,
        quotas: Quotas | None = None,
        peer_address: Callable[[], str] = str,
    ) -> None:
        self._edge = edge
        self._node = edge.dispatcher.node
        self._backend = backend
        self._quotas = quotas
        self._peer_address = peer_address
        self.registrar = Registrar(self._node)
        self.register = ServiceCall(name="EngineService/Register", handle=self._register, names_lease=False)
        self.attach = ServiceCall(name="EngineService/Attach", handle=self._attach, is_of_lease=True)
        self.detach = ServiceCall(name="EngineService/Detach", handle=self._detach, kind=CallKind.LIFE)

    Register, Attach, Detach = map(_one_answer, ("register", "attach", "detach"))

    # -- what they do ------------------------------------------------------------------------------------------

    def _register(
        self, ask: Ask, request: engine_pb2.RegisterRequest
    ) -> engine_pb2.RegisterResponse | asyncio.Future[Any]:
        layout = layout_from_proto(request.layout)
        require_working(self._backend, tuple(request.devices) or self._backend.devices()[: layout.ranks])
        asked = RegisterRequest(
            request.model,
            layout,
            request.tenant_salt,
            tuple(request.devices),
            _pool(request.device_pool) if request.HasField("device_pool") else PoolRequest(),
            _pool(request.host_pool) if request.HasField("host_pool") else PoolRequest(),
            self._budget(ask.who.acts_for),
            request.reserved_pages,
            request.display_name,
            self._party(ask.holder.process),
        )
        found = self.registrar.find(asked)
        if found is not None:
            return self._registered(found)

        async def make(_: Slot) -> engine_pb2.RegisterResponse:
            return self._registered(await self.registrar.register(asked, ask.holder.process))

        return self._edge.dispatcher.later(ask, CallKind.WAITS, make)

    def _party(self, process: CallerKey) -> Party:
        """The process that calls, where it has a life connection."""
        node = self._edge.dispatcher.node
        return node.party_of(process) if isinstance(process, bytes) and node.knows(process) else BACKGROUND

    def _registered(self, made: Registered) -> engine_pb2.RegisterResponse:
        return engine_pb2.RegisterResponse(
            model_id=made.model.id,
            replica=made.replica.id,
            namespace=made.model.namespace,
            device_pages=made.replica.device_pages,
            host_pages=made.model.host_pages,
            devices=made.replica.devices,
            epoch=self._node.epoch,
            existed=made.existed,
            reserved_pages=made.model.reserved_pages,
            first_pages=[0] * len(made.model.layout.groups),
            weights_version=made.model.weights_version,
            peer_address=self._peer_address(),
        )

    def _budget(self, tenant: str) -> Budget:
        return Budget(tenant) if self._quotas is None else self._quotas.budget(tenant)

    def _attach(self, ask: Ask, request: engine_pb2.AttachRequest) -> engine_pb2.AttachResponse:
        node = self._node
        call = ask.call
        assert call is not None, "Attach is a call of a lease"
        node.run_of(call.model.id, attach, node.core, call, request.rank, request.process_token)
        model, replica = call.model, call.replica
        slabs = node.vault.slabs(model.id, replica.id, request.rank)
        device = replica.devices[request.rank]
        words = self._backend.timeline(device).sheet(model.id)
        pages = replica.device_pages
        return engine_pb2.AttachResponse(
            device=device,
            slabs=[
                engine_pb2.GroupSlab(
                    group=group,
                    pages=pages[group],
                    handle=_handle(slab.handle),
                    planes=placements_to_proto(device_geometry(model.layout, group, pages[group])),
                )
                for group, slab in enumerate(slabs)
            ],
            timeline=_handle(words.handle),
            writers=None if words.writers is None else _handle(words.writers[0]),
        )

    def _detach(self, ask: Ask, request: engine_pb2.DetachRequest) -> engine_pb2.DetachResponse:
        node = self._node
        require_no_others(node.core, ask.lease, request.lease_id)
        model = 0 if ask.lease is None else ask.lease.model
        node.run_of(model, detach, node.core, request.lease_id, request.rank, request.process_token)
        return engine_pb2.DetachResponse()


def _pool(asked: engine_pb2.PoolShare) -> PoolRequest:
    if asked.WhichOneof("size") == "pages":
        return PoolRequest(pages=tuple(asked.pages.pages))
    return PoolRequest(share=asked.share)


def _handle(handle: Handle) -> common_pb2.MemoryHandle:
    return common_pb2.MemoryHandle(kind=handle.kind, token=handle.token, size_bytes=handle.size_bytes)


class LeaseService(lease_pb2_grpc.LeaseServiceServicer):
    """Each call in one turn of the loop. A heartbeat is a sign of life whatever becomes of it."""

    def __init__(self, edge: Edge, quotas: Quotas | None = None) -> None:
        self._edge = edge
        self._node = edge.dispatcher.node
        self._dispatcher = edge.dispatcher
        self._quotas = quotas
        self.open = ServiceCall(name="LeaseService/Open", handle=self._open, names_lease=False)
        self.keep_alive = ServiceCall(name="LeaseService/KeepAlive", handle=self._beat, kind=CallKind.LIFE)
        self.close = ServiceCall(name="LeaseService/Close", handle=self._close, kind=CallKind.LIFE)

    Open, Close = map(_one_answer, ("open", "close"))

    async def KeepAlive(
        self, request_iterator: AsyncIterator[lease_pb2.KeepAliveRequest], context: Context
    ) -> AsyncIterator[lease_pb2.KeepAliveResponse]:
        parent = self._edge.parent(context)
        async with self._edge.stream(self.keep_alive.name, context):
            async for request in request_iterator:
                await self._edge.require_read(self.keep_alive, context)
                served = self._edge.serve(self.keep_alive, request, context, parent)
                assert not isinstance(served, asyncio.Future), "a heartbeat never waits"
                if isinstance(served, OperationError):
                    await end_with(context, served)
                yield served

    # -- what they do ------------------------------------------------------------------------------------------

    def _open(self, ask: Ask, request: lease_pb2.OpenRequest) -> lease_pb2.OpenResponse:
        node = self._node
        require_model(node.core, ask.who.acts_for, request.model_id, request.namespace)
        model, replica, token = request.model_id, request.replica, request.process_token
        instance = request.instance_id
        known = find_lease(node.core, model, replica, token, request.request_id, instance)
        quota = self._quotas.check_open(ask.who.acts_for) if known is None and self._quotas is not None else 0
        lease = node.run_of(
            model,
            open_lease,
            node.core,
            model,
            replica,
            request.engine,
            token,
            request.request_id,
            node.now(),
            instance,
            quota,
        )
        number = lease.members[token]
        shown, engine = shown_id(lease.id), request.engine[:128]
        if number:
            events.event("lease_joined", lease=shown, engine=engine, model=model, replica=replica)
        else:
            events.event("lease_opened", lease=shown, engine=engine, model=model, replica=replica)
        return lease_pb2.OpenResponse(
            step_columns=True,
            lease_id=lease.id,
            silence_limit_ms=int(node.lease_seconds * 1000),
            epoch=node.epoch,
            joined=number > 0,
            first_id=first_id(number),
            instance_id=instance,
            blocks_per_sequence=lease.blocks_per_sequence,
            stock_pages=node.core.limits.stock_pages_per_lease,
        )

    def _beat(self, ask: Ask, request: lease_pb2.KeepAliveRequest) -> lease_pb2.KeepAliveResponse:
        node = self._node
        lease_id = self._dispatcher.live_lease(ask).id
        if request.pause_write_backs_ms:
            call = ask.renewed()
            node.run_of(call.model.id, pause_write_backs, node.core, call, request.pause_write_backs_ms)
        ends = ask.who.grace_ends
        return lease_pb2.KeepAliveResponse(
            lease_id=lease_id,
            epoch=node.epoch,
            draining=node.view().is_draining,
            token_grace_ms=0 if ends is None else max(1, int((ends - node.now()) * 1000)),
        )

    def _close(
        self, ask: Ask, request: lease_pb2.CloseRequest
    ) -> lease_pb2.CloseResponse | asyncio.Future[lease_pb2.CloseResponse]:
        node, lease_id = self._node, request.lease_id
        require_no_others(node.core, ask.lease, lease_id)
        if is_of_another_epoch(lease_id, node.epoch):
            return lease_pb2.CloseResponse()
        model = 0 if ask.lease is None else ask.lease.model

        def run() -> Wait | None:
            token = request.process_token
            return node.run_of(model, close_lease, node.core, lease_id, quiesced=request.quiesced, token=token)

        wait = run()
        events.event("lease_closed", lease=shown_id(lease_id), quiesced=request.quiesced)
        if wait is None:
            return lease_pb2.CloseResponse()

        async def wait_out(_: Slot) -> lease_pb2.CloseResponse:
            await node.wait_out(run, wait, self._dispatcher.until(ask), ask.holder.process, ask.method)
            return lease_pb2.CloseResponse()

        return self._dispatcher.later(ask, CallKind.WAITS, wait_out, is_admitted=True)
