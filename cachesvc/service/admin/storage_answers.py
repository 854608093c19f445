"""Operators' questions to the storage tier, and changes of it."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Protocol

from kvcache.v1 import storage_pb2

from cachesvc.flows.context.counters import Count
from cachesvc.flows.storage.presence import forget_all
from cachesvc.model.errors import NotFound, Unavailable
from cachesvc.questions.view import View
from cachesvc.service.access.auth import caller
from cachesvc.service.loop.node import Node
from cachesvc.storage.canary import SCOPE
from cachesvc.storage.objects import Way
from cachesvc.storage.seam import Scope
from cachesvc.storage.tier import Tier
from cachesvc.telemetry import events

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
        """Remove the objects of every tenant's model of that name, or of the namespace whose number begins so; of all
        models where the name is empty. Raises Unavailable, NotFound."""
        tier = self._require()
        async with self._busy:
            found = await asyncio.to_thread(tier.backend.status)
            scopes: list[Scope | None] = [scope for scope, kept in found.scopes.items() if name in ("", kept.label)]
            if not scopes and re.fullmatch(SHOWN_NAMESPACE, name):
                scopes = [scope for scope in found.scopes if scope.namespace.hex().startswith(name)]
            if name and not scopes:
                raise NotFound("stored model", name, "cachesvc storage lists those that there are")
            objects = 0
            for scope in scopes if name else [None]:
                objects += await asyncio.to_thread(tier.backend.purge, scope)
        for model in self._node.view().models():
            if name in ("", model.name) or any(scope and scope.namespace == model.namespace for scope in scopes):
                self._node.run(forget_all, self._node.core, model)
        events.event("storage_purged", model_name=name, objects=objects)
        return storage_pb2.PurgeStorageResponse(objects=objects)

    def _require(self) -> Tier:
        tier = self._configured.tier
        if tier is None:
            raise Unavailable("no storage is configured; start the daemon with --storage")
        return tier
