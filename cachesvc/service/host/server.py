"""The gRPC servers: all services on the unix socket and, if wanted, on loopback TCP or TLS, each with its own guard."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
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
from cachesvc.service.access.auth import EVERYONE, LOOPBACK, Doorkeeper, Guard
from cachesvc.service.host.health import LIVE, HealthListener
from cachesvc.service.host.socket_files import open_to_group
from cachesvc.service.host.tls import Certificates
from cachesvc.wire.status import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, MAX_STREAMS


@dataclass(frozen=True, slots=True)
class Services:
    """One servicer for each service."""

    engine: engine_pb2_grpc.EngineServiceServicer
    lease: lease_pb2_grpc.LeaseServiceServicer
    cache: cache_pb2_grpc.CacheServiceServicer
    event: event_pb2_grpc.EventServiceServicer
    admin: admin_pb2_grpc.AdminServiceServicer


@dataclass(frozen=True, slots=True)
class Listening:
    """Where to listen. ``tcp`` is HOST:PORT or empty; certificate and key make it TLS, ``client_ca`` mutual TLS.
    ``health``: HOST:PORT for probes. ``group``: who may open the unix socket beside its owner."""

    unix: str
    tcp: str = ""
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    health: str = ""
    group: str = ""


class Server:
    """Serves until ``close``. Raises Unavailable from ``start`` when an address is in use."""

    def __init__(
        self,
        services: Services,
        listening: Listening,
        keeper: Doorkeeper | None = None,
        refused: Callable[[str, str], None] = lambda _method, _code: None,
    ) -> None:
        """``keeper``: knows the callers. Without one, whoever may open the socket may do everything. ``refused(method,
        code)`` is told of calls that reach no service."""
        self._services = services
        self._listening = listening
        self._keeper = keeper
        self._refused = refused
        self._tcp: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._probes = HealthListener(self._health, listening.health)

    async def start(self) -> int:
        """Listen and serve; returns the TCP port (0: none)."""
        server = self._make(Guard(self._keeper, EVERYONE if self._keeper is None else None, refused=self._refused))
        logging.getLogger("grpc._cython.cygrpc").addFilter(is_about_us)
        make_way(self._listening.unix)
        mask = os.umask(0o177)  # the socket must not be open to others for a moment either
        try:
            server.add_insecure_port(f"unix:{self._listening.unix}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on the socket {self._listening.unix}: {error}") from error
        finally:
            os.umask(mask)
        self._server = server
        try:
            open_to_group(self._listening.unix, self._listening.group)
            port = self._add_tcp()
            await server.start()
            if self._tcp is not None:
                await self._tcp.start()
            await self.tell_live(live=True)
            if self._listening.health:
                await self._probes.start()
        except Unavailable:
            await self.close(0)
            raise
        await self.tell(serving=True)
        return port

    def _make(self, guard: Guard) -> grpc.aio.Server:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(interceptors=[guard], options=options)
        self._register(server)
        return server

    def _add_tcp(self) -> int:
        """A server of its own, because who may call is another question there."""
        listening = self._listening
        if not listening.tcp:
            return 0
        otherwise = None if self._keeper is not None else EVERYONE if listening.client_ca else LOOPBACK
        by_certificate = bool(listening.client_ca)
        self._tcp = self._make(Guard(self._keeper, otherwise, by_certificate=by_certificate, refused=self._refused))
        try:
            if not listening.key:
                return int(self._tcp.add_insecure_port(listening.tcp))
            certificates = Certificates(listening.certificate, listening.key, listening.client_ca)
            return int(self._tcp.add_secure_port(listening.tcp, certificates.credentials()))
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
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        channelz.add_channelz_servicer(server)
        reflection.enable_server_reflection([*service_names(), *_STANDARD, reflection.SERVICE_NAME], server)

    async def tell(self, *, serving: bool) -> None:
        """What health checks answer from now on, for the whole and for each service; never for ``live``."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *service_names()):
            await self._health.set(name, status)

    async def tell_live(self, *, live: bool) -> None:
        """What health checks of the name ``live`` answer from now on: whether a supervisor should let the daemon be."""
        status = health_pb2.HealthCheckResponse.SERVING if live else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(LIVE, status)

    async def close(self, grace_seconds: float) -> None:
        """Take no new calls, give running ones ``grace_seconds``, and remove the socket."""
        if self._server is None:
            return
        for server in (self._tcp, self._server):
            if server is not None:
                await server.stop(grace_seconds)
        await self._probes.close()
        self._server = self._tcp = None
        remove_socket(self._listening.unix)


_STANDARD = ("grpc.health.v1.Health", "grpc.channelz.v1.Channelz")


def service_names() -> tuple[str, ...]:
    """Full names of our own services."""
    modules = (engine_pb2, lease_pb2, cache_pb2, event_pb2, admin_pb2)
    return tuple(service.full_name for m in modules for service in m.DESCRIPTOR.services_by_name.values())


def is_about_us(record: logging.LogRecord) -> bool:
    """False for gRPC's traceback about a stream whose caller went away while an answer was on its way."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


def make_way(path: str) -> None:
    """Remove a socket file that nobody listens on.

    Raises Unavailable when somebody does, when the file is no socket, or when its folder is missing.
    """
    if not Path(path).parent.is_dir():
        raise Unavailable(f"the folder of the socket {path} does not exist; make it or choose another --socket")
    if not os.path.lexists(path):
        return
    require_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        result = probe.connect_ex(path)
    if result == 0:
        raise Unavailable(f"socket {path} is in use by a running daemon; stop it or choose another --socket")
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise Unavailable(f"{path} exists and is no socket of ours ({os.strerror(result)}); choose another --socket")
    remove_socket(path)


def remove_socket(path: str) -> None:
    """Remove a socket's file, if it is still there."""
    Path(path).unlink(missing_ok=True)


def require_socket(path: str) -> None:
    """Raises Unavailable for a file of another kind, which is somebody's and not ours to remove."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise Unavailable(f"{path} exists and is no socket; move it away or choose another --socket")
