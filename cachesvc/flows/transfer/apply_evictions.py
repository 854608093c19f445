"""Apply eviction plans: count the drops, and remember the keys that leave the index, within bounds."""

from __future__ import annotations

from functools import partial

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import Chore
from cachesvc.flows.transfer.pending_writes import is_about_to_leave
from cachesvc.ledger.eviction.planner import EvictionPlan
from cachesvc.ledger.index.block_ledger import Filling
from cachesvc.ledger.index.lost import forget_bare
from cachesvc.ledger.index.reuse_stats import Miss
from cachesvc.ledger.ledger import Model
from cachesvc.policy.eviction import eviction_policy


def carry_out(core: Core, model: Model, plan: EvictionPlan, ticket: int = 0) -> Filling:
    """Evict what was planned; returns the host copies that the drains bring, with ``ticket``."""
    coming = model.evictor.carry_out(plan, ticket)
    is_host = plan.place is model.blocks.host
    core.count(Count.HOST_EVICTIONS, len(plan.drops if is_host else plan.host_drops))
    if plan.drops if is_host else plan.host_drops:
        is_about_to_leave(core, model)
    if not is_host:
        core.count(Count.EVICTIONS, len(plan.drops))
    remember_dropped(core, model)
    return coming


def set_eviction(core: Core, name: str) -> None:
    """Switch to another eviction policy, one of the same order (``same_order``)."""
    policy = core.eviction = eviction_policy(name)
    for model in core.ledger.models.values():
        for replica in model.replicas:
            place = replica.place
            replica.shadow = replica.shadow or policy.new_shadow(place.pools[place.lead].capacity)
        blocks = model.blocks
        if blocks.chooser is not None:
            blocks.chooser.govern(decides=policy.learns, weighs_cost=policy.weighs_cost)
        elif (history := policy.new_history(model.layout.block_tokens)) is not None:
            blocks.follow(history)


def _prune(core: Core, model: Model) -> bool:
    """A turn of forgetting bare rows; True when no more can go."""
    model.is_pruning = False  # first: a defect in what follows ends it, and not for good
    is_over = core.ledger.models.get(model.id) is not model or forget_bare(model.blocks, core.turns.landed)
    model.is_pruning = not is_over
    return is_over


def remember_dropped(core: Core, model: Model, cause: Miss = Miss.EVICTED) -> None:
    """Remember which blocks left the index and why, and for the write policy their reuse counts. Bare rows that were
    above them leave as a chore."""
    if model.blocks.index.childless and not model.is_pruning:
        model.is_pruning = True
        core.chores.append(Chore(model.id, partial(_prune, core, model), gives_back=False))
    dropped = model.blocks.dropped
    if not dropped:
        return
    if model.stored.coming:
        model.stored.coming.difference_update(key for key, _, _ in dropped)
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
