"""Swap: take a sequence off the device (preemption) and bring it back, own pages and shared prefix alike.

Out: sealed blocks get host copies where they have none, own pages are copied to host pages of the sequence; when all
has arrived the device pages are free and the pin moves to the host. In is the way back. A failed swap leaves the
sequence where it was.
"""

from __future__ import annotations

from cachesvc.flows.backup import submit
from cachesvc.flows.call import Call
from cachesvc.flows.core import (
    Core,
    cells,
    exhausted,
    remember_dropped,
    ticket_view,
    wait_for,
)
from cachesvc.flows.release import unpin_windows
from cachesvc.flows.room import make_room
from cachesvc.ledger.evict import host_pages_for
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tickets import PageMove, Ticket
from cachesvc.model.answers import Swapped, Wait
from cachesvc.model.errors import Conflict
from cachesvc.model.transfer import Direction, PagePairs
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, PageState


def swap_out(core: Core, call: Call, sequence_id: int) -> Swapped | Wait:
    """Start to take a sequence off the device. Raises PoolExhausted when the host cannot hold it, Conflict."""
    sequence = call.sequence(sequence_id)
    model, replica = call.model, call.replica
    _require_still(sequence)
    if sequence.swapped_out:
        raise Conflict(f"sequence {sequence_id} is swapped out already")
    if sequence.blocks < sequence.hit_blocks:
        raise Conflict(f"sequence {sequence_id} has not allocated its hit yet; release it instead")
    running = [t for t in sequence.loads if core.ledger.tickets.is_running(t)]
    path = model.blocks.index.path(sequence.anchor)
    host = model.blocks.host
    running += _tickets_filling(core, model, [row for row in path if host.state(row) == FILLING])
    if running:
        return wait_for(core, running)
    rows = [row for row in path if not host.is_present(row)]
    moves = _own_moves(sequence, replica)
    _host_room(core, model, path, rows, moves)
    _free_spares(replica, sequence)
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE)
    pairs: list[tuple[int, int, int]] = []
    for move in moves:
        move.host_page = host.pools[move.group].take(1, PageState.IN_FLIGHT)[0]
        if move.is_own:
            replica.place.pools[move.group].move(move.device_page, PageState.IN_FLIGHT)
        pairs.append((move.group, move.device_page, move.host_page))
    for row in rows:
        pages = host_pages_for(model.blocks, replica.place, row)
        model.blocks.start_fill(host, row, pages)
        pairs += [(g, replica.place.pages[g][row], page) for g, page in enumerate(pages) if page != NO_PAGE]
    if sequence.anchor != NO_ROW:  # from now on the host copies of the whole path stay
        model.blocks.pin(host, sequence.anchor)
        sequence.host_anchor = sequence.anchor
    ticket.rows = rows
    return _go(core, model, sequence, ticket, moves, pairs)


def _free_spares(replica: Replica, sequence: Sequence) -> None:
    """Own pages outside of the tables hold nothing that is worth taking along."""
    for group, own in enumerate(sequence.own):
        for page in own.difference(sequence.tables[group]):
            own.remove(page)
            replica.place.pools[group].move(page, PageState.FREE)


def swap_in(core: Core, call: Call, sequence_id: int) -> Swapped | Wait:
    """Start to bring a sequence back; the answer has its new tables. Raises PoolExhausted, Conflict."""
    sequence = call.sequence(sequence_id)
    model, replica = call.model, call.replica
    place = replica.place
    _require_still(sequence)
    if not sequence.swapped_out:
        raise Conflict(f"sequence {sequence_id} is on the device already")
    path = model.blocks.index.path(sequence.anchor)
    joined = _tickets_filling(core, model, [row for row in path if place.state(row) == FILLING])
    if joined:
        return wait_for(core, joined)
    present = [row for row in path if place.state(row) != ABSENT]
    absent = [row for row in path if place.state(row) == ABSENT]
    wanted = [len(absent) if g in place.full_groups else 0 for g in range(len(place.pools))]
    for group, _, _ in sequence.swapped:
        wanted[group] += 1
    if present:
        model.blocks.pin(place, present[-1])
    try:
        wait = make_room(core, model, replica, wanted)
    finally:
        if present:
            model.blocks.unpin(place, present[-1])
    if wait is not None:
        return wait
    return _load_back(core, model, replica, sequence, absent)


def _load_back(core: Core, model: Model, replica: Replica, sequence: Sequence, absent: list[int]) -> Swapped:
    place, host = replica.place, model.blocks.host
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.LOAD)
    pairs: list[tuple[int, int, int]] = []
    for row in absent:
        pages = [
            place.pools[g].take(1, PageState.IN_FLIGHT)[0] if g in place.full_groups else NO_PAGE
            for g in range(len(place.pools))
        ]
        model.blocks.start_fill(place, row, pages)
        pairs += [(g, page, host.pages[g][row]) for g, page in enumerate(pages) if page != NO_PAGE]
    moves = []
    for group, position, host_page in sequence.swapped:
        page = place.pools[group].take(1, PageState.IN_FLIGHT)[0]
        host.pools[group].move(host_page, PageState.IN_FLIGHT)
        moves.append(PageMove(group, position, page, host_page))
        pairs.append((group, page, host_page))
    if sequence.anchor != NO_ROW:
        model.blocks.pin(place, sequence.anchor)
    ticket.rows = absent
    for move in moves:
        sequence.tables[move.group][move.position] = move.device_page
        sequence.own[move.group].add(move.device_page)
    for group in place.full_groups:
        for position, row in enumerate(model.blocks.index.path(sequence.anchor)):
            sequence.tables[group][position] = place.pages[group][row]
    return _go(core, model, sequence, ticket, moves, pairs)


