"""EngineService on the wire: models, and the handles by which engines map their pools."""

from __future__ import annotations

from functools import partial

from kvcache.v1 import common_pb2, engine_pb2, engine_pb2_grpc

from cachesvc.flows.budget import Budget
from cachesvc.flows.call import resolve
from cachesvc.flows.leases import attach, detach
from cachesvc.flows.models import RegisterRequest
from cachesvc.flows.sizing import PoolRequest
from cachesvc.memory.seam import Backend, Handle
from cachesvc.model.geometry import device_geometry
from cachesvc.service.access.auth import caller
from cachesvc.service.access.owners import require_lease
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls import CallGate, Context
from cachesvc.service.host.device_health import require_working
from cachesvc.service.node import Node
from cachesvc.service.registrar import Registrar
from cachesvc.wire.convert import layout_from_proto, placements_to_proto


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Register, Attach, Detach."""

    def __init__(self, node: Node, gate: CallGate, backend: Backend, quotas: Quotas | None = None) -> None:
        self._node = node
        self._gate = gate
        self._backend = backend
        self._quotas = quotas
        self._registrar = Registrar(node)

    async def close(self) -> None:
        """Let the registration that has begun end; further ones are refused."""
        await self._registrar.close()

    def _budget(self) -> Budget:
        tenant = caller().acts_for
        return Budget(tenant) if self._quotas is None else self._quotas.budget(tenant)

    async def Register(self, request: engine_pb2.RegisterRequest, context: Context) -> engine_pb2.RegisterResponse:
        return await self._gate.serve(context, partial(self._register, request), request)

    async def _register(self, request: engine_pb2.RegisterRequest) -> engine_pb2.RegisterResponse:
        layout = layout_from_proto(request.layout)
        require_working(self._backend, tuple(request.devices) or self._backend.devices()[: layout.ranks])
        made = await self._registrar.register(
            RegisterRequest(
                request.model,
                layout,
                request.tenant_salt,
                tuple(request.devices),
                _pool(request.device_pool) if request.HasField("device_pool") else PoolRequest(),
                _pool(request.host_pool) if request.HasField("host_pool") else PoolRequest(),
                self._budget(),
            )
        )
        return engine_pb2.RegisterResponse(
            model_id=made.model.id,
            replica=made.replica.id,
            namespace=made.model.namespace,
            device_pages=made.replica.device_pages,
            host_pages=made.model.host_pages,
            devices=made.replica.devices,
            epoch=self._node.epoch,
            existed=made.existed,
        )

    async def Attach(self, request: engine_pb2.AttachRequest, context: Context) -> engine_pb2.AttachResponse:
        return await self._gate.serve(context, partial(self._attach, request), request)

    async def _attach(self, request: engine_pb2.AttachRequest) -> engine_pb2.AttachResponse:
        node = self._node
        require_lease(node.core, request.lease_id)
        call = resolve(node.core.ledger, request.lease_id, node.now())
        node.run(partial(attach, node.core, call, request.rank, request.process_token))
        model, replica = call.model, call.replica
        slabs = node.vault.slabs(model.id, replica.id, request.rank)
        device = replica.devices[request.rank]
        timeline = self._backend.timeline(device)
        return engine_pb2.AttachResponse(
            device=device,
            slabs=[
                engine_pb2.GroupSlab(
                    group=group,
                    pages=replica.device_pages[group],
                    handle=_handle(slab.handle),
                    planes=placements_to_proto(device_geometry(model.layout, group, replica.device_pages[group])),
                )
                for group, slab in enumerate(slabs)
            ],
            timeline=_handle(timeline.handle),
        )

    async def Detach(self, request: engine_pb2.DetachRequest, context: Context) -> engine_pb2.DetachResponse:
        return await self._gate.serve(context, partial(self._detach, request), request)

    async def _detach(self, request: engine_pb2.DetachRequest) -> engine_pb2.DetachResponse:
        require_lease(self._node.core, request.lease_id)
        self._node.run(partial(detach, self._node.core, request.lease_id, request.rank, request.process_token))
        return engine_pb2.DetachResponse()


def _pool(asked: engine_pb2.PoolShare) -> PoolRequest:
    if asked.WhichOneof("size") == "pages":
        return PoolRequest(pages=tuple(asked.pages.pages))
    return PoolRequest(share=asked.share)


def _handle(handle: Handle) -> common_pb2.MemoryHandle:
    return common_pb2.MemoryHandle(kind=handle.kind, token=handle.token, size_bytes=handle.size_bytes)
