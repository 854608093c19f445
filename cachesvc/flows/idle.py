"""Idle models, which are evicted for a new one that needs what they hold: the longest idle first, and few."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Model


def idle_models(core: Core) -> list[Model]:
    """Models that no lease, no transfer and no other node needs, the longest idle first."""
    busy = {lease.model for lease in core.ledger.leases.values()}
    busy |= {ticket.model for ticket in core.ledger.tickets.running.values()}
    busy |= {model.id for model in core.ledger.models.values() if model.lent or not model.stored.is_idle}
    idle = [model for model in core.ledger.models.values() if model.id not in busy]
    return sorted(idle, key=lambda model: (model.last_used, model.id))


def fewest(idle: Sequence[Model], fits: Callable[[Sequence[Model]], bool]) -> Sequence[Model]:
    """Which of ``idle``, in that order, go so that ``fits(gone)``, which holds with all of them gone.

    Of those that are longest idle, as many as it takes; then each is spared whose going did not help.
    """
    if fits(()):
        return ()
    going = list(idle[: bisect_left(range(len(idle)), True, key=lambda count: fits(idle[:count]))])
    for model in reversed(going):
        spared = [other for other in going if other is not model]
        if spared and fits(spared):
            going = spared
    return going
