"""Make room in a replica's device pools: drop blocks that have another copy, drain the rest.

A call that must wait for drains keeps what is free, and what its drains free, by a reservation: others that come
meanwhile evict for themselves. What the call relies on (``Keep``) is held here, while victims are chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter

from cachesvc.flows.core import TURN, Call, Core, Count
from cachesvc.flows.transfers import carry_out, may_submit, require_transfer, store_pairs, submit, wait_for
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.page_pool import PagePool, Reservation, expire
from cachesvc.ledger.pins import Keep, kept
from cachesvc.ledger.planner import (
    BlockDemand,
    EvictionPlan,
    Spares,
    demand_of,
    drop_idle_copies,
    evictable_pages,
    idle_windows,
    no_row,
    transfers_here,
)
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.answers import Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import Direction, PageState, Urgency

DRAIN_FAILURES = 3
"""Write-backs that fail in a row before evictions go on without them."""
LOOKS_FOR_NOTHING = 64
LOOKS_A_PAGE = 4
"""Candidates that ``free_some`` looks at, in all and for each page: most can go, and where they cannot it gives up."""
DRAINS_AT_ONCE = 32
"""Write-backs under way for a call that evicts in turns: more would hold no link busier."""
MOST_AWAITED = 256
"""Transfers that a call waits for, the oldest of its replica: whichever ends, it looks again."""
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
        if place.lacks(wanted):
            room = None if waiter is None else waiter.reserve()
            with kept(call.model.blocks, place, keep):
                wait = _evict(core, call, wanted, waiter)
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

    It refuses nothing, waits for nothing, and evicts no more than in one slice. Returns how many pages of a group go at
    most, now or, for ``room``, once they are saved.
    """
    blocks, place = call.model.blocks, call.replica.place
    draining = _draining(core, call, room)
    left = _without_draining(place, wanted, draining)
    going = _drop_spent(core, call, left)
    going = max(going, drop_idle_copies(blocks, place, left, core.turns.evicted, cheap=True))
    demand = demand_of(place, left)
    if (short := demand.left) > 0:
        turn = _turn(core, call.model)
        looks = LOOKS_FOR_NOTHING + LOOKS_A_PAGE * min(short, turn)
        plan, _ = _plan(core, call, demand, turn, looks)
        if not plan.drains or may_submit(core, call.model, call.replica, call.lease.party):
            draining += _carry_out(core, call, plan, room)
            left = _without_draining(place, wanted, draining)
            going = max(going, plan.found)
    return max(going, drop_idle_copies(blocks, place, left, core.turns.evicted))


def _evict(core: Core, call: Call, wanted: Sequence[int], waiter: OpenSequence | None) -> Wait | None:
    """Make room in every pool that is short: first by windowed copies that no hit has used, in a pool that they share
    with full groups, then by blocks, then by other idle windowed copies."""
    blocks, place, most = call.model.blocks, call.replica.place, core.turns.evicted
    draining = _draining(core, call, None if waiter is None else waiter.room)
    left = _without_draining(place, wanted, draining)
    if place.window_groups:
        for groups, full, short in zip(place.shares, place.full_in, place.short_of(wanted), strict=True):
            if short > 0 and full < len(groups) and _evictable(call.model, place, groups, after_flights=False) < short:
                return _wait_or_refuse(core, call, groups, wanted, waiter)
        is_slice_over = bool(place.kin) and _drop_spent(core, call, left) >= most
        if not is_slice_over and place.has_shared_pools:
            is_slice_over = drop_idle_copies(blocks, place, left, most, cheap=True) >= most
        if is_slice_over:
            return TURN if place.lacks(wanted) else None
    if demand_of(place, wanted).left > 0:
        wait = _evict_blocks(core, call, wanted, waiter, draining)
        if wait is not None:
            return wait
    if place.window_groups:
        drop_idle_copies(blocks, place, wanted, most)
        if place.lacks(wanted):
            return TURN
    return None


