"""Back up sealed blocks to the host: a store ticket whose device copies stay READY."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.make_room import make_host_room
from cachesvc.flows.transfer.transfers import may_submit, store_pairs, submit
from cachesvc.ledger.eviction.planner import parts_of, start_backup
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.numbers.int32s import array_of, column
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import ABSENT, READY


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
