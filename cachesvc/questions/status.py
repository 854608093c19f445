"""First questions of an operator: full pools and their holders, the worth of hits, transfers, silent leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pins import OperatorPin
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import PageState
from cachesvc.questions.view import SHOWN_LETTERS, Question, View

MOST_LISTED = 16
SEQUENCES_A_STEP = 256
"""Some 0.1 ms."""
HELD_SHARE = 0.8
"""Share of a pool's pages in use by sequences, transfers or quarantine above which it has little left to evict."""

SCRAPS = 64
"""A model has scraps of a tier where all models have more than this number of times as much there."""

SILENT_SHARE = 0.5
"""Share of the time that a lease survives in silence: heartbeats come several times as often."""


class PoolLine(NamedTuple):
    """Pages of one group on one place, by state. ``capacity`` leaves out the ``reserved`` pages, the engines' own.
    ``pool``: the name of the pool that it shares with other groups, if it does; ``capacity``, ``reserved`` and free
    pages are then the pool's."""

    model: int
    place: str
    group: str
    capacity: int
    counts: dict[PageState, int]
    page_bytes: int
    reserved: int = 0
    pool: str = ""
    model_name: str = ""

    @property
    def title(self) -> str:
        """Name of the group, or of the pool that it shares."""
        return f"pool {self.pool}" if self.pool else f"group {self.group}"

    @property
    def held(self) -> int:
        """Pages that no eviction can free now."""
        return sum(self.counts[state] for state in (PageState.PRIVATE, PageState.IN_FLIGHT, PageState.QUARANTINED))


class LeaseLine(NamedTuple):
    lease_id: str
    engine: str
    model_id: int
    replica: int
    state: str
    silent_seconds: float
    sequences: int
    private_pages: int
    process_ids: tuple[int, ...]
    pinned_blocks: int
    instance_id: str


class HitLine(NamedTuple):
    looked_up_blocks: int
    device_blocks: int
    host_blocks: int
    storage_blocks: int

    @property
    def missed_blocks(self) -> int:
        return max(0, self.looked_up_blocks - self.device_blocks - self.host_blocks - self.storage_blocks)


class TransferLine(NamedTuple):
    running_loads: int
    running_stores: int
    awaited: int
    running_bytes: int
    done: int
    failed: int
    loaded_bytes: int
    stored_bytes: int
    peer_bytes: int


class PinLine(NamedTuple):
    """A prefix that an operator keeps from eviction: the key of its last block, its blocks, and where it is kept."""

    model_id: int
    model: str
    key_hex: str
    blocks: int
    seconds_left: float
    places: tuple[str, ...]


class Status(NamedTuple):
    """Everything at a glance, of one moment but for what leases hold. ``holders``, ``silent``: of the leases, at most
    ``MOST_LISTED`` each."""

    draining: bool
    blocks: int
    pools: list[PoolLine]
    leases: list[LeaseLine]
    holders: list[LeaseLine]
    silent: list[LeaseLine]
    hits: HitLine
    transfers: TransferLine
    running: int
    counters: Mapping[str, int]
    attention: list[str]
    pins: list[PinLine]


def status(view: View, silence_limit_seconds: float) -> Question[Status]:
    """Overview for the caller. ``silence_limit_seconds``: after which a lease is lost."""
    leases = yield from lease_lines(view)
    models, running = view.models(), view.running()
    quiet, full = silent(leases, silence_limit_seconds), pools(models)
    held = sorted(
        (line for line in leases if line.private_pages or line.pinned_blocks),
        key=lambda line: (-line.private_pages, -line.pinned_blocks),
    )
    return Status(
        view.is_draining,
        sum(len(model.blocks.index) for model in models),
        full,
        leases,
        held[:MOST_LISTED],
        quiet,
        hits(models),
        transfers(running, view.counters),
        len(running),
        view.counters,
        _attention(view, full, held, quiet, silence_limit_seconds),
        pin_lines(view),
    )


def pin_lines(view: View) -> list[PinLine]:
    """Pins of operators, those that end first at the front."""
    lines = [pin_line(model, pin, view.now()) for model in view.models() for pin in model.pins.by_key.values()]
    return sorted(lines, key=lambda line: line.seconds_left)


def pin_line(model: Model, pin: OperatorPin, now: float) -> PinLine:
    left = max(0.0, pin.until - now)
    return PinLine(model.id, model.shown, pin.key.hex(), pin.blocks, left, tuple(pin.places))


def lease_lines(view: View) -> Question[list[LeaseLine]]:
    out: list[LeaseLine] = []
    for lease in view.leases():
        private, pinned = sum(map(len, lease.stock)) + len(lease.quarantine), 0
        sequences = list(lease.sequences.values())
        for first in range(0, len(sequences), SEQUENCES_A_STEP):
            some = sequences[first : first + SEQUENCES_A_STEP]
            private += sum(len(pages) for sequence in some for pages in sequence.own)
            pinned += sum(sequence.sealed for sequence in some if sequence.anchor != NO_ROW)
            yield None
        line = LeaseLine(
            view.lease_id(lease),
            lease.engine,
            lease.model,
            lease.replica,
            lease.state.value,
            view.now() - lease.last_heard,
            len(lease.sequences),
            private,
            view.process_ids(lease),
            pinned,
            lease.instance[:SHOWN_LETTERS],
        )
        out.append(line)
    return out