def _drop_spent(core: Core, call: Call, wanted: Sequence[int]) -> int:
    """Drop blocks behind which no prompt can go on, a slice's at most; returns how many. They are worth no copy."""
    place, most = call.replica.place, core.turns.evicted
    if not place.kin or (demand := demand_of(place, wanted)).left <= 0:
        return 0
    plan, _ = call.model.evictor.plan_device(place, demand, to_host=False, most_work=most, saves=False, spent_only=True)
    carry_out(core, call.model, plan)
    return len(plan.drops)


def _evict_blocks(
    core: Core, call: Call, wanted: Sequence[int], waiter: OpenSequence | None, draining: list[Ticket]
) -> Wait | None:
    """Evict blocks towards the demand of the full groups, for what ``draining`` does not bring. None: it is met."""
    place, room, party = call.replica.place, None if waiter is None else waiter.room, call.lease.party
    left = _without_draining(place, wanted, draining)
    demand = demand_of(place, left)
    short = demand.left
    # The link is as busy as it can be, or has no room for a further transfer: the next look is at the end of one.
    if short > 0 and len(draining) >= DRAINS_AT_ONCE:
        return wait_for(core, (ticket.id for ticket in draining))
    if short > 0:
        turn = _turn(core, call.model)
        has_begun = room is not None and room.is_open
        is_beyond = turn < short and not has_begun and evictable_pages(call.model.blocks, place) < short
        plan, met = _plan(core, call, demand, turn)
        if is_beyond or not met:
            if place.has_shared_pools and drop_idle_copies(call.model.blocks, place, left, core.turns.evicted):
                return TURN
            by_pool = zip(place.short_of(wanted), place.full_in, place.shares, strict=True)
            _, shortest = max((lacking, groups) for lacking, full, groups in by_pool if full)
            return _wait_or_refuse(core, call, shortest, wanted, waiter)
        if plan.drains and draining and not may_submit(core, call.model, call.replica, party):
            return wait_for(core, (ticket.id for ticket in draining))
        if plan.drains:
            require_transfer(core, call.model, call.replica, party)
        draining += _carry_out(core, call, plan, room)
        if demand.left > 0:
            return TURN
    if demand_of(place, wanted).left <= 0:
        return None
    return wait_for(core, (ticket.id for ticket in draining))


def _turn(core: Core, model: Model) -> int:
    """Blocks that are evicted in a slice: half as many where each may have another one evicted on the host."""
    host = model.blocks.host
    is_host_full = (
        core.writing.copies_when_evicted and _has_host(model) and host.pools[host.lead].free < core.turns.evicted
    )
    return max(1, core.turns.evicted // 2) if is_host_full else core.turns.evicted


def _draining(core: Core, call: Call, room: Reservation | None) -> list[Ticket]:
    """Running evictions whose pages this call may count on: its own, and those without a waiter."""
    return [
        ticket
        for ticket in core.ledger.tickets.of_replica(call.model.id, call.replica.id, Direction.STORE)
        if ticket.drains and (ticket.room is None or ticket.room is room or not ticket.room.is_open)
    ]


def _without_draining(place: Place, wanted: Sequence[int], draining: Sequence[Ticket]) -> list[int]:
    """``wanted[g]`` pages of each group without those that running evictions free: nothing need go for them."""
    rows = [drain.row for ticket in draining for drain in ticket.drains]
    return [count - place.pages_in((group,), rows) for group, count in enumerate(wanted)]


def _plan(
    core: Core, call: Call, demand: BlockDemand, turn: int, looks: int = sys.maxsize
) -> tuple[EvictionPlan, bool]:
    """A slice's victims towards ``demand``; what is evicted is saved where that is the policy, and where it can be."""
    model, place = call.model, call.replica.place
    saves = core.writing.copies_when_evicted and _has_host(model)
    saves_now = saves and _is_worth_saving(call.replica) and may_submit(core, model, call.replica, call.lease.party)
    host, blocks = model.blocks.host, min(demand.left, turn)
    if saves_now and host.has_shared_pools and blocks > host.free_blocks:
        # Windowed copies that no hit has used go first, before any block goes to the host.
        pages = [blocks if group in host.full_groups else 0 for group in range(len(host.pools))]
        drop_idle_copies(model.blocks, host, pages, core.turns.evicted, cheap=True)
    plan_device, share = model.evictor.plan_device, core.writing.share
    before = demand.copy()
    plan, met = plan_device(place, demand, to_host=saves_now, share=share, most_looks=looks, most_work=turn)
    if not met and saves and not saves_now:
        demand.go_back(before)
        plan, met = plan_device(place, demand, to_host=True, most_looks=looks, most_work=turn)
    return plan, met


def _carry_out(core: Core, call: Call, plan: EvictionPlan, room: Reservation | None) -> list[Ticket]:
    """Carry a plan out; returns the ticket of its drains, if it has any."""
    model, replica = call.model, call.replica
    if not plan.drains:
        carry_out(core, model, plan)
        return []
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, Urgency.AWAITED, party=call.lease.party)
    ticket.drains = plan.drains
    ticket.room = room
    coming = carry_out(core, model, plan, ticket.id)
    submit(core, model, ticket, store_pairs(replica.place, coming), layered=False)
    return [ticket]


