"""The composition root: ``build`` makes the parts, ``run`` starts them in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
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
from cachesvc.service.calls.registrar import Registrar
from cachesvc.service.calls.telemetry import Telemetry
from cachesvc.service.host.device_health import DeviceHealth, Facts
from cachesvc.service.host.health import HealthAnswers
from cachesvc.service.host.life import LifeServer
from cachesvc.service.host.reload import Reloader, live_settings
from cachesvc.service.host.server import Listening, Server, Services, service_names
from cachesvc.service.host.socket_files import SocketClaim
from cachesvc.service.host.web import WebPage
from cachesvc.service.lane import Lanes
from cachesvc.service.loop.node import Collector, Node, collector_between_calls
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.event_service import EventService
from cachesvc.service.rpc.services import CacheService, EngineService, LeaseService
from cachesvc.storages import Storages
from cachesvc.swap.engine import SwapEngine, TransferEnds
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX

STOP_SECONDS = 1.0
"""Time limit of calls that are in flight when the daemon ends, seconds."""
GOODBYE_SECONDS = 0.1
"""Given at least to calls that were told that the daemon stops: their statuses have to go out."""

OPEN_SECONDS = 30.0
"""From Register to Open: an engine maps nothing in between, but its processes may have to start."""


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """Everything that runs in a daemon's process. ``keyrings``: one where tokens are configured, else none.
    ``stopping``: set it to end the daemon."""

    config: Config
    base: Base
    claim: SocketClaim
    life: LifeServer
    registrar: Registrar
    keyrings: tuple[Keyring, ...]
    checksums: Checksums
    dispatcher: Dispatcher
    server: Server
    following: EventService
    health: DeviceHealth
    facts: Facts
    metrics: MetricValues
    web: WebPage
    administration: Administration
    reloader: Reloader
    collector: Collector
    stopping: asyncio.Event


def _nothing() -> None:
    """No-op for a part that needs no start, or no close."""


class Step(NamedTuple):
    """A part's start and its close, each a plain call or one to await."""

    start: Callable[[], object] = _nothing
    close: Callable[[], object] = _nothing


def build(
    config: Config, reread: Callable[[], Config] | None = None, choose: Callable[[Config], Hardware] = choose_hardware
) -> DaemonParts:
    """Make everything, and start nothing. ``reread`` gives the configuration as its file has it by now.

    Raises a CacheError that says what cannot be had.
    """
    base, claim = _base(config, choose(config)), SocketClaim(config.socket)
    base.hardware.share_claim(claim.held)
    node, watch = base.node, base.telemetry.watch
    process_of, grace = node.core.ledger.processes.get, config.token_grace_seconds
    keyring = Keyring(config.tokens, process_of, node.now, grace) if config.tokens else None
    answers = HealthAnswers(service_names())
    health = DeviceHealth(base.hardware.backend, node, answers.tell, heals=base.hardware.has_processes)
    administration = Administration(node, health, config.drain_seconds)
    checksums = Checksums(node, base.engine.page_bytes, config.checksums, config.checksum_limit)
    calls = _calls(config, base, keyring)
    facts = _facts(config, base, health, calls, keyring)
    following = EventService(node, config.event_subscribers)
    reloader = _reloader(config, base, calls, administration, facts, reread)
    storage, quotas, reload = base.storages.answers, calls.all_quotas, reloader.reload
    admin = AdminService(calls.edge, Inspection(node, checksums), administration, facts, quotas, reload, storage)
    services = Services(calls.engine, calls.lease, calls.cache, following, admin)
    dispatcher = calls.edge.dispatcher
    return DaemonParts(
        config=config,
        base=base,
        claim=claim,
        life=_life(config, base, calls.lanes),
        registrar=calls.engine.registrar,
        keyrings=() if keyring is None else (keyring,),
        checksums=checksums,
        dispatcher=dispatcher,
        server=Server(services, _listening(config), answers, keyring, watch.refused, dispatcher.charge, ways=ways_in()),
        following=following,
        health=health,
        facts=facts,
        metrics=MetricValues(facts, node, base.engine, dispatcher.admission, watch, calls.cache, base.storages.read),
        web=WebPage(node, config.web_listen, facts),
        administration=administration,
        reloader=reloader,
        collector=collector_between_calls(node, dispatcher.admission),
        stopping=asyncio.Event(),
    )


