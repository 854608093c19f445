"""GetStatus as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.v1 import admin_pb2

from cachesvc import __version__
from cachesvc.flows import status
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.words import PageState
from cachesvc.service.device_line import DeviceLine
from cachesvc.service.node import Node


def status_to_proto(
    node: Node, config: dict[str, str], host_pool: HostPool, devices: Sequence[DeviceLine]
) -> admin_pb2.GetStatusResponse:
    """Everything at a glance, of this moment."""
    core = node.core
    leases = status.leases(core, node.now())
    ready = min(int(config["host_pool"]), host_pool.ready_chunks * int(config["host_chunk"]))
    attention = status.attention(core, leases, node.lease_seconds)
    if host_pool.failure is not None:
        attention.append(f"the host pool stays at {ready} bytes: {host_pool.failure}")
    hits = status.hits(core)
    return admin_pb2.GetStatusResponse(
        version=__version__,
        epoch=node.epoch,
        uptime_seconds=node.now() - node.started,
        backend=config["backend"],
        draining=core.ledger.draining,
        config=config,
        pools=[pool_to_proto(line) for line in status.pools(core)],
        counters=_counters(node, hits),
        devices=[_device(line) for line in devices],
        host_pool_bytes=int(config["host_pool"]),
        host_pool_ready_bytes=ready,
        attention=attention,
        hits=hits_to_proto(hits),
        transfers=admin_pb2.TransferStatus(**status.transfers(core)._asdict()),
        holders=[lease_to_proto(line) for line in status.holders(leases)],
        silent=[lease_to_proto(line) for line in status.silent(leases, node.lease_seconds)],
    )


def _counters(node: Node, hits: status.HitLine) -> dict[str, int]:
    core = node.core
    return {
        **core.counters,
        "tickets_running": len(core.ledger.tickets.running),
        "blocks": sum(len(model.blocks.index) for model in core.ledger.models.values()),
        "hit_blocks_device": hits.device_blocks,
        "hit_blocks_host": hits.host_blocks,
        "hit_blocks_storage": hits.storage_blocks,
    }


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


def _device(line: DeviceLine) -> admin_pb2.DeviceStatus:
    known: dict[str, Any] = line.shown()
    return admin_pb2.DeviceStatus(**known)