def make_host_room(core: Core, model: Model, wanted: Sequence[int], spares: Spares = no_row) -> bool:
    """Free host pages towards ``wanted[g]`` of group g, a turn's worth: first windowed copies that no hit has used, in
    pools that groups share, then blocks with all their copies. True where there is as much room as there can be; else
    ask again in another turn. ``spares``: as of ``plan_host_room``."""
    host = model.blocks.host
    if not host.lacks(wanted):
        return True
    went = 0
    if host.has_shared_pools:
        went = drop_idle_copies(model.blocks, host, wanted, core.turns.evicted, cheap=True)
    if host.lacks(wanted):
        plan, _ = model.evictor.plan_host_room(within_turn(core, host, wanted), spares)
        carry_out(core, model, plan)
        went += plan.found + len(plan.window_drops)
    return not went or not host.lacks(wanted)


def within_turn(core: Core, host: Place, wanted: Sequence[int]) -> list[int]:
    """Pages of each group that a turn makes room for: of each pool what is free, and as many as are evicted in one."""
    now = list(wanted)
    for groups, short in zip(host.shares, host.short_of(wanted), strict=True):
        beyond = short - core.turns.evicted
        for group in groups:
            less = min(now[group], max(0, beyond))
            now[group] -= less
            beyond -= less
    return now


def _wait_or_refuse(
    core: Core, call: Call, groups: tuple[int, ...], wanted_of: Sequence[int], waiter: OpenSequence | None
) -> Wait:
    """Wait where the end of running transfers can meet the demand of the pool of ``groups``. Operators' pins end where
    the only sequence with pages of the replica cannot go on beside them, and can without. Raises PoolExhausted where
    nothing helps."""
    model, replica, place, book = call.model, call.replica, call.replica.place, core.ledger.tickets
    pool, wanted = place.pools[groups[0]], sum(wanted_of[group] for group in groups)
    room, own = (None, 0) if waiter is None else (waiter.room, waiter.device_pages(groups))
    # Of others' transfers there may be thousands: C code alone goes through them.
    of_replica = (book.of_replica(model.id, replica.id, direction) for direction in Direction)
    readers = book.reading(model.id, replica.id)
    running = [*chain.from_iterable(of_replica), *readers]
    moving = chain.from_iterable(map(attrgetter("moves"), running))
    moves = sum(len(moved.own) for moved in moving if moved.group in groups)
    unpinned = [ticket.source[1] for ticket in readers if ticket.source is not None]
    coming = moves + _evictable(model, place, groups, after_flights=True, unpinned=unpinned)
    promised = sum(
        other.wanted[group] - other.held[group] for other in place.reservations if other is not room for group in groups
    )
    if pool.unreserved + coming - promised >= wanted:  # what another replica sends to the host is in flight here, too
        awaited = dict.fromkeys([*map(attrgetter("id"), running), *transfers_here(model.blocks, place)])
        if awaited:
            return wait_for(core, islice(awaited, MOST_AWAITED))
    if any(chore.model == model.id and chore.gives_back for chore in core.chores):
        return TURN
    if waiter is not None and wanted + own <= pool.capacity and _is_alone(core, model, replica, waiter):
        kept = model.pins.pages(model.blocks, place).by_pool()[place.shares.index(groups)]
        if kept and pool.unreserved + coming + kept - promised >= wanted:
            core.count(Count.PINS_ENDED_EARLY, len(model.pins.leave(place)))
            return TURN
    raise exhausted(pool, wanted, _evictable(model, place, groups, after_flights=False), own)