def steps(parts: DaemonParts) -> tuple[Step, ...]:
    """Steps of a start, in this order; the daemon closes them in reverse."""
    config, (hardware, telemetry, engine, node, host_pool, vault, storages) = parts.config, parts.base
    grace_seconds = max(GOODBYE_SECONDS, min(STOP_SECONDS, config.drain_seconds))
    admit = next((keyring.admit_scraper for keyring in parts.keyrings), None)
    return (
        Step(parts.claim.take, parts.claim.release),
        Step(partial(check_machine, config, hardware)),
        Step(hardware.backend.start, hardware.backend.close),
        Step(partial(measure_links, config, hardware, parts.facts.devices.append)),
        Step(telemetry.start_tracing, telemetry.close),
        Step(engine.start, engine.close),
        Step(parts.collector.start, parts.collector.close),
        Step(partial(node.start, vault), node.close),
        Step(storages.start),
        Step(host_pool.start, host_pool.close),
        Step(close=storages.close),
        Step(close=parts.registrar.close),
        Step(close=partial(asyncio.to_thread, hardware.hurry)),  # a Register may wait for a mover that hangs
        Step(parts.life.start, parts.life.close),
        *(Step(keyring.start, keyring.close) for keyring in parts.keyrings),
        Step(parts.checksums.start, parts.checksums.close),
        Step(parts.server.start, partial(parts.server.close, grace_seconds)),
        Step(close=parts.dispatcher.stop),
        Step(parts.following.start, parts.following.close),
        Step(parts.health.start, parts.health.close),
        Step(partial(telemetry.start_metrics, parts.metrics, admit)),
        Step(parts.web.start, parts.web.close),
        # In reverse: waits end, copies land (then engines may recompute into the pages of their loads), and engines
        # learn of the end before the socket closes: else a call could reach the next daemon under an old lease.
        Step(close=parts.life.close),
        Step(close=partial(asyncio.to_thread, engine.finish)),
        Step(close=node.stop_waiting),
    )


async def run(parts: DaemonParts) -> None:
    """Start the parts, serve until ``parts.stopping``, drain, and close what was started.

    Takes the process's SIGTERM, SIGINT and SIGHUP. Raises a CacheError that says what cannot be started.
    """
    loop, began = asyncio.get_running_loop(), time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, parts.stopping.set)
    loop.add_signal_handler(signal.SIGHUP, events.event, "reload_too_early")  # by itself it would end the daemon
    async with started(steps(parts)):
        _tell_ready(parts, round(time.monotonic() - began, 3))
        loop.add_signal_handler(signal.SIGHUP, _reload, parts)
        await parts.stopping.wait()
        await parts.administration.drain()
        await parts.administration.wait_for_engines(parts.base.storages.flush)
    events.event("stopped")


@asynccontextmanager
async def started(every: Iterable[Step]) -> AsyncIterator[None]:
    """Start in this order; at the end, or where a start fails, close what was started in the reverse order."""
    async with AsyncExitStack() as stack:
        for step in every:
            await _carry_out(step.start)
            stack.push_async_callback(_carry_out, step.close)
        yield


# -- what the parts are made of ----------------------------------------------------------------------------------------


class Base(NamedTuple):
    """The ledger, and what holds and moves the bytes that it tells of."""

    hardware: Hardware
    telemetry: Telemetry
    engine: SwapEngine
    node: Node
    host_pool: HostPool
    vault: Vault
    storages: Storages


class Calls(NamedTuple):
    """Services that engines call, and their limits. ``all_quotas``: also where there are none."""

    edge: Edge
    all_quotas: Quotas
    engine: EngineService
    lease: LeaseService
    cache: CacheService
    lanes: Lanes

    def transports(self) -> TransportStatus:
        lanes = self.lanes
        return TransportStatus(lanes=lanes.count, lane_calls=lanes.calls, grpc_calls=self.edge.calls)


