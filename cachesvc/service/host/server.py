"""The gRPC servers: all services on the unix socket and, if wanted, on loopback TCP or TLS, each with its own guard."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvcache.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
)

from cachesvc.model.errors import Unavailable
from cachesvc.model.text import unix_target
from cachesvc.service.access.admission import Option, Ways, local_options, tcp_options
from cachesvc.service.access.auth import EVERYONE, LOOPBACK, Charge, Doorkeeper, Guard, Unlocked, free
from cachesvc.service.host.health import HealthAnswers, HealthListener, Serving
from cachesvc.service.host.socket_files import open_to_group, remove_socket
from cachesvc.service.host.tls import add_port


@dataclass(frozen=True, slots=True)
class Services:
    engine: engine_pb2_grpc.EngineServiceServicer
    lease: lease_pb2_grpc.LeaseServiceServicer
    cache: cache_pb2_grpc.CacheServiceServicer
    event: event_pb2_grpc.EventServiceServicer
    admin: admin_pb2_grpc.AdminServiceServicer


@dataclass(frozen=True, slots=True)
class Listening:
    """Addresses of the listeners. ``tcp`` is HOST:PORT or empty; certificate and key make it TLS, ``client_ca`` mutual
    TLS. ``health``: HOST:PORT for probes. ``group``: group that may open the unix socket beside its owner."""

    unix: str
    tcp: str = ""
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    health: str = ""
    group: str = ""


class Server:
    """Serves from ``start`` to ``close``; ``port``: of TCP, 0 where there is none."""

    def __init__(
        self,
        services: Services,
        listening: Listening,
        answers: HealthAnswers,
        keeper: Doorkeeper | None = None,
        refused: Callable[[str, str], None] = lambda _method, _code: None,
        charge: Charge = free,
        *,
        ways: Ways,
    ) -> None:
        """``keeper``: knows the callers. Without one, any process that may open the socket may do everything.
        ``refused(method, code)`` is called for calls that reach no service. ``charge``: for messages' bytes. ``ways``:
        limits of connections."""
        self.port = 0
        self._services = services
        self._listening = listening
        self._keeper = keeper
        self._refused = refused
        self._charge = charge
        self._ways = ways
        self._answers = answers
        self._running: list[grpc.aio.Server] = []
        self._probes = HealthListener(answers, listening.health, ways.probes)

    async def start(self) -> None:
        """Listen and serve. Raises Unavailable when an address cannot be had."""
        guard = Guard(self._keeper or Unlocked(EVERYONE), refused=self._refused, charge=self._charge)
        server = self._make(guard, local_options(self._ways))
        logging.getLogger("grpc._cython.cygrpc").addFilter(is_about_us)
        mask = os.umask(0o177)  # the socket must not be open to others for a moment either
        try:
            server.add_insecure_port(unix_target(self._listening.unix))
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on the socket {self._listening.unix}: {error}") from error
        finally:
            os.umask(mask)
        self._running.append(server)
        try:
            open_to_group(self._listening.unix, self._listening.group)
            self._add_tcp()
            for each in self._running:
                await each.start()
            await self._answers.tell(Serving(ready=False, live=True))
            await self._probes.start()
        except Unavailable:
            await self.close(0)
            raise
        await self._answers.tell(Serving(ready=True, live=True))

    def _make(self, guard: Guard, options: list[Option]) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[guard], options=options)
        self._register(server)
        return server

    def _add_tcp(self) -> None:
        """Add a server of its own for TCP, because its callers have other rights."""
        listening = self._listening
        if not listening.tcp:
            return
        keeper, by_certificate = self._keeper or Unlocked(LOOPBACK), bool(listening.client_ca)
        guard = Guard(keeper, by_certificate=by_certificate, refused=self._refused, charge=self._charge)
        server = self._make(guard, tcp_options(self._ways))
        self._running.insert(0, server)
        try:
            files = listening.certificate, listening.key, listening.client_ca
            self.port = add_port(server, listening.tcp, *files)
        except (RuntimeError, OSError) as error:
            raise Unavailable(
                f"cannot listen on {listening.tcp}: {error}; is the port taken? choose another --listen"
            ) from error

    def _register(self, server: grpc.aio.Server) -> None:
        services = self._services
        engine_pb2_grpc.add_EngineServiceServicer_to_server(services.engine, server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(services.lease, server)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(services.cache, server)
        event_pb2_grpc.add_EventServiceServicer_to_server(services.event, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(services.admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._answers.servicer, server)
        channelz.add_channelz_servicer(server)
        reflection.enable_server_reflection([*service_names(), *_STANDARD, reflection.SERVICE_NAME], server)

    async def close(self, grace_seconds: float) -> None:
        """Take no new calls, give running ones ``grace_seconds``, and remove the socket. Idempotent."""
        if not self._running:
            return
        await asyncio.gather(*(server.stop(grace_seconds) for server in self._running))
        await self._probes.close()
        self._running.clear()
        remove_socket(self._listening.unix)


_STANDARD = ("grpc.health.v1.Health", "grpc.channelz.v1.Channelz")


def service_names() -> tuple[str, ...]:
    modules = (engine_pb2, lease_pb2, cache_pb2, event_pb2, admin_pb2)
    return tuple(service.full_name for m in modules for service in m.DESCRIPTOR.services_by_name.values())


def is_about_us(record: logging.LogRecord) -> bool:
    """False for gRPC's traceback about a stream whose caller went away while an answer was on its way."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")
