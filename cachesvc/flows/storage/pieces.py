"""A prefix in storage that the host cannot hold whole: each piece goes on to the device before the next one comes."""

from __future__ import annotations

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import TURN
from cachesvc.flows.transfer.loads import bring, loads_of
from cachesvc.flows.transfer.make_room import make_room
from cachesvc.flows.transfer.replicas import Sharing
from cachesvc.flows.transfer.transfers import may_submit, wait_for
from cachesvc.flows.transfer.unstage import unstage
from cachesvc.ledger.holds import Prefetch
from cachesvc.ledger.index.block_ledger import Hit
from cachesvc.model.answers import Wait
from cachesvc.model.errors import LimitExceeded, PoolExhausted
from cachesvc.model.transfer import Urgency


def pass_on(core: Core, call: Call, hit: Hit, sharing: Sharing, seconds: float) -> Wait | None:
    """Bring what has come of a hit onto the device, and free its pages on the host; None once that is done, or where
    the device has no room (``sharing.in_pieces`` ends then). Waits for ``seconds`` at most."""
    if hit.blocks == hit.device_blocks:
        return _free_host(core, call, sharing)
    model, replica = call.model, call.replica
    held = Prefetch(model.blocks, replica.place, call.lease.prefetches)
    held.hold(hit, core.ledger.stamp())
    try:
        loads = loads_of(core, model, replica, held.rest(), held.sealed, held.hit_blocks)
        if loads.blocked:
            return wait_for(core, loads.blocked)._replace(seconds=seconds)
        if not may_submit(core, model, replica, call.lease.party):
            sharing.in_pieces = False
            return None
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
        if wait is not None:
            return wait._replace(seconds=seconds) if wait.tickets else wait
        tickets = bring(core, call, held, loads, Urgency.AWAITED)
        sharing.passed_on = hit.blocks
        return Wait(tuple(ticket.id for ticket in tickets), seconds)
    except (PoolExhausted, LimitExceeded):
        sharing.in_pieces = False
        return None
    finally:
        if not held.loads:
            held.let_go()


def _free_host(core: Core, call: Call, sharing: Sharing) -> Wait | None:
    """Free host pages of the piece that is on the device; a turn's worth."""
    fetch, model = sharing.fetch, call.model
    assert fetch is not None, "a piece has come"
    left = core.turns.evicted
    for key in reversed(fetch.keys[: fetch.admitted]):
        left -= unstage(model, key)
        if left <= 0:
            return TURN
    return None
