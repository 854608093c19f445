"""The configured storage tier, or none. Part of the composition root."""

from __future__ import annotations

import asyncio
import time

from cachesvc.config import Config
from cachesvc.flows.storage.flush import begin_flush, go_on
from cachesvc.memory.host.pool import HostPool
from cachesvc.nodes import Nodes
from cachesvc.peer.sources import Nowhere, Sources
from cachesvc.policy.eviction import eviction_policy
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.calls.storage_events import StorageFlows
from cachesvc.service.calls.storage_metrics import read_storage
from cachesvc.service.loop.node import Node
from cachesvc.storage.file.engine import FileStorage
from cachesvc.storage.file.options import file_options
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.options import mooncake_options
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import Rank, StorageBackend, oldest_first
from cachesvc.storage.spec import StorageSpec, WriteWhen, parse_storage
from cachesvc.storage.tier import Tier
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.telemetry.metric_reader import Reading

KINDS = ("file", "mooncake")
FLUSH_LOOK_SECONDS, FLUSH_TELL_SECONDS = 0.02, 1.0
"""Intervals of the flush at a stop: between two looks at what is left, and between two log lines, seconds."""
TICK_SECONDS = 0.2
"""Interval at which expired waits are reported, and canaries sent, seconds."""


def check_storage(text: str) -> StorageSpec | None:
    """Storage that a daemon would have; None: none. Raises InvalidRequest."""
    if not text:
        return None
    spec = parse_storage(text, KINDS)
    if spec.kind == "mooncake":
        mooncake_options(spec)
    else:
        file_options(spec)
    return spec


def make_backend(spec: StorageSpec, rank: Rank = oldest_first) -> StorageBackend:
    """The engine that was named; ``rank``: in which order it evicts. Raises InvalidRequest."""
    if spec.kind == "mooncake":
        return MooncakeStorage(mooncake_options(spec))
    return FileStorage(file_options(spec), rank=rank)


def flags_that_keep_nothing(config: Config, spec: StorageSpec) -> list[tuple[str, str]]:
    """Flags that keep blocks from storage whatever is served, each with the reason."""
    out = []
    if not config.host_pool:
        out.append(
            ("--host-pool", "what is written, and what is read, passes through the host pool, which has 0 bytes")
        )
    if spec.tier.write is WriteWhen.NEVER:
        out.append(("--storage ...&write=never", "nothing is written: only what other daemons keep there is read"))
    elif not spec.tier.write_rate:
        out.append(("--storage ...&write_rate=0", "no byte may be written; leave it out, or give a size"))
    if not spec.tier.wait:
        out.append(("--storage ...&wait=0", "no Match waits for what is read: only Prefetch brings blocks"))
    return out


class Storages:
    """``tier``: None where neither storage nor peers are configured. ``nodes``: what is lent to other nodes, and
    borrowed. Raises InvalidRequest for what cannot be."""

    def __init__(self, config: Config) -> None:
        self._spec = check_storage(config.storage)
        self._idle_flags = [] if self._spec is None else flags_that_keep_nothing(config, self._spec)
        self._eviction = eviction_policy(config.eviction)
        self.nodes = Nodes(config)
        self.tier: Tier | None = None
        self._flows: StorageFlows | None = None
        self._node: Node | None = None
        self._host_pool: HostPool | None = None
        self._answers: StorageAnswers | None = None
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def text(self) -> str:
        """The configured text."""
        return "" if self._spec is None else self._spec.text

    @property
    def answers(self) -> StorageAnswers:
        """Answers to operators' questions, once it is connected."""
        assert self._answers is not None
        return self._answers

    def read(self, reading: Reading) -> None:
        """Add its counts to the metrics."""
        read_storage(reading, self.tier)

    def connect(self, node: Node, vault: Vault, host_pool: HostPool) -> None:
        """Between this node's flows and its host pages."""
        self._node, self._host_pool, self._answers = node, host_pool, StorageAnswers(node, self)
        self.nodes.connect(node, vault.host_view)
        spec, peers = self._spec, self.nodes.spec
        options = peers.tier if spec is None and peers is not None else spec.tier if spec is not None else None
        if options is None:
            return
        backend: StorageBackend = Nowhere() if spec is None else make_backend(spec, self._eviction.rank)
        if self.nodes.peers is not None:
            backend = Sources(self.nodes.peers, backend)
        store = ObjectStore(backend, time.monotonic)
        self.tier = Tier(store, options, vault.host_view, node.soon, time.monotonic)
        self._flows = StorageFlows(self.tier, node.core, node.run_news)

    def chunk_ready(self, chunk: int) -> None:
        """A chunk of the host pool has come; called from a thread of the pool."""
        if self.tier is not None and self._host_pool is not None:
            self.tier.backend.register(self._host_pool.chunk_view(chunk))

    async def start(self) -> None:
        """Begin, before the host pool does. Raises a CacheError that says what is missing."""
        if self.tier is not None:
            self.tier.start()
            events.event("storage_ready", storage=self.text)
            for flag, reason in self._idle_flags:
                events.warning("storage_keeps_nothing", flag=flag, reason=reason)
        await self.nodes.start()
        if self.tier is not None or self.nodes.desk is not None:
            self._tick()

    async def flush(self, seconds: float) -> None:
        """Write what is worth keeping before the daemon ends, the best first, for so long at most."""
        tier, node = self.tier, self._node
        if tier is None or node is None or not seconds:
            return
        tier.budget.lift()
        began = told = time.monotonic()
        left = blocks = node.run(begin_flush, node.core, tier.backend.totals().capacity_bytes)
        if blocks:
            events.event("storage_flush_began", blocks=blocks, seconds=seconds)
        while left and tier.breaker.is_closed and time.monotonic() < began + seconds:
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
        if self.tier is None:
            return out
        totals, breaker = self.tier.backend.totals(), self.tier.breaker
        if not breaker.is_closed:
            out.append(f"storage is not used: {breaker.reason}; it is tried again by itself")
        if totals.problem and totals.is_usable:
            out.append(f"storage: {totals.problem}; what is there is served, nothing is written")
        if totals.stuck_objects:
            out.append(f"storage: {totals.stuck_objects} files cannot be removed, and take room; the log says why")
        return out

    async def close(self) -> None:
        """Take nothing more. Idempotent."""
        await self.nodes.close()
        if self._ticking is not None:
            self._ticking.cancel()
        if self.tier is not None:
            if self._node is not None:
                self._node.core.storage = None
            self.tier.close()

    def _tick(self) -> None:
        """The root of a callback, again and again."""
        self._ticking = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        if self._node is not None and self._flows is not None:
            self._node.run_news(0, self._flows.tick)
        self.nodes.tick()
