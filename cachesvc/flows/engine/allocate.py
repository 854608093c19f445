"""Allocate: grow a sequence's tables; what lies on the host starts to load, the rest is fresh and private."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.flows.context.call import Call, require_active
from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.loads import bring, bring_part, loads_of
from cachesvc.flows.transfer.low_watermark import look_ahead, note_load
from cachesvc.flows.transfer.make_room import keep_room, make_room
from cachesvc.flows.transfer.transfers import may_submit, require_transfer, ticket_view, wait_for
from cachesvc.ledger.block_tables import Fresh
from cachesvc.model.answers import Allocated, GroupCells, Wait
from cachesvc.model.columns import NO_POSITIONS, Positions
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.transfer import Urgency


def allocate(
    core: Core,
    call: Call,
    sequence_id: int,
    blocks: int,
    *,
    short_suffix: bool = False,
    positions: Positions = NO_POSITIONS,
) -> Allocated | Wait:
    """Make the sequence's tables ``blocks`` long, all or nothing. ``short_suffix``: as of a ``Transfer``.

    ``positions[g]``: the new blocks that get a page in a windowed group; not named: all of a window, and the last one
    of a state. Raises InvalidRequest (shorter than the tables or than the hit, positions), LimitExceeded (blocks,
    transfers), PoolExhausted, LoadFailed, Conflict (swapped out).
    """
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_active(sequence)
    first = sequence.blocks
    if blocks > call.lease.blocks_per_sequence:
        most, setting = call.lease.blocks_per_sequence, "blocks_per_sequence"
        raise LimitExceeded.of_setting("blocks of a sequence", blocks, most, setting, "ask for fewer")
    if blocks < max(first, sequence.hit_blocks):
        raise InvalidRequest(
            f"sequence {sequence_id} has {first} blocks and a hit of {sequence.hit_blocks}; allocate at least as many"
        )
    loads = loads_of(core, call.model, call.replica, sequence.rest(), first, sequence.hit_blocks)
    if loads.blocked:
        return wait_for(core, loads.blocked)
    if loads.is_transfer and not may_submit(core, call.model, call.replica, call.lease.party):
        begun = list(filter(core.ledger.tickets.is_running, sequence.parts))
        if begun:  # its own parts have its share
            return wait_for(core, begun)
        require_transfer(core, call.model, call.replica, call.lease.party)
    fresh = _fresh(call, first + len(loads.rows), blocks, positions)
    counts = fresh.counts(len(sequence.tables))
    wait = make_room(core, call, loads.pages_wanted(sequence.missing(counts)), loads.keep, sequence)
    if wait is not None:
        return wait
    if not sequence.prepare(blocks, counts, core.turns.pages):
        return keep_room(core, call, loads.pages_wanted(sequence.missing(counts)), sequence)
    if part := bring_part(core, call, sequence, loads, short_suffix=short_suffix):
        left = [most - taken for most, taken in zip(loads.pages_wanted(), part, strict=True)]
        return keep_room(core, call, left, sequence)
    tickets = bring(core, call, sequence, loads, Urgency.AWAITED, short_suffix=short_suffix) if loads.rows else []
    in_parts = sum(sequence.parts.values())
    sequence.parts.clear()
    sequence.grow(sequence.fresh_pages(counts), fresh)
    call.lease.grown += fresh.blocks
    note_load(call.replica.place, in_parts + len(loads.missing[call.replica.place.lead]))
    look_ahead(core, call.model, call.replica)
    tables = tuple(GroupCells(group, first, table[first:]) for group, table in enumerate(sequence.tables))
    return Allocated(tables, tuple(map(ticket_view, tickets)), len(loads.rows))


def _fresh(call: Call, first: int, blocks: int, positions: Positions) -> Fresh:
    """The new blocks from ``first`` on, with the positions that get a page where not all do. Raises InvalidRequest."""
    place, states = call.replica.place, call.model.layout.state_groups
    if not positions and not states:
        return Fresh(first, blocks - first, NO_POSITIONS)
    found: dict[int, Sequence[int]] = {group: range(max(first, blocks - 1), blocks) for group in states}
    for group, named in positions.items():
        if group not in place.window_groups:
            raise InvalidRequest(f"group {group} has no window: each of its new blocks gets a page")
        rising = sorted(set(named))
        if rising != list(named) or (rising and not first <= rising[0] <= rising[-1] < blocks):
            raise InvalidRequest(
                f"positions of group {group} must rise within the new blocks [{first}, {blocks}), got {list(named)[:8]}"
            )
        found[group] = rising
    return Fresh(first, blocks - first, found)
