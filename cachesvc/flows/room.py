"""Make room in a replica's device pools: evict at once what can go at once, drain the rest."""

from __future__ import annotations

from cachesvc.flows.backup import submit_store
from cachesvc.flows.core import Core, exhausted
from cachesvc.ledger.evict import evictable_pages
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import Place
from cachesvc.ledger.tickets import PageMove
from cachesvc.model.answers import Wait
from cachesvc.model.words import ABSENT, READY, PageState


def make_room(core: Core, model: Model, replica: Replica, wanted: list[int]) -> Wait | None:
    """See to it that group g has ``wanted[g]`` free pages on the replica; None when it has them now.

    A Wait names the write-backs that will free the pages. Raises PoolExhausted when the whole demand cannot be met;
    nothing is evicted then.
    """
    place = replica.place
    shortage = max((wanted[group] - place.pools[group].free for group in place.full_groups), default=0)
    if shortage > 0 and (wait := _evict_blocks(core, model, replica, shortage, wanted)) is not None:
        return wait
    for group in place.window_groups:
        short = wanted[group] - place.pools[group].free
        if short > 0:
            _evict_window_pages(model, place, group, short, wanted[group])
    return None


def _evict_blocks(core: Core, model: Model, replica: Replica, shortage: int, wanted: list[int]) -> Wait | None:
    place = replica.place
    draining = [
        ticket
        for ticket in core.ledger.tickets.running.values()
        if ticket.model == model.id and ticket.replica == replica.id and (ticket.drains or _swaps_out(ticket.moves))
    ]
    coming = sum(len(ticket.drains) for ticket in draining)
    if shortage > coming:
        plan, met = model.evictor.plan_device(
            place, shortage - coming, to_host=core.writing.copies_when_evicted and _has_host(model)
        )
        if not met:
            if draining:
                return Wait(tuple(ticket.id for ticket in draining))
            pool = max(
                (place.pools[g] for g in place.full_groups),
                key=lambda p: wanted[place.pools.index(p)] - p.free,
            )
            raise exhausted(pool, wanted[place.pools.index(pool)], evictable_pages(model.blocks, place))
        drains = model.evictor.carry_out(plan)
        core.count("evictions", len(plan.drops))
        core.count("host_evictions", len(plan.host_drops))
        if drains:
            draining.append(submit_store(core, model, replica, [], drains))
    if all(place.pools[group].free >= wanted[group] for group in place.full_groups):
        return None
    return Wait(tuple(ticket.id for ticket in draining))


def _swaps_out(moves: list[PageMove]) -> bool:
    return bool(moves)


def _has_host(model: Model) -> bool:
    return any(pool.usable for pool in model.blocks.host.pools)


def _evict_window_pages(model: Model, place: Place, group: int, short: int, wanted: int) -> None:
    """Drop sealed pages of a windowed group that no window holds, oldest first, the front of a prompt before its end."""
    index = model.blocks.index
    states, pins = place.states[group], place.window_pins[group]
    idle = [
        (index.stamp[row], index.depth[row], row)
        for row in index.rows.values()
        if states[row] == READY and pins[row] == 0 and index.flights[row] == 0
    ]
    if len(idle) < short:
        raise exhausted(place.pools[group], wanted, len(idle))
    idle.sort()
    for _, _, row in idle[:short]:
        page = place.pages[group][row]
        place.move(group, row, ABSENT)
        place.pools[group].move(page, PageState.FREE)
