"""First questions of an operator: full pools and their holders, the worth of hits, transfers, silent leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from kvcache.v1 import admin_pb2, inspect_pb2, status_pb2

from cachesvc.ledger.ledger import LeaseState, Model
from cachesvc.ledger.pins import OperatorPin
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import Direction, PageState, Urgency
from cachesvc.questions.view import SHOWN_LETTERS, Question, View, listed

MOST_LISTED = 16
SEQUENCES_A_STEP = 256
"""Some 0.1 ms."""
HELD_SHARE = 0.8
"""Share of a pool's pages in use by sequences, transfers or quarantine above which it has little left to evict."""

SCRAPS = 64
"""A model has scraps of a tier where all models have more than this number of times as much there."""

SILENT_SHARE = 0.5
"""Share of the time that a lease survives in silence: heartbeats come several times as often."""


STATES = tuple(state.name.lower() for state in PageState)
"""Fields of a pool's pages by state. ``capacity`` leaves out the ``reserved`` pages, the engines' own; of a ``pool``
that groups share, both of these and the free pages are the pool's."""


def status(view: View, silence_limit_seconds: float) -> Question[admin_pb2.GetStatusResponse]:
    """Everything at a glance for the caller, but for what the daemon around the ledger adds."""
    return overview(view, (yield from lease_lines(view)), silence_limit_seconds)


def overview(
    view: View, leases: list[admin_pb2.LeaseStatus], silence_limit_seconds: float
) -> admin_pb2.GetStatusResponse:
    """Status of one moment but for what ``leases`` hold; of these at most ``MOST_LISTED`` each that hold most or are
    silent. ``silence_limit_seconds``: after which a lease is lost."""
    models, running = view.models(), view.running()
    found, full, quiet = hits(models), pools(models), silent(leases, silence_limit_seconds)
    held = sorted(
        (line for line in leases if line.private_pages or line.pinned_blocks),
        key=lambda line: (-line.private_pages, -line.pinned_blocks),
    )
    return admin_pb2.GetStatusResponse(
        draining=view.is_draining,
        pools=full,
        holders=held[:MOST_LISTED],
        silent=quiet,
        hits=found,
        transfers=transfers(running, view.counters),
        counters={
            **view.counters,
            "tickets_running": len(running),
            "blocks": sum(len(model.blocks.index) for model in models),
            "hit_blocks_device": found.device_blocks,
            "hit_blocks_host": found.host_blocks,
            "hit_blocks_storage": found.storage_blocks,
        },
        attention=_attention(view, full, held, quiet, silence_limit_seconds),
        pins=pin_lines(view),
    )


def pin_lines(view: View) -> list[inspect_pb2.PinStatus]:
    """Pins of operators, those that end first at the front."""
    lines = [pin_line(model, pin, view.now()) for model in view.models() for pin in model.pins.by_key.values()]
    return sorted(lines, key=lambda line: line.seconds_left)


def pin_line(model: Model, pin: OperatorPin, now: float) -> inspect_pb2.PinStatus:
    return inspect_pb2.PinStatus(
        model_id=model.id,
        model=model.shown,
        key_hex=pin.key.hex(),
        blocks=pin.blocks,
        seconds_left=max(0.0, pin.until - now),
        places=pin.places,
    )


def lease_lines(view: View) -> Question[list[admin_pb2.LeaseStatus]]:
    out: list[admin_pb2.LeaseStatus] = []
    for lease in view.leases():
        private, pinned = sum(map(len, lease.stock)) + len(lease.quarantine), 0
        sequences = list(lease.sequences.values())
        for first in range(0, len(sequences), SEQUENCES_A_STEP):
            some = sequences[first : first + SEQUENCES_A_STEP]
            private += sum(len(pages) for sequence in some for pages in sequence.own)
            pinned += sum(sequence.sealed for sequence in some if sequence.anchor != NO_ROW)
            yield None
        line = admin_pb2.LeaseStatus(
            lease_id=view.lease_id(lease),
            engine=lease.engine,
            model_id=lease.model,
            replica=lease.replica,
            state=lease.state.value,
            silent_seconds=view.now() - lease.last_heard,
            sequences=len(lease.sequences),
            private_pages=private,
            process_ids=view.process_ids(lease),
            pinned_blocks=pinned,
            instance_id=lease.instance[:SHOWN_LETTERS],
        )
        out.append(line)
    return out


def leases(view: View) -> Question[list[admin_pb2.ListLeasesResponse]]:
    lines = yield from lease_lines(view)
    return (yield from listed(admin_pb2.ListLeasesResponse, "leases", lines, lambda line: line))


