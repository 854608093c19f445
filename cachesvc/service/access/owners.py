"""Whose a lease, a model or a ticket is: another tenant's is answered just as one that is not there."""

from __future__ import annotations

import hmac
import re
import secrets

from cachesvc.flows.core import Core
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import LeaseLost, NotFound
from cachesvc.service.access.auth import EVERYONE, UNPROVEN, Caller, Scope, caller

SHOWN = 12
"""Characters of a lease's id that readers see; all of them are random."""
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


def visible_model(core: Core, model_id: int) -> Model:
    """A model that the caller may look at. Raises NotFound."""
    model = core.ledger.model(model_id)
    if not caller().sees(model.tenant):
        raise NotFound("model", model_id, "register it first")
    return model


def visible_models(core: Core) -> list[Model]:
    """Every model that the caller may look at."""
    who = caller()
    return [model for model in core.ledger.models.values() if who.sees(model.tenant)]


def visible_leases(core: Core) -> list[Lease]:
    """Every lease that the caller may look at."""
    who, models = caller(), core.ledger.models
    return [lease for lease in core.ledger.leases.values() if who.sees(models[lease.model].tenant)]


def is_visible(core: Core, ticket: Ticket) -> bool:
    """True for a ticket that the caller may look at; one of a model that has gone is for those who see all."""
    model = core.ledger.models.get(ticket.model)
    who = caller()
    return who.sees(model.tenant) if model is not None else who.sees_all


def own_ticket(core: Core, who: Caller, ticket_id: int) -> Ticket:
    """A ticket of the caller's tenant. Raises NotFound, for another tenant's too: tickets are numbered through."""
    ticket = core.ledger.tickets.get(ticket_id)
    model = core.ledger.models.get(ticket.model)
    if model is None or model.tenant != who.acts_for:
        raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
    return ticket


def shown_lease(core: Core, lease: Lease) -> str:
    """A lease's id as the caller may see it. The whole id is a key to the lease, so readers get its beginning alone;
    so does everyone where no tokens are configured, for models whose engines keep a salt of their own."""
    who = caller()
    is_open = not core.ledger.models[lease.model].is_salted if who is EVERYONE else Scope.ADMIN in who.scopes
    return lease.id if is_open else lease.id[:SHOWN]


def shown_namespace(model: Model) -> bytes:
    """A model's namespace as the caller may see it: nothing of one with a salt where no tokens are configured."""
    return b"" if model.is_salted and caller() in UNPROVEN else model.namespace
