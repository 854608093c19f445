"""The composition root: a ``Daemon`` makes its parts, ``run`` starts them in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from kvcache.v1.status_pb2 import TransportStatus

from cachesvc import __version__
from cachesvc.config import Config
from cachesvc.flows.core import Core, Limits
from cachesvc.flows.leases import process_arrived, process_holds
from cachesvc.hardware import Hardware, check_machine, choose_hardware, measure_links
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.host_pool import HostPool
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.service.access.admission import Admission, ways_in
from cachesvc.service.access.auth import MODEL_BITS, TICKET_BITS, lease_name, unordered_numbers
from cachesvc.service.access.quota import NO_QUOTA, Quotas
from cachesvc.service.access.tokens import Keyring
from cachesvc.service.admin.admin_service import Administration, AdminService, Inspection
from cachesvc.service.admin.checksums import Checksums
from cachesvc.service.admin.metric_values import MetricValues
from cachesvc.service.calls.dispatcher import Dispatcher
from cachesvc.service.calls.telemetry import Telemetry
from cachesvc.service.host.device_health import DeviceHealth, Facts
from cachesvc.service.host.health import HealthAnswers
from cachesvc.service.host.life import LifeServer
from cachesvc.service.host.reload import Reloader, live_settings
from cachesvc.service.host.server import Listening, Server, Services, service_names
from cachesvc.service.host.socket_files import SocketClaim
from cachesvc.service.host.web import WebPage
from cachesvc.service.lane import Lanes
from cachesvc.service.loop.node import Node, collector_between_calls
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.event_service import EventService
from cachesvc.service.rpc.services import CacheService, EngineService, LeaseService
from cachesvc.storages import Storages
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX

STOP_SECONDS = 1.0
"""Time limit of calls that are in flight when the daemon ends, seconds."""
GOODBYE_SECONDS = 0.1
"""Given at least to calls that were told that the daemon stops: their statuses have to go out."""

OPEN_SECONDS = 30.0
"""From Register to Open: an engine maps nothing in between, but its processes may have to start."""


def _nothing() -> None:
    """No-op for a part that needs no start, or no close."""


class Step(NamedTuple):
    """A part's start and its close, each a plain call or one to await."""

    start: Callable[[], object] = _nothing
    close: Callable[[], object] = _nothing


