"""Whose a lease, a model or a ticket is: another tenant's is answered just as one that is not there."""

from __future__ import annotations

import hmac

from cachesvc.flows.core import Core
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import NotFound
from cachesvc.questions.view import Sight
from cachesvc.service.access.auth import EVERYONE, UNPROVEN, Scope, caller


def require_lease(core: Core, lease_id: str) -> None:
    """Raises NotFound for another tenant's lease. One that is not known, or is lost, is the flow's to refuse."""
    lease = core.ledger.leases.get(lease_id)
    if lease is not None and core.ledger.models[lease.model].tenant != caller().acts_for:
        raise NotFound("lease", lease_id, "open one first")


def require_model(core: Core, model_id: int, namespace: bytes) -> None:
    """Raises NotFound for another tenant's model, and for one made with a salt where ``namespace`` is not its own.

    The namespace of such a model is known to who registered with the salt, and to nobody else.
    """
    model = core.ledger.models.get(model_id)
    if model is None:
        return
    has_salt = not model.is_salted or hmac.compare_digest(namespace, model.namespace)
    if model.tenant != caller().acts_for or not has_salt:
        raise NotFound("model", model_id, "register it first")


def own_ticket(core: Core, ticket_id: int) -> Ticket:
    """A ticket of the caller's tenant. Raises NotFound, for another tenant's too: tickets are numbered through."""
    ticket = core.ledger.tickets.get(ticket_id)
    model = core.ledger.models.get(ticket.model)
    if model is None or model.tenant != caller().acts_for:
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
