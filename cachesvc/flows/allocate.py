"""Allocate: grow a sequence's tables; what lies on the host starts to load, the rest is fresh and private."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cachesvc.flows.backup import submit
from cachesvc.flows.core import Core, cells, open_sequence, replica_of, require_on_device, ticket_view
from cachesvc.flows.match import window_positions
from cachesvc.flows.room import make_room
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.transfer import Direction, PagePairs
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, READY, PageState


@dataclass(slots=True)
class _Loads:
    """The part of a sequence's hit that is not on the device: rows to load, rows somebody else is loading."""

    rows: list[int]
    absent: list[int]
    joined: list[int]


def allocate(core: Core, lease_id: str, sequence_id: int, blocks: int, now: float) -> Allocated | Wait:
    """Make the sequence's tables ``blocks`` long, all or nothing.

    Raises InvalidRequest (shorter than the tables or than the hit), LimitExceeded, PoolExhausted, LoadFailed,
    LeaseLost, StateConflict (swapped out).
    """
    lease, sequence = open_sequence(core, lease_id, sequence_id)
    require_on_device(sequence)
    model, replica = replica_of(core, lease)
    lease.last_heard = now
    first = sequence.blocks
    if blocks > core.limits.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", blocks, core.limits.blocks_per_sequence)
    if blocks < max(first, sequence.hit_blocks):
        raise InvalidRequest(
            f"sequence {sequence_id} has {first} blocks and a hit of {sequence.hit_blocks}; allocate at least as many"
        )
    loads = _loads(model, replica, sequence)
    fresh = blocks - first - len(loads.rows)
    with _kept(model, replica, loads):
        wait = make_room(core, model, replica, _pages_wanted(model, replica, sequence, loads, fresh))
        if wait is not None:
            return wait
        tickets = _start_loads(core, model, replica, sequence, loads) if loads.rows else []
    _add_fresh(replica, sequence, fresh)
    _declare_computing(model, sequence, first + len(loads.rows))
    place = replica.place
    tables = tuple(cells(place, group, first, table[first:]) for group, table in enumerate(sequence.tables))
    return Allocated(tables, tuple(ticket_view(ticket) for ticket in tickets), len(loads.rows))


def _loads(model: Model, replica: Replica, sequence: Sequence) -> _Loads:
    if sequence.blocks >= sequence.hit_blocks:
        return _Loads([], [], [])
    place = replica.place
    rows = model.blocks.index.path(sequence.host_anchor, sequence.anchor)
    absent = [row for row in rows if place.state(row) == ABSENT]
    joined = [row for row in rows if place.state(row) == FILLING]
    return _Loads(rows, absent, joined)


@contextmanager
def _kept(model: Model, replica: Replica, loads: _Loads) -> Iterator[None]:
    """Keep what others brought to the device since Match while room is made for the rest."""
    place = replica.place
    present = [row for row in loads.rows if place.state(row) != ABSENT]
    if present:
        model.blocks.pin(place, present[-1])
    try:
        yield
    finally:
        if present:
            model.blocks.unpin(place, present[-1])


def _window_loads(model: Model, replica: Replica, sequence: Sequence, group: int, loads: _Loads) -> list[int]:
    """Rows whose pages a windowed group must have from the host for this hit."""
    needed = window_positions(model, group, sequence.hit_blocks)
    base = sequence.blocks
    host = model.blocks.host.states[group]
    absent = set(loads.absent)
    rows = [loads.rows[position - base] for position in needed if position >= base]
    return [row for row in rows if row in absent and host[row] == READY]


def _pages_wanted(model: Model, replica: Replica, sequence: Sequence, loads: _Loads, fresh: int) -> list[int]:
    windowed = replica.place.window_groups
    return [
        fresh + (len(_window_loads(model, replica, sequence, group, loads)) if group in windowed else len(loads.absent))
        for group in range(len(model.layout.groups))
    ]


