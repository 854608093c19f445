"""Prefetch: load a prefix towards the device ahead of its use; nothing is held once it is there."""

from __future__ import annotations

from cachesvc.flows.allocate import allocate
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core, ticket_view
from cachesvc.flows.match import open_on_hit
from cachesvc.flows.peers import Sharing
from cachesvc.flows.release import let_go
from cachesvc.model.answers import Prefetched, Wait
from cachesvc.model.errors import CacheError
from cachesvc.model.transfer import Urgency


def prefetch(core: Core, call: Call, keys: bytes, sharing: Sharing | None = None) -> Prefetched | Wait:
    """Start loading what of ``keys`` lies on the host, in the background until somebody needs it.

    With ``sharing`` also what other replicas have; where it must come through the host, that is waited for.
    It works as a sequence of the daemon's own (its id is negative) that ends when its loads do. Raises PoolExhausted,
    InvalidRequest.
    """
    lease = call.lease
    sequence_id = min([0, *lease.sequences]) - 1
    opened = open_on_hit(core, call, sequence_id, keys, 0, sharing)
    if isinstance(opened, Wait):
        begun = sharing.ticket if sharing is not None else None
        return opened if sharing is None or begun is None else Prefetched(sharing.blocks, (ticket_view(begun),))
    hit, _ = opened
    sequence = lease.sequences[sequence_id]
    try:
        granted = allocate(core, call, sequence_id, hit.blocks, Urgency.BACKGROUND)
    except CacheError:
        let_go(core, lease, sequence)
        raise
    if isinstance(granted, Wait):
        let_go(core, lease, sequence)
        return granted
    if not granted.tickets:
        let_go(core, lease, sequence)
    return Prefetched(hit.blocks, granted.tickets)
