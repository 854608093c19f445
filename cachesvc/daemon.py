"""The composition root: makes the parts, starts them in order, and ends them in the reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cachesvc import __version__
from cachesvc.config import Config
from cachesvc.flows.admin import drain
from cachesvc.flows.core import Core, Limits
from cachesvc.flows.leases import process_arrived, process_gone, process_holds
from cachesvc.hardware import Hardware, choose_hardware, link_costs
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.seam import Backend
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import rank_rule
from cachesvc.policy.writing import WriteRule
from cachesvc.service.access.admission import Admission
from cachesvc.service.access.keyring import Keyring
from cachesvc.service.access.owners import lease_name
from cachesvc.service.access.quota import Quotas
from cachesvc.service.checksums import Checksums
from cachesvc.service.dispatch import Dispatcher
from cachesvc.service.gather import Facts, Gatherer
from cachesvc.service.host.device_health import DeviceHealth, Serving
from cachesvc.service.host.life import LifeServer
from cachesvc.service.host.reload import Reloader, live_settings
from cachesvc.service.host.server import Listening, Server, Services, make_way, require_socket
from cachesvc.service.host.socket_files import open_to_group
from cachesvc.service.host.web import WebPage
from cachesvc.service.inspection import Inspection
from cachesvc.service.node import Node
from cachesvc.service.rpc.admin_service import AdminService, DeviceLine
from cachesvc.service.rpc.cache_service import CacheService
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.engine_service import EngineService
from cachesvc.service.rpc.event_service import EventService
from cachesvc.service.rpc.lease_service import LeaseService
from cachesvc.service.telemetry import Telemetry
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX

DRAIN_LOOK_SECONDS = 0.05
GOODBYE_SECONDS = 0.1
"""Given to calls that were told that the daemon stops: their statuses have to go out."""


class Access(NamedTuple):
    """What calls pass through, and who may make them."""

    edge: Edge
    cache: CacheService
    quotas: Quotas | None
    keyring: Keyring | None


class Daemon:
    """Everything that runs in the daemon's process. ``reread`` gives the configuration as its file has it by now."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config] | None = None,
        choose: Callable[[Config], Hardware] = choose_hardware,
    ) -> None:
        self._config = config
        self._reread = reread
        self._choose = choose
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
        hardware = self._choose(config)
        backend = hardware.backend
        backend.start()
        self._stack.callback(backend.close)
        devices: list[DeviceLine] = []
        costs = link_costs(config, hardware.gpus, devices.append)
        telemetry = Telemetry(config.metrics_listen, config.otlp_endpoint, __version__, os.environ)
        self._stack.push_async_callback(telemetry.close)
        telemetry.start_tracing()
        epoch = secrets.randbits(63)
        engine = SwapEngine(
            backend,
            lambda ticket, error: node.on_transfer_done(ticket, error),  # noqa: PLW0108 - made below
            costs=costs,
            tracer=telemetry.tracer,
        )
        core = _core(config, engine, epoch)
        node = Node(core, epoch=epoch, wait_seconds=config.wait_seconds, lease_seconds=config.lease_seconds)
        self._node = node
        engine.start()
        self._stack.callback(engine.close)
        host_pool = HostPool(
            config.host_pool,
            config.host_chunk,
            config.host_threads,
            hardware.nodes,
            backend,
        )
        vault = Vault(backend, host_pool, engine, node.on_host_pages)
        node.start(vault)
        self._stack.push_async_callback(node.close)
        host_pool.start()
        self._stack.callback(host_pool.close)
        self._start_life(node, vault, epoch)
        access = await self._start_access(node, telemetry)
        inspection = self._start_inspection(node, engine)
        port = await self._start_server(node, access, backend, host_pool, devices, inspection, telemetry)
        facts = _facts(config, backend)
        metrics_port = telemetry.start_metrics(
            Gatherer(facts, node, engine, access.edge.dispatcher.admission, telemetry.watch, access.cache, host_pool)
        )
        events.event("config", **config.shown())
        events.event(
            "ready",
            socket=config.socket,
            port=port,
            metrics_port=metrics_port,
            web_port=await self._start_web(node, backend),
            backend=backend.name,
            devices=backend.devices(),
            epoch=epoch,
            pid=os.getpid(),
            seconds=round(time.monotonic() - began, 3),
        )

    async def _start_access(self, node: Node, telemetry: Telemetry) -> Access:
        config = self._config
        keyring = await self._start_keyring(node)
        quotas = None if keyring is None else Quotas(node.core, keyring.quota_of, keyring.tenants)
        admission = Admission(config.calls_in_flight, config.waiting_calls, config.waiting_calls_per_process, quotas)
        dispatcher = Dispatcher(node, admission, telemetry.watch if telemetry.is_on else None)
        edge = Edge(dispatcher, telemetry.tracer)
        return Access(edge, CacheService(edge, config.operations_per_step, quotas), quotas, keyring)

    def _start_inspection(self, node: Node, engine: SwapEngine) -> Inspection:
        checksums = Checksums(node, engine.page_bytes, self._config.checksums, self._config.checksum_limit)
        checksums.start()
        self._stack.push_async_callback(checksums.close)
        return Inspection(node, checksums, self._config.eviction)

    def _start_life(self, node: Node, vault: Vault, epoch: int) -> None:
        life = LifeServer(
            self._config.socket + LIFE_SUFFIX,
            epoch=epoch,
            allowed_uids=self._config.attaching_uids(os.getuid()),
            allowed_gids=frozenset(self._config.allow_gids),
            grace_seconds=self._config.lease_seconds,
            arrived=partial(process_arrived, node.core),
            gone=lambda token: node.run(partial(process_gone, node.core, token)),
            descriptor=vault.descriptor,
            holds=partial(process_holds, node.core),
        )
        life.start()
        self._stack.callback(life.close)
        open_to_group(self._config.socket + LIFE_SUFFIX, self._config.socket_group)

    async def _start_web(self, node: Node, backend: Backend) -> int:
        if not self._config.web_listen:
            return 0
        page = WebPage(node, self._config.web_listen, backend.name)
        self._stack.push_async_callback(page.close)
        return await page.start()

    async def _start_server(
        self,
        node: Node,
        access: Access,
        backend: Backend,
        host_pool: HostPool,
        devices: list[DeviceLine],
        inspection: Inspection,
        telemetry: Telemetry,
    ) -> int:
        config = self._config
        edge, cache, quotas, keyring = access
        shown = {**config.shown(), "backend": backend.name}
        following = EventService(node, config.event_subscribers)
        health = DeviceHealth(backend, node, self._tell_serving)
        reloader = self._reloader(live_settings(node, edge.dispatcher.admission, cache, backend), shown)
        engine = EngineService(edge, backend, quotas)
        self._stack.push_async_callback(engine.close)
        services = Services(
            engine=engine,
            lease=LeaseService(edge, quotas),
            cache=cache,
            event=following,
            admin=AdminService(
                node,
                edge,
                host_pool,
                inspection,
                shown,
                devices,
                self._not_serving,
                health,
                reloader.reload,
                quotas,
            ),
        )
        listening = Listening(
            config.socket,
            config.listen,
            config.tls_certificate,
            config.tls_key,
            config.tls_client_ca,
            health=config.health_listen,
            group=config.socket_group,
        )
        server = Server(services, listening, keyring, telemetry.watch.refused)
        port = await server.start()
        self._server = server
        self._stack.push_async_callback(server.close, max(GOODBYE_SECONDS, min(1.0, config.drain_seconds)))
        self._stack.callback(edge.dispatcher.stop)
        following.start()
        self._stack.callback(following.close)
        health.start()
        self._stack.push_async_callback(health.close)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_files, reloader, keyring)
        return port

    def _reloader(self, live: Mapping[str, Callable[[Any], None]], shown: dict[str, str]) -> Reloader:
        """Reads the file again where there is one; ``shown`` is what operators see of it."""

        def keep(name: str, apply: Callable[[Any], None], value: Any) -> None:
            apply(value)
            self._config = replace(self._config, **{name: value})
            shown[name] = str(value)

        reread = self._reread
        return Reloader(
            asdict(self._config),
            None if reread is None else lambda: asdict(reread()),
            {name: partial(keep, name, apply) for name, apply in live.items()},
        )

    async def _start_keyring(self, node: Node) -> Keyring | None:
        """Who may call, where tokens are configured. Raises InvalidRequest for a file that cannot be used."""
        if not self._config.tokens:
            return None
        keyring = Keyring(self._config.tokens, node.core.ledger.processes.get)
        keyring.load()
        keyring.start()
        self._stack.push_async_callback(keyring.close)
        return keyring

    async def _not_serving(self) -> None:
        if self._server is not None:
            await self._server.tell(serving=False)

    async def _tell_serving(self, serving: Serving) -> None:
        assert self._server is not None
        await self._server.tell(serving=serving.ready)
        await self._server.tell_live(live=serving.live)

    def stop(self) -> None:
        """Begin to end (SIGTERM, SIGINT)."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, serve until ``stop``, drain, and close everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        # Until the server is up; what SIGHUP does by itself would end the daemon.
        loop.add_signal_handler(signal.SIGHUP, lambda: events.event("reload_too_early"))
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


def reload_files(reloader: Reloader, keyring: Keyring | None) -> None:
    """Read the configuration and the tokens again; whatever is wrong with the one file, the other counts."""
    try:
        reloader.reload_by_signal()
    finally:
        if keyring is not None:
            keyring.reload()


def _core(config: Config, engine: SwapEngine, epoch: int) -> Core:
    limits = Limits(
        blocks_per_sequence=config.blocks_per_sequence,
        sequences_per_lease=config.sequences_per_lease,
        stock_pages_per_lease=config.stock_pages_per_lease,
        leases=config.leases,
        events_per_model=config.event_history,
    )
    writing = WriteRule(WritePolicy(config.write_policy), config.write_through_threshold)
    return Core(
        Ledger(),
        engine,
        rank_rule(config.eviction),
        writing,
        limits,
        new_name=partial(lease_name, epoch),
    )


def _facts(config: Config, backend: Backend) -> Facts:
    return Facts(__version__, backend.name, config.device_pool, config.host_pool, config.host_chunk)


def make_way_for_life(path: str) -> None:
    """Remove the life socket that a killed daemon left; the gRPC socket has told that no daemon runs.

    Raises Unavailable for a file that is no socket.
    """
    if os.path.lexists(path):
        require_socket(path)
        Path(path).unlink(missing_ok=True)
