"""The configured storage tier, or none. Part of the composition root."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from cachesvc.config import Config
from cachesvc.flows.storage_writes import begin_flush, go_on
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.errors import InvalidRequest
from cachesvc.nodes import Nodes
from cachesvc.policy.eviction import eviction_policy
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.calls.telemetry import StorageFlows, read_storage
from cachesvc.service.loop.node import Node
from cachesvc.storage.file.engine import FileStorage, file_options
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.native import mooncake_options
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.s3.client import s3_options
from cachesvc.storage.s3.engine import S3Storage
from cachesvc.storage.seam import Rank, StorageBackend, oldest_first
from cachesvc.storage.spec import StorageSpec, WriteWhen, parse_storage
from cachesvc.storage.tier import Tier
from cachesvc.storage.tiers import MOST_TIERS, Tiers
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.telemetry.scrape_server import Reading

OPTIONS = {"file": file_options, "mooncake": mooncake_options, "s3": s3_options}
FLUSH_LOOK_SECONDS, FLUSH_TELL_SECONDS = 0.02, 1.0
"""Intervals of the flush at a stop: between two looks at what is left, and between two log lines, seconds."""
PLACE_SECONDS = 1.0
"""Time that a disk has to say what a path's links mean, seconds."""
TICK_SECONDS = 0.2
"""Interval at which expired waits are reported, and canaries sent, seconds."""


def check_storage(texts: Sequence[str]) -> tuple[StorageSpec, ...]:
    """Storage that a daemon would have, the fastest tier first. Raises InvalidRequest."""
    specs = tuple(parse_storage(text, tuple(OPTIONS)) for text in texts)
    for spec in specs:
        OPTIONS[spec.kind](spec)
    if len(specs) > MOST_TIERS:
        raise InvalidRequest(f"storage: {len(specs)} tiers, and there are at most {MOST_TIERS}; leave some out")
    places = [_place_of(spec) for spec in specs]
    for spec, place in zip(specs, places, strict=True):
        if places.count(place) > 1:
            raise InvalidRequest(f"storage: {spec.kind}:{spec.where} is given twice; each tier has a place of its own")
    return specs


def _place_of(spec: StorageSpec) -> tuple[str, str, str]:
    """Place of a tier, the same for two texts that mean one place, as far as their disk answers in time."""
    where = spec.where.rstrip("/")
    if spec.kind == "file":
        found = [os.path.normpath(spec.where)]
        looking = threading.Thread(target=lambda: found.append(os.path.realpath(spec.where)), daemon=True)
        looking.start()
        looking.join(PLACE_SECONDS)
        where = found[-1]
    return spec.kind, where, spec.options.get("endpoint", "").rstrip("/")


def make_backend(spec: StorageSpec, rank: Rank = oldest_first) -> StorageBackend:
    """The engine that was named; ``rank``: in which order it evicts. Raises InvalidRequest."""
    if spec.kind == "mooncake":
        return MooncakeStorage(mooncake_options(spec))
    if spec.kind == "s3":
        return S3Storage(s3_options(spec))
    return FileStorage(file_options(spec), rank=rank)


def tier_names(kinds: Sequence[str]) -> list[str]:
    """Names of tiers: their engines', with a number where there are several of a kind: file, s3, file2."""
    counts = [kinds[: at + 1].count(kind) for at, kind in enumerate(kinds)]
    return [kind if count == 1 else f"{kind}{count}" for kind, count in zip(kinds, counts, strict=True)]


def flags_that_keep_nothing(spec: StorageSpec) -> list[tuple[str, str]]:
    """Flags that keep blocks from storage whatever is served, each with the reason."""
    out = []
    if spec.tier.write is WriteWhen.NEVER:
        out.append(("--storage ...&write=never", "nothing is written: only what other daemons keep there is read"))
    elif not spec.tier.write_rate:
        out.append(("--storage ...&write_rate=0", "no byte may be written; leave it out, or give a size"))
    if not spec.tier.wait:
        out.append(("--storage ...&wait=0", "no Match waits for what is read: only Prefetch brings blocks"))
    return out


