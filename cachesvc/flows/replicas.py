"""Sharing between replicas: blocks of another replica come device to device, or else through the host.

A call begins one transfer at most and waits a few times at most, each time for a bounded while. Whatever came of it,
the call then goes on with the hit that there is; so nothing here fails a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.flows.core import TURN, Call, Core, Count
from cachesvc.flows.loads import load_from, loads_of
from cachesvc.flows.make_room import make_host_room, make_room
from cachesvc.flows.transfers import expedite, may_submit, store_pairs, submit
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pins import Keep, kept
from cachesvc.ledger.planner import parts_of, start_backup
from cachesvc.ledger.retention import window_positions
from cachesvc.ledger.storage_state import Expectation, Fetch
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Expected, Wait
from cachesvc.model.errors import LimitExceeded, PoolExhausted
from cachesvc.model.numbers import array_of, column
from cachesvc.model.words import ABSENT, KEY_BYTES, READY, Direction, Urgency


@dataclass(slots=True)
class Sharing:
    """Progress of one call in reaching more than its replica does; made for the call, handed to each of its runs.

    ``ticket``: the load from another replica that the call began; with it the replica has ``blocks`` blocks in place.
    ``fetch``: what it waits for from storage, since ``fetch_since``; the first one was from block ``fetched_first`` on.
    ``goes_on``: it waits for what lies behind that one. ``in_pieces``: the host cannot hold all that storage has; the
    device has ``passed_on`` blocks of it by then. ``expected``: what the caller expects of another node; ``coming``
    blocks of it are on their way still, and ``arrived`` came; the call waits for them since ``expects_since``.
    ``expectation``: of them; None where nothing is on its way.
    """

    urgency: Urgency = Urgency.AWAITED
    waits: int = 0
    awaited: tuple[int, ...] = ()
    has_begun: bool = False
    ticket: Ticket | None = None
    blocks: int = 0
    fetch: Fetch | None = None
    fetch_since: float = 0.0
    fetched_first: int = 0
    goes_on: bool = False
    in_pieces: bool = False
    passed_on: int = 0
    expected: Expected | None = None
    expects_since: float | None = None
    coming: int = 0
    arrived: int = 0
    expectation: Expectation | None = None


class _Source(NamedTuple):
    """A replica that has all of ``path`` on its device, windows too."""

    replica: Replica
    path: array[int]


def share(core: Core, call: Call, keys: bytes, max_blocks: int, hit: Hit, sharing: Sharing) -> Wait | None:
    """Begin (or go on) to bring what another replica has beyond ``hit``; None: the hit is all that there will be."""
    model, replica = call.model, call.replica
    wanted = len(keys) // KEY_BYTES
    wanted = min(wanted, max_blocks) if max_blocks else wanted
    least = hit.blocks + core.limits.peer_blocks_min
    if len(model.replicas) < 2 or wanted < least or _is_over(core, sharing):
        return None
    source = _longest(core, model, replica, keys[: wanted * KEY_BYTES], least)
    if source is None or (hit.blocks and source.path[hit.blocks - 1] != hit.row):  # the keys are not chained
        return None
    if core.mover.can_reach(model.id, source.replica.id, replica.id):
        return _load(core, call, source, sharing)
    return _relay(core, call, source, hit, sharing)


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


def _load(core: Core, call: Call, source: _Source, sharing: Sharing) -> Wait | None:
    """Copy all that the replica lacks of the path from device to device. It is not followed layer by layer."""
    model, replica = call.model, call.replica
    loads = loads_of(core, model, replica, source.path, 0, len(source.path))
    if loads.joined or loads.blocked:
        return _wait(core, sharing, {*loads.joined, *loads.blocked})
    draining = replica.place.draining
    leaving = {draining[row] for row in source.path if row in draining} if draining else set()
    if leaving and not loads.missing[replica.place.lead]:  # windows alone would hang below nothing that stays
        return _wait(core, sharing, leaving)
    if sharing.has_begun or not loads.is_transfer or not may_submit(core, model, replica, call.lease.party):
        return None
    try:
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
    except (PoolExhausted, LimitExceeded):
        return None
    if wait is not None:
        return _wait(core, sharing, wait.tickets) if wait.tickets else wait
    ticket = load_from(core, call, loads, source.replica, source.path[-1], sharing.urgency)
    core.count(Count.PEER_LOADS)
    sharing.has_begun, sharing.ticket, sharing.blocks = True, ticket, len(source.path)
    return _wait(core, sharing, (ticket.id,))


def _relay(core: Core, call: Call, source: _Source, hit: Hit, sharing: Sharing) -> Wait | None:
    """Have the other replica store what the host lacks of the path; it is loaded from there as usual."""
    blocks, host = call.model.blocks, call.model.blocks.host
    rows = source.path[_first_from_host(call.model, call.replica, source.path, hit) :]
    filling = host.fillers(rows)
    if filling:
        return _wait(core, sharing, filling)
    if sharing.has_begun:
        return None
    on_host = hit.row if hit.blocks > hit.device_blocks else NO_ROW
    with kept(blocks, host, Keep(on_host)):  # room for the end of the path is not made at the cost of its middle
        if not has_backup_room(core, call.model, source.replica, rows):
            return TURN
        ticket = back_up(core, call.model, source.replica, rows, sharing.urgency)
    if ticket is None:
        return None
    sharing.has_begun = True
    core.count(Count.RELAYED_BLOCKS, ticket.blocks)
    return _wait(core, sharing, (ticket.id,))


def _first_from_host(model: Model, replica: Replica, path: array[int], hit: Hit) -> int:
    """The first position of the path that cannot be used in place: from there on the host must have everything."""
    place = replica.place
    gone = [
        position
        for group in place.window_groups
        for position in window_positions(model.layout, group, len(path))
        if place.states[group][path[position]] != READY
    ]
    return min([hit.device_blocks, *gone])


def _wait(core: Core, sharing: Sharing, tickets: Iterable[int]) -> Wait:
    sharing.waits += 1
    sharing.awaited = tuple(sorted(tickets))
    if sharing.urgency is Urgency.AWAITED:
        expedite(core, sharing.awaited)
    return Wait(sharing.awaited, core.limits.peer_wait_seconds)


def back_up(
    core: Core, model: Model, replica: Replica, rows: Sequence[int], urgency: Urgency = Urgency.BACKGROUND
) -> Ticket | None:
    """Store the rows (root first) that have a READY device copy and no host copy; as many as the host can take, where
    no more than a turn's worth is evicted for them: a caller with more makes room before, by ``has_backup_room``.

    Best effort: a host pool without room, or a mover without, ends it silently, because the device copies are still
    there. By default it has no waiter yet.
    """
    blocks, place = model.blocks, replica.place
    wanted = _unsaved(blocks.host, place, rows)
    if not wanted or not may_submit(core, model, replica):
        return None
    make_host_room(core, model, list(map(len, parts_of(blocks, place, wanted))))
    wanted = wanted[: blocks.host.free_blocks]
    if not wanted:
        return None
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, urgency)
    ticket.rows = wanted[:]
    coming = start_backup(blocks, place, wanted, ticket.id)
    submit(core, model, ticket, store_pairs(place, coming), layered=False)
    return ticket


def back_up_reused(core: Core, model: Model, replica: Replica, row: int) -> None:
    """Count a reuse for every block of the path down to ``row`` that has no host copy yet, and back up those due; where
    there are windows all of them, for it is behind ``row`` that a prompt can go on.

    The walk ends at the first block with a host copy, so each block is counted ``threshold`` times at most.
    """
    blocks = model.blocks
    index = blocks.index
    due, path = list[int](), list[int]()
    if not any(pool.capacity for pool in blocks.host.pools):
        return
    while row != NO_ROW and not blocks.host.is_present(row):
        index.reuses[row] = min(index.reuses[row] + 1, 0xFFFF)
        path.append(row)
        if core.writing.is_due(index.reuses[row]):
            due.append(row)
        row = index.parent[row]
    if due and blocks.host.window_groups:
        due = path
    back_up(core, model, replica, due[::-1])


def has_backup_room(core: Core, model: Model, replica: Replica, rows: Sequence[int]) -> bool:
    """True where ``back_up`` finds as much room on the host for ``rows`` as there can be. Else a turn's worth was
    evicted: ask again in another turn."""
    blocks, place = model.blocks, replica.place
    wanted = list(map(len, parts_of(blocks, place, _unsaved(blocks.host, place, rows))))
    return not wanted[blocks.host.lead] or make_host_room(core, model, wanted)


def _unsaved(host: Place, place: Place, rows: Sequence[int]) -> array[int]:
    """Those of ``rows`` that a place has whole and the host has not."""
    given = array("i", rows)
    is_new = (host.states_of(host.lead, given) == ABSENT) & (place.states_of(place.lead, given) == READY)
    return array_of(column(given)[is_new])
