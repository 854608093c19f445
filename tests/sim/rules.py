"""Rules that hold between any two events, beyond accounting, and that a wrong order of events would break."""

from __future__ import annotations

from collections import Counter

from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.words import ABSENT, NO_PAGE, Direction, Urgency
from cachesvc.swap.engine import SwapEngine


def broken_rules(ledger: Ledger) -> list[str]:
    """Broken rules; empty when there are none."""
    out: list[str] = []
    for model in ledger.models.values():
        out += _hittable_below_hittable(model)
        for lease in ledger.leases.values():
            if lease.model == model.id:
                for sequence in lease.sequences.values():
                    out += _sequence(model, sequence)
                running = ledger.tickets.is_running
                idle = sum(not any(map(running, prefetch.loads)) for prefetch in lease.prefetches)
                out += [f"lease {lease.id}: {idle} prefetches without a load hold their blocks"] if idle else []
    return out


def unhurried(ledger: Ledger, engine: SwapEngine) -> list[str]:
    """Tickets with a waiter that are not awaited where copies are ordered. Holds while no end of a transfer is
    unread."""
    tickets = [ticket for ticket in ledger.tickets.running.values() if isinstance(ticket.direction, Direction)]
    known = Counter(ticket.urgency for ticket in tickets if ticket.landed is None)
    moving: Counter[Urgency] = Counter()
    for (_, urgency), waiting in engine.waiting().items():
        moving[urgency] += waiting.queued + waiting.copying
    return [] if known == moving else [f"transfers by urgency: the ledger has {known}, the mover {moving}"]


def _hittable_below_hittable(model: Model) -> list[str]:
    """A block that can be hit on a device has a parent there that can be hit: bisection would not find it else."""
    index = model.blocks.index
    return [
        f"{place.name} row {row}: can be hit, and its parent cannot"
        for place in index.places[1:]
        for row in index.rows.values()
        if place.is_hittable(row) and index.parent[row] != NO_ROW and not place.is_hittable(index.parent[row])
    ]


def _sequence(model: Model, sequence: OpenSequence) -> list[str]:
    if not sequence.is_open:
        return []
    where = f"sequence {sequence.id} of lease {sequence.lease}"
    if sequence.swapped_out or sequence.swap_ticket:
        host = model.blocks.host
        path = model.blocks.index.path(sequence.host_anchor) if sequence.swapped_out else []
        return [f"{where}: row {row} is gone from the host" for row in path if host.state(row) == ABSENT]
    full = () if sequence.failed else model.any_replica(sequence.replica).place.full_groups
    holes = [group for group in full if NO_PAGE in sequence.tables[group]]
    return [f"{where}: a hole in the table of group {group}, which has no window" for group in holes]
