"""The composition root: makes the parts, starts them in order, and ends them in the reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cachesvc.config import Config
from cachesvc.flows.admin import drain
from cachesvc.flows.core import Core, Limits
from cachesvc.flows.leases import process_arrived, process_gone
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory import numa
from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.available import MemoryLimit, memory_limits
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.seam import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import rank_rule
from cachesvc.policy.writing import WriteRule
from cachesvc.service.admin_service import AdminService, DeviceLine
from cachesvc.service.cache_service import CacheService
from cachesvc.service.calls import CallGate
from cachesvc.service.checksums import Checksums
from cachesvc.service.engine_service import EngineService
from cachesvc.service.event_service import EventService
from cachesvc.service.inspection import Inspection
from cachesvc.service.lease_service import LeaseService
from cachesvc.service.life import LifeServer
from cachesvc.service.node import Node
from cachesvc.service.server import Listening, Server, Services, make_way, require_socket
from cachesvc.service.web import WebPage
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.planner import LinkCosts
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX
from gpu_ops.calibration import LinkFigures, calibrate
from gpu_ops.errors import CudaError, CudaMissing
from gpu_ops.gpu import Gpu, find_gpus

DRAIN_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Hardware:
    """The memory that the daemon will own. ``gpus`` are those of the cuda backend; ``node``: of the host pool."""

    backend: Backend
    gpus: tuple[Gpu, ...] = ()
    node: int | None = None


def choose_hardware(config: Config) -> Hardware:
    """What the configuration asks for; ``auto`` takes GPUs where there are some. Nothing is started.

    Raises Unavailable where cuda was asked for and cannot be had, InvalidRequest for pools beyond the memory.
    """
    if config.backend != "shm":
        try:
            return gpu_hardware(config)
        except CudaMissing as missing:
            if config.backend == "cuda":
                raise Unavailable(f"{missing}; or use --backend shm") from missing
            events.event("no_gpu", reason=str(missing))
        except CudaError as broken:  # a GPU is there: serving without it would hide that
            raise Unavailable(f"the GPU cannot be used: {broken}; see nvidia-smi, or use --backend shm") from broken
    check_shm_memory(config, memory_limits())
    rules = copy_rules(config)
    return Hardware(
        ShmBackend(config.shm_devices, config.device_pool, rules=rules), node=0 if len(numa.nodes()) > 1 else None
    )


def copy_rules(config: Config) -> CopyRules:
    """How copies share a link."""
    return CopyRules(
        slice_bytes=config.slice_bytes,
        load_bytes_per_second=config.load_limit,
        store_bytes_per_second=config.store_limit,
    )


def gpu_hardware(config: Config) -> Hardware:
    """Every GPU that this process sees; the host pool goes to their NUMA node, where they agree on one."""
    gpus = find_gpus()
    backend = CudaBackend(gpus, config.device_pool, vmm=config.device_memory == "vmm", rules=copy_rules(config))
    near = {numa.node_of_pci(gpu.facts.pci) for gpu in gpus}
    node = near.pop() if len(near) == 1 else None
    if len(numa.nodes()) > 1:
        events.event("host_pool_node", node=node, gpus=len(gpus))
    return Hardware(backend, gpus, node)


def link_costs(config: Config, gpus: tuple[Gpu, ...], tell: Callable[[DeviceLine], None]) -> LinkCosts:
    """Measure started GPUs and tell what each is; the costs are the slowest one's. The default without a GPU.

    Raises Unavailable.
    """
    found: list[LinkFigures] = []
    for gpu in gpus:
        try:
            figures = calibrate(gpu) if config.calibration == "start" else None
        except RuntimeError as error:
            raise Unavailable(
                f"GPU {gpu.uuid} cannot be measured: {error}; see nvidia-smi and ulimit -l, or use --calibration never"
            ) from error
        line = DeviceLine(gpu.uuid, gpu.facts.name, config.device_pool, gpu.context_bytes, figures)
        events.event("device_ready", pci=gpu.facts.pci, free_bytes=gpu.free_bytes(), **line.logged())
        tell(line)
        if figures is not None:
            found.append(figures)
    if not found:
        return LinkCosts()
    slowest = min(found, key=lambda figures: figures.load_bytes_per_us)
    return LinkCosts(
        per_copy_us=slowest.per_copy_us,
        per_row_ns=slowest.per_row_ns,
        bytes_per_us=slowest.load_bytes_per_us,
        per_step_us=slowest.per_step_us,
        max_pitch_bytes=slowest.max_pitch_bytes,
    )


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
        hardware = choose_hardware(config)
        backend = hardware.backend
        backend.start()
        self._stack.callback(backend.close)
        devices: list[DeviceLine] = []
        costs = link_costs(config, hardware.gpus, devices.append)
        epoch = secrets.randbits(63)
        engine = SwapEngine(
            backend,
            lambda ticket, error: node.on_transfer_done(ticket, error),  # noqa: PLW0108 - made below
            costs=costs,
        )
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
            hardware.node,
            backend,
        )
        vault = Vault(backend, host_pool, engine, node.on_host_pages)
        node.start(vault)
        self._stack.push_async_callback(node.close)
        host_pool.start()
        self._stack.callback(host_pool.close)
        self._start_life(node, vault, epoch)
        checksums = Checksums(node, engine.page_bytes, config.checksums, config.checksum_limit)
        checksums.start()
        self._stack.push_async_callback(checksums.close)
        inspection = Inspection(node, checksums, config.eviction)
        port = await self._start_server(node, backend, host_pool, devices, inspection)
        events.event("config", **config.shown())
        events.event(
            "ready",
            socket=config.socket,
            port=port,
            web_port=await self._start_web(node, backend),
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

    async def _start_web(self, node: Node, backend: Backend) -> int:
        if not self._config.web_listen:
            return 0
        page = WebPage(node, self._config.web_listen, backend.name)
        self._stack.push_async_callback(page.close)
        return await page.start()

    async def _start_server(
        self, node: Node, backend: Backend, host_pool: HostPool, devices: list[DeviceLine], inspection: Inspection
    ) -> int:
        config = self._config
        gate = CallGate(config.calls_in_flight)
        shown = {**config.shown(), "backend": backend.name}
        services = Services(
            engine=EngineService(node, gate, backend),
            lease=LeaseService(node, gate),
            cache=CacheService(node, gate, config.operations_per_step),
            event=EventService(),
            admin=AdminService(node, gate, host_pool, inspection, shown, devices, self._not_serving),
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
