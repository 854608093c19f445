"""Operators' actions: drain, evict, take a model out of service and back."""

from __future__ import annotations

from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.apply_evictions import remember_dropped
from cachesvc.ledger.index.reuse_stats import Miss
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pages.change_log import Cause
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import Tier

EVICTABLE_TIERS = (Tier.DEVICE.value, Tier.HOST.value)


def drain(core: Core) -> int:
    """Open nothing new from now on; returns how many leases are still live."""
    core.ledger.draining = True
    return sum(lease.state is LeaseState.LIVE for lease in core.ledger.leases.values())


def require_tier(tier: str) -> None:
    """Raises InvalidRequest for what is not a tier that blocks are evicted from."""
    if tier not in EVICTABLE_TIERS:
        raise InvalidRequest(f"tier {tier!r} is neither 'device' nor 'host'")


def distrust(model: Model, why: str) -> None:
    """Serve nothing of a model until it was verified: a change to it broke half-way. The first reason is kept."""
    model.distrust(why)


def trust(core: Core, model_id: int) -> None:
    """Put a model back into service after a Verify found it consistent. Raises NotFound."""
    core.ledger.model(model_id).suspect = ""


def evict(core: Core, model_id: int, tier: str, count: int) -> int:
    """Drop up to ``count`` (0: all) unpinned blocks of a model from a tier, in eviction order, without saving them.

    Returns the number of evicted blocks. Its time grows with ``count``. Raises NotFound, InvalidRequest.
    """
    require_tier(tier)
    model = core.ledger.model(model_id)
    ledger = model.blocks
    places = [ledger.host] if tier == Tier.HOST.value else [replica.place for replica in model.replicas]
    evicted = 0
    for place in places:
        wanted = (count - evicted) if count else len(ledger.index)
        if wanted <= 0:
            break
        if place is ledger.host:
            plan, _ = model.evictor.plan_host(wanted)
        else:
            plan, _ = model.evictor.plan_device(place, wanted, to_host=False, saves=False)
        plan.cause = Cause.OPERATOR
        model.evictor.carry_out(plan)
        evicted += len(plan.drops)
    remember_dropped(core, model, Miss.OPERATOR)
    return evicted
