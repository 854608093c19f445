"""Handles the loss of device memory when its mover process dies: replicas there are lost, and nothing else.

From the moment of the loss no flow sees a lost replica or its copies: they are none of ``Model.replicas`` and
``BlockIndex.places``. Its leases end, so that engines learn of it with their next call; an engine that registers again
gets a new replica, with a number of its own. The journal reports the end of each of its copies, in turns. Copies on
the host and on other replicas stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import Chore
from cachesvc.flows.leases.teardown import free_quarantine, lose
from cachesvc.flows.transfer.apply_evictions import remember_dropped
from cachesvc.ledger.index.lost import LostCopies, is_empty
from cachesvc.ledger.index.reuse_stats import Miss
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model, Replica


def lose_device(core: Core, device: str, why: str) -> list[str]:
    """The slabs of a device do not exist any more; returns the leases that are lost by it. Transfers of the device have
    ended, or their ends are on their way."""
    lost: list[tuple[Model, Replica]] = []
    for model in core.ledger.models.values():
        for replica in [each for each in model.replicas if device in each.devices]:
            model.lose(replica, f"device {device} lost its memory ({why})")
            core.count(Count.PINS_ENDED_EARLY, len(model.pins.leave(replica.place)))
            lost.append((model, replica))
    ended = [lease for model, replica in lost for lease in _end_leases(core, model, replica)]
    empty_lost(core)
    return ended


def empty_lost(core: Core) -> None:
    """Begin to forget what lost replicas had, as far as nothing moves or holds it; a replica is forgotten with the
    last of it."""
    for model in core.ledger.models.values():
        for replica in list(model.lost):
            if replica.is_emptying or _forget(core, model, replica):
                continue
            replica.is_emptying = True
            copies = LostCopies(model.blocks, replica.place)
            core.chores.append(Chore(model.id, partial(_forget_some, core, model, replica, copies), gives_back=False))


def _end_leases(core: Core, model: Model, replica: Replica) -> Iterable[str]:
    """End the leases of a lost replica. No process can write its pages: they need no quarantine."""
    at_once = True
    for lease in list(core.ledger.leases.values()):
        if (lease.model, lease.replica) != (model.id, replica.id):
            continue
        if lease.state is LeaseState.LIVE:
            lose(core, lease, f"{replica.gone}; register again", at_once=at_once)
            yield lease.id
        if lease.id in core.ledger.leases:
            free_quarantine(core, lease, at_once=at_once)
        at_once = False


def _forget_some(core: Core, model: Model, replica: Replica, copies: LostCopies) -> bool:
    """A turn of forgetting copies; True when no more can go now."""
    replica.is_emptying = False  # first: a defect in what follows ends it, and not for good
    if core.ledger.models.get(model.id) is not model:
        return True
    is_over = copies.forget_some(core.turns.landed)
    remember_dropped(core, model, Miss.LOST)
    replica.is_emptying = not is_over
    if is_over:
        _forget(core, model, replica)
    return is_over


def _forget(core: Core, model: Model, replica: Replica) -> bool:
    """Forget a lost replica; False where something of it is left, or under way."""
    leases, tickets = core.ledger.leases.values(), core.ledger.tickets
    is_held = any((lease.model, lease.replica) == (model.id, replica.id) for lease in leases)
    if is_held or not is_empty(replica.place) or tickets.touches(model.id, replica.id):
        return False
    model.forget(replica)
    return True
