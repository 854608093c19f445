"""What an operator asks first: what is full, who holds it, what hits were worth, what is moving, who fell silent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from cachesvc.flows.core import Core
from cachesvc.ledger.leases import Lease, LeaseState
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import PageState

MOST_LISTED = 16
HELD_SHARE = 0.8
"""A pool whose pages are so far in use by sequences, transfers or quarantine has little left to evict."""

SILENT_SHARE = 0.5
"""Of what a lease survives: beats come several times as often."""


class PoolLine(NamedTuple):
    """One page-id space: counts by state."""

    model: int
    place: str
    group: str
    capacity: int
    counts: dict[PageState, int]
    page_bytes: int

    @property
    def held(self) -> int:
        """Pages that no eviction can free now."""
        return sum(self.counts[state] for state in (PageState.PRIVATE, PageState.IN_FLIGHT, PageState.QUARANTINED))


class LeaseLine(NamedTuple):
    """One engine and what it holds."""

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


class HitLine(NamedTuple):
    """Blocks by where Match found them."""

    looked_up_blocks: int
    device_blocks: int
    host_blocks: int
    storage_blocks: int

    @property
    def missed_blocks(self) -> int:
        """What engines had to compute."""
        return max(0, self.looked_up_blocks - self.device_blocks - self.host_blocks - self.storage_blocks)


class TransferLine(NamedTuple):
    """Transfers that run, and totals."""

    running_loads: int
    running_stores: int
    awaited: int
    running_bytes: int
    done: int
    failed: int
    loaded_bytes: int
    stored_bytes: int
    peer_bytes: int


def pools(models: Collection[Model]) -> list[PoolLine]:
    """Every pool of the models."""
    out: list[PoolLine] = []
    for model in models:
        for place in model.blocks.index.places:
            for group, pool in enumerate(place.pools):
                counts = {state: pool.counts[state] for state in PageState}
                name = model.layout.groups[group].name
                out.append(PoolLine(model.id, place.name, name, pool.capacity, counts, model.layout.page_bytes(group)))
    return out


def lease_line(core: Core, lease: Lease, shown_id: str, now: float) -> LeaseLine:
    """A lease under the name that its reader may see."""
    private = sum(len(own) for sequence in lease.sequences.values() for own in sequence.own)
    private += sum(len(pages) for pages in lease.stock) + len(lease.quarantine)
    processes = core.ledger.processes
    return LeaseLine(
        shown_id,
        lease.engine,
        lease.model,
        lease.replica,
        lease.state.value,
        now - lease.last_heard,
        len(lease.sequences),
        private,
        tuple(sorted(processes[token].pid for token in lease.processes if token in processes)),
        sum(sequence.sealed for sequence in lease.sequences.values() if not sequence.swapped_out),
    )


def holders(lines: list[LeaseLine]) -> list[LeaseLine]:
    """Those that hold most, private pages before pins."""
    held = [line for line in lines if line.private_pages or line.pinned_blocks]
    return sorted(held, key=lambda line: (-line.private_pages, -line.pinned_blocks))[:MOST_LISTED]


def silent(lines: list[LeaseLine], lease_seconds: float) -> list[LeaseLine]:
    """Live leases that have not been heard for long, the longest first."""
    late = [
        line
        for line in lines
        if line.state == LeaseState.LIVE.value and line.silent_seconds > SILENT_SHARE * lease_seconds
    ]
    return sorted(late, key=lambda line: -line.silent_seconds)[:MOST_LISTED]


def hits(models: Collection[Model]) -> HitLine:
    """Since the models were registered."""
    found = {tier: sum(model.hit_blocks[tier] for model in models) for tier in ("device", "host", "storage")}
    looked_up = sum(model.reuse.requested for model in models)
    return HitLine(looked_up, found["device"], found["host"], found["storage"])


def transfers(running: Collection[Ticket], counters: Mapping[str, int]) -> TransferLine:
    """Now, and since the start."""
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


def attention(core: Core, models: Collection[Model], lines: list[LeaseLine], lease_seconds: float) -> list[str]:
    """Sentences about what stands out of the models and their leases; empty when nothing does."""
    out = ["the daemon is draining: it opens no new leases or sequences"] if core.ledger.draining else []
    by_lease = holders(lines)
    for pool in pools(models):
        usable = sum(pool.counts.values())
        if usable and pool.held >= HELD_SHARE * usable:
            mine = [line for line in by_lease if line.model_id == pool.model and line.private_pages]
            most = f"; most is held by {mine[0].engine} (lease {mine[0].lease_id[:12]})" if mine else ""
            out.append(
                f"model {pool.model}, {pool.place}, group {pool.group}: {pool.held} of {usable} pages are in use and "
                f"cannot be evicted{most}"
            )
        if quarantined := pool.counts[PageState.QUARANTINED]:
            out.append(
                f"model {pool.model}, {pool.place}, group {pool.group}: {quarantined} pages wait "
                "in quarantine until the processes of their lost lease are gone"
            )
    out += [
        f"{line.engine} (lease {line.lease_id[:12]}) is silent for {line.silent_seconds:.1f} s; its lease is lost "
        f"after {lease_seconds:g} s"
        for line in silent(lines, lease_seconds)
    ]
    return out
