"""Make room in a replica's device pools: drop blocks that have another copy, drain the rest.

A call that must wait for drains keeps what is free, and what its drains free, by a reservation: others that come
meanwhile evict for themselves. What the call relies on (``Keep``) is held here, while victims are chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import TURN
from cachesvc.flows.transfer.apply_evictions import carry_out
from cachesvc.flows.transfer.transfers import may_submit, require_transfer, store_pairs, submit, wait_for
from cachesvc.ledger.eviction.planner import (
    EvictionPlan,
    drop_idle_windows,
    evictable_pages,
    idle_windows,
    transfers_here,
)
from cachesvc.ledger.index.pins import Keep, kept
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pages.page_pool import PagePool
from cachesvc.ledger.pages.reservations import Reservation, expire
from cachesvc.ledger.sequences import Sequence as OpenSequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.numbers.sharing import Party
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import PageState

DRAIN_FAILURES = 3
"""Write-backs that fail in a row before evictions go on without them."""
LOOKS_FOR_NOTHING = 64
LOOKS_A_PAGE = 4
"""Candidates that ``free_some`` looks at, in all and for each page: most can go, and where they cannot it gives up."""
DRAINS_AT_ONCE = 32
"""Write-backs under way for a call that evicts in turns: more would hold no link busier."""
TRY_AGAIN_EVERY = 64
"""After repeated failures, retry a write-back once every this number of evictions."""


def make_room(
    core: Core, call: Call, wanted: Sequence[int], keep: Keep, waiter: OpenSequence | None = None
) -> Wait | None:
    """See to it that group g has ``wanted[g]`` pages to take on the replica; None when it has them now.

    Nothing of ``keep`` goes. A Wait names the write-backs that will free the pages, or none where more is to be evicted
    than in one turn, and what there is of them is kept for the ``waiter`` until its call runs again. Raises
    PoolExhausted when the whole demand cannot be met; nothing is evicted then, but for what went in earlier turns.
    """
    place = call.replica.place
    if place.reservations:
        expire(place.reservations, call.now)
    room = None if waiter is None else waiter.room
    if room is not None:
        room.give_back()
    wait: Wait | None = None
    try:
        if any(count > pool.unreserved for count, pool in zip(wanted, place.pools, strict=True)):
            room = None if waiter is None else waiter.reserve()
            with kept(call.model.blocks, place, keep):
                wait = _evict(core, call.model, call.replica, wanted, room, call.lease.party)
    finally:  # it has what it wanted, or is refused: it no longer waits
        if room is not None and wait is None:
            room.release()
    return wait if wait is None or waiter is None else keep_room(core, call, wanted, waiter, wait)


def keep_room(core: Core, call: Call, wanted: Sequence[int], waiter: OpenSequence, wait: Wait = TURN) -> Wait:
    """Reserve what there is of ``wanted[g]`` pages for the call of ``waiter`` until it runs again."""
    room = waiter.reserve()
    room.keep(wanted, call.now + core.limits.reservation_seconds)
    return wait._replace(reserved=room)


def free_some(core: Core, call: Call, wanted: Sequence[int], room: Reservation) -> int:
    """Evict what is cold towards ``wanted[g]`` pages to take of group g, as far as can be had cheaply; for the stock.

    It refuses nothing, waits for nothing, and evicts no more than in one turn; returns how many pages of a group go at
    most, now or, for ``room``, once they are saved.
    """
    model, replica, place, party = call.model, call.replica, call.replica.place, call.lease.party
    short = _shortage(place, wanted) - sum(len(ticket.drains) for ticket in _draining(core, model, replica, room))
    going = 0
    if short > 0:
        turn = _turn(core, model)
        plan, _ = _plan(core, model, replica, short, turn, party, LOOKS_FOR_NOTHING + LOOKS_A_PAGE * min(short, turn))
        if not plan.drains or may_submit(core, model, replica, party):
            _carry_out(core, model, replica, plan, room, party)
            going = plan.found
    for group in place.window_groups:
        before = place.pools[group].unreserved
        drop_idle_windows(model.blocks, place, group, min(wanted[group] - before, core.turns.evicted))
        going = max(going, place.pools[group].unreserved - before)
    return going


def _evict(
    core: Core, model: Model, replica: Replica, wanted: Sequence[int], room: Reservation | None, party: Party
) -> Wait | None:
    place = replica.place
    for group in place.window_groups:
        short = wanted[group] - place.pools[group].unreserved
        if short > 0 and idle_windows(model.blocks, place, group) < short:
            return _wait_or_refuse(core, model, replica, group, wanted[group], room)
    if _shortage(place, wanted) > 0 and (wait := _evict_blocks(core, model, replica, wanted, room, party)) is not None:
        return wait
    for group in place.window_groups:
        short = wanted[group] - place.pools[group].unreserved
        drop_idle_windows(model.blocks, place, group, min(short, core.turns.evicted))
        if short > core.turns.evicted:
            return TURN
    return None


def _evict_blocks(
    core: Core, model: Model, replica: Replica, wanted: Sequence[int], room: Reservation | None, party: Party
) -> Wait | None:
    place = replica.place
    draining = _draining(core, model, replica, room)
    short = _shortage(place, wanted) - sum(len(ticket.drains) for ticket in draining)
    if short > 0 and len(draining) >= DRAINS_AT_ONCE:
        return wait_for(core, (ticket.id for ticket in draining))
    if short > 0:
        turn = _turn(core, model)
        has_begun = room is not None and room.is_open
        is_beyond = turn < short and not has_begun and evictable_pages(model.blocks, place) < short
        plan, met = _plan(core, model, replica, short, turn, party)
        if is_beyond or not met:
            group = max(place.full_groups, key=lambda g: wanted[g] - place.pools[g].unreserved)
            return _wait_or_refuse(core, model, replica, group, wanted[group], room)
        if plan.drains and draining and not may_submit(core, model, replica, party):
            return wait_for(core, (ticket.id for ticket in draining))
        if plan.drains:
            require_transfer(core, model, replica, party)
        draining += _carry_out(core, model, replica, plan, room, party)
        if plan.found < short:
            return TURN
    if _shortage(place, wanted) <= 0:
        return None
    return wait_for(core, (ticket.id for ticket in draining))


def _turn(core: Core, model: Model) -> int:
    """Blocks that are evicted in a turn: half as many where each may have another one evicted on the host."""
    host = model.blocks.host
    is_host_full = (
        core.writing.copies_when_evicted and _has_host(model) and host.pools[host.lead].free < core.turns.evicted
    )
    return max(1, core.turns.evicted // 2) if is_host_full else core.turns.evicted


def _shortage(place: Place, wanted: Sequence[int]) -> int:
    return max((wanted[group] - place.pools[group].unreserved for group in place.full_groups), default=0)


def _draining(core: Core, model: Model, replica: Replica, room: Reservation | None) -> list[Ticket]:
    """Running evictions whose pages this call may count on: its own, and those without a waiter."""
    return [
        ticket
        for ticket in core.ledger.tickets.of_replica(model.id, replica.id, Direction.STORE)
        if ticket.drains and (ticket.room is None or ticket.room is room or not ticket.room.is_open)
    ]


def _plan(
    core: Core, model: Model, replica: Replica, count: int, turn: int, party: Party, looks: int = sys.maxsize
) -> tuple[EvictionPlan, bool]:
    """A turn's victims; what is evicted is saved where that is the policy, and where it can be."""
    place = replica.place
    saves = core.writing.copies_when_evicted and _has_host(model)
    saves_now = saves and _is_worth_saving(replica) and may_submit(core, model, replica, party)
    share = core.writing.share
    plan_device = model.evictor.plan_device
    plan, met = plan_device(place, count, to_host=saves_now, share=share, most_looks=looks, most_work=turn)
    if not met and saves and not saves_now:
        plan, met = plan_device(place, count, to_host=True, most_looks=looks, most_work=turn)
    return plan, met


