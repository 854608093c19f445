"""A port for probes: it answers ``grpc.health.v1.Health/Check`` and nothing else, without TLS, for any caller.

Kubelets probe by TCP on the pod's address, speak no TLS and no unix socket. So that this may listen beyond loopback,
nothing that it answers tells or changes anything: no other service, no reflection, no ``Watch``, whose streams would
stay open.

    ""      SERVING once the daemon serves; NOT_SERVING when it drains or must not take new work: start-up, readiness
    live    SERVING for as long as the event loop answers, also while it drains, and until no GPU is left: liveness
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.model.errors import Unavailable
from cachesvc.service.access.admission import rude_options

LIVE = "live"
MAX_PROBE_BYTES = 4096
CALLS_A_CONNECTION = 8
CONNECTION_SECONDS = 30
"""Kubelets connect anew for every probe. There is no limit of calls over all connections: a caller that held that many
would keep probes out, and so have the daemon killed; held calls end with their connection instead."""


class Serving(NamedTuple):
    ready: bool
    live: bool


class _Checks(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it comes without types
    """``Check`` of the daemon's own health, and no ``Watch``."""

    def __init__(self, told: health.aio.HealthServicer) -> None:
        self._told = told

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        answer: health_pb2.HealthCheckResponse = await self._told.Check(request, context)
        return answer

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this port answers Check alone; the daemon's socket Watch too"
        )


class HealthAnswers:
    """Answers of health checks: for the whole and each of the ``services`` by their full names, and ``live``."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *services)

    async def tell(self, serving: Serving) -> None:
        """Answer this from now on. ``live`` never follows from the rest: only a supervisor asks for it."""
        for name in self._names:
            await self.servicer.set(name, _status(is_serving=serving.ready))
        await self.servicer.set(LIVE, _status(is_serving=serving.live))


def _status(*, is_serving: bool) -> Any:
    return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING


class HealthListener:
    """Serves what ``told`` says on ``address`` (HOST:PORT; empty: nowhere) until ``close``."""

    def __init__(self, told: HealthAnswers, address: str, connections: int) -> None:
        self._told = told.servicer
        self._connections = connections
        self._address = address
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen and serve; returns the port (0: none). Raises Unavailable when the address cannot be had."""
        if not self._address:
            return 0
        options = [
            *rude_options(self._connections),
            ("grpc.max_receive_message_length", MAX_PROBE_BYTES),
            ("grpc.max_metadata_size", MAX_PROBE_BYTES),
            ("grpc.max_concurrent_streams", CALLS_A_CONNECTION),
            ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
            ("grpc.max_connection_age_grace_ms", CONNECTION_SECONDS * 1000),
        ]
        server = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(_Checks(self._told), server)
        try:
            port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot answer probes on {self._address}: {error}; is the port taken? choose another --health-listen"
            ) from error
        await server.start()
        self._server = server
        return int(port)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
