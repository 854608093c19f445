"""GetStatus as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.v1 import admin_pb2

from cachesvc import __version__
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.words import PageState
from cachesvc.questions import status
from cachesvc.service.access.auth import UNPROVEN, caller
from cachesvc.service.access.owners import is_visible, shown_lease, visible_leases, visible_models
from cachesvc.service.device_line import DeviceLine
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.node import Node


def status_to_proto(
    node: Node, config: dict[str, str], host_pool: HostPool, devices: Sequence[DeviceLine], health: DeviceHealth
) -> admin_pb2.GetStatusResponse:
    """Everything at a glance, of this moment: of what the caller may look at."""
    core, who = node.core, caller()
    models = visible_models(core)
    leases = shown_leases(node)
    serving, faults = health.serving(), health.faults()
    ready = min(int(config["host_pool"]), host_pool.ready_chunks * int(config["host_chunk"]))
    counters = core.counters if who.sees_all else {}
    running = [ticket for ticket in core.ledger.tickets.running.values() if is_visible(core, ticket)]
    attention = status.attention(core, models, leases, node.lease_seconds)
    attention += [f"device {uuid} is broken: {fault}" for uuid, fault in faults.items()]
    if host_pool.failure is not None:
        attention.append(f"the host pool stays at {ready} bytes: {host_pool.failure}")
    if failed := counters.get("tickets_failed", 0):
        attention.append(f"{failed} transfers have failed since the start; see ListTickets and the log")
    hits = status.hits(models)
    return admin_pb2.GetStatusResponse(
        version=__version__,
        epoch=node.epoch,
        uptime_seconds=node.now() - node.started,
        backend=config["backend"],
        draining=core.ledger.draining,
        config=config if who.sees_all else {},
        pools=[pool_to_proto(line) for line in status.pools(models)],
        counters={
            **counters,
            "tickets_running": len(running),
            "blocks": sum(len(model.blocks.index) for model in models),
            "hit_blocks_device": hits.device_blocks,
            "hit_blocks_host": hits.host_blocks,
            "hit_blocks_storage": hits.storage_blocks,
        },
        devices=[_device(line, faults.get(line.uuid, "")) for line in devices],
        host_pool_bytes=int(config["host_pool"]),
        host_pool_ready_bytes=ready,
        ready=serving.ready,
        live=serving.live,
        caller=who.name,
        scopes=sorted(scope.value for scope in who.scopes),
        tenant=who.tenant or "",
        tokens=who not in UNPROVEN,
        attention=attention,
        hits=hits_to_proto(hits),
        transfers=admin_pb2.TransferStatus(**status.transfers(running, counters)._asdict()),
        holders=[lease_to_proto(line) for line in status.holders(leases)],
        silent=[lease_to_proto(line) for line in status.silent(leases, node.lease_seconds)],
    )


def shown_leases(node: Node) -> list[status.LeaseLine]:
    """The leases that the caller may look at, in the order of their opening."""
    core = node.core
    return [status.lease_line(core, lease, shown_lease(core, lease), node.now()) for lease in visible_leases(core)]


def pool_to_proto(line: status.PoolLine) -> admin_pb2.PoolStatus:
    """One pool."""
    return admin_pb2.PoolStatus(
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


def hits_to_proto(hits: status.HitLine) -> admin_pb2.HitStatus:
    """Counts and their shares of what was looked up."""
    of = max(1, hits.looked_up_blocks)
    return admin_pb2.HitStatus(
        **hits._asdict(),
        missed_blocks=hits.missed_blocks,
        device_ratio=hits.device_blocks / of,
        host_ratio=hits.host_blocks / of,
        storage_ratio=hits.storage_blocks / of,
    )


def lease_to_proto(line: status.LeaseLine) -> admin_pb2.LeaseStatus:
    """One lease."""
    return admin_pb2.LeaseStatus(**line._asdict())


def _device(line: DeviceLine, fault: str) -> admin_pb2.DeviceStatus:
    known: dict[str, Any] = line.shown()
    return admin_pb2.DeviceStatus(**known, healthy=not fault, fault=fault)
