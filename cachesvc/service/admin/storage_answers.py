"""Operators' questions to the storage tier, and changes of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.v1 import storage_pb2

from cachesvc.flows.context.counters import Count
from cachesvc.flows.storage.presence import forget_all
from cachesvc.model.errors import InvalidRequest, NotFound, Unavailable
from cachesvc.model.text.printable import one_line
from cachesvc.questions.view import View
from cachesvc.service.access.auth import caller
from cachesvc.service.loop.node import Node
from cachesvc.storage.canary import SCOPE
from cachesvc.storage.objects import Way
from cachesvc.storage.seam import Kept, Scope
from cachesvc.storage.tier import Tier
from cachesvc.telemetry import events

SHOWN_DIGITS = 12
MOST_SHOWN = 8
SHOWN_NAMESPACE = "[0-9a-f]{12,64}"
"""A namespace as listings have it, or more of it."""


class Configured(Protocol):
    """``tier``: the daemon's, or None; ``text``: as it was configured."""

    tier: Tier | None

    @property
    def text(self) -> str:
        """Configured text; empty where there is none."""


class StorageAnswers:
    """Answers about the storage that is ``configured``."""

    def __init__(self, node: Node, configured: Configured) -> None:
        self._node = node
        self._configured = configured
        self._busy = asyncio.Lock()

    async def status(self, view: View) -> storage_pb2.GetStorageResponse:
        """Status of the scopes whose models the caller may see; a caller that sees all gets models too that are not
        registered now."""
        tier = self._configured.tier
        if tier is None:
            return storage_pb2.GetStorageResponse()
        found = await asyncio.to_thread(tier.backend.status)
        counts, counters = tier.store.counts, self._node.core.counters
        seen = None if caller().sees_all else {model.namespace for model in view.models()}
        scopes = [
            storage_pb2.StoredScope(
                model=kept.label,
                namespace_hex=scope.namespace.hex() if seen is None else "",
                objects=kept.objects,
                size_bytes=kept.size_bytes,
                oldest_seconds=kept.oldest_seconds or 0.0,
                newest_seconds=kept.newest_seconds or 0.0,
            )
            for scope, kept in sorted(found.scopes.items(), key=lambda each: -each[1].size_bytes)
            if scope != SCOPE and (seen is None or scope.namespace in seen)
        ]
        return storage_pb2.GetStorageResponse(
            storage=self._configured.text if seen is None else tier.backend.kind,
            engine=tier.backend.kind,
            shared=tier.backend.caps.is_shared,
            breaker=tier.breaker.state.value,
            breaker_reason=tier.breaker.reason,
            breaker_opened=tier.breaker.opened,
            objects=found.objects,
            size_bytes=found.size_bytes,
            capacity_bytes=found.capacity_bytes,
            evicted_objects=found.evicted_objects,
            complete=found.is_complete,
            scopes=scopes,
            outcomes=[
                storage_pb2.StorageOutcome(way=way.value, outcome=outcome.value, items=items)
                for (way, outcome), items in sorted(counts.items.items(), key=lambda each: each[0][0].value)
            ],
            read_bytes=counts.size_bytes[Way.GET],
            written_bytes=counts.size_bytes[Way.PUT],
            read_bytes_per_second=tier.store.bandwidth(Way.GET),
            items_under_way=tier.store.out(),
            fetched_blocks=counters.get(Count.STORAGE_FETCHED_BLOCKS, 0),
            kept_blocks=counters.get(Count.STORAGE_KEPT_BLOCKS, 0),
            not_kept_blocks=counters.get(Count.STORAGE_NOT_KEPT_BLOCKS, 0),
            waiting_blocks=sum(model.stored.waiting for model in view.models()),
        )

    async def check(self) -> storage_pb2.CheckStorageResponse:
        """Check the store, one call at a time. Raises Unavailable, NotSupported."""
        tier = self._require()
        async with self._busy:
            began = time.monotonic()
            found = await asyncio.to_thread(tier.store.check_all)
        return storage_pb2.CheckStorageResponse(
            objects_checked=found.objects,
            size_bytes=found.size_bytes,
            wrong=found.wrong,
            missing=found.missing,
            unreadable=found.unreadable,
            seconds=time.monotonic() - began,
        )

    async def purge(self, name: str) -> storage_pb2.PurgeStorageResponse:
        """Remove the objects of the one namespace of that name, or whose number begins so, with all its layouts; of all
        where the name is empty. Raises Unavailable, NotFound, InvalidRequest."""
        tier = self._require()
        async with self._busy:
            scopes = _named((await asyncio.to_thread(tier.backend.status)).scopes, name) if name else [None]
            objects = 0
            for scope in scopes:
                objects += await asyncio.to_thread(tier.backend.purge, scope)
        for model in self._node.view().models():
            if any(scope is None or scope.namespace == model.namespace for scope in scopes):
                self._node.run(forget_all, self._node.core, model)
        events.event("storage_purged", model_name=name, objects=objects)
        return storage_pb2.PurgeStorageResponse(objects=objects)

    def _require(self) -> Tier:
        tier = self._configured.tier
        if tier is None:
            raise Unavailable("no storage is configured; start the daemon with --storage")
        return tier


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
