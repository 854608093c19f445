"""Answers about the index as messages: blocks, trees, explanations, dumps, verification."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from kvcache.v1 import admin_pb2, inspect_pb2, status_pb2, storage_pb2

from cachesvc.flows.core import Count
from cachesvc.flows.presence import forget_all
from cachesvc.ledger.reuse_stats import ID_BYTES, RecentRequest
from cachesvc.model.answers import TicketView
from cachesvc.model.errors import InvalidRequest, NotFound, Unavailable
from cachesvc.model.text import one_line
from cachesvc.model.words import PageState, Tier
from cachesvc.questions.dump import Columns, Dump
from cachesvc.questions.explanation import BlockExplanation, BlockHolder, EventLine, Explanation
from cachesvc.questions.query import BlockLine, ModelLine, SequenceLine, TreeLine
from cachesvc.questions.status import HitLine, LeaseLine, PinLine, PoolLine, Status
from cachesvc.questions.view import Listed, View, in_steps
from cachesvc.service.access.auth import UNPROVEN, Caller, caller
from cachesvc.service.access.quota import TenantLine
from cachesvc.service.host.device_health import DeviceLine, Facts
from cachesvc.service.loop.line import Aside
from cachesvc.service.loop.node import Node
from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import CAME, Kept, Scope, Step, StoreStatus
from cachesvc.storage.spec import StorageSpec
from cachesvc.storage.tier import SCOPE
from cachesvc.storage.tier import Tier as StorageTier
from cachesvc.storage.tiers import Tiers
from cachesvc.telemetry import events
from cachesvc.wire.convert import layout_to_proto, ticket_to_proto


def blocks_to_proto(listed: Listed[BlockLine]) -> Iterator[admin_pb2.ListBlocksResponse]:
    yield admin_pb2.ListBlocksResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        yield admin_pb2.ListBlocksResponse(blocks=map(_block, some))


def tree_to_proto(listed: Listed[TreeLine]) -> Iterator[admin_pb2.GetTreeResponse]:
    yield admin_pb2.GetTreeResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        nodes = [admin_pb2.TreeNode(key_hex=line.key.hex(), **line._asdict()) for line in some]
        yield admin_pb2.GetTreeResponse(nodes=nodes)


def explanation_to_proto(found: Explanation) -> Iterator[admin_pb2.ExplainResponse]:
    yield admin_pb2.ExplainResponse(truncated=found.truncated, forgotten_before_seconds=found.forgotten_before_seconds)
    for block in found.blocks:
        yield admin_pb2.ExplainResponse(stories=[_explained(block)])


def head_to_proto(taken: Dump, version: str, eviction: str) -> inspect_pb2.DumpIndexResponse:
    columns = taken.columns
    return inspect_pb2.DumpIndexResponse(
        head=inspect_pb2.IndexHead(
            format=1,
            version=version,
            taken_unix_seconds=time.time(),
            model_id=taken.model,
            model=taken.model_name,
            namespace_hex=taken.namespace.hex(),
            block_tokens=taken.block_tokens,
            groups=taken.groups,
            full_groups=taken.full_groups,
            places=columns.places,
            eviction=eviction,
            blocks=columns.blocks,
            pools=[inspect_pb2.IndexPool(**pool._asdict()) for pool in columns.pools],
        )
    )


def rows_to_proto(columns: Columns, first: int, count: int) -> inspect_pb2.DumpIndexResponse:
    """A further message of a dump. Touches nothing of the ledger."""
    known = columns.rows(first, count)._asdict()
    known["copies"] = [inspect_pb2.IndexCopies(**copy._asdict()) for copy in known["copies"]]
    return inspect_pb2.DumpIndexResponse(rows=inspect_pb2.IndexRows(**known))


def requests_to_proto(
    requests: Sequence[RecentRequest], blocks_per_message: int
) -> Iterator[inspect_pb2.DumpIndexResponse]:
    """Further messages of a dump of requests, each with at most as many blocks, but with one request at least."""
    part = inspect_pb2.RecentRequests()
    for request in requests:
        if part.blocks and len(part.block_ids) // ID_BYTES + request.blocks > blocks_per_message:
            yield inspect_pb2.DumpIndexResponse(requests=part)
            part = inspect_pb2.RecentRequests()
        part.seconds.append(request.seconds - requests[0].seconds)
        part.output_tokens.append(request.output_tokens)
        part.blocks.append(request.blocks)
        part.block_ids += request.block_ids
    if part.blocks:
        yield inspect_pb2.DumpIndexResponse(requests=part)


def _block(line: BlockLine) -> admin_pb2.BlockStatus:
    known = line._asdict()
    known |= {
        "key_hex": line.key.hex(),
        "parent_key_hex": line.parent_key.hex(),
        "copies": [admin_pb2.BlockCopy(**copy._asdict()) for copy in line.copies],
    }
    return admin_pb2.BlockStatus(**known)


def _explained(found: BlockExplanation) -> admin_pb2.BlockStory:
    return admin_pb2.BlockStory(
        model_id=found.model,
        model=found.model_name,
        key=found.key,
        block=None if found.block is None else _block(found.block),
        holders=[_holder(holder) for holder in found.holders],
        holders_truncated=found.holders_truncated,
        tickets=found.tickets,
        events=[_event(event) for event in found.events],
        verdict=found.conclusion,
        accesses_since=found.accesses_since,
    )


def _holder(holder: BlockHolder) -> inspect_pb2.BlockHolder:
    return inspect_pb2.BlockHolder(
        lease_id=holder.lease_id,
        engine=holder.engine,
        sequence_id=holder.sequence,
        tier=(Tier.DEVICE if holder.place else Tier.HOST).value,
        replica=max(0, holder.place - 1),
        blocks_below=holder.blocks_below,
    )


def _event(event: EventLine) -> inspect_pb2.BlockEvent:
    return inspect_pb2.BlockEvent(
        sequence_number=event.number,
        age_seconds=event.age_seconds,
        kind=event.kind,
        present=event.present,
        place=event.place,
        group=event.group,
        reason=event.cause,
    )


def status_to_proto(found: Status, facts: Facts, who: Caller) -> admin_pb2.GetStatusResponse:
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
    return inspect_pb2.PinStatus(**line._asdict())


def pool_to_proto(line: PoolLine) -> admin_pb2.PoolStatus:
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
    for line in lines:
        yield admin_pb2.ListModelsResponse(models=[_model(line)])


def leases_to_proto(lines: Sequence[LeaseLine]) -> Iterator[admin_pb2.ListLeasesResponse]:
    for some in in_steps(lines):
        yield admin_pb2.ListLeasesResponse(leases=map(_lease, some))


def sequences_to_proto(listed: Listed[SequenceLine]) -> Iterator[admin_pb2.ListSequencesResponse]:
    yield admin_pb2.ListSequencesResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        sequences = [admin_pb2.SequenceStatus(**line._asdict()) for line in some]
        yield admin_pb2.ListSequencesResponse(sequences=sequences)


def tickets_to_proto(lines: Sequence[TicketView]) -> Iterator[admin_pb2.ListTicketsResponse]:
    for some in in_steps(lines):
        yield admin_pb2.ListTicketsResponse(tickets=map(ticket_to_proto, some))


def tenants_to_proto(lines: Iterable[TenantLine]) -> inspect_pb2.ListTenantsResponse:
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


LAST_OF_FIRST = 17
"""Number of the last field of a tier that the whole answer has of the first tier."""
SHOWN_DIGITS = 12
MOST_SHOWN = 8
STALL_SECONDS, STATUS_SECONDS = 15.0, 5.0
"""Time in which a check or a purge of objects gets on, and time for a status, which is from memory, seconds."""
Result = TypeVar("Result")
SHOWN_NAMESPACE = "[0-9a-f]{12,64}"
"""A namespace as listings have it, or more of it."""


class Configured(Protocol):
    """``tiers``: the daemon's, or None; ``specs``: as they were configured."""

    tiers: Tiers | None
    specs: tuple[StorageSpec, ...]


