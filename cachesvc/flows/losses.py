"""The memory of a device is gone with its mover: what replicas held there is lost, and nothing else.

A lost replica keeps its number and is never granted pages again; whoever registers gets a new one. Its leases end, so
that engines hear of it with their next call. What it had on its device leaves in turns, without being saved: copies on
the host and on other replicas stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from cachesvc.flows.core import Core
from cachesvc.flows.ending import free_quarantine, lose
from cachesvc.flows.evictions import remember_dropped
from cachesvc.flows.turns import Chore
from cachesvc.ledger.journal import Cause
from cachesvc.ledger.leases import LeaseState
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.reuse import Miss


def lose_device(core: Core, device: str, why: str) -> list[str]:
    """The slabs of a device do not exist any more; returns the leases that are lost by it. Transfers of the device have
    ended, or their ends are on their way."""
    ended: list[str] = []
    for model in core.ledger.models.values():
        for replica in model.present_replicas():
            if device in replica.devices:
                replica.gone = f"device {device} lost its memory ({why})"
                ended += _end_leases(core, model, replica)
    empty_lost(core)
    return ended


def empty_lost(core: Core) -> None:
    """Begin to drop what lost replicas still count as theirs, as far as no transfer and no host copy below holds it."""
    for model in core.ledger.models.values():
        for replica in model.replicas:
            if replica.gone and not replica.is_emptying and replica.place.residents:
                replica.is_emptying = True
                core.chores.append(Chore(model.id, partial(_drop_some, core, model, replica)))


def _end_leases(core: Core, model: Model, replica: Replica) -> Iterable[str]:
    """Nobody can write the pages of memory that is gone: they need no quarantine."""
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


def _drop_some(core: Core, model: Model, replica: Replica) -> bool:
    """A turn of dropping; True when there is no more to drop now."""
    some = core.turns.evicted
    plan, _ = model.evictor.plan_device(replica.place, some, to_host=False, most_looks=4 * some, saves=False)
    plan.cause = Cause.LOST
    dropped = len(plan.drops)
    model.evictor.carry_out(plan)
    remember_dropped(core, model, Miss.LOST)
    if not dropped:
        replica.is_emptying = False
    return not dropped
