"""Idle models: evict as few as possible for a new model that needs their memory, the longest idle first.

An engine registers before it opens its lease. Until each that has registered has opened one, or ``Limits.open_seconds``
have passed, the model is not idle: engines that start together would evict each other's pools in turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from cachesvc.flows.context.core import Core
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.numbers.sharing import BACKGROUND, Party, most_of

MOST_EXPECTED = 64
"""Engines of a model that have registered and not opened a lease yet; more are not counted."""


def expect_open(core: Core, model: Model) -> None:
    """An engine has registered the model: it will open a lease."""
    model.expected = min(model.expected + 1, MOST_EXPECTED)
    model.expected_until = core.ledger.moment.seconds + core.limits.open_seconds


def has_opened(model: Model) -> None:
    """A lease was opened."""
    model.expected = max(model.expected - 1, 0)


def idle_models(core: Core) -> list[Model]:
    """Models that no lease, no transfer, no other node and no engine that has just registered needs, the longest idle
    first."""
    busy = {lease.model for lease in core.ledger.leases.values()}
    busy |= {ticket.model for ticket in core.ledger.tickets.running.values()}
    busy |= {model.id for model in core.ledger.models.values() if model.lent or not model.stored.is_idle}
    busy |= {model.id for model in core.ledger.models.values() if model.coming}
    now = core.ledger.moment.seconds
    busy |= {model.id for model in core.ledger.models.values() if model.expected and now < model.expected_until}
    idle = [model for model in core.ledger.models.values() if model.id not in busy]
    return sorted(idle, key=lambda model: (model.last_used, model.id))


def models_for(core: Core, party: Party) -> int:
    """Models that there may be with one more of a process. It has its share of all while other processes are connected
    or use some; a process without any gets its first one beyond the limit, up to a quarter more.

    A model counts to the process that registered it and has all its leases. Raises LimitExceeded.
    """
    ledger, limit = core.ledger, core.limits.models
    if party == BACKGROUND:  # a caller that the daemon cannot tell from others
        return limit
    users = {model.id: {model.party} for model in (*ledger.models.values(), *ledger.coming.values())}
    for lease in ledger.leases.values():
        users[lease.model].add(lease.party)
    idle = {model.id for model in idle_models(core)}
    held = Counter(next(iter(users[each])) for each in users if each not in idle and len(users[each]) == 1)
    own = held[party]
    is_alone = all(each.party == party for each in ledger.processes.values()) and held.total() == own
    if not is_alone and own >= (share := most_of(party, held, limit)):
        raise LimitExceeded("models of this process", own + 1, share)
    return limit if own else limit + max(1, limit // 4)


def fewest(idle: Sequence[Model], fits: Callable[[Sequence[Model]], bool]) -> Sequence[Model]:
    """Choose from ``idle``, in that order, the models to evict so that ``fits(gone)``, which holds with all of them
    gone.

    It takes the longest idle models until they fit; then it spares each one that did not help.
    """
    if fits(()):
        return ()
    going = list(idle[: bisect_left(range(len(idle)), True, key=lambda count: fits(idle[:count]))])
    for model in reversed(going):
        spared = [other for other in going if other is not model]
        if spared and fits(spared):
            going = spared
    return going