def _base(config: Config, hardware: Hardware) -> Base:
    telemetry = Telemetry(config.metrics_listen, config.otlp_endpoint, __version__, os.environ)
    ended, epoch = TransferEnds(), secrets.randbits(63)
    engine = SwapEngine(hardware.movers, ended.tell, tracer=telemetry.tracer)
    core = _core(config, engine, epoch)
    node = Node(core, epoch=epoch, wait_seconds=config.wait_seconds, lease_seconds=config.lease_seconds)
    ended.connect(node.on_transfer_done)
    hardware.tell_losses(node.on_device_lost)
    memory, nodes, in_files = hardware.backend, hardware.nodes, hardware.has_processes
    sizes, storages = (config.host_pool, config.host_chunk, config.host_threads), Storages(config)
    host_pool = HostPool(*sizes, nodes, memory, in_files=in_files, on_ready=storages.chunk_ready)
    vault = Vault(memory, host_pool, engine, node.on_host_pages)
    storages.connect(node, vault, host_pool)
    return Base(hardware, telemetry, engine, node, host_pool, vault, storages)


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


def _life(config: Config, base: Base, lanes: Lanes) -> LifeServer:
    node = base.node

    return LifeServer(
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
        connections=ways_in().life,
    )


def _calls(config: Config, base: Base, keyring: Keyring | None) -> Calls:
    node = base.node
    quotas = None
    if keyring is not None:
        quotas = Quotas(node.core, keyring.quota_of, keyring.tenants, keyring.working_tenants)
    admission = Admission(config.calls_in_flight, config.waiting_calls, config.waiting_calls_per_process, quotas)
    dispatcher = Dispatcher(node, admission, base.telemetry.watch if base.telemetry.is_on else None)
    edge = Edge(dispatcher, base.telemetry.tracer)
    cache = CacheService(edge, config.operations_per_step)
    return Calls(
        edge,
        quotas or Quotas(node.core, lambda _: NO_QUOTA),
        EngineService(edge, base.hardware.backend, quotas, base.storages.nodes.advertised),
        LeaseService(edge, quotas),
        cache,
        Lanes(dispatcher, cache, keyring, base.telemetry.tracer, config.lanes_per_process, ways_in().lanes),
    )


def _listening(config: Config) -> Listening:
    return Listening(
        config.socket,
        config.listen,
        config.tls_certificate,
        config.tls_key,
        config.tls_client_ca,
        health=config.health_listen,
        group=config.socket_group,
    )


def _facts(config: Config, base: Base, health: DeviceHealth, calls: Calls, keyring: Keyring | None) -> Facts:
    return Facts(
        version=__version__,
        backend=base.hardware.backend.name,
        epoch=base.node.epoch,
        started=base.node.started,
        lease_seconds=config.lease_seconds,
        device_pool_bytes=config.device_pool,
        host_pool_bytes=config.host_pool,
        host_chunk_bytes=config.host_chunk,
        eviction=config.eviction,
        settings={**config.shown(), "backend": base.hardware.backend.name},
        devices=[],
        host_pool=base.host_pool,
        health=health,
        transports=calls.transports,
        loop=base.node.loop_watch,
        keyring=keyring,
        other_attention=base.storages.attention,
    )


def _reloader(
    config: Config,
    base: Base,
    calls: Calls,
    administration: Administration,
    facts: Facts,
    reread: Callable[[], Config] | None,
) -> Reloader:
    admission, backend = calls.edge.dispatcher.admission, base.hardware.backend
    live = live_settings(base.node, admission, calls.cache, calls.lanes, backend, administration)
    return Reloader(asdict(config), facts.settings, None if reread is None else lambda: asdict(reread()), live)


async def _carry_out(call: Callable[[], object]) -> None:
    result = call()
    if inspect.isawaitable(result):
        await result


def _tell_ready(parts: DaemonParts, seconds: float) -> None:
    events.event("config", **parts.config.shown())
    events.event(
        "ready",
        socket=parts.config.socket,
        port=parts.server.port,
        metrics_port=parts.base.telemetry.metrics_port,
        web_port=parts.web.port,
        backend=parts.facts.backend,
        devices=parts.base.hardware.backend.devices(),
        epoch=parts.facts.epoch,
        pid=os.getpid(),
        seconds=seconds,
    )


def _reload(parts: DaemonParts) -> None:
    """Read the configuration and the tokens again; whatever is wrong with the one file, the other counts."""
    try:
        parts.reloader.reload_by_signal()
    finally:
        for keyring in parts.keyrings:
            keyring.reload()
