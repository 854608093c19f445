"""Make room in a replica's device pools: evict at once what can go at once, drain the rest."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.flows.backup import submit_store
from cachesvc.flows.core import Core, exhausted, remember_dropped, wait_for
from cachesvc.ledger.evict import drop_idle_windows, evictable_pages, idle_windows
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import Place
from cachesvc.model.answers import Wait
from cachesvc.model.transfer import Direction, Urgency

DRAIN_FAILURES = 3
"""Write-backs that fail in a row before evictions go on without them."""
TRY_AGAIN_EVERY = 64
"""Evictions until one is saved again: whoever waits for it waits for one failure more."""


def make_room(core: Core, model: Model, replica: Replica, wanted: list[int]) -> Wait | None:
    """See to it that group g has ``wanted[g]`` free pages on the replica; None when it has them now.

    A Wait names the write-backs that will free the pages. Raises PoolExhausted when the whole demand cannot be met;
    nothing is evicted then.
    """
    place = replica.place
    for group in place.window_groups:
        short = wanted[group] - place.pools[group].free
        if short > 0 and idle_windows(model.blocks, place, group) < short:
            return _wait_or_refuse(core, model, replica, group, wanted[group])
    shortage = max((wanted[group] - place.pools[group].free for group in place.full_groups), default=0)
    if shortage > 0 and (wait := _evict_blocks(core, model, replica, shortage, wanted)) is not None:
        return wait
    for group in place.window_groups:
        drop_idle_windows(model.blocks, place, group, wanted[group] - place.pools[group].free)
    return None


def _evict_blocks(core: Core, model: Model, replica: Replica, shortage: int, wanted: list[int]) -> Wait | None:
    place = replica.place
    draining = [t for t in core.ledger.tickets.of_replica(model.id, replica.id, Direction.STORE) if t.drains]
    coming = sum(len(ticket.drains) for ticket in draining)
    if shortage > coming:
        saves = core.writing.copies_when_evicted and _has_host(model)
        plan, met = model.evictor.plan_device(place, shortage - coming, to_host=saves and _is_worth_saving(replica))
        if not met and saves and replica.failed_drains >= DRAIN_FAILURES:
            plan, met = model.evictor.plan_device(place, shortage - coming, to_host=True)
        if not met:
            group = max(place.full_groups, key=lambda g: wanted[g] - place.pools[g].free)
            return _wait_or_refuse(core, model, replica, group, wanted[group])
        drains = model.evictor.carry_out(plan)
        core.count("evictions", len(plan.drops))
        core.count("host_evictions", len(plan.host_drops))
        remember_dropped(core, model)
        if drains:
            draining.append(submit_store(core, model, replica, [], drains, Urgency.AWAITED))
    if all(place.pools[group].free >= wanted[group] for group in place.full_groups):
        return None
    return wait_for(core, (ticket.id for ticket in draining))


def _wait_or_refuse(core: Core, model: Model, replica: Replica, group: int, wanted: int) -> Wait:
    """Wait where the end of running transfers can meet the demand. Raises PoolExhausted where it cannot."""
    place, book = replica.place, core.ledger.tickets
    pool = place.pools[group]
    running = [t for direction in Direction for t in book.of_replica(model.id, replica.id, direction)]
    readers = book.reading(model.id, replica.id)
    running += readers
    if running:
        moves = sum(move.is_own and move.group == group for ticket in running for move in ticket.moves)
        unpinned = [ticket.source[1] for ticket in readers if ticket.source is not None]
        if pool.free + moves + _evictable(model, place, group, after_flights=True, unpinned=unpinned) >= wanted:
            return wait_for(core, (ticket.id for ticket in running))
    raise exhausted(pool, wanted, _evictable(model, place, group, after_flights=False))


def _evictable(model: Model, place: Place, group: int, *, after_flights: bool, unpinned: Sequence[int] = ()) -> int:
    if group in place.full_groups:
        return evictable_pages(model.blocks, place, after_flights=after_flights, unpinned=unpinned)
    return idle_windows(model.blocks, place, group, after_flights=after_flights)


def _is_worth_saving(replica: Replica) -> bool:
    """False while write-backs fail: what cannot be saved is dropped, or nobody would ever have room again. Now and then
    one is tried."""
    if replica.failed_drains < DRAIN_FAILURES:
        return True
    replica.unsaved += 1
    return replica.unsaved % TRY_AGAIN_EVERY == 0


def _has_host(model: Model) -> bool:
    return any(pool.usable for pool in model.blocks.host.pools)
