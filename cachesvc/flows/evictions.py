"""Carry evictions out: they are counted, and what leaves the index is remembered, within bounds."""

from __future__ import annotations

from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.ledger.blocks import Filling
from cachesvc.ledger.evict import EvictionPlan
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.reuse import Miss


def carry_out(core: Core, model: Model, plan: EvictionPlan, ticket: int = 0) -> Filling:
    """Evict what was planned; returns the host copies that the drains bring, with ``ticket``."""
    coming = model.evictor.carry_out(plan, ticket)
    is_host = plan.place is model.blocks.host
    core.count(Count.HOST_EVICTIONS, len(plan.drops if is_host else plan.host_drops))
    if not is_host:
        core.count(Count.EVICTIONS, len(plan.drops))
    remember_dropped(core, model)
    return coming


def remember_dropped(core: Core, model: Model, cause: Miss = Miss.EVICTED) -> None:
    """Remember which blocks left the index and why, and for the write policy their reuse counts."""
    dropped = model.blocks.dropped
    if not dropped:
        return
    limit = core.limits.remembered_blocks // len(core.ledger.models)
    model.reuse.dropped(((key, tier) for key, _, tier in dropped), cause, limit)
    if core.writing.counts_reuse:
        for key, reuses, _ in dropped:
            if reuses:
                model.remembered[key] = reuses
                model.remembered.move_to_end(key)
        while len(model.remembered) > core.writing.remember:
            model.remembered.popitem(last=False)
    dropped.clear()
