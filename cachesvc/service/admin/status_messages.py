"""Answers about the whole daemon as messages: status, models, leases, sequences, transfers, tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvcache.v1 import admin_pb2, inspect_pb2, status_pb2

from cachesvc.model.answers import TicketView
from cachesvc.model.words import PageState
from cachesvc.questions.listing import ModelLine, SequenceLine
from cachesvc.questions.status import HitLine, LeaseLine, PinLine, PoolLine, Status
from cachesvc.questions.steps import in_steps
from cachesvc.questions.view import Listed
from cachesvc.service.access.auth import UNPROVEN, Caller
from cachesvc.service.access.quota import TenantLine
from cachesvc.service.host.device_line import DeviceLine
from cachesvc.service.host.facts import Facts
from cachesvc.wire.convert import layout_to_proto, ticket_to_proto


def status_to_proto(found: Status, facts: Facts, who: Caller) -> admin_pb2.GetStatusResponse:
    """Overview message for the caller ``who``."""
    serving, faults = facts.health.serving(), facts.health.faults()
    return admin_pb2.GetStatusResponse(
        version=facts.version,
        epoch=facts.epoch,
        uptime_seconds=facts.uptime_seconds,
        backend=facts.backend,
        draining=found.draining,
        config=facts.settings if who.sees_all else {},
        pools=[pool_to_proto(line) for line in found.pools],
        counters={
            **found.counters,
            "tickets_running": found.running,
            "blocks": found.blocks,
            "hit_blocks_device": found.hits.device_blocks,
            "hit_blocks_host": found.hits.host_blocks,
            "hit_blocks_storage": found.hits.storage_blocks,
        },
        devices=[_device(line, faults.get(line.uuid, "")) for line in facts.devices],
        host_pool_bytes=facts.host_pool_bytes,
        host_pool_ready_bytes=facts.host_pool_ready_bytes,
        ready=serving.ready,
        live=serving.live,
        caller=who.name,
        scopes=sorted(scope.value for scope in who.scopes),
        tenant=who.tenant or "",
        tokens=who not in UNPROVEN,
        attention=[*found.attention, *facts.attention(who.sees, sees_all=who.sees_all)],
        hits=_hits(found.hits),
        transfers=status_pb2.TransferStatus(**found.transfers._asdict()),
        holders=[_lease(line) for line in found.holders],
        silent=[_lease(line) for line in found.silent],
        transports=status_pb2.TransportStatus(**facts.transports()._asdict()),
        loop=status_pb2.LoopStatus(**facts.loop.line()._asdict()),
        pins=[pin_to_proto(line) for line in found.pins],
    )


def pin_to_proto(line: PinLine) -> inspect_pb2.PinStatus:
    """One pin of an operator."""
    return inspect_pb2.PinStatus(**line._asdict())


def pool_to_proto(line: PoolLine) -> admin_pb2.PoolStatus:
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
        reserved=line.reserved,
        pool=line.pool,
        model=line.model_name,
    )


def models_to_proto(lines: Iterable[ModelLine]) -> Iterator[admin_pb2.ListModelsResponse]:
    """The answer of ListModels, in parts."""
    for line in lines:
        yield admin_pb2.ListModelsResponse(models=[_model(line)])


def leases_to_proto(lines: Sequence[LeaseLine]) -> Iterator[admin_pb2.ListLeasesResponse]:
    """The answer of ListLeases, in parts."""
    for some in in_steps(lines):
        yield admin_pb2.ListLeasesResponse(leases=map(_lease, some))


def sequences_to_proto(listed: Listed[SequenceLine]) -> Iterator[admin_pb2.ListSequencesResponse]:
    """The answer of ListSequences, in parts."""
    yield admin_pb2.ListSequencesResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        sequences = [admin_pb2.SequenceStatus(**line._asdict()) for line in some]
        yield admin_pb2.ListSequencesResponse(sequences=sequences)


def tickets_to_proto(lines: Sequence[TicketView]) -> Iterator[admin_pb2.ListTicketsResponse]:
    """The answer of ListTickets, in parts."""
    for some in in_steps(lines):
        yield admin_pb2.ListTicketsResponse(tickets=map(ticket_to_proto, some))


def tenants_to_proto(lines: Iterable[TenantLine]) -> inspect_pb2.ListTenantsResponse:
    """The answer of ListTenants."""
    return inspect_pb2.ListTenantsResponse(tenants=[inspect_pb2.TenantStatus(**line._asdict()) for line in lines])


def _model(line: ModelLine) -> admin_pb2.ModelStatus:
    known = line._asdict()
    known |= {
        "namespace_hex": line.namespace.hex(),
        "layout": layout_to_proto(line.layout),
        "replicas": [admin_pb2.ReplicaStatus(**replica._asdict()) for replica in line.replicas],
    }
    return admin_pb2.ModelStatus(**known)


def _lease(line: LeaseLine) -> admin_pb2.LeaseStatus:
    return admin_pb2.LeaseStatus(**line._asdict())


def _hits(hits: HitLine) -> status_pb2.HitStatus:
    """Counts and their shares of what was looked up."""
    of = max(1, hits.looked_up_blocks)
    return status_pb2.HitStatus(
        **hits._asdict(),
        missed_blocks=hits.missed_blocks,
        device_ratio=hits.device_blocks / of,
        host_ratio=hits.host_blocks / of,
        storage_ratio=hits.storage_blocks / of,
    )


def _device(line: DeviceLine, fault: str) -> status_pb2.DeviceStatus:
    known: dict[str, Any] = line.shown()
    return status_pb2.DeviceStatus(**known, healthy=not fault, fault=fault)
