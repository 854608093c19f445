"""Prefetch: load a prefix towards the device ahead of its use; nothing is held once it is there."""

from __future__ import annotations

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Core
from cachesvc.flows.match import open_on_hit
from cachesvc.flows.release import let_go
from cachesvc.model.answers import Prefetched, Wait
from cachesvc.model.errors import CacheError
from cachesvc.model.transfer import Urgency


def prefetch(core: Core, lease_id: str, keys: bytes, now: float) -> Prefetched | Wait:
    """Start loading what of ``keys`` lies on the host, in the background until somebody needs it.

    It works as a sequence of the daemon's own (its id is negative) that ends when its loads do. Raises PoolExhausted,
    LeaseLost, InvalidRequest.
    """
    lease = core.ledger.lease(lease_id)
    sequence_id = min([0, *lease.sequences]) - 1
    hit, _ = open_on_hit(core, lease_id, sequence_id, keys, 0, now)
    sequence = lease.sequences[sequence_id]
    try:
        granted = allocate(core, lease_id, sequence_id, hit.blocks, now, Urgency.BACKGROUND)
    except CacheError:
        let_go(core, lease, sequence)
        raise
    if isinstance(granted, Wait):
        let_go(core, lease, sequence)
        return granted
    if not granted.tickets:
        let_go(core, lease, sequence)
    return Prefetched(hit.blocks, granted.tickets)
