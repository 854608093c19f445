"""Whose a lease, a model or a ticket is: another tenant's is answered just as one that is not there."""

from __future__ import annotations

import hmac
import re
import secrets

from cachesvc.flows.core import Core
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import LeaseLost, NotFound
from cachesvc.questions.view import Sight
from cachesvc.service.access.auth import EVERYONE, UNPROVEN, Caller, Scope, caller

_NAMED = re.compile("[0-9a-f]{32}-([0-9a-f]{1,16})")


def lease_name(epoch: int) -> str:
    """A new lease's id: 128 random bits, and the daemon's epoch behind them, by which a later daemon knows it."""
    return f"{secrets.token_hex(16)}-{epoch:x}"


def own_lease(core: Core, who: Caller, lease_id: str) -> Lease | None:
    """A lease of the caller's tenant, live or lost; None for one that is not known, or is another tenant's."""
    lease = core.ledger.leases.get(lease_id)
    if lease is None or core.ledger.models[lease.model].tenant != who.acts_for:
        return None
    return lease


def require_no_others(core: Core, own: Lease | None, lease_id: str) -> None:
    """Raises NotFound for a lease of another tenant, where ``own_lease`` found ``own``. One that is not known, or is
    lost, passes."""
    if own is None and lease_id in core.ledger.leases:
        raise NotFound("lease", lease_id, "open one first")


def no_lease(core: Core, lease_id: str, epoch: int) -> NotFound | LeaseLost:
    """What to say of a lease that ``own_lease`` does not find."""
    ledger = core.ledger
    if lease_id in ledger.lost and lease_id not in ledger.leases:
        return LeaseLost(lease_id, ledger.lost[lease_id])
    if is_of_another_epoch(lease_id, epoch):
        return LeaseLost(lease_id, "it was opened with an earlier daemon, and its pages went with that one")
    return NotFound("lease", lease_id, "open one first")


def is_of_another_epoch(lease_id: str, epoch: int) -> bool:
    """True for a lease that another life of the daemon opened."""
    named = _NAMED.fullmatch(lease_id)
    return named is not None and int(named[1], 16) != epoch


def require_model(core: Core, who: Caller, model_id: int, namespace: bytes) -> None:
    """Raises NotFound for another tenant's model, and for one made with a salt where ``namespace`` is not its own.

    The namespace of such a model is known to who registered with the salt, and to nobody else.
    """
    model = core.ledger.models.get(model_id)
    if model is None:
        return
    has_salt = not model.is_salted or hmac.compare_digest(namespace, model.namespace)
    if model.tenant != who.acts_for or not has_salt:
        raise NotFound("model", model_id, "register it first")


def own_ticket(core: Core, who: Caller, ticket_id: int) -> Ticket:
    """A ticket of the caller's tenant. Raises NotFound, for another tenant's too: tickets are numbered through."""
    ticket = core.ledger.tickets.get(ticket_id)
    model = core.ledger.models.get(ticket.model)
    if model is None or model.tenant != who.acts_for:
        raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
    return ticket


def sight() -> Sight:
    """What the caller of the running RPC may see. The whole id of a lease is a key to it, so those who may only read
    get its beginning; whoever has proved nothing gets neither ids nor namespaces of models with a salt."""
    who = caller()
    return Sight(
        tenant=None if who.sees_all else who.tenant,
        whole_ids=who is EVERYONE or Scope.ADMIN in who.scopes,
        salted=who not in UNPROVEN,
    )
