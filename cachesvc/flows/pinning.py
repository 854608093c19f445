"""Pins of operators: keep a resident prefix for a time, within ``Limits.pin_share`` of each pool.

Pools are a model's, and a model is a tenant's, so a pin takes pages from its own tenant alone. It keeps no idle model
from being evicted for another one.
"""

from __future__ import annotations

import math

from cachesvc.flows.core import Core
from cachesvc.flows.transfers import remember_dropped
from cachesvc.ledger.change_log import Cause
from cachesvc.ledger.ledger import LeaseState, Model
from cachesvc.ledger.pins import KeptCopies, OperatorPin, keepable
from cachesvc.ledger.reuse_stats import Miss
from cachesvc.model.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, QuotaExceeded
from cachesvc.model.words import Tier

MOST_SECONDS = 7 * 24 * 3600.0


def pin(core: Core, model: Model, key: bytes, seconds: float, now: float) -> OperatorPin:
    """Keep the prefix that ends at ``key`` for ``seconds`` where it is. The same prefix again: for that long from now.

    Raises InvalidRequest (seconds), NotFound (the block; the model, evicted since it was looked up), Unavailable (it is
    out of service), Conflict (the prefix is not resident as a whole), LimitExceeded (pins of the model), QuotaExceeded
    (pages of a pool). Nothing has changed then.
    """
    require_time(seconds)
    if core.ledger.models.get(model.id) is not model:
        raise NotFound("model", model.id, "it was evicted for another one; see ListModels (cachesvc models)")
    model.require_trusted()
    blocks, pins = model.blocks, model.pins
    row = blocks.index.rows.get(key)
    if row is None:
        raise NotFound("block", key.hex(), "it is not resident, or belongs to another model")
    known = pins.by_key.get(key)
    if known is None and len(pins.by_key) >= core.limits.pins_per_model:
        hint = "unpin another one, or pin a longer prefix that goes through several"
        raise LimitExceeded(f"pins of model {model.id}", len(pins.by_key) + 1, core.limits.pins_per_model, hint)
    kept = _kept(model, row)
    pins.count(blocks, kept)
    refusal = _over_quota(core, model, kept)
    if refusal is not None:
        pins.discount(kept)
        raise refusal
    made = OperatorPin(blocks, row, kept, now + seconds)
    pins.put(made)
    return made


def require_time(seconds: float) -> None:
    """Raises InvalidRequest for a time for which nothing can be pinned."""
    if not (0 < seconds <= MOST_SECONDS and math.isfinite(seconds)):
        raise InvalidRequest(f"seconds is {seconds:g}; a pin lasts more than 0 and at most {MOST_SECONDS:.0f} (a week)")


def unpin(model: Model, digits: str) -> OperatorPin:
    """End the pin on the one prefix whose key begins with these hexadecimal digits. Raises NotFound, InvalidRequest."""
    text = digits.strip().lower()
    found = [key for key in model.pins.by_key if key.hex().startswith(text)] if text else []
    if len(found) > 1:
        raise InvalidRequest(f"{text} names {len(found)} pins; give more digits")
    if not found or (ended := model.pins.end(found[0])) is None:
        raise NotFound("pin", text, "GetStatus (cachesvc status) shows those that are there")
    return ended


def expire_pins(core: Core, now: float) -> list[tuple[Model, OperatorPin]]:
    """End the pins whose time is over."""
    return [(model, ended) for model in core.ledger.models.values() for ended in model.pins.expire(now)]


def _kept(model: Model, row: int) -> list[KeptCopies]:
    """Copies to keep, on each replica that has a hit of the whole prefix, and on the host once. Raises Conflict."""
    blocks = model.blocks
    out: dict[int, KeptCopies] = {}
    for replica in model.replicas:
        for kept in keepable(blocks, row, replica.place) or ():
            known = out.setdefault(kept.place.number, KeptCopies(kept.place, kept.tip, {}))
            for group, rows in kept.windows.items():
                known.windows[group] = {**known.windows.get(group, {}), **rows}
    if not out:
        count = blocks.index.depth[row] + 1
        raise Conflict(
            f"no replica has the whole prefix of {count} blocks, in place or on the host (of a model with windows or "
            f"states, what the next token looks back to as well); have an engine compute or load it, then pin it"
        )
    return list(out.values())


def _over_quota(core: Core, model: Model, kept: list[KeptCopies]) -> QuotaExceeded | None:
    """The refusal where pins keep more than their share of a pool."""
    for each in kept:
        for groups, pages in zip(each.place.shares, model.pins.pages(model.blocks, each.place).by_pool(), strict=True):
            limit = int(core.limits.pin_share * each.place.pools[groups[0]].usable)
            if pages > limit:
                name = each.place.share_names(model.layout)[groups[0]] or model.layout.groups[groups[0]].name
                return QuotaExceeded(
                    model.tenant,
                    f"pinned pages on {each.place.name}, group {name}",
                    pages,
                    limit,
                    f"unpin another prefix, pin a shorter one, or raise pin_share (now {core.limits.pin_share:g} of "
                    "each pool) and reload",
                )
    return None


EVICTABLE_TIERS = (Tier.DEVICE.value, Tier.HOST.value)


def drain(core: Core) -> int:
    """Open nothing new from now on; returns how many leases are still live."""
    core.ledger.draining = True
    return sum(lease.state is LeaseState.LIVE for lease in core.ledger.leases.values())


def require_tier(tier: str) -> None:
    """Raises InvalidRequest for what is not a tier that blocks are evicted from."""
    if tier not in EVICTABLE_TIERS:
        raise InvalidRequest(f"tier {tier!r} is neither 'device' nor 'host'")


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
