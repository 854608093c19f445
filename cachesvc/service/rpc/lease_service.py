"""LeaseService: Open, KeepAlive, Close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvcache.v1 import lease_pb2, lease_pb2_grpc
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.flows.leases.leases import close_lease, find_lease, open_lease, pause_write_backs
from cachesvc.ledger.leases import first_id
from cachesvc.model.answers import Wait
from cachesvc.questions.owned import require_model, require_no_others
from cachesvc.service.access.admission import CallKind, Slot
from cachesvc.service.access.owners import is_of_another_epoch, shown_id
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import Ask, ServiceCall
from cachesvc.service.rpc.edge import Context, Edge, end_with
from cachesvc.telemetry import events


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

    async def Open(self, request: lease_pb2.OpenRequest, context: Context) -> lease_pb2.OpenResponse:
        return await self._edge.answer(self.open, request, context)

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

    async def Close(self, request: lease_pb2.CloseRequest, context: Context) -> lease_pb2.CloseResponse:
        return await self._edge.answer(self.close, request, context)

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
            milliseconds = request.pause_write_backs_ms
            node.run_call(ask.renewed(), lambda core, call: pause_write_backs(core, call, milliseconds))
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
