"""AdminService on the wire: what operators see through grpcurl and the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain, islice

from kvcache.v1 import admin_pb2, admin_pb2_grpc, inspect_pb2

from cachesvc.flows import admin
from cachesvc.flows.transfers import ticket_view
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.errors import CacheError
from cachesvc.questions.query import MAX_LISTED
from cachesvc.service.access.auth import caller
from cachesvc.service.access.owners import (
    is_visible,
    shown_lease,
    shown_namespace,
    visible_leases,
    visible_model,
    visible_models,
)
from cachesvc.service.access.quota import Quotas
from cachesvc.service.access.tenants import list_tenants
from cachesvc.service.access.undecodable import require_read
from cachesvc.service.device_line import DeviceLine
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.reload import Change
from cachesvc.service.inspection import Inspection
from cachesvc.service.node import Node
from cachesvc.service.rpc.edge import Context, Edge, refuse
from cachesvc.service.rpc.explain import explain
from cachesvc.service.rpc.status_view import lease_to_proto, shown_leases, status_to_proto
from cachesvc.telemetry import events
from cachesvc.wire.convert import layout_to_proto, ticket_to_proto

__all__ = ["AdminService", "DeviceLine"]

DEFAULT_LISTED = 1024


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads the ledger on the loop's thread; nothing here waits."""

    def __init__(
        self,
        node: Node,
        edge: Edge,
        host_pool: HostPool,
        inspection: Inspection,
        config: dict[str, str],
        devices: Sequence[DeviceLine],
        on_drain: Callable[[], Awaitable[None]],
        health: DeviceHealth,
        reload: Callable[[], list[Change]],
        quotas: Quotas | None = None,
    ) -> None:
        self._node = node
        self._edge = edge
        self._host_pool = host_pool
        self._inspection = inspection
        self._config = config
        self._devices = devices
        self._on_drain = on_drain
        self._health = health
        self._reload_config = reload
        self._quotas = quotas
        self._evictions: dict[int, int] = {}

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return await self._edge.ask(context, "AdminService/GetStatus", request, partial(self._status, request))

    async def _status(self, request: admin_pb2.GetStatusRequest) -> admin_pb2.GetStatusResponse:
        shown = status_to_proto(self._node, self._config, self._host_pool, self._devices, self._health)
        if request.brief:
            shown.ClearField("config")
            shown.ClearField("counters")
        return shown

    async def ListModels(self, request: admin_pb2.ListModelsRequest, context: Context) -> admin_pb2.ListModelsResponse:
        return await self._edge.ask(context, "AdminService/ListModels", request, self._models)

    async def _models(self) -> admin_pb2.ListModelsResponse:
        ledger = self._node.core.ledger
        models = []
        for model in visible_models(self._node.core):
            replicas = [
                admin_pb2.ReplicaStatus(
                    replica=replica.id,
                    devices=replica.devices,
                    leases=sum(
                        lease.model == model.id and lease.replica == replica.id for lease in ledger.leases.values()
                    ),
                )
                for replica in model.replicas
            ]
            models.append(
                admin_pb2.ModelStatus(
                    model_id=model.id,
                    model=model.name,
                    namespace=shown_namespace(model),
                    namespace_hex=shown_namespace(model).hex(),
                    layout=layout_to_proto(model.layout),
                    replicas=replicas,
                    blocks=len(model.blocks.index),
                    host_pages=model.host_pages,
                    device_pages=model.replicas[0].device_pages if model.replicas else (),
                )
            )
        return admin_pb2.ListModelsResponse(models=models)

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, context: Context) -> admin_pb2.ListLeasesResponse:
        return await self._edge.ask(context, "AdminService/ListLeases", request, self._leases)

    async def _leases(self) -> admin_pb2.ListLeasesResponse:
        return admin_pb2.ListLeasesResponse(leases=[lease_to_proto(line) for line in shown_leases(self._node)])

    async def ListTenants(
        self, request: inspect_pb2.ListTenantsRequest, context: Context
    ) -> inspect_pb2.ListTenantsResponse:
        return await self._edge.ask(
            context, "AdminService/ListTenants", request, partial(list_tenants, self._node.core, self._quotas)
        )

    async def ListSequences(
        self, request: admin_pb2.ListSequencesRequest, context: Context
    ) -> admin_pb2.ListSequencesResponse:
        return await self._edge.ask(context, "AdminService/ListSequences", request, partial(self._sequences, request))

    async def _sequences(self, request: admin_pb2.ListSequencesRequest) -> admin_pb2.ListSequencesResponse:
        limit = min(request.limit or DEFAULT_LISTED, MAX_LISTED)
        core = self._node.core
        every = (
            (shown_lease(core, lease), sequence)
            for lease in visible_leases(core)
            if request.lease_id in ("", lease.id, shown_lease(core, lease))
            for sequence in lease.sequences.values()
            if sequence.id >= 0
        )
        listed = list(islice(every, limit + 1))
        lines = [
            admin_pb2.SequenceStatus(
                lease_id=lease_id,
                sequence_id=sequence.id,
                blocks=sequence.blocks,
                sealed_blocks=sequence.sealed,
                private_pages=sum(len(own) for own in sequence.own),
                swapped_out=sequence.swapped_out,
                failed=sequence.failed,
            )
            for lease_id, sequence in listed[:limit]
        ]
        return admin_pb2.ListSequencesResponse(sequences=lines, truncated=len(listed) > limit)

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, context: Context) -> admin_pb2.ListBlocksResponse:
        return await self._edge.ask(
            context, "AdminService/ListBlocks", request, partial(self._inspection.blocks, request)
        )

    async def Explain(self, request: inspect_pb2.ExplainRequest, context: Context) -> admin_pb2.ExplainResponse:
        return await self._edge.ask(context, "AdminService/Explain", request, partial(explain, self._node, request))

    async def GetTree(self, request: admin_pb2.GetTreeRequest, context: Context) -> admin_pb2.GetTreeResponse:
        return await self._edge.ask(context, "AdminService/GetTree", request, partial(self._inspection.tree, request))

    async def ListTickets(
        self, request: admin_pb2.ListTicketsRequest, context: Context
    ) -> admin_pb2.ListTicketsResponse:
        return await self._edge.ask(context, "AdminService/ListTickets", request, partial(self._tickets, request))

    async def _tickets(self, request: admin_pb2.ListTicketsRequest) -> admin_pb2.ListTicketsResponse:
        book = self._node.core.ledger.tickets
        every = chain(book.running.values(), reversed(book.ended.values()))
        newest_first = (ticket for ticket in every if is_visible(self._node.core, ticket))
        limit = min(request.limit or 64, MAX_LISTED)
        return admin_pb2.ListTicketsResponse(
            tickets=[ticket_to_proto(ticket_view(ticket)) for ticket in islice(newest_first, limit)]
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return await self._edge.ask(context, "AdminService/Drain", request, self._drain)

    async def _drain(self) -> admin_pb2.DrainResponse:
        live = admin.drain(self._node.core)
        await self._on_drain()
        events.event("draining", live_leases=live)
        return admin_pb2.DrainResponse(live_leases=live)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> admin_pb2.EvictResponse:
        return await self._edge.ask(context, "AdminService/Evict", request, partial(self._evict, request))

    async def _evict(self, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        if request.request_id and request.request_id in self._evictions:
            return admin_pb2.EvictResponse(evicted=self._evictions[request.request_id])
        visible_model(self._node.core, request.model_id)
        flow = partial(admin.evict, self._node.core, request.model_id, request.tier, request.blocks)
        evicted = self._node.run(flow)
        if request.request_id:
            self._evictions[request.request_id] = evicted
            while len(self._evictions) > DEFAULT_LISTED:
                self._evictions.pop(next(iter(self._evictions)))
        events.event("evicted_by_operator", model=request.model_id, tier=request.tier, blocks=evicted)
        return admin_pb2.EvictResponse(evicted=evicted)

    async def Verify(self, request: admin_pb2.VerifyRequest, context: Context) -> admin_pb2.VerifyResponse:
        return await self._edge.ask(context, "AdminService/Verify", request, partial(self._inspection.verify, request))

    async def Reload(self, request: inspect_pb2.ReloadRequest, context: Context) -> inspect_pb2.ReloadResponse:
        return await self._edge.ask(context, "AdminService/Reload", request, self._reload)

    async def _reload(self) -> inspect_pb2.ReloadResponse:
        changes = [inspect_pb2.SettingChange(**change._asdict()) for change in self._reload_config()]
        return inspect_pb2.ReloadResponse(changes=changes)

    async def DumpIndex(
        self, request: inspect_pb2.DumpIndexRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.DumpIndexResponse]:
        try:
            require_read()
            async with aclosing(self._inspection.dump(request)) as parts:  # also where the caller goes half way
                async for part in parts:
                    caller().check()
                    yield part
        except CacheError as error:
            await refuse(context, error)
