"""Land a transfer: what its copies become, which sequences may go on, and who is told."""

from __future__ import annotations

from cachesvc.flows.allocate import settle_loads
from cachesvc.flows.core import Core, remember_dropped
from cachesvc.flows.release import let_go, unpin_windows
from cachesvc.flows.swap import land_swap
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.reuse import Miss
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
        failing = _failing(core)
        for ticket in list(book.running.values()):
            reason = failing.get(ticket.id, "")
            if ticket.landed is not None and _may_end(core, ticket, reason):
                _end(core, ticket, reason)
                ended.append(ticket.id)
                moved = True
    return ended


def _failing(core: Core) -> dict[int, str]:
    """Why running tickets will fail: their copy broke, or what lies above them has failed or will."""
    book = core.ledger.tickets
    failing: dict[int, str] = {}
    for ticket in book.running.values():  # in the order of their ids: what lies above comes first
        if ticket.landed:
            failing[ticket.id] = ticket.landed
        for above in ticket.after if ticket.id not in failing else ():
            broken = failing.get(above) or (book.ended[above].reason if above in book.ended else "")
            if broken:
                failing[ticket.id] = f"ticket {above} above it failed: {broken}"
                break
    return failing


def _may_end(core: Core, ticket: Ticket, reason: str) -> bool:
    """A good ticket ends after those above it, a failed one after those below: no block is there without its parent."""
    running = core.ledger.tickets.running
    if reason:
        return not any(ticket.id in other.after for other in running.values())
    return not any(above in running for above in ticket.after)


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
        if ticket.drains:
            replica.failed_drains = replica.failed_drains + 1 if error else 0
        for drain in ticket.drains:
            model.evictor.finish_drain(replica.place, drain, arrived=not error)
            core.count("evictions", 0 if error else 1)
    if ticket.sequence is not None:
        land_swap(core, model, replica, ticket, error)
    ticket.forget_parts()
    remember_dropped(core, model)


def _end_load(core: Core, model: Model, replica: Replica, ticket: Ticket, error: str) -> None:
    blocks = model.blocks
    for row in reversed(ticket.rows):  # leaves first: a child never stays where its parent is gone
        blocks.finish_fill(replica.place, row, arrived=not error)
        if ticket.source is None:
            blocks.host.used[row] |= not error
    if error:
        model.reuse.missed[Miss.LOAD_FAILED] += len(ticket.rows)
    if ticket.source is not None:
        blocks.unpin(model.replicas[ticket.source[0]].place, ticket.source[1])
        core.count("peer_blocks", 0 if error else len(ticket.rows))
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
            unpin_windows(model, replica, sequence, 0)  # it can only be released now
        else:
            settle_loads(model, replica, sequence)
        if sequence.id < 0:  # a prefetch: it holds its blocks only until they are in place
            let_go(core, lease, sequence)
