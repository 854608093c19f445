"""Transfers: may one begin, begin it, wait for it, land it.

Whether the mover can take a transfer is asked before a flow changes anything, so a refusal at submission is the end of
the mover or a bug. Such a ticket fails at once, and its flow answers with a failed ticket: none is ever told as running
that does not run.
"""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.flows.evictions import remember_dropped
from cachesvc.ledger.blocks import Filling
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import Place
from cachesvc.ledger.reuse import Miss
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import TicketView, Wait
from cachesvc.model.errors import CacheError, LimitExceeded
from cachesvc.model.transfer import DONE, Direction, Failed, Outcome, PagePairs, Transfer, Urgency
from cachesvc.model.words import PageState


def may_submit(core: Core, model: Model, replica: Replica) -> bool:
    """True where one more transfer of the replica can begin."""
    has_place = len(core.ledger.tickets.running) < core.limits.running_tickets
    return has_place and core.mover.free_slots(model.id, replica.id) > 0


def require_transfer(core: Core, model: Model, replica: Replica) -> None:
    """Raises LimitExceeded where no further transfer of the replica can begin."""
    if not may_submit(core, model, replica):
        running = len(core.ledger.tickets.running)
        raise LimitExceeded("transfers under way", running + 1, min(running, core.limits.running_tickets))


def store_pairs(place: Place, coming: Filling) -> tuple[PagePairs, ...]:
    """From a replica's device to the host copies that come."""
    return tuple(
        PagePairs(group, tuple(map(place.pages[group].__getitem__, rows)), tuple(pages))
        for group, (rows, pages) in enumerate(zip(coming.rows, coming.pages, strict=True))
        if rows
    )


def load_pairs(source: Place, coming: Filling) -> tuple[PagePairs, ...]:
    """From the host, or another replica's device, to the device copies that come."""
    return tuple(
        PagePairs(group, tuple(pages), tuple(map(source.pages[group].__getitem__, rows)))
        for group, (rows, pages) in enumerate(zip(coming.rows, coming.pages, strict=True))
        if rows
    )


def submit(core: Core, model: Model, ticket: Ticket, pairs: tuple[PagePairs, ...], *, layered: bool) -> None:
    """Hand a ticket's pages to the mover and note where its progress is read.

    Call it once the ledger knows all about the ticket: one without pages is done at once, and one that the mover
    refuses has failed.
    """
    ticket.size_bytes = sum(len(pair.device_pages) * model.layout.page_bytes(pair.group) for pair in pairs)
    if not pairs:
        land(core, ticket.id, DONE)
        return
    transfer = Transfer(
        ticket.id,
        model.id,
        ticket.replica,
        ticket.direction,
        pairs,
        layered=layered,
        urgency=ticket.urgency,
        source_replica=ticket.source[0] if ticket.source is not None else None,
    )
    try:
        ticket.slot = core.mover.submit(transfer)
    except CacheError as refusal:
        land(core, ticket.id, Failed(str(refusal)))
        if core.on_refused is not None:
            core.on_refused(ticket.id, str(refusal))
        return
    onto_device = Count.H2D_BYTES if ticket.source is None else Count.P2P_BYTES
    core.count(Count.D2H_BYTES if ticket.direction is Direction.STORE else onto_device, ticket.size_bytes)


def wait_for(core: Core, tickets: Iterable[int]) -> Wait:
    """The answer of a flow that can go on only when one of the tickets has ended; they are awaited from now on."""
    wait = Wait(tuple(tickets))
    expedite(core, wait.tickets)
    return wait


def expedite(core: Core, tickets: Iterable[int]) -> None:
    """Somebody waits for the tickets now, and so for those that must end before them."""
    running = core.ledger.tickets.running
    due = list(tickets)
    for number in due:  # grows
        ticket = running.get(number)
        if ticket is not None and ticket.urgency is Urgency.BACKGROUND:
            ticket.urgency = Urgency.AWAITED
            core.mover.expedite(number)
            due += ticket.after


def land(core: Core, ticket_id: int, outcome: Outcome) -> list[int]:
    """The mover is through with a ticket. Returns the tickets ended by it.

    A load below another that still runs is held back until that one has ended, and fails with it.
    """
    ended = core.ledger.tickets.land(ticket_id, outcome)
    for ticket in ended:
        _settle(core, ticket)
    return [ticket.id for ticket in ended]


def _settle(core: Core, ticket: Ticket) -> None:
    model = core.ledger.models[ticket.model]
    replica = model.replicas[ticket.replica]
    core.count(Count.TICKETS_FAILED if ticket.reason else Count.TICKETS_DONE)
    if ticket.direction is Direction.LOAD:
        _settle_load(core, model, replica, ticket)
    else:
        _settle_store(core, model, replica, ticket)
    if ticket.traveller is not None:
        _settle_swap(core, replica, ticket)
    if ticket.room is not None:
        ticket.room.top_up()
    ticket.forget_parts()
    remember_dropped(core, model)


def _settle_load(core: Core, model: Model, replica: Replica, ticket: Ticket) -> None:
    blocks, arrived = model.blocks, not ticket.reason
    for row in reversed(ticket.rows):  # leaves first: a child never stays where its parent is gone
        blocks.finish_fill(replica.place, row, arrived=arrived)
        if ticket.source is None:
            blocks.host.used[row] |= arrived
    if not arrived:
        model.reuse.missed[Miss.LOAD_FAILED] += len(ticket.rows)
    if ticket.pin is not None:
        ticket.pin.let_go()
        core.count(Count.PEER_BLOCKS, len(ticket.rows) if arrived else 0)
    for waiter in ticket.waiters:
        waiter.load_ended(ticket.id, ticket.reason)


def _settle_store(core: Core, model: Model, replica: Replica, ticket: Ticket) -> None:
    arrived = not ticket.reason
    for row in ticket.rows:
        model.blocks.finish_fill(model.blocks.host, row, arrived=arrived)
    if ticket.drains:
        replica.failed_drains = 0 if arrived else replica.failed_drains + 1
        for drain in ticket.drains:
            model.evictor.finish_drain(replica.place, drain, arrived=arrived)
        core.count(Count.EVICTIONS, len(ticket.drains) if arrived else 0)


def _settle_swap(core: Core, replica: Replica, ticket: Ticket) -> None:
    """Pages of a sequence that has ended are free, unless its lease is lost and somebody may still write them."""
    assert ticket.traveller is not None
    lease = core.ledger.leases.get(ticket.traveller.lease)
    for group, pages in enumerate(ticket.traveller.swap_ended(ticket)):
        pool = replica.place.pools[group]
        if lease is not None and lease.state is LeaseState.QUARANTINED:
            lease.set_aside(group, pool, pages)
        else:
            pool.move_all(pages, PageState.FREE)


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
