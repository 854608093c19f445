"""The configured storage tier, or none. Part of the composition root."""

from __future__ import annotations

import asyncio
import time

from cachesvc.config import Config
from cachesvc.memory.host.pool import HostPool
from cachesvc.nodes import Nodes
from cachesvc.peer.sources import Nowhere, Sources
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.calls.storage_events import StorageFlows
from cachesvc.service.calls.storage_metrics import read_storage
from cachesvc.service.loop.node import Node
from cachesvc.storage.file.engine import FileStorage
from cachesvc.storage.file.options import file_options
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.options import mooncake_options
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import StorageBackend
from cachesvc.storage.spec import StorageSpec, parse_storage
from cachesvc.storage.tier import Tier
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.telemetry.metric_reader import Reading

KINDS = ("file", "mooncake")
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


def make_backend(spec: StorageSpec) -> StorageBackend:
    """The engine that was named. Raises InvalidRequest."""
    if spec.kind == "mooncake":
        return MooncakeStorage(mooncake_options(spec))
    return FileStorage(file_options(spec))


class Storages:
    """``tier``: None where neither storage nor peers are configured. ``nodes``: what is lent to other nodes, and
    borrowed. Raises InvalidRequest for what cannot be."""

    def __init__(self, config: Config) -> None:
        self._spec = check_storage(config.storage)
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
        backend: StorageBackend = Nowhere() if spec is None else make_backend(spec)
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
        await self.nodes.start()
        if self.tier is not None or self.nodes.desk is not None:
            self._tick()

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