class StorageAnswers:
    """Answers about the storage that is ``configured``."""

    def __init__(self, node: Node, configured: Configured) -> None:
        self._node = node
        self._configured = configured
        self._busy = asyncio.Lock()
        self._last: Aside | None = None

    async def status(self, view: View) -> storage_pb2.GetStorageResponse:
        """Status of the scopes whose models the caller may see; a caller that sees all gets models too that are not
        registered now."""
        tiers = self._configured.tiers
        if tiers is None:
            return storage_pb2.GetStorageResponse()
        counters = view.counters
        tenants = {model.namespace: model.tenant for model in view.models()}
        texts = [spec.text for spec in self._configured.specs]
        shown: list[storage_pb2.StorageTier] = []
        for number, tier in enumerate((*tiers.stores, *(each for each in tiers.all if each not in tiers.stores))):
            found = await self._status_of(tier)
            text = texts[number] if number < len(texts) and caller().sees_all else tier.backend.kind
            shown.append(_tier(tier, text, found, tenants, sees_all=caller().sees_all))
        first = {field.name: value for field, value in shown[0].ListFields() if field.number <= LAST_OF_FIRST}
        return storage_pb2.GetStorageResponse(
            **first,
            fetched_blocks=counters.get(Count.STORAGE_FETCHED_BLOCKS, 0),
            kept_blocks=counters.get(Count.STORAGE_KEPT_BLOCKS, 0),
            not_kept_blocks=counters.get(Count.STORAGE_NOT_KEPT_BLOCKS, 0),
            waiting_blocks=sum(model.stored.waiting for model in view.models()),
            tiers=shown,
        )

    async def check(self) -> storage_pb2.CheckStorageResponse:
        """Check every tier that can list what it keeps, one call at a time. Raises Unavailable, NotSupported."""
        tiers = self._require()
        async with self._busy:
            began = time.monotonic()
            found = [await self._aside(tier, "check", tier.store.check_all) for tier in tiers.all]
        return storage_pb2.CheckStorageResponse(
            objects_checked=sum(each.objects for each in found),
            size_bytes=sum(each.size_bytes for each in found),
            wrong=sum(each.wrong for each in found),
            missing=sum(each.missing for each in found),
            unreadable=sum(each.unreadable for each in found),
            seconds=time.monotonic() - began,
        )

    async def purge(self, name: str) -> storage_pb2.PurgeStorageResponse:
        """Remove the objects of the one namespace of that name, or whose number begins so, with all its layouts, from
        every tier; of all where the name is empty. Raises Unavailable, NotFound, InvalidRequest."""
        tiers = self._require()
        async with self._busy:
            scopes: Sequence[Scope | None] = [None]
            if name:
                known: dict[Scope, Kept] = {}
                for tier in tiers.all:
                    known |= (await self._status_of(tier)).scopes
                scopes = _named(known, name)
            objects = 0
            for tier in tiers.all:
                for scope in scopes:
                    objects += await self._aside(tier, "purge", partial(tier.backend.purge, scope))
        for model in self._node.view().models():
            if any(scope is None or scope.namespace == model.namespace for scope in scopes):
                self._node.run(forget_all, self._node.core, model)
        events.event("storage_purged", model_name=name, objects=objects)
        return storage_pb2.PurgeStorageResponse(objects=objects)

    @staticmethod
    async def _status_of(tier: StorageTier) -> StoreStatus:
        return await Aside(f"the status of storage {tier.name}", STATUS_SECONDS).run(tier.backend.status)

    async def _aside(self, tier: StorageTier, what: str, call: Callable[[Step], Result]) -> Result:
        """Carry out a check or a purge of a tier. Raises Unavailable also while one that was given up hangs still."""
        if self._last is not None and self._last.hangs:
            raise Unavailable("a check or a purge of before still waits for storage that does not answer; try later")
        self._last = Aside(f"the {what} of storage {tier.name}", STALL_SECONDS)
        return await self._last.run(partial(call, self._last.step))

    def _require(self) -> Tiers:
        tiers = self._configured.tiers
        if tiers is None:
            raise Unavailable("no storage is configured; start the daemon with --storage")
        return tiers


