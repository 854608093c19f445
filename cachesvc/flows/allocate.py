"""Allocate: grow a sequence's tables; what lies on the host starts to load, the rest is fresh and private."""

from __future__ import annotations

from cachesvc.flows.call import Call
from cachesvc.flows.core import (
    Core,
    cells,
    expedite,
    require_on_device,
    ticket_view,
    wait_for,
)
from cachesvc.flows.loads import Loads, fill, kept, loads_of, pages_wanted
from cachesvc.flows.room import make_room
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import NO_PAGE, PageState


def allocate(
    core: Core, call: Call, sequence_id: int, blocks: int, urgency: Urgency = Urgency.AWAITED
) -> Allocated | Wait:
    """Make the sequence's tables ``blocks`` long, all or nothing. ``urgency``: of the loads that this takes.

    Raises InvalidRequest (shorter than the tables or than the hit), LimitExceeded, PoolExhausted, LoadFailed,
    Conflict (swapped out).
    """
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_on_device(sequence)
    model, replica = call.model, call.replica
    first = sequence.blocks
    if blocks > core.limits.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", blocks, core.limits.blocks_per_sequence)
    if blocks < max(first, sequence.hit_blocks):
        raise InvalidRequest(
            f"sequence {sequence_id} has {first} blocks and a hit of {sequence.hit_blocks}; allocate at least as many"
        )
    loads = _loads(core, model, replica, sequence)
    if loads.blocked:
        return wait_for(core, loads.blocked)
    fresh = blocks - first - len(loads.rows)
    with kept(model, replica, loads):
        wait = make_room(core, model, replica, pages_wanted(model, loads, fresh))
        if wait is not None:
            return wait
        tickets = _start_loads(core, model, replica, sequence, loads, urgency) if loads.rows else []
    _add_fresh(replica, sequence, fresh)
    declare_computing(model, sequence)
    tables = tuple(cells(group, first, table[first:]) for group, table in enumerate(sequence.tables))
    return Allocated(tables, tuple(ticket_view(ticket) for ticket in tickets), len(loads.rows))


def _loads(core: Core, model: Model, replica: Replica, sequence: Sequence) -> Loads:
    """The part of a sequence's hit that is not in its tables yet."""
    if sequence.blocks >= sequence.hit_blocks:
        return Loads([], [], {}, {}, [], [])
    rows = model.blocks.index.path(sequence.host_anchor, sequence.anchor)
    return loads_of(core, model, replica, rows, sequence.blocks, sequence.hit_blocks)


def _start_loads(
    core: Core, model: Model, replica: Replica, sequence: Sequence, loads: Loads, urgency: Urgency
) -> list[Ticket]:
    """Fill what is missing from the host, join what is being filled, and write both into the tables."""
    place = replica.place
    book = core.ledger.tickets
    tickets = [book.running[ticket] for ticket in loads.joined]
    if urgency is Urgency.AWAITED:
        expedite(core, loads.joined)
    _anchor_present(model, replica, sequence, loads)
    if loads.whole or any(loads.windows.values()):
        ticket = book.open(model.id, replica.id, Direction.LOAD, urgency)
        ticket.after = list(loads.joined)
        tickets.append(ticket)
        fill(core, model, replica, loads, ticket, model.blocks.host, layered=True)
    for group, table in enumerate(sequence.tables):
        base, pages = len(table), place.pages[group]
        if group in loads.needed:
            needed = loads.needed[group]
            table.extend(
                pages[row] if position in needed else NO_PAGE for position, row in enumerate(loads.rows, start=base)
            )
            sequence.window_rows.setdefault(group, {}).update(needed)
            for row in needed.values():
                model.blocks.use_window(row, sequence.host_anchor)
                model.blocks.pin_window(place, group, row)
        else:
            table.extend(pages[row] for row in loads.rows)
    waiter = (sequence.lease, sequence.id)
    for ticket in tickets:
        ticket.waiters.append(waiter)
        sequence.loads.append(ticket.id)
    if not tickets:
        settle_loads(model, replica, sequence)
    return tickets


def _anchor_present(model: Model, replica: Replica, sequence: Sequence, loads: Loads) -> None:
    """Blocks that came to the device since Match are the sequence's now: nothing in flight may be what keeps them."""
    place = replica.place
    present = [row for row in loads.rows if place.is_hittable(row)]
    if not present:
        return
    model.blocks.pin(place, present[-1])
    if sequence.anchor != NO_ROW:
        model.blocks.unpin(place, sequence.anchor)
    sequence.anchor = present[-1]
    sequence.sealed += len(present)


def settle_loads(model: Model, replica: Replica, sequence: Sequence) -> None:
    """Move a sequence's pins after its loads: the deepest block is pinned on the device, nothing on the host."""
    blocks = model.blocks
    place = replica.place
    blocks.pin(place, sequence.host_anchor)
    if sequence.anchor != NO_ROW:
        blocks.unpin(place, sequence.anchor)
    blocks.unpin(blocks.host, sequence.host_anchor)
    sequence.anchor = sequence.host_anchor
    place.used[sequence.anchor] |= sequence.id >= 0  # a prefetch has brought what nobody may ever use
    sequence.host_anchor = NO_ROW
    sequence.sealed = sequence.hit_blocks


def _add_fresh(replica: Replica, sequence: Sequence, fresh: int) -> None:
    for group, table in enumerate(sequence.tables):
        pages = replica.place.pools[group].take(fresh, PageState.PRIVATE)
        table.extend(pages)
        sequence.own[group].update(pages)


def declare_computing(model: Model, sequence: Sequence) -> None:
    """The sequence computes all blocks from its hit on whose keys are known."""
    last = min(sequence.blocks, sequence.known_keys)
    for position in range(max(sequence.sealed, sequence.hit_blocks, sequence.declared), last):
        key = sequence.key(position)
        model.computing[key] = model.computing.get(key, 0) + 1
    sequence.declared = max(sequence.declared, last)


def withdraw_computing(model: Model, sequence: Sequence, first: int, last: int) -> None:
    """The sequence no longer computes blocks ``[first, last)``, as far as it had declared them."""
    for position in range(first, min(last, sequence.declared)):
        key = sequence.key(position)
        left = model.computing[key] - 1
        if left:
            model.computing[key] = left
        else:
            del model.computing[key]