def _carry_out(
    core: Core, model: Model, replica: Replica, plan: EvictionPlan, room: Reservation | None, party: Party
) -> list[Ticket]:
    """Carry a plan out; returns the ticket of its drains, if it has any."""
    if not plan.drains:
        carry_out(core, model, plan)
        return []
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, Urgency.AWAITED, party=party)
    ticket.drains = plan.drains
    ticket.room = room
    coming = carry_out(core, model, plan, ticket.id)
    submit(core, model, ticket, store_pairs(replica.place, coming), layered=False)
    return [ticket]


def _wait_or_refuse(
    core: Core, model: Model, replica: Replica, group: int, wanted: int, room: Reservation | None
) -> Wait:
    """Wait where the end of running transfers can meet the demand. Raises PoolExhausted where it cannot."""
    place, book = replica.place, core.ledger.tickets
    pool = place.pools[group]
    running = [t for direction in Direction for t in book.of_replica(model.id, replica.id, direction)]
    readers = book.reading(model.id, replica.id)
    running += readers
    moves = sum(len(moved.own) for ticket in running for moved in ticket.moves if moved.group == group)
    unpinned = [ticket.source[1] for ticket in readers if ticket.source is not None]
    coming = moves + _evictable(model, place, group, after_flights=True, unpinned=unpinned)
    promised = sum(other.wanted[group] - other.held[group] for other in place.reservations if other is not room)
    if pool.unreserved + coming - promised >= wanted:  # what another replica sends to the host is in flight here, too
        awaited = dict.fromkeys([ticket.id for ticket in running] + transfers_here(model.blocks, place))
        if awaited:
            return wait_for(core, awaited)
    if any(chore.model == model.id and chore.gives_back for chore in core.chores):
        return TURN
    raise exhausted(pool, wanted, _evictable(model, place, group, after_flights=False))