def _tier(
    tier: StorageTier, text: str, found: StoreStatus, tenants: Mapping[bytes, str], *, sees_all: bool
) -> storage_pb2.StorageTier:
    scopes = [
        storage_pb2.StoredScope(
            model=kept.label,
            namespace_hex=scope.namespace.hex() if sees_all else "",
            objects=kept.objects,
            size_bytes=kept.size_bytes,
            oldest_seconds=kept.oldest_seconds or 0.0,
            newest_seconds=kept.newest_seconds or 0.0,
            tenant=tenants.get(scope.namespace, ""),
        )
        for scope, kept in sorted(found.scopes.items(), key=lambda each: -each[1].size_bytes)
        if scope != SCOPE and (sees_all or scope.namespace in tenants)
    ]
    shown = storage_pb2.StorageTier(
        storage=text,
        engine=tier.backend.kind,
        shared=tier.backend.caps.is_shared,
        breaker=tier.breaker.state.value,
        objects=sum(scope.objects for scope in scopes),
        size_bytes=sum(scope.size_bytes for scope in scopes),
        capacity_bytes=found.capacity_bytes,
        complete=found.is_complete,
        scopes=scopes,
        write=tier.options.write.value,
    )
    if sees_all:
        shown.MergeFrom(_of_all(tier, found))
    return shown


