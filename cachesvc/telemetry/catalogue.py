"""Every metric: its name, labels and meaning. docs/metrics.md is written from this, and nothing else is exported.

Labels are few and bounded: a model's name with its number (at most 64 models at a time), tiers, states, devices,
methods and causes that are words of the code. Never a key, a salt, a namespace, a lease or an engine's name: what
one tenant's prompts are must not show in what another one can scrape, and series must not grow with the load.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

PREFIX = "cachesvc_"
MODEL = ("model", "model_id")


class MetricKind(Enum):
    """Kinds of values: a counter only grows (until its model or the daemon goes)."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. ``name`` is without the prefix and, of counters, without Prometheus' ``_total``."""

    kind: MetricKind
    name: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def exported(self) -> str:
        return PREFIX + self.name + ("_total" if self.kind is MetricKind.COUNTER else "")


_counter, _gauge, _histogram = (partial(Metric, kind) for kind in MetricKind)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Is it hitting, and if not, why": (
        _counter("requested_tokens", MODEL, "Tokens of full blocks in Match requests, within `max_blocks`."),
        _counter("hit_tokens", (*MODEL, "tier"), "Tokens that Match found: `device` in place, `host` to be loaded."),
        _counter(
            "ceiling_tokens",
            MODEL,
            "Tokens that an unbounded cache would have found: the reuse ceiling. A lower bound where more blocks were "
            "dropped than are remembered (`remembered_keys`).",
        ),
        _counter(
            "lost_hit_tokens",
            (*MODEL, "kind"),
            "Tokens by which hits were shorter than the groups without a window allow: a page of a `window` or a "
            "`state` was missing where a longer one would have ended.",
        ),
        _counter(
            "missed_tokens",
            (*MODEL, "reason"),
            "Tokens that Match was asked for and that were no hit. `new`: never published here, or forgotten; "
            "`evicted`: made room for others; `operator`: evicted by hand; `partly`: resident, but a windowed group "
            "has lost its part; `elsewhere`: on another replica alone, or on the way. With the hits they are the "
            "requested tokens.",
        ),
        _counter(
            "unloaded_tokens", MODEL, "Tokens of hits whose load failed later: counted as hits, and computed after all."
        ),
        _counter("computed_tokens", MODEL, "Tokens that engines computed and published."),
        _counter(
            "recomputed_tokens",
            (*MODEL, "tier", "reason"),
            "Computed tokens that had been computed before. `tier` is where they were last. `evicted`, `operator`: "
            "dropped since; `elsewhere`: resident, but not in place for this replica when its request matched; "
            "`duplicate`: in place already when published: two computed them at the same time, "
            "or a windowed group had lost its part.",
        ),
        _counter(
            "compared_tokens",
            MODEL,
            "Tokens in Match requests while the eviction policy was one that learns; from a sample of blocks.",
        ),
        _counter(
            "compared_hit_tokens",
            (*MODEL, "policy"),
            "Of these, hits in place: `own`, those that there were, and `lru`, those that least recently used would "
            "have had with as many pages. Where `lru` stays ahead, set `eviction` to it.",
        ),
        _gauge("remembered_keys", MODEL, "Keys of dropped blocks that are remembered, to explain misses."),
    ),
    "Is memory full, and of what": (
        _gauge(
            "pages",
            (*MODEL, "tier", "group", "state"),
            "Pages of the pools by state: `free`, `private` (one sequence may write them), `sealed` (published), "
            "`in_flight`, `quarantined` (their engine is lost, and may still write), `reserved` (left to the engines, "
            "never granted). All replicas together.",
        ),
        _gauge("page_bytes", (*MODEL, "group"), "Bytes of one page on one rank."),
        _gauge("blocks", (*MODEL, "tier", "state"), "Blocks with a copy on the tier: `filling`, `ready`, `draining`."),
        _gauge("resident_blocks", MODEL, "Blocks in the index: on any tier, each counted once."),
        _gauge(
            "pinned_blocks",
            (*MODEL, "tier"),
            "Blocks that open sequences pin. A block that n sequences pin counts n times.",
        ),
        _counter("dropped_blocks", (*MODEL, "tier"), "Blocks whose copy on the tier was dropped."),
        _counter(
            "dropped_unused_blocks",
            (*MODEL, "tier"),
            "Of these, blocks that were not used since they came: no hit on `device`, no load from `host`.",
        ),
        _counter(
            "dropped_unused_bytes",
            (*MODEL, "tier"),
            "Bytes that were written to the tier and never read: those of `dropped_unused_blocks`, on all ranks.",
        ),
        _counter("dropped_windows", (*MODEL, "tier"), "Windowed copies that were dropped while their block stayed."),
        _histogram(
            "eviction_age_seconds",
            (*MODEL, "tier"),
            "Time from a block's last access to its drop, without blocks of requests that say `once`. Short: the tier "
            "is too small for what is used again.",
        ),
        _gauge("device_pool_bytes", ("device",), "Bytes of a device that the daemon gives to models."),
        _gauge("device_pool_free_bytes", ("device",), "Of these, bytes that no model has."),
        _gauge(
            "device_peers_refused", (), "Pairs of devices whose copies failed their check: hits there come by the host."
        ),
        _gauge(
            "host_chunks_refused",
            ("device",),
            "Chunks of the host pool that a device refuses to map or pin: its models do without them.",
        ),
        _gauge("host_pool_bytes", (), "Bytes of the host pool."),
        _gauge("host_pool_ready_bytes", (), "Of these, bytes that are populated and registered."),
    ),
    "Are swaps slow": (
        _counter("transfer_bytes", ("direction", "device"), "Bytes that landed: `h2d`, `d2h`, `p2p` (from a replica)."),
        _histogram("transfer_seconds", ("direction",), "Time of a transfer from submission to end, if it went well."),
        _histogram(
            "transfer_queue_seconds",
            ("direction", "urgency"),
            "Time until its first slice was started: planning, and waiting for others. `awaited`: an engine waits for "
            "it.",
        ),
        _counter("transfer_failures", ("direction",), "Transfers that failed; the log's `transfer_failed` says why."),
        _gauge("transfers", ("direction", "urgency", "state"), "Transfers that have not ended, `queued` or `copying`."),
        _gauge("oldest_transfer_seconds", ("direction", "urgency"), "Age of the oldest transfer that has not begun."),
    ),
    "Does storage help, and is it used": (
        _counter(
            "storage_items",
            ("way", "outcome", "tier"),
            "Objects that were asked for (`get`) or written (`put`), by how that ended: `ok` (verified, or kept), "
            "`lent` (verified, and of another node), `miss`, `wrong` (not what its name says: removed), `misplaced` "
            "(below another block than the reader says), `busy` (not begun: no room, or too late), `failed`, `late` "
            "(the wait had timed out). `tier`: the engine's name, with a number behind a second one of a kind (`file`, "
            "`s3`, `file2`); what a daemon has in all is `sum without (tier)`. Absent without a tier, as all of these "
            "but `cachesvc_storage_tiers`.",
        ),
        _counter("storage_moved_bytes", ("way", "tier"), "Bytes of those that were `ok` or `lent`."),
        _gauge("storage_tiers", (), "Storage tiers of the daemon; 0 without `--storage` and peers."),
        _gauge("storage_objects", ("tier",), "Stored objects, as far as the daemon knows."),
        _gauge("storage_bytes", ("tier",), "Bytes of the stored objects."),
        _gauge("storage_capacity_bytes", ("tier",), "Capacity in bytes; 0: the engine has no limit of its own."),
        _counter(
            "storage_evicted_objects", ("tier",), "Objects that made room for others, or were not used for too long."
        ),
        _gauge("storage_closed", ("tier",), "1 while the tier is used; 0 while it is given up."),
        _gauge(
            "storage_writable",
            ("tier",),
            "1 while nothing keeps the tier from writing; 0: its disk is full, mounted for reading or gone, its folder "
            "is not ours, its bucket refuses. `cachesvc status` says which.",
        ),
        _counter(
            "storage_given_up", ("tier",), "Times that storage was given up: for errors, or because nothing came."
        ),
        _gauge(
            "storage_items_under_way",
            ("tier",),
            "Objects whose host pages the engine reads or writes now, those included whose wait has timed out.",
        ),
    ),
    "Who is there, and who is silent": (
        _gauge("leases", ("state",), "Leases: `live`, or `quarantined` (lost, with pages that may still be written)."),
        _gauge("lease_silence_seconds", (), "Longest time since the last heartbeat of a live lease; 0 without one."),
        _gauge("lease_silence_limit_seconds", (), "Silence after which a lease is lost."),
        _counter("leases_ended", ("cause",), "Leases that ended: `closed`, `silent`, `process_ended`, `other`."),
        _gauge("processes", (), "Processes with a life connection."),
        _gauge("sequences", MODEL, "Open sequences."),
    ),
    "Do calls fail, and how long do they take": (
        _histogram(
            "rpc_seconds",
            ("method",),
            "Time to serve a call; of the streams Step and KeepAlive, each message. It includes waiting for transfers.",
        ),
        _counter(
            "rpc_calls",
            ("method", "code"),
            "Calls (of Step and KeepAlive: messages) by outcome, with those that no service got; see ERRORS.md.",
        ),
        _counter("transport_calls", ("transport",), "Calls by transport: `lane` or `grpc`."),
        _gauge("lanes", (), "Lanes that are open."),
        _counter("step_operations", ("operation", "code"), "Operations carried by Steps, by outcome."),
        _gauge("calls_in_flight", (), "Calls being served for more than a turn of the event loop, without waiting."),
        _gauge("calls_in_flight_limit", (), "Calls in flight above which more are refused."),
        _gauge("waiting_calls", (), "Calls that wait for transfers."),
        _gauge("waiting_calls_limit", (), "Waiting calls above which more are refused."),
        _gauge("loop_lag_seconds", (), "Time that this reading waited for the event loop: the least wait of a call."),
        _gauge(
            "loop_longest_seconds",
            ("flow",),
            "Longest time of the last one to two minutes that a flow held the event loop, while other calls waited. "
            "Flows are methods, `landing` (of transfers), `chore` (the rest of long flows), `question` (slices of "
            "operators' questions), `sweep` and `collector`.",
        ),
        _gauge(
            "loop_longest_round_seconds",
            (),
            "Longest time of the last one to two minutes between two looks of the event loop at its sockets, with "
            "parsing, questions and events.",
        ),
        _counter("loop_long_rounds", (), "Rounds of the event loop that took more than 2 ms."),
    ),
    "The daemon itself": (
        _gauge("info", ("version", "backend"), "Always 1."),
        _gauge("uptime_seconds", (), "Time since the daemon started."),
        _gauge("draining", (), "1 while the daemon opens nothing new."),
        _gauge("event_subscribers", (), "Open subscriptions to changes of blocks."),
        _counter(
            "events",
            ("event",),
            "Counts of flows: evictions, peer loads, pauses and so on, by the names of GetStatus.",
        ),
        _gauge(
            "tokens_stale_seconds",
            (),
            "Time for which the tokens' file could not be read, so that entries taken out of it are accepted; 0: it is "
            "read.",
        ),
        _gauge(
            "tokens_retired_shown",
            (),
            "Tokens that left the tokens' file or are revoked, and that callers have shown in the last 30 s.",
        ),
        _counter("log_lines_lost", (), "Log lines that could not be written: standard error was full or closed."),
    ),
}

CATALOGUE: dict[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}