def _is_alone(core: Core, model: Model, replica: Replica, waiter: OpenSequence) -> bool:
    """True where no other sequence has pages of the replica: no release of one can help ``waiter``."""
    leases = core.ledger.leases.values()
    mine = [lease for lease in leases if (lease.model, lease.replica) == (model.id, replica.id)]
    others = chain.from_iterable(lease.sequences.values() for lease in mine)
    return not any(each.is_on_device for each in others if each is not waiter)


def room_left(place: Place) -> tuple[list[int], list[int]]:
    """Pages of each group that can be taken now, and that eviction can give, some of them once transfers have ended.

    Both are counted all the time: asking costs nothing, however many there are.
    """
    blocks = max(0, place.unprotected)
    evictable = [blocks] * len(place.pools)
    for group, idle in place.window_leaves.items():
        evictable[group] = len(idle)
    if place.has_shared_pools:
        for groups in place.shares:
            of_pool = sum(evictable[group] for group in groups)
            for group in groups:
                evictable[group] = of_pool
    return [pool.unreserved for pool in place.pools], evictable


def exhausted(pool: PagePool, wanted: int, evictable: int, own: int = 0) -> PoolExhausted:
    """The refusal of a pool, with its numbers. What is reserved counts as held. ``own``: pages that the sequence which
    asks has there."""
    quarantined = pool.counts[PageState.QUARANTINED]
    return PoolExhausted(
        pool=pool.name if pool.usable == pool.capacity else f"{pool.name} (only {pool.usable} pages have arrived yet)",
        wanted=wanted,
        free=pool.unreserved,
        evictable=evictable,
        pinned=pool.usable - pool.unreserved - quarantined - evictable,
        quarantined=quarantined,
        capacity=pool.capacity,
        own=own,
    )


def _evictable(
    model: Model, place: Place, groups: Sequence[int], *, after_flights: bool, unpinned: Sequence[int] = ()
) -> int:
    """Pages that eviction can give of the pool of ``groups``: a block has one in each full group, and windowed copies
    that are idle go by themselves or with their block."""
    found = 0
    full = sum(group in place.full_groups for group in groups)
    if full:
        found = full * evictable_pages(model.blocks, place, after_flights=after_flights, unpinned=unpinned)
    windowed = (group for group in groups if group in place.window_leaves)
    return found + sum(idle_windows(model.blocks, place, group, after_flights=after_flights) for group in windowed)


def _is_worth_saving(replica: Replica) -> bool:
    """False while write-backs fail: blocks that cannot be saved are dropped, or no call would find room again. One is
    retried now and then."""
    if replica.failed_drains < DRAIN_FAILURES:
        return True
    replica.unsaved += 1
    return replica.unsaved % TRY_AGAIN_EVERY == 0


def _has_host(model: Model) -> bool:
    return any(pool.usable for pool in model.blocks.host.pools)