def _of_all(tier: StorageTier, found: StoreStatus) -> storage_pb2.StorageTier:
    """Figures of all tenants, and free text, which may name anything: for operators."""
    counts = tier.store.counts
    return storage_pb2.StorageTier(
        breaker_reason=tier.breaker.reason,
        breaker_opened=tier.breaker.opened,
        objects=found.objects,
        size_bytes=found.size_bytes,
        evicted_objects=found.evicted_objects,
        outcomes=[
            storage_pb2.StorageOutcome(way=verb.value, outcome=outcome.value, items=items)
            for (verb, outcome), items in sorted(counts.items.items(), key=lambda each: each[0][0].value)
        ],
        read_bytes=counts.size_bytes[Verb.GET],
        written_bytes=counts.size_bytes[Verb.PUT],
        read_bytes_per_second=tier.store.bandwidth(Verb.GET),
        items_under_way=tier.store.out(),
        hits=sum(counts.items[Verb.GET, outcome] for outcome in CAME),
        errors=found.errors,
        last_error=found.last_error,
        problem=found.problem,
        read_p50_seconds=counts.latency(Verb.GET, 0.5),
        read_p99_seconds=counts.latency(Verb.GET, 0.99),
        write_p50_seconds=counts.latency(Verb.PUT, 0.5),
        write_p99_seconds=counts.latency(Verb.PUT, 0.99),
    )


def _named(scopes: Mapping[Scope, Kept], name: str) -> Sequence[Scope | None]:
    """Scopes of the one namespace that is meant. Raises NotFound, InvalidRequest where several could be."""
    found = [scope for scope, kept in scopes.items() if kept.label == one_line(name)]
    if not found and re.fullmatch(SHOWN_NAMESPACE, name):
        found = [scope for scope in scopes if scope.namespace.hex().startswith(name)]
    if not found:
        raise NotFound("stored model", name, "cachesvc storage lists those that there are")
    namespaces = sorted({scope.namespace.hex()[:SHOWN_DIGITS] for scope in found})
    if len(namespaces) > 1:
        raise InvalidRequest(
            f"{len(namespaces)} namespaces, of tenants or versions of weights, are called {name!r}: name one by its "
            f"number in the listing of cachesvc storage: {', '.join(namespaces[:MOST_SHOWN])}"
        )
    return found
