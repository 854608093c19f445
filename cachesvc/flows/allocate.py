"""Allocate: grow a sequence's tables; what lies on the host starts to load, the rest is fresh and private."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cachesvc.flows.core import TURN, Call, Core, refusal_of, require_active
from cachesvc.flows.loads import bring, bring_part, loads_of
from cachesvc.flows.make_room import exhausted, keep_room, make_room, within_turn
from cachesvc.flows.transfers import (
    carry_out,
    load_pairs,
    look_ahead,
    may_submit,
    note_load,
    require_transfer,
    store_pairs,
    submit,
    ticket_view,
    wait_for,
)
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pins import Keep
from cachesvc.ledger.planner import drop_idle_copies, no_row, start_backup
from cachesvc.ledger.sequence_state import AWAY
from cachesvc.ledger.sequences import Fresh
from cachesvc.ledger.tickets import MovedPages
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import NO_POSITIONS, Allocated, GroupCells, Positions, Swapped, Wait
from cachesvc.model.errors import Conflict, InvalidRequest, LimitExceeded
from cachesvc.model.numbers import array_of, column
from cachesvc.model.words import ABSENT, Direction, PagePairs, Urgency


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


# Swap: take a sequence off the device (preemption) and bring it back, own pages and shared prefix alike.
#
# Out: sealed blocks get host copies where they have none, own pages are copied to host pages of the sequence; when all
# has arrived the device pages are free and the pin moves to the host. In is the way back. A failed swap leaves the
# sequence where it was.


def swap_out(core: Core, call: Call, sequence_id: int) -> Swapped | Wait:
    """Start to take a sequence off the device.

    Raises PoolExhausted when the host cannot hold it, LimitExceeded (transfers), Conflict.
    """
    sequence = call.sequence(sequence_id)
    model, place = call.model, call.replica.place
    require_active(sequence)
    if sequence.blocks < sequence.hit_blocks:
        raise Conflict(f"sequence {sequence_id} has not allocated its hit yet; release it instead")
    path = model.blocks.index.path(sequence.anchor)
    host = model.blocks.host
    running = [*sequence.loads, *host.fillers(path)]
    if running:
        return wait_for(core, running)
    rows = _absent(host, path)
    wanted = [count + (len(rows) if group in host.full_groups else 0) for group, count in enumerate(sequence.moving())]
    if any(wanted):
        require_transfer(core, model, call.replica, call.lease.party)
    if (wait := _make_host_room(core, model, sequence.anchor, wanted)) is not None:
        return wait
    moves = sequence.own_moves()
    ticket = core.ledger.tickets.open(model.id, call.replica.id, Direction.STORE, party=call.lease.party)
    sequence.leave(ticket, moves)
    coming = start_backup(model.blocks, place, rows, ticket.id)
    ticket.rows = rows[:]
    sequence.keep_on_host()
    submit(core, model, ticket, _joined(moves, store_pairs(place, coming)), layered=False)
    return Swapped((ticket_view(ticket),), ())


def swap_in(core: Core, call: Call, sequence_id: int, *, short_suffix: bool = False) -> Swapped | Wait:
    """Start to bring a sequence back; the answer has its new tables. ``short_suffix``: as of a ``Transfer``.

    After a swap in that failed, asking again says that no launch that was to use it runs any more.

    Raises PoolExhausted, LimitExceeded (transfers), Conflict.
    """
    sequence = call.sequence(sequence_id)
    model, replica, place = call.model, call.replica, call.replica.place
    if sequence.state is not AWAY:
        raise refusal_of(sequence)
    path = model.blocks.index.path(sequence.host_anchor)
    filling = place.fillers(path)
    if filling:
        return wait_for(core, filling)
    absent = _absent(place, path)
    wanted = [len(absent) if group in place.full_groups else 0 for group in range(len(place.pools))]
    for group, own in enumerate(sequence.swapped):
        wanted[group] += len(own.positions)
    if any(wanted):
        require_transfer(core, model, replica, call.lease.party)
    sequence.free_spares()
    present = len(path) - len(absent)
    keep = Keep(path[present - 1] if present else NO_ROW)  # what a device has is prefix-closed
    wait = make_room(core, call, wanted, keep, sequence)
    if wait is not None:
        return wait
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.LOAD, party=call.lease.party)
    missing = [absent if group in place.full_groups else array("i") for group in range(len(place.pools))]
    coming = model.blocks.start_fill(place, missing, ticket.id)
    ticket.rows = absent[:]
    sequence.come_back(ticket)
    pairs = _joined(ticket.moves, load_pairs(model.blocks.host, coming))
    submit(core, model, ticket, pairs, layered=True, short_suffix=short_suffix)
    tables = tuple(GroupCells(group, 0, table[:]) for group, table in enumerate(sequence.tables))
    return Swapped((ticket_view(ticket),), tables)


def _absent(place: Place, rows: array[int]) -> array[int]:
    """Rows of ``rows`` that have no copy on the place."""
    return array_of(column(rows)[place.states_of(place.lead, rows) == ABSENT])


def _joined(moves: list[MovedPages], shared: Iterable[PagePairs]) -> tuple[PagePairs, ...]:
    """Own pages and shared blocks as one transfer: the pages of a group together."""
    of_group = {each.group: (array("i", each.device_pages), array("i", each.host_pages)) for each in shared}
    for moved in moves:
        if moved.positions:
            device, host = of_group.get(moved.group, (array("i"), array("i")))
            of_group[moved.group] = moved.device_pages + device, moved.host_pages + host
    return tuple(PagePairs(group, *of_group[group]) for group in sorted(of_group))


def _make_host_room(core: Core, model: Model, tip: int, wanted: list[int]) -> Wait | None:
    """Free ``wanted[g]`` host pages of group g, at the cost of no block from the root down to ``tip``; None when they
    are there. Where it takes several turns, other calls may take the pages freed so far. Raises PoolExhausted, with
    nothing evicted in this turn."""
    host, index = model.blocks.host, model.blocks.index
    if host.has_shared_pools:
        drop_idle_copies(model.blocks, host, wanted, core.turns.evicted, cheap=True)
    now = within_turn(core, host, wanted)
    spares = (lambda row: index.is_above(row, tip)) if tip != NO_ROW else no_row
    plan, short = model.evictor.plan_host_room(now, spares)
    if short is not None:
        groups = next(groups for groups in host.shares if short in groups)
        raise exhausted(host.pools[short], sum(wanted[g] for g in groups), sum(map(plan.freed, groups)))
    carry_out(core, model, plan)
    return None if now == wanted else TURN
