"""Telemetry that an operator has asked for: metrics to scrape, metrics and traces by OTLP. By default nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvcache.v1 import admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc.service.calls.observe import CallWatch
from cachesvc.telemetry.metric_reader import MetricReader, Reading
from cachesvc.telemetry.otlp import Otlp
from cachesvc.telemetry.prometheus import metrics_page
from cachesvc.telemetry.scrape_server import Admit, ScrapeServer
from cachesvc.telemetry.tracing import Tracer

_MODULES = (engine_pb2, lease_pb2, cache_pb2, event_pb2, admin_pb2)


class Telemetry:
    """``start_tracing`` before calls come, ``start_metrics`` once all run.

    ``watch``: counts calls; the dispatcher gets it only where anything is exported (``is_on``). ``metrics_port``: of
    the scrape endpoint, 0 while there is none.
    """

    def __init__(self, metrics_listen: str, otlp_endpoint: str, version: str, environment: Mapping[str, str]) -> None:
        self._metrics_listen = metrics_listen
        self._otlp = Otlp(otlp_endpoint, version, environment) if otlp_endpoint else None
        self._server: ScrapeServer | None = None
        self.tracer = Tracer()
        self.watch = _watch(self.tracer)
        self.metrics_port = 0

    @property
    def is_on(self) -> bool:
        """True where anything is exported."""
        return bool(self._metrics_listen) or self._otlp is not None

    def start_tracing(self) -> None:
        """Begin to trace, where spans are wanted. Raises Unavailable."""
        if self._otlp is not None:
            self._otlp.start_tracing(self.tracer)

    def start_metrics(self, gather: Callable[[Reading], None], admit: Admit | None) -> None:
        """Serve and push readings from now on, where they are wanted. ``admit``: to whom they are served; None: to
        all. Raises Unavailable."""
        reader = MetricReader(asyncio.get_running_loop(), gather)
        if self._otlp is not None:
            self._otlp.start_metrics(reader)
        if self._metrics_listen:
            self._server = ScrapeServer(self._metrics_listen, metrics_page(reader), admit)
            self.metrics_port = self._server.start()

    async def close(self) -> None:
        """End what was started, off the loop, which a last reading may still need."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        if self._otlp is not None:
            await asyncio.to_thread(self._otlp.close)


def _watch(tracer: Tracer) -> CallWatch:
    """A watch that knows every method of our own services."""
    watch = CallWatch(tracer)
    for module in _MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            watch.know(f"{service.name}/{method.name}" for method in service.methods)
    return watch
