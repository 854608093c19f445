"""Allocate: grow a sequence's tables; what lies on the host starts to load, the rest is fresh and private."""

from __future__ import annotations

from cachesvc.flows.context.call import Call, require_on_device
from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.loads import bring, loads_of
from cachesvc.flows.transfer.low_watermark import look_ahead
from cachesvc.flows.transfer.make_room import keep_room, make_room
from cachesvc.flows.transfer.transfers import require_transfer, ticket_view, wait_for
from cachesvc.model.answers import Allocated, GroupCells, Wait
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.transfer import Urgency


def allocate(core: Core, call: Call, sequence_id: int, blocks: int, *, short_suffix: bool = False) -> Allocated | Wait:
    """Make the sequence's tables ``blocks`` long, all or nothing. ``short_suffix``: as of a ``Transfer``.

    Raises InvalidRequest (shorter than the tables or than the hit), LimitExceeded (blocks, transfers), PoolExhausted,
    LoadFailed, Conflict (swapped out).
    """
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_on_device(sequence)
    first = sequence.blocks
    if blocks > call.lease.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", blocks, call.lease.blocks_per_sequence)
    if blocks < max(first, sequence.hit_blocks):
        raise InvalidRequest(
            f"sequence {sequence_id} has {first} blocks and a hit of {sequence.hit_blocks}; allocate at least as many"
        )
    loads = loads_of(core, call.model, call.replica, sequence.rest(), first, sequence.hit_blocks)
    if loads.blocked:
        return wait_for(core, loads.blocked)
    if loads.is_transfer:
        require_transfer(core, call.model, call.replica, call.lease.party)
    fresh = blocks - first - len(loads.rows)
    wanted = loads.pages_wanted(fresh - min(fresh, sequence.pages_ahead))
    wait = make_room(core, call, wanted, loads.keep, sequence)
    if wait is not None:
        return wait
    if not sequence.prepare(blocks, fresh, core.turns.pages):
        wanted = loads.pages_wanted(fresh - min(fresh, sequence.pages_ahead))
        return keep_room(core, call, wanted, sequence)
    tickets = bring(core, call, sequence, loads, Urgency.AWAITED, short_suffix=short_suffix) if loads.rows else []
    sequence.grow(sequence.fresh_pages(fresh))
    call.lease.grown += fresh
    look_ahead(core, call.model, call.replica)
    tables = tuple(GroupCells(group, first, table[first:]) for group, table in enumerate(sequence.tables))
    return Allocated(tables, tuple(map(ticket_view, tickets)), len(loads.rows))
