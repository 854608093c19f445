"""The composition root: makes the parts, starts them in order, and ends them in the reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from cachesvc.config import Config
from cachesvc.flows.admin import drain
from cachesvc.flows.core import Core, Limits
from cachesvc.flows.leases import process_arrived, process_gone
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory import numa
from cachesvc.memory.available import MemoryLimit, memory_limits
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.seam import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest, NotSupported
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import rank_rule
from cachesvc.policy.writing import WriteRule
from cachesvc.service.admin_service import AdminService
from cachesvc.service.cache_service import CacheService
from cachesvc.service.calls import CallGate
from cachesvc.service.engine_service import EngineService
from cachesvc.service.event_service import EventService
from cachesvc.service.lease_service import LeaseService
from cachesvc.service.life import LifeServer
from cachesvc.service.node import Node
from cachesvc.service.server import Listening, Server, Services, make_way, require_socket
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX

HOST_POOL_NODE = 0
DRAIN_LOOK_SECONDS = 0.05


def choose_backend(config: Config) -> Backend:
    """The backend that the configuration asks for. Raises NotSupported for one that is not built."""
    if config.backend == "cuda":
        raise NotSupported("the cuda backend is not built in this release; use --backend shm")
    check_shm_memory(config, memory_limits())
    return ShmBackend(config.shm_devices, config.device_pool)


def check_shm_memory(config: Config, limits: tuple[MemoryLimit, ...]) -> None:
    """Raises InvalidRequest where pools exceed memory; later, on first use, only the OOM killer would say no."""
    devices = config.shm_devices * config.device_pool
    for limit in limits[:1]:
        if devices + config.host_pool > limit.available_bytes:
            raise InvalidRequest(
                f"{config.shm_devices} shm device pools of {config.device_pool} bytes and a host pool of "
                f"{config.host_pool} need {devices + config.host_pool} bytes, but {limit.source} leaves "
                f"{limit.available_bytes}; ask for smaller pools or raise the limit"
            )


class Daemon:
    """Everything that runs in the daemon's process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self._stack = AsyncExitStack()
        self._node: Node | None = None
        self._server: Server | None = None

    async def start(self) -> None:
        """Start the parts, each closing before those that it stands on. Raises a CacheError that says what is wrong."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config = self._config
        began = time.monotonic()
        make_way(config.socket)
        make_way_for_life(config.socket + LIFE_SUFFIX)
        backend = choose_backend(config)
        backend.start()
        self._stack.callback(backend.close)
        epoch = secrets.randbits(63)
        engine = SwapEngine(backend, lambda ticket, error: node.on_transfer_done(ticket, error))  # noqa: PLW0108 - made below
        node = Node(
            _core(config, engine), epoch=epoch, wait_seconds=config.wait_seconds, lease_seconds=config.lease_seconds
        )
        self._node = node
        engine.start()
        self._stack.callback(engine.close)
        host_pool = HostPool(
            config.host_pool,
            config.host_chunk,
            config.host_threads,
            HOST_POOL_NODE if len(numa.nodes()) > 1 else None,
            backend,
        )
        vault = Vault(backend, host_pool, engine, node.on_host_pages)
        node.start(vault)
        self._stack.push_async_callback(node.close)
        host_pool.start()
        self._stack.callback(host_pool.close)
        self._start_life(node, vault, epoch)
        port = await self._start_server(node, backend, host_pool)
        events.event("config", **config.shown())
        events.event(
            "ready",
            socket=config.socket,
            port=port,
            backend=backend.name,
            devices=backend.devices(),
            epoch=epoch,
            pid=os.getpid(),
            seconds=round(time.monotonic() - began, 3),
        )

    def _start_life(self, node: Node, vault: Vault, epoch: int) -> None:
        life = LifeServer(
            self._config.socket + LIFE_SUFFIX,
            epoch=epoch,
            allowed_uids=frozenset(self._config.allow_uids or (0, os.getuid())),
            grace_seconds=self._config.lease_seconds,
            arrived=lambda token, pid, uid: process_arrived(node.core, token, pid, uid),
            gone=lambda token: node.run(partial(process_gone, node.core, token)),
            descriptor=vault.descriptor,
        )
        life.start()
        self._stack.callback(life.close)

    async def _start_server(self, node: Node, backend: Backend, host_pool: HostPool) -> int:
        config = self._config
        gate = CallGate(config.calls_in_flight)
        shown = {**config.shown(), "backend": backend.name}
        services = Services(
            engine=EngineService(node, gate, backend),
            lease=LeaseService(node, gate),
            cache=CacheService(node, gate, config.operations_per_step),
            event=EventService(),
            admin=AdminService(node, gate, host_pool, shown, self._not_serving),
        )
        listening = Listening(config.socket, config.listen, config.tls_certificate, config.tls_key)
        server = Server(services, listening)
        port = await server.start()
        self._server = server
        self._stack.push_async_callback(server.close, min(1.0, config.drain_seconds))
        return port

    async def _not_serving(self) -> None:
        if self._server is not None:
            await self._server.tell(serving=False)

    def stop(self) -> None:
        """Begin to end (SIGTERM, SIGINT)."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, serve until ``stop``, drain, and close everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.start()
        await self._stopping.wait()
        await self._drain()
        await self._stack.aclose()
        events.event("stopped")

    async def _drain(self) -> None:
        """Open nothing new, and give engines ``drain_seconds`` to close their leases."""
        assert self._node is not None
        live = drain(self._node.core)
        await self._not_serving()
        events.event("draining", live_leases=live)
        until = time.monotonic() + self._config.drain_seconds
        leases = self._node.core.ledger.leases
        while time.monotonic() < until and any(lease.state is LeaseState.LIVE for lease in leases.values()):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_SECONDS)


def _core(config: Config, engine: SwapEngine) -> Core:
    limits = Limits(
        blocks_per_sequence=config.blocks_per_sequence,
        sequences_per_lease=config.sequences_per_lease,
        stock_pages_per_lease=config.stock_pages_per_lease,
        leases=config.leases,
    )
    writing = WriteRule(WritePolicy(config.write_policy), config.write_through_threshold)
    return Core(
        Ledger(),
        engine,
        rank_rule(config.eviction),
        writing,
        limits,
        new_name=partial(secrets.token_hex, 16),
    )


def make_way_for_life(path: str) -> None:
    """Remove the life socket that a killed daemon left; the gRPC socket has told that no daemon runs.

    Raises Unavailable for a file that is no socket.
    """
    if os.path.lexists(path):
        require_socket(path)
        Path(path).unlink(missing_ok=True)
