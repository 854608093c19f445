"""Share between replicas: what only another replica has comes device to device, or else through the host.

A call begins one transfer at most and waits a few times at most, each time for a bounded while. Whatever came of it,
the call then goes on with the hit that there is; so nothing here fails a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.flows.backup import back_up
from cachesvc.flows.core import Core, expedite
from cachesvc.flows.loads import Loads, fill, kept, loads_of, pages_wanted
from cachesvc.flows.room import make_room
from cachesvc.ledger.blocks import Hit, window_positions
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import DRAINING, FILLING, READY


@dataclass(slots=True)
class Sharing:
    """What one call has done so far to reach more than its replica does; made for the call, handed to each of its runs.

    ``ticket``: the load from another replica that the call began; with it the replica has ``blocks`` blocks in place.
    """

    urgency: Urgency = Urgency.AWAITED
    waits: int = 0
    awaited: tuple[int, ...] = ()
    has_begun: bool = False
    ticket: Ticket | None = None
    blocks: int = 0


class _Source(NamedTuple):
    """A replica that has all of ``path`` on its device, windows too."""

    replica: Replica
    path: list[int]


def share(
    core: Core, model: Model, replica: Replica, keys: bytes, max_blocks: int, hit: Hit, sharing: Sharing
) -> Wait | None:
    """Begin (or go on) to bring what another replica has beyond ``hit``; None: the hit is all that there will be."""
    wanted = len(keys) // KEY_BYTES
    wanted = min(wanted, max_blocks) if max_blocks else wanted
    least = hit.blocks + core.limits.peer_blocks_min
    if len(model.replicas) < 2 or wanted < least or _is_over(core, sharing):
        return None
    source = _longest(core, model, replica, keys[: wanted * KEY_BYTES], least)
    if source is None:
        return None
    if core.mover.can_reach(model.id, source.replica.id, replica.id):
        return _load(core, model, replica, source, sharing)
    return _relay(core, model, replica, source, hit, sharing)


def _is_over(core: Core, sharing: Sharing) -> bool:
    """True after the last wait, and where a wait was cut short: the call has been held up for long enough."""
    book = core.ledger.tickets
    too_slow = bool(sharing.awaited) and all(book.is_running(ticket) for ticket in sharing.awaited)
    return too_slow or sharing.waits >= core.limits.peer_waits


def _longest(core: Core, model: Model, replica: Replica, keys: bytes, least: int) -> _Source | None:
    """The replica with the longest prefix of ``least`` blocks or more; of equal ones, one that can be reached."""
    blocks = model.blocks
    best: tuple[int, bool, Replica, int] | None = None
    for other in model.replicas:
        if other is replica:
            continue
        count, row = blocks.find_in_place(keys, other.place)
        if count >= least and (best is None or count >= best[0]):
            near = core.mover.can_reach(model.id, other.id, replica.id)
            if best is None or (count, near) > best[:2]:
                best = count, near, other, row
    return None if best is None else _Source(best[2], blocks.index.path(best[3]))


def _load(core: Core, model: Model, replica: Replica, source: _Source, sharing: Sharing) -> Wait | None:
    """Copy all that the replica lacks of the path from device to device. It is not followed layer by layer."""
    loads = loads_of(core, model, replica, source.path, 0, len(source.path))
    if loads.joined or loads.blocked:
        return _wait(core, sharing, {*loads.joined, *loads.blocked})
    leaving = {row for row in source.path if replica.place.state(row) == DRAINING}
    if leaving and not loads.whole:  # windows alone would hang below nothing that stays
        return _wait(core, sharing, _storing(core, model, leaving))
    if not _may_begin(core, sharing):
        return None
    with kept(model, replica, loads):
        try:
            wait = make_room(core, model, replica, pages_wanted(model, loads, 0))
        except PoolExhausted:
            return None
        if wait is not None:
            return _wait(core, sharing, wait.tickets)
        ticket = _begin_load(core, model, replica, source, loads, sharing.urgency)
    sharing.has_begun, sharing.ticket, sharing.blocks = True, ticket, len(source.path)
    return _wait(core, sharing, (ticket.id,))


def _begin_load(core: Core, model: Model, replica: Replica, source: _Source, loads: Loads, urgency: Urgency) -> Ticket:
    """The pin keeps what drains on the source; everything else there stays because its rows are in flight."""
    tip = source.path[-1]
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.LOAD, urgency)
    ticket.source = (source.replica.id, tip)
    model.blocks.pin(source.replica.place, tip)
    fill(core, model, replica, loads, ticket, source.replica.place, layered=False)
    core.count("peer_loads")
    return ticket


def _relay(core: Core, model: Model, replica: Replica, source: _Source, hit: Hit, sharing: Sharing) -> Wait | None:
    """Have the other replica store what the host lacks of the path; it is loaded from there as usual."""
    blocks, host = model.blocks, model.blocks.host
    rows = source.path[_first_from_host(model, replica, source.path, hit) :]
    filling = {row for row in rows if host.state(row) == FILLING}
    if filling:
        return _wait(core, sharing, _storing(core, model, filling))
    if not _may_begin(core, sharing):
        return None
    kept_on_host = hit.blocks > hit.device_blocks
    if kept_on_host:  # room for the end of the path is not made at the cost of its middle
        blocks.pin(host, hit.row)
    ticket = back_up(core, model, source.replica, rows, sharing.urgency)
    if kept_on_host:
        blocks.unpin(host, hit.row)
    if ticket is None:
        return None
    sharing.has_begun = True
    core.count("relayed_blocks", ticket.blocks)
    return _wait(core, sharing, (ticket.id,))


def _first_from_host(model: Model, replica: Replica, path: list[int], hit: Hit) -> int:
    """The first position of the path that cannot be used in place: from there on the host must have everything."""
    place = replica.place
    gone = [
        position
        for group in place.window_groups
        for position in window_positions(model.layout, group, len(path))
        if place.states[group][path[position]] != READY
    ]
    return min([hit.device_blocks, *gone])


def _storing(core: Core, model: Model, rows: set[int]) -> list[int]:
    """Running tickets that bring one of ``rows`` to the host, or let it drain."""
    return [
        ticket.id
        for ticket in core.ledger.tickets.running.values()
        if ticket.model == model.id
        and ticket.direction is Direction.STORE
        and not rows.isdisjoint([*ticket.rows, *(drain.row for drain in ticket.drains)])
    ]


def _may_begin(core: Core, sharing: Sharing) -> bool:
    return not sharing.has_begun and len(core.ledger.tickets.running) < core.limits.running_tickets


def _wait(core: Core, sharing: Sharing, tickets: Iterable[int]) -> Wait:
    sharing.waits += 1
    sharing.awaited = tuple(sorted(tickets))
    if sharing.urgency is Urgency.AWAITED:
        expedite(core, sharing.awaited)
    return Wait(sharing.awaited, core.limits.peer_wait_seconds)
