"""Back up sealed blocks to the host: a store ticket whose device copies stay READY."""

from __future__ import annotations

from cachesvc.flows.core import Core, remember_dropped
from cachesvc.ledger.evict import Drain, host_pages_for
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import CacheError
from cachesvc.model.transfer import Direction, PagePairs, Transfer, Urgency
from cachesvc.model.words import READY


def back_up(
    core: Core, model: Model, replica: Replica, rows: list[int], urgency: Urgency = Urgency.BACKGROUND
) -> Ticket | None:
    """Store the rows (root first) that have a READY device copy and no host copy; as many as the host can take.

    Best effort: a host pool without room ends it silently, because the device copies are still there. Unless told
    otherwise nobody waits for it yet.
    """
    blocks = model.blocks
    place = replica.place
    wanted = [row for row in rows if not blocks.host.is_present(row) and place.state(row) == READY]
    if not wanted or len(core.ledger.tickets.running) >= core.limits.running_tickets:
        return None
    for row in wanted:
        blocks.begin_flight(row)  # so that making room does not take these very blocks
    free = min(blocks.host.pools[group].free for group in blocks.host.full_groups)
    if free < len(wanted):
        plan, _ = model.evictor.plan_host(len(wanted) - free)
        model.evictor.carry_out(plan)
        core.count("host_evictions", len(plan.drops))
        remember_dropped(core, model)
        free = min(blocks.host.pools[group].free for group in blocks.host.full_groups)
    for row in wanted[free:]:
        blocks.end_flight(row)
    wanted = wanted[:free]
    if not wanted:
        return None
    pairs: list[tuple[int, tuple[int, ...]]] = []
    for row in wanted:
        pages = host_pages_for(blocks, place, row)
        blocks.start_fill(blocks.host, row, pages)
        blocks.end_flight(row)
        pairs.append((row, pages))
    return submit_store(core, model, replica, pairs, [], urgency)


def submit_store(
    core: Core,
    model: Model,
    replica: Replica,
    rows: list[tuple[int, tuple[int, ...]]],
    drains: list[tuple[Drain, tuple[int, ...]]],
    urgency: Urgency,
) -> Ticket:
    """One store ticket for backups (``rows``) and evictions (``drains``), each with its host pages by group."""
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, urgency)
    ticket.rows = [row for row, _ in rows]
    ticket.drains = [drain for drain, _ in drains]
    place = replica.place
    moving = rows + [(drain.row, pages) for drain, pages in drains if drain.copied]
    pairs: list[PagePairs] = []
    for group in range(len(model.layout.groups)):
        mine = [(place.pages[group][row], pages[group]) for row, pages in moving if pages[group] >= 0]
        if mine:
            device, host = zip(*mine, strict=True)
            pairs.append(PagePairs(group, device, host))
    submit(core, model, ticket, tuple(pairs), layered=False)
    return ticket


def submit(core: Core, model: Model, ticket: Ticket, pairs: tuple[PagePairs, ...], *, layered: bool) -> None:
    """Hand a ticket's pages to the mover and note where its progress is read.

    A ticket that the mover refuses fails like any other: it lands when the flow is through.
    """
    ticket.size_bytes = sum(len(pair.device_pages) * model.layout.page_bytes(pair.group) for pair in pairs)
    if not pairs:
        core.stillborn.append((ticket.id, ""))
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
    except CacheError as error:
        core.stillborn.append((ticket.id, str(error)))
        return
    onto_device = "h2d_bytes" if ticket.source is None else "p2p_bytes"
    core.count("d2h_bytes" if ticket.direction is Direction.STORE else onto_device, ticket.size_bytes)