def room_left(place: Place) -> tuple[list[int], list[int]]:
    """Pages of each group that can be taken now, and that eviction can give, some of them once transfers have ended.

    Both are counted all the time: asking costs nothing, however many there are.
    """
    blocks = max(0, place.unprotected)
    evictable = [blocks] * len(place.pools)
    for group, idle in place.window_leaves.items():
        evictable[group] = len(idle)
    return [pool.unreserved for pool in place.pools], evictable


def exhausted(pool: PagePool, wanted: int, evictable: int) -> PoolExhausted:
    """The refusal of a pool, with its numbers. What is reserved counts as held."""
    quarantined = pool.counts[PageState.QUARANTINED]
    return PoolExhausted(
        pool=pool.name if pool.usable == pool.capacity else f"{pool.name} (only {pool.usable} pages have arrived yet)",
        wanted=wanted,
        free=pool.unreserved,
        evictable=evictable,
        pinned=pool.usable - pool.unreserved - quarantined - evictable,
        quarantined=quarantined,
        capacity=pool.capacity,
    )


def _evictable(model: Model, place: Place, group: int, *, after_flights: bool, unpinned: Sequence[int] = ()) -> int:
    if group in place.full_groups:
        return evictable_pages(model.blocks, place, after_flights=after_flights, unpinned=unpinned)
    return idle_windows(model.blocks, place, group, after_flights=after_flights)


def _is_worth_saving(replica: Replica) -> bool:
    """False while write-backs fail: blocks that cannot be saved are dropped, or no call would find room again. One is
    retried now and then."""
    if replica.failed_drains < DRAIN_FAILURES:
        return True
    replica.unsaved += 1
    return replica.unsaved % TRY_AGAIN_EVERY == 0


def _has_host(model: Model) -> bool:
    return any(pool.usable for pool in model.blocks.host.pools)
