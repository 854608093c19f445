"""AdminService on the wire: what operators see through grpcurl and the command line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc import __version__
from cachesvc.flows import admin
from cachesvc.flows.core import ticket_view
from cachesvc.ledger.conservation import audit
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.words import PageState
from cachesvc.service.auth import EVERYONE, caller
from cachesvc.service.calls import CallGate, Context
from cachesvc.service.device_health import DeviceHealth
from cachesvc.service.explain import block_status, explain
from cachesvc.service.node import Node
from cachesvc.service.owners import (
    is_visible,
    shown_lease,
    shown_namespace,
    visible_leases,
    visible_model,
    visible_models,
)
from cachesvc.service.quota import Quotas
from cachesvc.service.reload import Change
from cachesvc.service.tenants import list_tenants
from cachesvc.telemetry import events
from cachesvc.wire.convert import layout_to_proto, ticket_to_proto

DEFAULT_LISTED = 1024


class Link(Protocol):
    """What was measured of a device's link."""

    @property
    def load_bytes_per_us(self) -> float:
        """Host -> device."""

    @property
    def store_bytes_per_us(self) -> float:
        """Device -> host."""

    @property
    def both_bytes_per_us(self) -> float:
        """Both at once, together."""

    @property
    def per_copy_us(self) -> float:
        """What a copy costs beside its rows and bytes."""

    @property
    def per_row_ns(self) -> float:
        """What a row costs beside its bytes."""

    @property
    def per_step_us(self) -> float:
        """What a step costs beside its copies."""

    @property
    def narrow_plane_bytes(self) -> int:
        """Planes narrower than this load at less than half of the link's speed."""


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device as operators see it. ``link`` is None where it was not measured."""

    uuid: str
    name: str
    pool_bytes: int
    context_bytes: int
    link: Link | None

    def logged(self) -> dict[str, object]:
        """For the log, whose events have a name of their own."""
        known = self.shown()
        return {"device": known.pop("uuid"), "device_name": known.pop("name")} | known

    def shown(self) -> dict[str, object]:
        """By the names of DeviceStatus."""
        known: dict[str, object] = {
            "uuid": self.uuid,
            "name": self.name,
            "pool_bytes": self.pool_bytes,
            "context_bytes": self.context_bytes,
        }
        if self.link is None:
            return known
        return known | {
            "load_gb_per_second": round(self.link.load_bytes_per_us / 1e3, 2),
            "store_gb_per_second": round(self.link.store_bytes_per_us / 1e3, 2),
            "both_gb_per_second": round(self.link.both_bytes_per_us / 1e3, 2),
            "copy_us": round(self.link.per_copy_us, 2),
            "row_ns": round(self.link.per_row_ns, 1),
            "step_us": round(self.link.per_step_us, 2),
            "narrow_plane_bytes": self.link.narrow_plane_bytes,
        }


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads the ledger on the loop's thread; nothing here waits."""

    def __init__(
        self,
        node: Node,
        gate: CallGate,
        host_pool: HostPool,
        config: dict[str, str],
        devices: Sequence[DeviceLine],
        on_drain: Callable[[], Awaitable[None]],
        health: DeviceHealth,
        reload: Callable[[], list[Change]],
        quotas: Quotas | None = None,
    ) -> None:
        self._node = node
        self._gate = gate
        self._host_pool = host_pool
        self._config = config
        self._devices = devices
        self._on_drain = on_drain
        self._health = health
        self._reload_config = reload
        self._quotas = quotas
        self._evictions: dict[int, int] = {}

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return await self._gate.serve(context, self._status)

    async def _status(self) -> admin_pb2.GetStatusResponse:
        node = self._node
        core = node.core
        serving, faults = self._health.serving(), self._health.faults()
        who = caller()
        models = visible_models(core)
        counters = dict(core.counters) if who.sees_all else {}
        counters["tickets_running"] = sum(is_visible(core, ticket) for ticket in core.ledger.tickets.running.values())
        counters["blocks"] = sum(len(model.blocks.index) for model in models)
        for tier in ("device", "host", "storage"):
            counters[f"hit_blocks_{tier}"] = sum(model.hit_blocks[tier] for model in models)
        return admin_pb2.GetStatusResponse(
            version=__version__,
            epoch=node.epoch,
            uptime_seconds=node.now() - node.started,
            backend=self._config["backend"],
            draining=core.ledger.draining,
            config=self._config,
            pools=[
                admin_pb2.PoolStatus(
                    model_id=line.model,
                    place=line.place,
                    group=line.group,
                    capacity=line.capacity,
                    free=line.counts[PageState.FREE],
                    private=line.counts[PageState.PRIVATE],
                    sealed=line.counts[PageState.SEALED],
                    in_flight=line.counts[PageState.IN_FLIGHT],
                    quarantined=line.counts[PageState.QUARANTINED],
                    page_bytes=line.page_bytes,
                )
                for line in admin.pools(core)
                if who.sees(core.ledger.models[line.model].tenant)
            ],
            counters=counters,
            caller=who.name,
            scopes=sorted(scope.value for scope in who.scopes),
            tenant=who.tenant or "",
            tokens=who is not EVERYONE,
            devices=[_device(line, faults.get(line.uuid, "")) for line in self._devices],
            ready=serving.ready,
            live=serving.live,
            host_pool_bytes=int(self._config["host_pool"]),
            host_pool_ready_bytes=min(
                int(self._config["host_pool"]), self._host_pool.ready_chunks * int(self._config["host_chunk"])
            ),
        )

    async def ListModels(self, request: admin_pb2.ListModelsRequest, context: Context) -> admin_pb2.ListModelsResponse:
        return await self._gate.serve(context, self._models)

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
                    layout=layout_to_proto(model.layout),
                    replicas=replicas,
                    blocks=len(model.blocks.index),
                    host_pages=model.host_pages,
                    device_pages=model.replicas[0].device_pages if model.replicas else (),
                )
            )
        return admin_pb2.ListModelsResponse(models=models)

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, context: Context) -> admin_pb2.ListLeasesResponse:
        return await self._gate.serve(context, self._leases)

    async def _leases(self) -> admin_pb2.ListLeasesResponse:
        ledger = self._node.core.ledger
        now = self._node.now()
        leases = []
        for lease in visible_leases(self._node.core):
            private = sum(len(own) for sequence in lease.sequences.values() for own in sequence.own)
            private += sum(len(pages) for pages in lease.stock) + len(lease.quarantine)
            pids = [ledger.processes[token].pid for token in lease.processes if token in ledger.processes]
            leases.append(
                admin_pb2.LeaseStatus(
                    lease_id=shown_lease(self._node.core, lease),
                    engine=lease.engine,
                    model_id=lease.model,
                    replica=lease.replica,
                    state=lease.state.value,
                    silent_seconds=now - lease.last_heard,
                    sequences=len(lease.sequences),
                    private_pages=private,
                    process_ids=sorted(pids),
                )
            )
        return admin_pb2.ListLeasesResponse(leases=leases)

    async def ListTenants(
        self, request: admin_pb2.ListTenantsRequest, context: Context
    ) -> admin_pb2.ListTenantsResponse:
        return await self._gate.serve(context, partial(list_tenants, self._node.core, self._quotas))

    async def ListSequences(
        self, request: admin_pb2.ListSequencesRequest, context: Context
    ) -> admin_pb2.ListSequencesResponse:
        return await self._gate.serve(context, partial(self._sequences, request), request)

    async def _sequences(self, request: admin_pb2.ListSequencesRequest) -> admin_pb2.ListSequencesResponse:
        limit = min(request.limit or DEFAULT_LISTED, admin.MAX_LISTED)
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
        return await self._gate.serve(context, partial(self._blocks, request), request)

    async def _blocks(self, request: admin_pb2.ListBlocksRequest) -> admin_pb2.ListBlocksResponse:
        visible_model(self._node.core, request.model_id)
        lines, more = admin.blocks(self._node.core, request.model_id, request.keys, request.limit)
        return admin_pb2.ListBlocksResponse(blocks=[block_status(line) for line in lines], truncated=more)

    async def Explain(self, request: admin_pb2.ExplainRequest, context: Context) -> admin_pb2.ExplainResponse:
        return await self._gate.serve(context, partial(explain, self._node, request))

    async def GetTree(self, request: admin_pb2.GetTreeRequest, context: Context) -> admin_pb2.GetTreeResponse:
        return await self._gate.serve(context, partial(self._tree, request), request)

    async def _tree(self, request: admin_pb2.GetTreeRequest) -> admin_pb2.GetTreeResponse:
        visible_model(self._node.core, request.model_id)
        lines, more = admin.tree(self._node.core, request.model_id, request.key, request.depth, request.limit)
        return admin_pb2.GetTreeResponse(nodes=[admin_pb2.TreeNode(**line._asdict()) for line in lines], truncated=more)

    async def ListTickets(
        self, request: admin_pb2.ListTicketsRequest, context: Context
    ) -> admin_pb2.ListTicketsResponse:
        return await self._gate.serve(context, partial(self._tickets, request), request)

    async def _tickets(self, request: admin_pb2.ListTicketsRequest) -> admin_pb2.ListTicketsResponse:
        book = self._node.core.ledger.tickets
        every = chain(book.running.values(), reversed(book.ended.values()))
        newest_first = (ticket for ticket in every if is_visible(self._node.core, ticket))
        limit = min(request.limit or 64, admin.MAX_LISTED)
        return admin_pb2.ListTicketsResponse(
            tickets=[ticket_to_proto(ticket_view(ticket)) for ticket in islice(newest_first, limit)]
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return await self._gate.serve(context, self._drain)

    async def _drain(self) -> admin_pb2.DrainResponse:
        live = admin.drain(self._node.core)
        await self._on_drain()
        events.event("draining", live_leases=live)
        return admin_pb2.DrainResponse(live_leases=live)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> admin_pb2.EvictResponse:
        return await self._gate.serve(context, partial(self._evict, request), request)

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
        return await self._gate.serve(context, self._verify)

    async def _verify(self) -> admin_pb2.VerifyResponse:
        found = audit(self._node.core.ledger)
        return admin_pb2.VerifyResponse(
            ok=not found.problems,
            problems=found.problems[:DEFAULT_LISTED],
            pages_checked=found.pages,
            blocks_checked=found.blocks,
        )

    async def Reload(self, request: admin_pb2.ReloadRequest, context: Context) -> admin_pb2.ReloadResponse:
        return await self._gate.serve(context, self._reload)

    async def _reload(self) -> admin_pb2.ReloadResponse:
        changes = [admin_pb2.SettingChange(**change._asdict()) for change in self._reload_config()]
        return admin_pb2.ReloadResponse(changes=changes)


def _device(line: DeviceLine, fault: str) -> admin_pb2.DeviceStatus:
    known: dict[str, Any] = line.shown()
    return admin_pb2.DeviceStatus(**known, healthy=not fault, fault=fault)