def _go(
    core: Core,
    model: Model,
    sequence: Sequence,
    ticket: Ticket,
    moves: list[PageMove],
    pairs: list[tuple[int, int, int]],
) -> Swapped:
    ticket.moves = moves
    ticket.sequence = (sequence.lease, sequence.id)
    sequence.swap_ticket = ticket.id
    grouped = tuple(
        PagePairs(g, tuple(d for h, d, _ in pairs if h == g), tuple(p for h, _, p in pairs if h == g))
        for g in sorted({g for g, _, _ in pairs})
    )
    submit(core, model, ticket, grouped, layered=ticket.direction is Direction.LOAD)
    loading = ticket.direction is Direction.LOAD
    tables = tuple(cells(g, 0, table) for g, table in enumerate(sequence.tables)) if loading else ()
    return Swapped((ticket_view(ticket),), tables)


def land_swap(core: Core, model: Model, replica: Replica, ticket: Ticket, error: str) -> None:
    """A swap has ended: settle the pages of its sequence, which may be gone or its lease lost."""
    assert ticket.sequence is not None
    lease = core.ledger.leases.get(ticket.sequence[0])
    sequence = lease.sequences.get(ticket.sequence[1]) if lease is not None else None
    if sequence is not None and sequence.swap_ticket != ticket.id:
        sequence = None
    out = ticket.direction is Direction.STORE
    host_stays = sequence is not None and out != bool(error)
    quarantine = lease if lease is not None and lease.state is LeaseState.QUARANTINED else None
    for move in ticket.moves:
        host = model.blocks.host.pools[move.group]
        host.move(move.host_page, PageState.PRIVATE if host_stays else PageState.FREE)
        if not move.is_own:
            continue
        pool = replica.place.pools[move.group]
        if sequence is not None and not host_stays:
            pool.move(move.device_page, PageState.PRIVATE)
        elif quarantine is not None:
            pool.move(move.device_page, PageState.QUARANTINED)
            quarantine.quarantine.append((move.group, move.device_page))
        else:
            pool.move(move.device_page, PageState.FREE)
    if sequence is not None:
        _land_sequence(model, replica, sequence, ticket, error)


def _land_sequence(model: Model, replica: Replica, sequence: Sequence, ticket: Ticket, error: str) -> None:
    blocks, place = model.blocks, replica.place
    sequence.swap_ticket = 0
    out = ticket.direction is Direction.STORE
    if out and not error:
        sequence.swapped = [(m.group, m.position, m.host_page) for m in ticket.moves]
        sequence.swapped_out = True
        if sequence.anchor != NO_ROW:
            blocks.unpin(place, sequence.anchor)
        unpin_windows(model, replica, sequence, 0)
        _clear_tables(sequence)
    elif not out and error:
        if sequence.anchor != NO_ROW:
            blocks.unpin(place, sequence.anchor)
        _clear_tables(sequence)
    else:  # back on the device, or never gone
        if sequence.anchor != NO_ROW:
            place.used[sequence.anchor] = 1
        sequence.swapped_out = False
        sequence.swapped.clear()
        if sequence.host_anchor != NO_ROW:
            blocks.unpin(blocks.host, sequence.host_anchor)
            sequence.host_anchor = NO_ROW


def _clear_tables(sequence: Sequence) -> None:
    for group in range(len(sequence.tables)):
        sequence.own[group].clear()
        sequence.tables[group] = [NO_PAGE] * sequence.blocks


def _require_still(sequence: Sequence) -> None:
    if sequence.swap_ticket:
        raise Conflict(f"sequence {sequence.id} is being swapped by ticket {sequence.swap_ticket}; wait for it")


def _own_moves(sequence: Sequence, replica: Replica) -> list[PageMove]:
    """Own pages in the tables, and the shared ones that windows still need (they come back as own pages)."""
    moves: list[PageMove] = []
    for group, table in enumerate(sequence.tables):
        windowed = group in replica.place.window_groups
        moves += [
            PageMove(group, position, page, NO_PAGE, is_own=page in sequence.own[group])
            for position, page in enumerate(table)
            if page != NO_PAGE and (page in sequence.own[group] or windowed)
        ]
    return moves


def _tickets_filling(core: Core, model: Model, rows: list[int]) -> list[int]:
    wanted = set(rows)
    if not wanted:
        return []
    running = core.ledger.tickets.running.values()
    return [t.id for t in running if t.model == model.id and (wanted & {*t.rows, *(drain.row for drain in t.drains)})]


def _host_room(core: Core, model: Model, path: list[int], rows: list[int], moves: list[PageMove]) -> None:
    """Free host pages for the whole swap, or raise PoolExhausted with nothing evicted."""
    blocks, host = model.blocks, model.blocks.host
    wanted = [len(rows) if g in host.full_groups else 0 for g in range(len(host.pools))]
    for move in moves:
        wanted[move.group] += 1
    for row in path:
        blocks.begin_flight(row)
    plan, short = model.evictor.plan_host_room(wanted)
    for row in path:
        blocks.end_flight(row)
    if short is not None:
        freed = sum(host.states[short][row] != ABSENT for row in plan.drops)
        raise exhausted(host.pools[short], wanted[short], freed)
    model.evictor.carry_out(plan)
    core.count("host_evictions", len(plan.drops))
    remember_dropped(core, model)
