"""EngineService: models, and the handles by which engines map their pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvcache.v1 import common_pb2, engine_pb2, engine_pb2_grpc

from cachesvc.flows.leases.leases import attach, detach
from cachesvc.flows.models.registration import Registered, RegisterRequest
from cachesvc.flows.models.sizing import PoolRequest
from cachesvc.flows.models.tenant_budget import Budget
from cachesvc.memory.interface import DeviceMemory, Handle
from cachesvc.model.geometry import device_geometry
from cachesvc.model.numbers.sharing import BACKGROUND, Party
from cachesvc.questions.owned import require_no_others
from cachesvc.service.access.admission import CallerKey, CallKind, Slot
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import Ask, ServiceCall
from cachesvc.service.calls.registrar import Registrar
from cachesvc.service.host.device_health import require_working
from cachesvc.service.rpc.edge import Context, Edge
from cachesvc.wire.convert import layout_from_proto, placements_to_proto


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

    async def Register(self, request: engine_pb2.RegisterRequest, context: Context) -> engine_pb2.RegisterResponse:
        return await self._edge.answer(self.register, request, context)

    async def Attach(self, request: engine_pb2.AttachRequest, context: Context) -> engine_pb2.AttachResponse:
        return await self._edge.answer(self.attach, request, context)

    async def Detach(self, request: engine_pb2.DetachRequest, context: Context) -> engine_pb2.DetachResponse:
        return await self._edge.answer(self.detach, request, context)

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