def _start_loads(core: Core, model: Model, replica: Replica, sequence: Sequence, loads: _Loads) -> list[Ticket]:
    """Fill what is absent from the host, join what is being filled, and write both into the tables."""
    place = replica.place
    book = core.ledger.tickets
    joined = [t for t in book.running.values() if _fills(t, replica.id, model.id) and set(t.rows) & set(loads.joined)]
    tickets = list(joined)
    if loads.absent:
        ticket = book.open(model.id, replica.id, Direction.LOAD)
        ticket.rows = loads.absent
        ticket.after = [t.id for t in joined]
        _fill(core, model, replica, sequence, loads, ticket)
        tickets.append(ticket)
    for group, table in enumerate(sequence.tables):
        pages = place.pages[group]
        states = place.states[group]
        table.extend(pages[row] if states[row] else NO_PAGE for row in loads.rows)
    waiter = (sequence.lease, sequence.id)
    for ticket in tickets:
        ticket.waiters.append(waiter)
        sequence.loads.append(ticket.id)
    if not tickets:
        settle_loads(model, replica, sequence)
    return tickets


def _fills(ticket: Ticket, replica: int, model: int) -> bool:
    return ticket.direction is Direction.LOAD and ticket.replica == replica and ticket.model == model


def _fill(core: Core, model: Model, replica: Replica, sequence: Sequence, loads: _Loads, ticket: Ticket) -> None:
    place, host = replica.place, model.blocks.host
    rows_of: list[list[int]] = []
    pages_of: list[dict[int, int]] = []
    for group in range(len(model.layout.groups)):
        windowed = group in place.window_groups
        rows = _window_loads(model, replica, sequence, group, loads) if windowed else loads.absent
        rows_of.append(rows)
        pages_of.append(dict(zip(rows, place.pools[group].take(len(rows), PageState.IN_FLIGHT), strict=True)))
    for row in loads.absent:
        model.blocks.start_fill(place, row, [pages.get(row, NO_PAGE) for pages in pages_of])
    pairs = tuple(
        PagePairs(group, tuple(pages_of[group][row] for row in rows), tuple(host.pages[group][row] for row in rows))
        for group, rows in enumerate(rows_of)
        if rows
    )
    submit(core, model, ticket, pairs, layered=True)


def settle_loads(model: Model, replica: Replica, sequence: Sequence) -> None:
    """Move a sequence's pins after its loads: the deepest block is pinned on the device, nothing on the host."""
    blocks = model.blocks
    place = replica.place
    blocks.pin(place, sequence.host_anchor)
    if sequence.anchor >= 0:
        blocks.unpin(place, sequence.anchor)
    blocks.unpin(blocks.host, sequence.host_anchor)
    path = blocks.index.path(sequence.host_anchor)
    for group in place.window_groups:
        held = sequence.window_rows.setdefault(group, {})
        for position in range(sequence.sealed, sequence.hit_blocks):
            row = path[position]
            if place.states[group][row] == READY and position not in held and sequence.tables[group][position] >= 0:
                place.window_pins[group][row] += 1
                held[position] = row
    sequence.anchor = sequence.host_anchor
    sequence.host_anchor = -1
    sequence.sealed = sequence.hit_blocks


def _add_fresh(replica: Replica, sequence: Sequence, fresh: int) -> None:
    for group, table in enumerate(sequence.tables):
        pages = replica.place.pools[group].take(fresh, PageState.PRIVATE)
        table.extend(pages)
        sequence.own[group].update(pages)


def _declare_computing(model: Model, sequence: Sequence, first: int) -> None:
    for position in range(first, min(sequence.blocks, sequence.known_keys)):
        key = sequence.key(position)
        model.computing[key] = model.computing.get(key, 0) + 1


def withdraw_computing(model: Model, sequence: Sequence, first: int, last: int) -> None:
    """The sequence no longer computes blocks ``[first, last)``."""
    for position in range(first, min(last, sequence.known_keys)):
        key = sequence.key(position)
        left = model.computing.get(key, 0) - 1
        if left > 0:
            model.computing[key] = left
        else:
            model.computing.pop(key, None)