class Daemon:
    """Everything that runs in a daemon's process: made here, started by ``run``. ``reread`` gives the configuration as
    its file has it by now. ``stopping``: set it to end the daemon.

    Raises a CacheError that says what cannot be had.
    """

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config] | None = None,
        choose: Callable[[Config], Hardware] = choose_hardware,
    ) -> None:
        self.config = config
        self.stopping = asyncio.Event()
        # The ledger, and what holds and moves the bytes that it knows of.
        hardware = self.hardware = choose(config)
        self.claim = SocketClaim(config.socket)
        hardware.share_claim(self.claim.held)
        telemetry = self.telemetry = Telemetry(config.metrics_listen, config.otlp_endpoint, __version__, os.environ)
        epoch, backend = secrets.randbits(63), hardware.backend
        engine = self.engine = SwapEngine(hardware.movers, tracer=telemetry.tracer)
        core = _core(config, engine, epoch)
        node = self.node = Node(core, epoch=epoch, wait_seconds=config.wait_seconds, lease_seconds=config.lease_seconds)
        engine.on_done = node.on_transfer_done
        hardware.tell_losses(node.on_device_lost)
        self.storages = Storages(config)
        self.host_pool = HostPool(
            *(config.host_pool, config.host_chunk, config.host_threads, hardware.nodes, backend),
            in_files=hardware.has_processes,
            on_ready=self.storages.chunk_ready,
        )
        self.vault = Vault(backend, self.host_pool, engine, node.on_host_pages)
        self.storages.connect(node, self.vault, self.host_pool)
        # Callers and their limits.
        keyring = self.keyring = None
        quotas = None
        if config.tokens:
            processes, grace = core.ledger.processes, config.token_grace_seconds
            keyring = self.keyring = Keyring(config.tokens, processes.get, node.now, grace)
            quotas = Quotas(core, keyring.quota_of, keyring.tenants, keyring.working_tenants)
        admission = Admission(config.calls_in_flight, config.waiting_calls, config.waiting_calls_per_process, quotas)
        self.dispatcher = Dispatcher(node, admission, telemetry.watch if telemetry.is_on else None)
        self.collector = collector_between_calls(node, admission)
        self._make_services(Edge(self.dispatcher, telemetry.tracer), quotas, reread)

    def _make_services(self, edge: Edge, quotas: Quotas | None, reread: Callable[[], Config] | None) -> None:
        """Make all that callers reach: services, sockets, health checks, the page and the metrics."""
        config, node, backend, ways = self.config, self.node, self.hardware.backend, ways_in()
        watch, admission = self.telemetry.watch, self.dispatcher.admission
        cache, lease = CacheService(edge, config.operations_per_step), LeaseService(edge, quotas)
        engine = EngineService(edge, backend, quotas, self.storages.nodes.advertised)
        self.registrar = engine.registrar
        lanes = Lanes(self.dispatcher, cache, self.keyring, self.telemetry.tracer, config.lanes_per_process, ways.lanes)
        self.life = LifeServer(
            config.socket + LIFE_SUFFIX,
            epoch=node.epoch,
            allowed_uids=config.attaching_uids(os.getuid()),
            allowed_gids=frozenset(config.allow_gids),
            group=config.socket_group,
            grace_seconds=config.lease_seconds,
            arrived=partial(process_arrived, node.core),
            gone=node.process_gone,
            descriptor=node.descriptor,
            holds=partial(process_holds, node.core),
            lanes=lanes,
            connections=ways.life,
        )
        answers = HealthAnswers(service_names())
        self.health = DeviceHealth(backend, node, answers.tell, heals=self.hardware.has_processes)
        self.administration = Administration(node, self.health, config.drain_seconds)
        self.checksums = Checksums(node, self.engine.page_bytes, config.checksums, config.checksum_limit)
        self.following = EventService(node, config.event_subscribers)
        facts = self.facts = Facts(
            version=__version__,
            backend=backend.name,
            epoch=node.epoch,
            started=node.started,
            lease_seconds=config.lease_seconds,
            device_pool_bytes=config.device_pool,
            host_pool_bytes=config.host_pool,
            host_chunk_bytes=config.host_chunk,
            eviction=config.eviction,
            settings={**config.shown(), "backend": backend.name},
            devices=[],
            host_pool=self.host_pool,
            health=self.health,
            transports=lambda: TransportStatus(lanes=lanes.count, lane_calls=lanes.calls, grpc_calls=edge.calls),
            loop=node.loop_watch,
            keyring=self.keyring,
            other_attention=self.storages.attention,
        )
        live = live_settings(node, admission, cache, lanes, backend, self.administration)
        again = None if reread is None else lambda: asdict(reread())
        self.reloader = Reloader(asdict(config), facts.settings, again, live)
        admin = AdminService(
            *(edge, Inspection(node, self.checksums), self.administration, facts),
            *(quotas or Quotas(node.core, lambda _: NO_QUOTA), self.reloader.reload, self.storages.answers),
        )
        tls = config.tls_certificate, config.tls_key, config.tls_client_ca
        listening = Listening(config.socket, config.listen, *tls, config.health_listen, config.socket_group)
        services = Services(engine, lease, cache, self.following, admin)
        self.server = Server(
            services, listening, answers, self.keyring, watch.refused, self.dispatcher.charge, ways=ways
        )
        self.metrics = MetricValues(facts, node, self.engine, admission, watch, cache, self.storages.read)
        self.web = WebPage(node, config.web_listen, facts)

    def steps(self) -> tuple[Step, ...]:
        """Steps of a start, in this order; the daemon closes them in reverse."""
        config, hardware = self.config, self.hardware
        grace_seconds = max(GOODBYE_SECONDS, min(STOP_SECONDS, config.drain_seconds))
        keyrings = () if self.keyring is None else (self.keyring,)
        admit = None if self.keyring is None else self.keyring.admit_scraper
        return (
            Step(self.claim.take, self.claim.release),
            Step(partial(check_machine, config, hardware)),
            Step(hardware.backend.start, hardware.backend.close),
            Step(partial(measure_links, config, hardware, self.facts.devices.append)),
            Step(self.telemetry.start_tracing, self.telemetry.close),
            Step(self.engine.start, self.engine.close),
            Step(self.collector.start, self.collector.close),
            Step(partial(self.node.start, self.vault), self.node.close),
            Step(self.storages.start),
            Step(self.host_pool.start, self.host_pool.close),
            Step(close=self.storages.close),
            Step(close=self.registrar.close),
            Step(close=partial(asyncio.to_thread, hardware.hurry)),  # a Register may wait for a mover that hangs
            Step(self.life.start, self.life.close),
            *(Step(keyring.start, keyring.close) for keyring in keyrings),
            Step(self.checksums.start, self.checksums.close),
            Step(self.server.start, partial(self.server.close, grace_seconds)),
            Step(close=self.dispatcher.stop),
            Step(self.following.start, self.following.close),
            Step(self.health.start, self.health.close),
            Step(partial(self.telemetry.start_metrics, self.metrics, admit)),
            Step(self.web.start, self.web.close),
            # In reverse: waits end, copies land (then engines may recompute into the pages of their loads), and engines
            # learn of the end before the socket closes: else a call could reach the next daemon under an old lease.
            Step(close=self.life.close),
            Step(close=partial(asyncio.to_thread, self.engine.finish)),
            Step(close=self.node.stop_waiting),
        )

    async def run(self) -> None:
        """Start the parts, serve until ``stopping``, drain, and close what was started.

        Takes the process's SIGTERM, SIGINT and SIGHUP. Raises a CacheError that says what cannot be started.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: events.event("reload_too_early"))  # else it ends the daemon
        async with started(self.steps()):
            self._tell_ready(round(time.monotonic() - began, 3))
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            await self.stopping.wait()
            await self.administration.drain()
            await self.administration.wait_for_engines(self.storages.flush)
        events.event("stopped")

    def _tell_ready(self, seconds: float) -> None:
        events.event("config", **self.config.shown())
        events.event(
            "ready",
            socket=self.config.socket,
            port=self.server.port,
            metrics_port=self.telemetry.metrics_port,
            web_port=self.web.port,
            backend=self.facts.backend,
            devices=self.hardware.backend.devices(),
            epoch=self.facts.epoch,
            pid=os.getpid(),
            seconds=seconds,
        )

    def _reload(self) -> None:
        """Read the configuration and the tokens again; whatever is wrong with the one file, the other counts."""
        try:
            self.reloader.reload_by_signal()
        finally:
            if self.keyring is not None:
                self.keyring.reload()


@asynccontextmanager
async def started(every: Iterable[Step]) -> AsyncIterator[None]:
    """Start in this order; at the end, or where a start fails, close what was started in the reverse order."""
    async with AsyncExitStack() as stack:
        for step in every:
            await _carry_out(step.start)
            stack.push_async_callback(_carry_out, step.close)
        yield


def _core(config: Config, engine: SwapEngine, epoch: int) -> Core:
    same = ("blocks_per_sequence", "sequences_per_lease", "stock_pages_per_lease", "leases", "ahead_pages", "pin_share")
    settings = {name: getattr(config, name) for name in same}
    limits = Limits(events_per_model=config.event_history, open_seconds=OPEN_SECONDS, **settings)
    writing = WriteRule(WritePolicy(config.write_policy), config.write_through_threshold, share=config.write_back_share)
    new_name = partial(lease_name, epoch)
    policy = eviction_policy(config.eviction)
    if not config.tokens:
        return Core(Ledger(), engine, policy, writing, limits, new_name=new_name)
    ledger = Ledger(ticket_numbers=unordered_numbers(TICKET_BITS))  # engines of several tenants get them
    return Core(ledger, engine, policy, writing, limits, new_name=new_name, model_numbers=unordered_numbers(MODEL_BITS))


async def _carry_out(call: Callable[[], object]) -> None:
    result = call()
    if inspect.isawaitable(result):
        await result
