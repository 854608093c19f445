"""Answers about configured storage: its tiers, a check of all objects, and their removal."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvcache.v1 import storage_pb2

from cachesvc.flows.core import Count
from cachesvc.flows.stored import forget_all
from cachesvc.model.errors import InvalidRequest, NotFound, Unavailable
from cachesvc.model.text import one_line
from cachesvc.questions.view import View
from cachesvc.service.access.auth import caller
from cachesvc.service.loop.line import Aside
from cachesvc.service.loop.node import Node
from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import CAME, Kept, Scope, Step, StoreStatus
from cachesvc.storage.spec import StorageSpec
from cachesvc.storage.tier import SCOPE
from cachesvc.storage.tier import Tier as StorageTier
from cachesvc.storage.tiers import Tiers
from cachesvc.telemetry import events

LAST_OF_FIRST = 17
"""Number of the last field of a tier that the whole answer has of the first tier."""
SHOWN_DIGITS = 12
MOST_SHOWN = 8
STALL_SECONDS, STATUS_SECONDS = 15.0, 5.0
"""Time in which a check or a purge of objects gets on, and time for a status, which is from memory, seconds."""
Result = TypeVar("Result")
SHOWN_NAMESPACE = "[0-9a-f]{12,64}"
"""A namespace as listings have it, or more of it."""


class StorageAnswers:
    """Answers about a daemon's storage: its ``tiers``, or None, and the ``specs`` by which they were configured."""

    def __init__(self, node: Node, specs: Sequence[StorageSpec] = (), tiers: Tiers | None = None) -> None:
        self._node = node
        self._specs = specs
        self._tiers = tiers
        self._busy = asyncio.Lock()
        self._last: Aside | None = None

    async def status(self, view: View) -> storage_pb2.GetStorageResponse:
        """Status of the scopes whose models the caller may see; a caller that sees all gets models too that are not
        registered now."""
        tiers = self._tiers
        if tiers is None:
            return storage_pb2.GetStorageResponse()
        counters = view.counters
        tenants = {model.namespace: model.tenant for model in view.models()}
        texts = [spec.text for spec in self._specs]
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
        if self._tiers is None:
            raise Unavailable("no storage is configured; start the daemon with --storage")
        return self._tiers


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
