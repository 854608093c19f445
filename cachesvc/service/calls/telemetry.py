"""Telemetry that an operator has asked for: metrics to scrape, metrics and traces by OTLP. By default nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvcache.v1 import admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc.flows.core import Core
from cachesvc.flows.expected import tick_expected
from cachesvc.flows.fetch import fetched
from cachesvc.flows.storage_writes import begin_soon, kept, pump_all
from cachesvc.flows.stored import forget, forget_all, spread_all
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import READY
from cachesvc.service.calls.dispatcher import CallWatch
from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import Outcome, Use
from cachesvc.storage.tier import News
from cachesvc.storage.tiers import Tiers
from cachesvc.telemetry.scrape_server import Admit, MetricReader, Otlp, Reading, ScrapeServer, metrics_page
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


OWED_PATHS = 64
"""Used paths of one batch that are looked at for what a tier lacks, some 50 us each."""
Run = Callable[[int, Callable[[], None]], None]
"""``(model, flow)``: runs a flow of a model on the ledger thread, as the root of a callback."""


class StorageFlows:
    """Storage seam of the flows. ``run``: see ``Run``."""

    def __init__(self, tiers: Tiers, core: Core, run: Run) -> None:
        self.tiers = tiers
        self.promoted_blocks = 0
        self._core = core
        self._run = run
        self.wait_seconds = tiers.wait_seconds
        self.keeps_all = tiers.keeps_all
        self.keeps_used = tiers.keeps_used
        self.expects = tiers.expects
        self.lagged = tiers.lagged
        self.room = tiers.room
        self.has = tiers.has
        self.fetch = tiers.fetch
        self.keep = tiers.keep
        self.forget = tiers.forget
        tiers.tell = self._told
        tiers.tell_gone = self._gone
        tiers.tell_lost = self._lost
        tiers.owed = self._owed
        core.storage = self
        core.on_wanted = partial(begin_soon, core)

    def used(self, model: Model, uses: Sequence[Use]) -> None:
        self.tiers.used(model, uses, model.blocks.chooser)
        if not self.tiers.are_several:
            return
        index = model.blocks.index
        hit = [each.key for each in uses if each.hits]
        for key in hit[:OWED_PATHS]:
            row = index.rows.get(key, NO_ROW)
            if row != NO_ROW:
                path = index.path(row)
                self.tiers.owe(model, len(path), lambda depth, path=path: index.key_of(path[depth]))  # type: ignore[misc]

    def _owed(self, model_id: int, keys: list[bytes]) -> None:
        """Write blocks to tiers that lack them, where they are on the host, root first."""
        model: Model | None = self._core.ledger.models.get(model_id)
        if model is None:
            return
        stored, index, host = model.stored, model.blocks.index, model.blocks.host
        idle = [key for key in keys if key not in stored.keeping and key not in stored.wanted]
        rows = [index.rows.get(key, NO_ROW) for key in idle]
        here = [row for row in rows if row != NO_ROW and host.states[host.lead][row] == READY]
        self.promoted_blocks += len(here)
        stored.ready.extend(index.key_of(row) for row in sorted(here, key=index.depth.__getitem__))
        if here:
            begin_soon(self._core, model)

    def tick(self) -> None:
        """Do periodic work, on the ledger thread."""
        self.tiers.tick()
        tick_expected(self._core)
        spread_all(self._core)
        pump_all(self._core)

    def _lost(self) -> None:
        for model in self._core.ledger.models.values():
            forget_all(self._core, model)

    def _gone(self, model: int, keys: list[bytes]) -> None:
        self._run(model, partial(forget, self._core, model, keys))

    def _told(self, model: int, ticket: int, key: bytes, news: list[News]) -> None:
        def run() -> None:
            if ticket:
                fetched(self._core, model, ticket, news)
            else:
                kept(self._core, model, key, [each.outcome for each in news])

        self._run(model, run)


def read_storage(reading: Reading, tiers: Tiers | None) -> None:
    """Costs nothing that grows with what is stored."""
    found = () if tiers is None else tiers.all
    reading.put("storage_tiers", len(found))
    for tier in found:
        totals, counts, name = tier.backend.totals(), tier.store.counts, tier.name
        reading.put("storage_objects", totals.objects, name)
        reading.put("storage_bytes", totals.size_bytes, name)
        reading.put("storage_capacity_bytes", totals.capacity_bytes, name)
        reading.put("storage_evicted_objects", totals.evicted_objects, name)
        reading.put("storage_closed", int(tier.breaker.is_closed), name)
        reading.put("storage_writable", int(not totals.problem), name)
        reading.put("storage_given_up", tier.breaker.opened, name)
        reading.put("storage_items_under_way", tier.store.out(), name)
        for verb in Verb:
            reading.put("storage_moved_bytes", counts.size_bytes[verb], verb.value, name)
            for outcome in Outcome:
                reading.put("storage_items", counts.items[verb, outcome], verb.value, outcome.value, name)
