"""What an operator has asked to be told: metrics to scrape, metrics and traces by OTLP. By default nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvcache.v1 import admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc.service.host.server import Services
from cachesvc.service.watch import CallWatch
from cachesvc.telemetry.metric_reader import Reader, Reading
from cachesvc.telemetry.otlp import Otlp
from cachesvc.telemetry.prometheus import MetricsServer
from cachesvc.telemetry.tracing import Tracer

_DESCRIPTORS = {
    "engine": engine_pb2.DESCRIPTOR.services_by_name["EngineService"],
    "lease": lease_pb2.DESCRIPTOR.services_by_name["LeaseService"],
    "cache": cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
    "event": event_pb2.DESCRIPTOR.services_by_name["EventService"],
    "admin": admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
}


class Telemetry:
    """``watch_services`` as they are made, ``start_tracing`` before calls come, ``start_metrics`` once all run.

    ``metrics_port``: of the scrape endpoint, 0 while there is none.
    """

    def __init__(self, metrics_listen: str, otlp_endpoint: str, version: str, environment: Mapping[str, str]) -> None:
        self._metrics_listen = metrics_listen
        self._otlp = Otlp(otlp_endpoint, version, environment) if otlp_endpoint else None
        self._server: MetricsServer | None = None
        self.tracer = Tracer()
        self.watch = CallWatch(self.tracer)
        self.metrics_port = 0

    @property
    def is_on(self) -> bool:
        """True where anything is told."""
        return bool(self._metrics_listen) or self._otlp is not None

    def start_tracing(self) -> None:
        """Begin to trace, where spans are wanted. Raises Unavailable."""
        if self._otlp is not None:
            self._otlp.start_tracing(self.tracer)

    def watch_services(self, services: Services) -> Services:
        """The services as they are to be served: watched, or as they came where nothing is told."""
        if not self.is_on:
            return services
        watched = {
            name: self.watch.watched(described, getattr(services, name)) for name, described in _DESCRIPTORS.items()
        }
        return replace(services, **watched)

    def start_metrics(self, gather: Callable[[Reading], None]) -> None:
        """Serve and push readings from now on, where they are wanted. Raises Unavailable."""
        reader = Reader(asyncio.get_running_loop(), gather)
        if self._otlp is not None:
            self._otlp.start_metrics(reader)
        if self._metrics_listen:
            self._server = MetricsServer(self._metrics_listen, reader)
            self.metrics_port = self._server.start()

    async def close(self) -> None:
        """End what was started, off the loop, which a last reading may still need."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        if self._otlp is not None:
            await asyncio.to_thread(self._otlp.close)
