"""Reads what the daemon's parts have counted into metrics, on the event loop, at the cost of models, pools and leases.

Nothing here walks blocks: a scrape must not be felt by an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachesvc.ledger.ledger import LeaseEnd, LeaseState, Model
from cachesvc.ledger.page_pool import PlaceCounts
from cachesvc.ledger.reuse_stats import Miss
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.layout import Layout
from cachesvc.model.words import FILLING, CopyState, PageState, Tier
from cachesvc.questions.view import View
from cachesvc.service.access.admission import Admission
from cachesvc.service.calls.dispatcher import CallWatch
from cachesvc.service.host.device_health import Facts
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.services import CacheService
from cachesvc.swap.engine import DIRECTIONS, SwapEngine
from cachesvc.telemetry import events
from cachesvc.telemetry.scrape_server import Reading

SUBSCRIBERS = "event_subscribers"
BLOCK_STATES = tuple(state for state in CopyState if state >= FILLING)


class Sizes(NamedTuple):
    """Bytes of a model's pages by group, and of a whole block (without what windows hold) by tier, on all ranks."""

    pages: tuple[int, ...]
    blocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The parts that count. Calling it fills a reading."""

    facts: Facts
    node: Node
    engine: SwapEngine
    admission: Admission
    watch: CallWatch
    cache: CacheService
    storage: Callable[[Reading], None]
    _sizes: dict[int, Sizes] = field(default_factory=dict)

    def __call__(self, reading: Reading) -> None:
        self.node.loop_watch.begin()
        view = self.node.view()
        self._daemon(reading, view)
        self._memory(reading)
        self.storage(reading)
        sequences: Counter[int] = Counter()
        self._leases(reading, view, sequences)
        models = view.models()
        for model in models:
            reading.put("sequences", sequences[model.id], model.shown, model.id)
            _reuse(reading, model)
            if model.id not in self._sizes:
                self._sizes[model.id] = _sizes(model.layout)
            _blocks(reading, model, self._sizes[model.id])
        for gone in self._sizes.keys() - {model.id for model in models}:
            del self._sizes[gone]
        self._transfers(reading)
        self._calls(reading)

    def _daemon(self, reading: Reading, view: View) -> None:
        reading.put("info", 1, self.facts.version, self.facts.backend)
        reading.put("uptime_seconds", self.facts.uptime_seconds)
        reading.put("draining", int(view.is_draining))
        reading.put("tokens_stale_seconds", self.facts.tokens_stale_seconds)
        reading.put("tokens_retired_shown", len(self.facts.retired_shown()))
        reading.put("log_lines_lost", events.lost_lines())
        reading.put("event_subscribers", view.counters.get(SUBSCRIBERS, 0))
        for name, count in view.counters.items():
            if name != SUBSCRIBERS:  # it falls too, and a counter that falls reads as a restart
                reading.put("events", count, name)

    def _memory(self, reading: Reading) -> None:
        facts = self.facts
        lacking = facts.health.backend.lacking_hosts()
        for device in self.node.vault.devices():
            reading.put("device_pool_bytes", facts.device_pool_bytes, device)
            reading.put("device_pool_free_bytes", self.node.vault.device_free_bytes(device), device)
            reading.put("host_chunks_refused", lacking.get(device, (0, ""))[0], device)
        reading.put("device_peers_refused", len(facts.health.backend.refused_peers()))
        reading.put("host_pool_bytes", facts.host_pool_bytes)
        reading.put("host_pool_ready_bytes", facts.host_pool_ready_bytes)

    def _leases(self, reading: Reading, view: View, sequences: Counter[int]) -> None:
        now, silence = view.now(), 0.0
        states = dict.fromkeys(LeaseState, 0)
        for lease in view.leases():
            states[lease.state] += 1
            sequences[lease.model] += len(lease.sequences)
            if lease.state is LeaseState.LIVE:
                silence = max(silence, now - lease.last_heard)
        for state, count in states.items():
            reading.put("leases", count, state.value)
        reading.put("lease_silence_seconds", silence)
        reading.put("lease_silence_limit_seconds", self.facts.lease_seconds)
        reading.put("processes", view.processes)
        for cause in LeaseEnd:
            reading.put("leases_ended", view.counters.get(f"leases_ended_{cause.value}", 0), cause.value)

    def _transfers(self, reading: Reading) -> None:
        counts = self.engine.transfers
        for (direction, device), size_bytes in list(counts.device_bytes.items()):
            reading.put("transfer_bytes", size_bytes, direction, device)
        for direction in DIRECTIONS:
            reading.put_histogram("transfer_seconds", counts.seconds[direction], direction)
            reading.put("transfer_failures", counts.failures[direction], direction)
        waiting = self.engine.waiting()
        for (direction, urgency), histogram in counts.queued.items():
            reading.put_histogram("transfer_queue_seconds", histogram, direction, urgency.value)
            now = waiting.get((direction, urgency))
            labels = (direction, urgency.value)
            reading.put("transfers", now.queued if now else 0, *labels, "queued")
            reading.put("transfers", now.copying if now else 0, *labels, "copying")
            reading.put("oldest_transfer_seconds", now.oldest_seconds if now else 0.0, *labels)

    def _calls(self, reading: Reading) -> None:
        watch = self.node.loop_watch
        for flow, seconds in watch.longest().items():
            reading.put("loop_longest_seconds", seconds, flow)
        reading.put("loop_longest_round_seconds", watch.longest_round())
        reading.put("loop_long_rounds", watch.long_rounds)
        for method, histogram in self.watch.seconds.items():
            reading.put_histogram("rpc_seconds", histogram, method)
        for (method, code), count in self.watch.codes.items():
            reading.put("rpc_calls", count, method, code)
        for (operation, code), count in self.cache.operations.items():
            reading.put("step_operations", count, operation, code)
        transports = self.facts.transports()
        reading.put("lanes", transports.lanes)
        reading.put("transport_calls", transports.lane_calls, "lane")
        reading.put("transport_calls", transports.grpc_calls, "grpc")
        work, waits = self.admission.work, self.admission.waits
        reading.put("calls_in_flight", work.held)
        reading.put("calls_in_flight_limit", work.limit)
        reading.put("waiting_calls", waits.held)
        reading.put("waiting_calls_limit", waits.limit)


def _reuse(reading: Reading, model: Model) -> None:
    labels = (model.shown, model.id)
    tokens, reuse = model.layout.block_tokens, model.reuse
    reading.put("requested_tokens", reuse.requested * tokens, *labels)
    reading.put("ceiling_tokens", reuse.ceiling * tokens, *labels)
    reading.put("computed_tokens", reuse.published * tokens, *labels)
    reading.put("unloaded_tokens", reuse.unloaded * tokens, *labels)
    reading.put("remembered_keys", reuse.remembered, *labels)
    for tier, blocks in model.hit_blocks.items():
        reading.put("hit_tokens", blocks * tokens, *labels, tier)
    for kind, blocks in model.lost_blocks.items() if model.layout.window_groups else ():
        reading.put("lost_hit_tokens", blocks * tokens, *labels, kind)
    shadows = [replica.shadow for replica in model.replicas if replica.shadow is not None]
    for shadow in (*shadows, *([model.compared] if model.compared.asked else ())):
        reading.put("compared_tokens", shadow.asked * tokens, *labels)
        reading.put("compared_hit_tokens", shadow.hits * tokens, *labels, "own")
        reading.put("compared_hit_tokens", shadow.shadow_hits * tokens, *labels, "lru")
    for cause, blocks in reuse.missed.items():
        if cause is not Miss.DUPLICATE:
            reading.put("missed_tokens", blocks * tokens, *labels, cause.value)
    for (tier, cause), blocks in reuse.recomputed.items():
        reading.put("recomputed_tokens", blocks * tokens, *labels, tier, cause.value)


def _sizes(layout: Layout) -> Sizes:
    pages = tuple(layout.page_bytes(group) for group in range(len(layout.groups)))
    full = layout.full_groups
    device = sum(pages[group] for group in full) * layout.ranks
    host = sum(pages[group] * layout.host_ranks(group) for group in full)
    return Sizes(pages, {Tier.DEVICE.value: device, Tier.HOST.value: host})


def _blocks(reading: Reading, model: Model, sizes: Sizes) -> None:
    labels = (model.shown, model.id)
    layout = model.layout
    reading.put("resident_blocks", len(model.blocks.index), *labels)
    for group, named in enumerate(layout.groups):
        reading.put("page_bytes", sizes.pages[group], *labels, named.name)
    for place in model.blocks.index.places:
        tier = (Tier.HOST if place is model.blocks.host else Tier.DEVICE).value
        shared = place.share_names(layout)
        for group, pool in enumerate(place.pools):
            name, whole = layout.groups[group].name, shared[group] or layout.groups[group].name
            for state, pages in zip(PageState, pool.own_counts, strict=True):
                of = whole if state is PageState.FREE else name
                reading.put("pages", pages, *labels, tier, of, state.name.lower())
            reading.put("pages", pool.withheld, *labels, tier, whole, "reserved")
        _place(reading, place, (*labels, tier), sizes.blocks[tier])
    device = Tier.DEVICE.value
    _left(reading, model.blocks.past, (*labels, device), sizes.blocks[device])


def _place(reading: Reading, place: Place, labels: tuple[object, ...], block_bytes: int) -> None:
    counts = place.counts
    for state in BLOCK_STATES:
        reading.put("blocks", counts.states[state], *labels, state.name.lower())
    reading.put("pinned_blocks", counts.pinned, *labels)
    _left(reading, counts, labels, block_bytes)


def _left(reading: Reading, counts: PlaceCounts, labels: tuple[object, ...], block_bytes: int) -> None:
    reading.put("dropped_blocks", counts.left, *labels)
    reading.put("dropped_unused_blocks", counts.left_unused, *labels)
    reading.put("dropped_unused_bytes", counts.left_unused * block_bytes, *labels)
    reading.put("dropped_windows", counts.windows_left, *labels)
    reading.put_histogram("eviction_age_seconds", counts.ages, *labels)