def pools(models: Collection[Model]) -> list[PoolLine]:
    out: list[PoolLine] = []
    for model in models:
        for place in model.blocks.index.places:
            names = place.share_names(model.layout)
            for group, pool in enumerate(place.pools):
                counts = dict(zip(PageState, pool.own_counts, strict=True))
                name = model.layout.groups[group].name
                page_bytes = model.layout.page_bytes(group)
                line = PoolLine(model.id, place.name, name, pool.capacity, counts, page_bytes, pool.withheld)
                out.append(line._replace(pool=names[group], model_name=model.shown))
    return out


def by_pool(lines: Collection[PoolLine]) -> list[PoolLine]:
    """The lines, of groups that share a pool one for all of them."""
    out: dict[tuple[int, str, str], PoolLine] = {}
    for line in lines:
        name = (line.model, line.place, line.title)
        before = out.setdefault(name, line)
        if before is not line:
            counts = {state: pages + before.counts[state] for state, pages in line.counts.items()}
            counts[PageState.FREE] = line.counts[PageState.FREE]
            out[name] = line._replace(counts=counts, page_bytes=max(line.page_bytes, before.page_bytes))
    return list(out.values())


def silent(lines: list[LeaseLine], silence_limit_seconds: float) -> list[LeaseLine]:
    """Live leases without a recent heartbeat, the longest first."""
    late = [
        line
        for line in lines
        if line.state == LeaseState.LIVE.value and line.silent_seconds > SILENT_SHARE * silence_limit_seconds
    ]
    return sorted(late, key=lambda line: -line.silent_seconds)[:MOST_LISTED]


def hits(models: Collection[Model]) -> HitLine:
    found = {tier: sum(model.hit_blocks[tier] for model in models) for tier in ("device", "host", "storage")}
    looked_up = sum(model.reuse.requested for model in models)
    return HitLine(looked_up, found["device"], found["host"], found["storage"])


def transfers(running: Collection[Ticket], counters: Mapping[str, int]) -> TransferLine:
    """Counts of running transfers, and since the start."""
    loads = sum(ticket.direction is Direction.LOAD for ticket in running)
    count = counters.get
    return TransferLine(
        loads,
        len(running) - loads,
        sum(ticket.urgency is Urgency.AWAITED for ticket in running),
        sum(ticket.size_bytes for ticket in running),
        count("tickets_done", 0),
        count("tickets_failed", 0),
        count("h2d_bytes", 0),
        count("d2h_bytes", 0),
        count("p2p_bytes", 0),
    )


def scraps(models: Collection[Model], full: Collection[PoolLine]) -> list[str]:
    """Sentences about models whose name another one had first, under another layout, and which got next to nothing."""
    sizes: Counter[tuple[int, str]] = Counter()
    for pool in by_pool(full):
        sizes[pool.model, "host" if pool.place == "host" else "devices"] += pool.capacity * pool.page_bytes
    first: dict[tuple[str, str], Model] = {}
    out = []
    for model in models:
        before = first.setdefault((model.tenant, model.name), model)
        if before is model:
            continue
        for tier in ("devices", "host"):
            total, own = sum(size for (_, where), size in sizes.items() if where == tier), sizes[model.id, tier]
            if total > SCRAPS * own and sizes[before.id, tier] > SCRAPS * own:
                out.append(
                    f"model {model.id} ({model.shown}) has {own} of {total} bytes on {tier}: its name was registered "
                    f"first with another layout (model {before.id}), which holds the pool. If engines of both are to "
                    "share, give them one layout; else register each with device_share=, or evict the one that is idle"
                )
    return out


def _attention(
    view: View, full: list[PoolLine], held: list[LeaseLine], quiet: list[LeaseLine], silence_limit_seconds: float
) -> list[str]:
    """Sentences about what stands out; empty when nothing does."""
    out = ["the daemon is draining: it opens no new leases or sequences"] if view.is_draining else []
    out += [
        f"model {model.id} ({model.shown}) is out of service since a call met a defect ({model.suspect}); a Verify "
        "that finds it sound puts it back"
        for model in view.models()
        if model.suspect
    ]
    for pool in by_pool(full):
        usable = sum(pool.counts.values())
        where = f"model {pool.model} ({pool.model_name}), {pool.place}, {pool.title}"
        if usable and pool.held >= HELD_SHARE * usable:
            mine = [line for line in held if line.model_id == pool.model and line.private_pages]
            most = f"; most is held by {mine[0].engine} (lease {mine[0].lease_id[:SHOWN_LETTERS]})" if mine else ""
            out.append(f"{where}: {pool.held} of {usable} pages are in use and cannot be evicted{most}")
        if quarantined := pool.counts[PageState.QUARANTINED]:
            out.append(
                f"{where}: {quarantined} pages wait in quarantine until the processes of their lost lease are gone"
            )
    out += scraps(view.models(), full)
    out += [
        f"{line.engine} (lease {line.lease_id[:SHOWN_LETTERS]}) is silent for {line.silent_seconds:.1f} s; "
        f"its lease is lost after {silence_limit_seconds:g} s"
        for line in quiet
    ]
    if failed := view.counters.get("tickets_failed", 0):
        out.append(f"{failed} transfers have failed since the start; see ListTickets and the log")
    return out
