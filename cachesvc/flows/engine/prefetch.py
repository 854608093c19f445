"""Prefetch: load a prefix towards the device ahead of its use; nothing is held once it is there."""

from __future__ import annotations

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.engine.match import find_hit
from cachesvc.flows.transfer.loads import bring, loads_of
from cachesvc.flows.transfer.make_room import make_room
from cachesvc.flows.transfer.replicas import Sharing
from cachesvc.flows.transfer.transfers import require_transfer, ticket_view, wait_for
from cachesvc.ledger.holds import Prefetch
from cachesvc.model.answers import Prefetched, Wait
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.transfer import Urgency


def prefetch(core: Core, call: Call, keys: bytes, sharing: Sharing | None = None) -> Prefetched | Wait:
    """Start loading what of ``keys`` lies on the host, in the background until a flow waits for it.

    With ``sharing`` also what other replicas have; where it must come through the host, that is waited for. Raises
    InvalidRequest, LimitExceeded (prefetches, transfers), PoolExhausted, DaemonDraining.
    """
    lease, model, replica = call.lease, call.model, call.replica
    if len(lease.prefetches) >= core.limits.prefetches_per_lease:
        raise LimitExceeded(
            "prefetches of this lease under way", len(lease.prefetches) + 1, core.limits.prefetches_per_lease
        )
    hit = find_hit(core, call, keys, 0, sharing)
    if isinstance(hit, Wait):
        begun = sharing.ticket if sharing is not None else None
        return hit if sharing is None or begun is None else Prefetched(sharing.blocks, (ticket_view(begun),))
    held = Prefetch(model.blocks, replica.place, lease.prefetches)
    held.hold(hit, core.ledger.stamp())
    try:
        loads = loads_of(core, model, replica, held.rest(), held.sealed, held.hit_blocks)
        if loads.blocked:
            return wait_for(core, loads.blocked)
        if loads.is_transfer:
            require_transfer(core, model, replica, lease.party)
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
        if wait is not None:
            return wait
        tickets = bring(core, call, held, loads, Urgency.BACKGROUND)
        return Prefetched(hit.blocks, tuple(map(ticket_view, tickets)))
    finally:
        if not held.loads:  # all is in place, or nothing comes
            held.let_go()