def pools(models: Collection[Model]) -> list[admin_pb2.PoolStatus]:
    return [
        admin_pb2.PoolStatus(
            model_id=model.id,
            model=model.shown,
            place=place.name,
            group=model.layout.groups[group].name,
            pool=name,
            capacity=pool.capacity,
            reserved=pool.withheld,
            page_bytes=model.layout.page_bytes(group),
            **dict(zip(STATES, pool.own_counts, strict=True)),
        )
        for model in models
        for place in model.blocks.index.places
        for group, (pool, name) in enumerate(zip(place.pools, place.share_names(model.layout), strict=True))
    ]


def title(pool: admin_pb2.PoolStatus) -> str:
    """Name of the group, or of the pool that it shares."""
    return f"pool {pool.pool}" if pool.pool else f"group {pool.group}"


def by_pool(lines: Iterable[admin_pb2.PoolStatus]) -> list[admin_pb2.PoolStatus]:
    """The lines, of groups that share a pool one for all of them."""
    out: dict[tuple[int, str, str], admin_pb2.PoolStatus] = {}
    for line in lines:
        whole = out.setdefault((line.model_id, line.place, title(line)), admin_pb2.PoolStatus())
        counts = {state: getattr(line, state) + getattr(whole, state) for state in STATES if state != "free"}
        page_bytes = max(line.page_bytes, whole.page_bytes)
        whole.CopyFrom(line)
        whole.MergeFrom(admin_pb2.PoolStatus(page_bytes=page_bytes, **counts))
    return list(out.values())


def silent(lines: list[admin_pb2.LeaseStatus], silence_limit_seconds: float) -> list[admin_pb2.LeaseStatus]:
    """Live leases without a recent heartbeat, the longest first."""
    late = [
        line
        for line in lines
        if line.state == LeaseState.LIVE.value and line.silent_seconds > SILENT_SHARE * silence_limit_seconds
    ]
    return sorted(late, key=lambda line: -line.silent_seconds)[:MOST_LISTED]


def hits(models: Collection[Model]) -> status_pb2.HitStatus:
    """Counts and their shares of what was looked up."""
    device, host, storage = (sum(model.hit_blocks[tier] for model in models) for tier in ("device", "host", "storage"))
    looked_up = sum(model.reuse.requested for model in models)
    whole = max(1, looked_up)
    return status_pb2.HitStatus(
        looked_up_blocks=looked_up,
        device_blocks=device,
        host_blocks=host,
        storage_blocks=storage,
        missed_blocks=max(0, looked_up - device - host - storage),
        device_ratio=device / whole,
        host_ratio=host / whole,
        storage_ratio=storage / whole,
    )


def transfers(running: Collection[Ticket], counters: Mapping[str, int]) -> status_pb2.TransferStatus:
    """Counts of running transfers, and since the start."""
    loads = sum(ticket.direction is Direction.LOAD for ticket in running)
    return status_pb2.TransferStatus(
        running_loads=loads,
        running_stores=len(running) - loads,
        awaited=sum(ticket.urgency is Urgency.AWAITED for ticket in running),
        running_bytes=sum(ticket.size_bytes for ticket in running),
        done=counters.get("tickets_done", 0),
        failed=counters.get("tickets_failed", 0),
        loaded_bytes=counters.get("h2d_bytes", 0),
        stored_bytes=counters.get("d2h_bytes", 0),
        peer_bytes=counters.get("p2p_bytes", 0),
    )


def scraps(models: Collection[Model], full: list[admin_pb2.PoolStatus]) -> list[str]:
    """Sentences about models whose name another one had first, under another layout, and which got next to nothing."""
    sizes: Counter[tuple[int, str]] = Counter()
    for pool in by_pool(full):
        sizes[pool.model_id, "host" if pool.place == "host" else "devices"] += pool.capacity * pool.page_bytes
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
    view: View,
    full: list[admin_pb2.PoolStatus],
    held: list[admin_pb2.LeaseStatus],
    quiet: list[admin_pb2.LeaseStatus],
    silence_limit_seconds: float,
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
        usable = sum(getattr(pool, state) for state in STATES)
        in_use = usable - pool.free - pool.sealed
        where = f"model {pool.model_id} ({pool.model}), {pool.place}, {title(pool)}"
        if usable and in_use >= HELD_SHARE * usable:
            mine = [line for line in held if line.model_id == pool.model_id and line.private_pages]
            most = f"; most is held by {mine[0].engine} (lease {mine[0].lease_id[:SHOWN_LETTERS]})" if mine else ""
            out.append(f"{where}: {in_use} of {usable} pages are in use and cannot be evicted{most}")
        if pool.quarantined:
            out.append(
                f"{where}: {pool.quarantined} pages wait in quarantine until the processes of their lost lease are gone"
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
