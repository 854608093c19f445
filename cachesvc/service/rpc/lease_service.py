"""LeaseService on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from kvcache.v1 import lease_pb2, lease_pb2_grpc

from cachesvc.flows.call import resolve
from cachesvc.flows.leases import close_lease, open_lease, pause_write_backs
from cachesvc.service.access.auth import caller
from cachesvc.service.access.owners import require_lease, require_model
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls import CallGate, Context
from cachesvc.service.node import Node
from cachesvc.telemetry import events


class LeaseService(lease_pb2_grpc.LeaseServiceServicer):
    """Open, KeepAlive, Close."""

    def __init__(self, node: Node, gate: CallGate, quotas: Quotas | None = None) -> None:
        self._node = node
        self._gate = gate
        self._quotas = quotas

    async def Open(self, request: lease_pb2.OpenRequest, context: Context) -> lease_pb2.OpenResponse:
        return await self._gate.serve(context, partial(self._open, request), request)

    async def _open(self, request: lease_pb2.OpenRequest) -> lease_pb2.OpenResponse:
        node = self._node
        require_model(node.core, request.model_id, request.namespace)
        if self._quotas is not None:
            self._quotas.check_open(caller().acts_for)
        flow = partial(
            open_lease,
            node.core,
            request.model_id,
            request.replica,
            request.engine,
            request.process_token,
            request.request_id,
            node.now(),
        )
        lease = node.run(flow)
        events.event("lease_opened", lease=lease.id, engine=lease.engine, model=lease.model, replica=lease.replica)
        return lease_pb2.OpenResponse(
            lease_id=lease.id, silence_limit_ms=int(node.lease_seconds * 1000), epoch=node.epoch
        )

    async def KeepAlive(
        self, request_iterator: AsyncIterator[lease_pb2.KeepAliveRequest], context: Context
    ) -> AsyncIterator[lease_pb2.KeepAliveResponse]:
        async for request in request_iterator:
            yield await self._gate.serve(context, partial(self._beat, request), request, is_rated=False)

    async def _beat(self, request: lease_pb2.KeepAliveRequest) -> lease_pb2.KeepAliveResponse:
        node, lease_id = self._node, request.lease_id
        require_lease(node.core, lease_id)
        call = resolve(node.core.ledger, lease_id, node.now())
        if request.pause_write_backs_ms:
            node.run(partial(pause_write_backs, node.core, call, request.pause_write_backs_ms))
        draining = node.core.ledger.draining
        return lease_pb2.KeepAliveResponse(lease_id=lease_id, epoch=node.epoch, draining=draining)

    async def Close(self, request: lease_pb2.CloseRequest, context: Context) -> lease_pb2.CloseResponse:
        return await self._gate.serve(context, partial(self._close, request), request)

    async def _close(self, request: lease_pb2.CloseRequest) -> lease_pb2.CloseResponse:
        require_lease(self._node.core, request.lease_id)
        self._node.run(partial(close_lease, self._node.core, request.lease_id, quiesced=request.quiesced))
        events.event("lease_closed", lease=request.lease_id, quiesced=request.quiesced)
        return lease_pb2.CloseResponse()