class Storages:
    """``tiers``: None where neither storage nor peers are configured. ``nodes``: what is lent to other nodes, and
    borrowed. Raises InvalidRequest for what cannot be."""

    def __init__(self, config: Config) -> None:
        self.specs = check_storage(config.storage)
        self._idle_flags = [flag for spec in self.specs for flag in flags_that_keep_nothing(spec)]
        self._eviction = eviction_policy(config.eviction)
        self.nodes = Nodes(config)
        self.tiers: Tiers | None = None
        self._flows: StorageFlows | None = None
        self._node: Node | None = None
        self._host_pool: HostPool | None = None
        self._answers: StorageAnswers | None = None
        self._unready: list[tuple[StorageSpec, Tier]] = []
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> StorageAnswers:
        """Answers to operators' questions, once it is connected."""
        assert self._answers is not None
        return self._answers

    def read(self, reading: Reading) -> None:
        read_storage(reading, self.tiers)

    def connect(self, node: Node, vault: Vault, host_pool: HostPool) -> None:
        """Between this node's flows and its host pages."""
        self._node, self._host_pool, self._answers = node, host_pool, StorageAnswers(node)
        self.nodes.connect(node, vault.host_view)
        made = [(spec.tier, make_backend(spec, self._eviction.rank)) for spec in self.specs]
        if self.nodes.peers is not None and self.nodes.spec is not None:
            options = replace(made[0][0], write=WriteWhen.NEVER) if made else self.nodes.spec.tier
            made.insert(0, (options, self.nodes.peers))
        if not made:
            return
        names = tier_names([backend.kind for _, backend in made])
        tiers = [
            Tier(ObjectStore(backend, time.monotonic), options, vault.host_view, node.soon, time.monotonic, name=name)
            for name, (options, backend) in zip(names, made, strict=True)
        ]
        self.tiers = Tiers(tiers, time.monotonic)
        self._answers = StorageAnswers(node, self.specs, self.tiers)
        self._flows = StorageFlows(self.tiers, node.core, node.run_news)

    def chunk_ready(self, chunk: int) -> None:
        """A chunk of the host pool has come; called from a thread of the pool."""
        if self.tiers is not None and self._host_pool is not None:
            self.tiers.register(self._host_pool.chunk_view(chunk))

    async def start(self) -> None:
        """Begin, before the host pool does. Raises a CacheError that says what is missing."""
        if self.tiers is not None:
            self.tiers.start()
            self._unready = list(zip(self.specs, self.tiers.all[: len(self.specs)], strict=True))
            self._tell_ready()
            for flag, reason in self._idle_flags:
                events.warning("storage_keeps_nothing", flag=flag, reason=reason)
        await self.nodes.start()
        if self.tiers is not None or self.nodes.desk is not None:
            self._tick()

    async def flush(self, seconds: float) -> None:
        """Write what is worth keeping before the daemon ends, the best first, for so long at most."""
        tiers, node = self.tiers, self._node
        if tiers is None or node is None or not seconds:
            return
        for tier in tiers.stores:
            tier.lift_rate()
        began = told = time.monotonic()
        capacity_bytes = tiers.stores[0].backend.totals().capacity_bytes if tiers.stores else 0
        left = blocks = node.run(begin_flush, node.core, capacity_bytes)
        if blocks:
            events.event("storage_flush_began", blocks=blocks, seconds=seconds)
        while left and any(tier.breaker.is_closed for tier in tiers.stores) and time.monotonic() < began + seconds:
            await asyncio.sleep(FLUSH_LOOK_SECONDS)
            left = node.run(go_on, node.core)
            if left and time.monotonic() >= told + FLUSH_TELL_SECONDS:
                told = time.monotonic()
                events.event("storage_flush_progress", blocks=blocks, left=left)
        if blocks:
            events.event("storage_flushed", blocks=blocks, left=left, seconds=round(time.monotonic() - began, 3))

    def attention(self) -> list[str]:
        """Sentences about what is wrong with storage, or with other nodes."""
        out = self.nodes.attention()
        for tier in () if self.tiers is None else self.tiers.all:
            totals, breaker = tier.backend.totals(), tier.breaker
            name = f"storage {tier.name}"
            if not breaker.is_closed:
                out.append(
                    f"{name} is not used now ({breaker.state.value}): {totals.problem or breaker.reason}; it is tried "
                    "again by itself, and cachesvc storage has more"
                )
            if tier.late:
                out.append(f"{name}: {tier.late} objects have not come back in time, and hold their host pages")
            if totals.problem and totals.is_usable and breaker.is_closed:
                out.append(f"{name}: {totals.problem}; what is there is served, nothing is written")
            if totals.stuck_objects:
                out.append(f"{name}: {totals.stuck_objects} files cannot be removed, and take room; the log says why")
        return out

    async def close(self) -> None:
        await self.nodes.close()
        if self._ticking is not None:
            self._ticking.cancel()
        if self.tiers is not None:
            if self._node is not None:
                self._node.core.storage = None
            self.tiers.close()

    def _tell_ready(self) -> None:
        """Log tiers that read and write now, each once."""
        for each in list(self._unready):
            totals, is_used = each[1].backend.totals(), each[1].breaker.is_closed
            if totals.has_answered and totals.is_usable and not totals.problem and is_used:
                events.event("storage_ready", storage=each[0].text)
                self._unready.remove(each)

    def _tick(self) -> None:
        """The root of a callback, again and again."""
        self._ticking = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        if self._node is not None and self._flows is not None:
            self._node.run_news(0, self._flows.tick)
        self._tell_ready()
        self.nodes.tick()
