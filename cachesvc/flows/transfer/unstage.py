"""Host pages of blocks that are on their way through the host: freed once a device, or storage, has them.

Such blocks came from storage in pieces, because the host cannot hold their prefix whole, or from a device to be
written. Their copies on the host would keep out others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import begin
from cachesvc.ledger.eviction.planner import EvictionPlan
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model


def unstage(model: Model, key: bytes) -> int:
    """Free the host page of a landed block that a device has, and of those above it that had to wait for it; returns
    how many were freed. One whose host copy is the last one stays for good; one that is in use is tried again."""
    landed, index, host = model.stored.landed, model.blocks.index, model.blocks.host
    run: list[int] = []
    row = index.rows.get(key, NO_ROW)
    if row == NO_ROW:
        landed.discard(key)
    while row != NO_ROW and (name := index.key_of(row)) in landed:
        is_on_device = any(place.is_hittable(row) for place in index.places if place is not host)
        if not is_on_device or not host.is_hittable(row):
            landed.discard(name)
            break
        if host.pins[row] or index.flights[row] or host.children[row] != bool(run):
            break
        landed.discard(name)
        run.append(row)
        row = index.parent[row]
    if run:
        model.evictor.carry_out(EvictionPlan(host, drops=run))
    return len(run)


def unstage_all(core: Core, model: Model) -> None:
    """A load has ended: free what it no longer needs on the host, as a background task."""
    if model.stored.landed:
        begin(core.chores, model.id, partial(_unstage_some, core, model, iter(list(model.stored.landed))))


def _unstage_some(core: Core, model: Model, keys: Iterator[bytes]) -> bool:
    """A turn of it; True when all were looked at."""
    left = core.turns.evicted
    for key in keys:
        left -= max(1, unstage(model, key))
        if left <= 0:
            return False
    return True
