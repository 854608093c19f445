"""Land a transfer: what its copies become, which sequences may go on, and who is told."""

from __future__ import annotations

from cachesvc.flows.allocate import settle_loads
from cachesvc.flows.core import Core, remember_dropped
from cachesvc.flows.release import let_go, unpin_windows
from cachesvc.flows.swap import land_swap
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.transfer import Direction

__all__ = ["land", "remember_dropped"]


def land(core: Core, ticket_id: int, error: str) -> list[int]:
    """The mover is through with a ticket (``error`` is empty when every byte arrived). Returns the tickets ended by it.

    A load below another that still runs is held back until that one has ended, and fails with it.
    """
    book = core.ledger.tickets
    book.running[ticket_id].landed = error
    ended: list[int] = []
    moved = True
    while moved:
        moved = False
        for ticket in list(book.running.values()):
            reason = _verdict(core, ticket)
            if reason is not None:
                _end(core, ticket, reason)
                ended.append(ticket.id)
                moved = True
    return ended


def _verdict(core: Core, ticket: Ticket) -> str | None:
    """None while the ticket must wait; else why it fails, or empty when it is done.

    A failed ticket ends only after those below it, so that no block is on the device without its parent.
    """
    book = core.ledger.tickets
    if ticket.landed is None:
        return None
    reason = ticket.landed
    for above in ticket.after if not reason else ():
        other = book.running.get(above)
        if other is not None and not other.landed:
            return None
        broken = other.landed if other is not None else book.ended[above].reason if above in book.ended else ""
        if broken:
            reason = f"ticket {above} above it failed: {broken}"
    if reason and any(ticket.id in other.after for other in book.running.values()):
        return None
    return reason


def _end(core: Core, ticket: Ticket, error: str) -> None:
    model = core.ledger.models[ticket.model]
    replica = model.replicas[ticket.replica]
    core.ledger.tickets.end(ticket, error)
    core.count("tickets_failed" if error else "tickets_done")
    if ticket.direction is Direction.LOAD:
        _end_load(core, model, replica, ticket, error)
    else:
        for row in ticket.rows:
            model.blocks.finish_fill(model.blocks.host, row, arrived=not error)
        for drain in ticket.drains:
            model.evictor.finish_drain(replica.place, drain, arrived=not error)
            core.count("evictions", 0 if error else 1)
    if ticket.sequence is not None:
        land_swap(core, model, replica, ticket, error)
    remember_dropped(core, model)


def _end_load(core: Core, model: Model, replica: Replica, ticket: Ticket, error: str) -> None:
    blocks = model.blocks
    for row in reversed(ticket.rows):  # leaves first: a child never stays where its parent is gone
        blocks.finish_fill(replica.place, row, arrived=not error)
    for lease_id, sequence_id in ticket.waiters:
        lease = core.ledger.leases.get(lease_id)
        sequence = lease.sequences.get(sequence_id) if lease is not None else None
        if lease is None or sequence is None or ticket.id not in sequence.loads:
            continue
        sequence.loads.remove(ticket.id)
        if error and not sequence.failed:
            sequence.failed = f"load {ticket.id} failed: {error}"
        if sequence.loads:
            continue
        if sequence.failed:
            unpin_windows(model, replica, sequence, sequence.sealed)
        else:
            settle_loads(model, replica, sequence)
        if sequence.id < 0:  # a prefetch: it holds its blocks only until they are in place
            let_go(core, lease, sequence)
