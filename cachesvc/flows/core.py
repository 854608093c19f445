"""What every flow works on: the ledger, the rules, the limits, and the seams to whatever moves and holds bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.pages import PagePool
from cachesvc.ledger.reuse import Miss
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import GroupCells, TicketView, Wait
from cachesvc.model.errors import Conflict, PoolExhausted
from cachesvc.model.transfer import TimelineSlot, Transfer, Urgency
from cachesvc.model.words import PageState
from cachesvc.policy.eviction import RankRule
from cachesvc.policy.writing import WriteRule


class Mover(Protocol):
    """Moves pages; answers by ticket, later and from elsewhere, through ``transfers.land``."""

    def submit(self, transfer: Transfer) -> TimelineSlot:
        """Queue a transfer; returns where its progress can be read."""

    def expedite(self, ticket: int) -> None:
        """Somebody waits for a BACKGROUND transfer now. Nothing where it has ended."""

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        """True where transfers between the devices of two replicas need not pass through the host, on every rank."""

    def pause_write_backs(self, devices: Seq[str], seconds: float) -> None:
        """Start no copies of BACKGROUND stores on the devices for a while."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound that a caller can run into. Sizes in the unit of the name.

    ``remembered_blocks``: keys of dropped blocks, over all models, that tell a miss's cause (some 150 bytes each).
    ``peer_blocks_min``: what another replica must have beyond a hit before a call waits for it. ``peer_waits`` and
    ``peer_wait_seconds``: how often it does, and how long each time, for a Step does nothing else meanwhile.
    """

    blocks_per_sequence: int = 65536
    sequences_per_lease: int = 4096
    stock_pages_per_lease: int = 4096
    leases: int = 1024
    models: int = 64
    running_tickets: int = 4096
    remembered_blocks: int = 1 << 18
    events_per_model: int = 65536
    peer_blocks_min: int = 1
    peer_waits: int = 4
    peer_wait_seconds: float = 0.5


@dataclass
class Core:
    """Made once by the composition root; tests make their own.

    ``new_name`` gives lease ids. ``stillborn``: tickets that the mover refused, to be landed once the flow is through.
    ``on_sealed``: told ``(model, replica, row of the last, count)`` once for each Publish that sealed blocks.
    """

    ledger: Ledger
    mover: Mover
    rank: RankRule
    writing: WriteRule
    limits: Limits = field(default_factory=Limits)
    counters: dict[str, int] = field(default_factory=dict)
    next_model: int = 1
    new_name: Callable[[], str] = field(default_factory=lambda: map(str, itertools.count(1)).__next__)
    stillborn: list[tuple[int, str]] = field(default_factory=list)
    on_sealed: Callable[[int, int, int, int], None] | None = None

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter that operators see."""
        self.counters[name] = self.counters.get(name, 0) + amount


def require_on_device(sequence: Sequence) -> None:
    """Raises Conflict while a sequence is swapped out or on its way."""
    if sequence.swap_ticket:
        raise Conflict(f"sequence {sequence.id} is being swapped by ticket {sequence.swap_ticket}; wait for it")
    if sequence.swapped_out:
        raise Conflict(f"sequence {sequence.id} is swapped out; swap it in first")


def wait_for(core: Core, tickets: Iterable[int]) -> Wait:
    """The answer of a flow that can go on only when one of the tickets has ended; they are awaited from now on."""
    wait = Wait(tuple(tickets))
    expedite(core, wait.tickets)
    return wait


def expedite(core: Core, tickets: Iterable[int]) -> None:
    """Somebody waits for the tickets now, and so for those that must end before them."""
    running = core.ledger.tickets.running
    for ticket in tickets:
        if ticket in running and running[ticket].urgency is Urgency.BACKGROUND:
            running[ticket].urgency = Urgency.AWAITED
            core.mover.expedite(ticket)
            expedite(core, running[ticket].after)


def remember_dropped(core: Core, model: Model, cause: Miss = Miss.EVICTED) -> None:
    """Remember, within bounds, which blocks left the index and why, and for the write policy their reuse counts."""
    dropped = model.blocks.dropped
    if dropped:
        limit = core.limits.remembered_blocks // len(core.ledger.models)
        model.reuse.dropped(((key, tier) for key, _, tier in dropped), cause, limit)
    if core.writing.counts_reuse:
        for key, reuses, _ in dropped:
            if reuses:
                model.remembered[key] = reuses
                model.remembered.move_to_end(key)
        while len(model.remembered) > core.writing.remember:
            model.remembered.popitem(last=False)
    dropped.clear()


def ticket_view(ticket: Ticket) -> TicketView:
    """A ticket as callers see it."""
    return TicketView(
        ticket.id,
        ticket.state.value,
        ticket.reason,
        ticket.slot,
        ticket.direction.value,
        ticket.blocks,
        ticket.size_bytes,
    )


def cells(group: int, first_block: int, pages: Iterable[int]) -> GroupCells:
    """Table cells of one group. Only stock pages need their generations."""
    return GroupCells(group, first_block, tuple(pages))


def exhausted(pool: PagePool, wanted: int, evictable: int) -> PoolExhausted:
    """The refusal of a pool, with its numbers."""
    held = pool.usable - pool.free - pool.counts[PageState.QUARANTINED] - evictable
    return PoolExhausted(
        pool=pool.name if pool.usable == pool.capacity else f"{pool.name} (only {pool.usable} pages have arrived yet)",
        wanted=wanted,
        free=pool.free,
        evictable=evictable,
        pinned=held,
        quarantined=pool.counts[PageState.QUARANTINED],
        capacity=pool.capacity,
    )
