"""Ownership and use of a tenant: another tenant's objects get the same answer as absent ones."""

from __future__ import annotations

import hmac

from cachesvc.flows.context.core import Core
from cachesvc.flows.models.tenant_budget import pool_device_bytes, pool_host_bytes, pool_pages
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import NotFound
from cachesvc.model.words import PageState


def require_no_others(core: Core, own: Lease | None, lease_id: str) -> None:
    """Raises NotFound for a lease of another tenant, where ``Ledger.hear`` found ``own``. One that is not known, or is
    lost, passes."""
    if own is None and lease_id in core.ledger.leases:
        raise NotFound("lease", lease_id, "open one first")


def why_lost(core: Core, lease_id: str) -> str | None:
    """Reason why a lease ended of which nothing is left; None where it is unknown, or something is left."""
    return None if lease_id in core.ledger.leases else core.ledger.lost.get(lease_id)


def require_model(core: Core, tenant: str, model_id: int, namespace: bytes) -> None:
    """Raises NotFound for another tenant's model, for one made with a salt where ``namespace`` is not its own, and
    where the caller names another namespace: numbers are given anew after a restart.

    Only clients that registered with the salt know the namespace of such a model.
    """
    model = core.ledger.models.get(model_id)
    if model is None:
        return
    is_named = hmac.compare_digest(namespace, model.namespace) or not (namespace or model.is_salted)
    if model.tenant != tenant or not is_named:
        raise NotFound("model", model_id, "register it first")


def models_named(core: Core, namespace: bytes) -> list[Model]:
    """Models of a namespace, of any tenant: a caller that knows it knows the salt."""
    return [model for model in core.ledger.models.values() if model.namespace == namespace]


def own_ticket(core: Core, tenant: str, ticket_id: int) -> Ticket:
    """A ticket of the tenant. Raises NotFound, for another tenant's too: tickets are numbered through."""
    ticket = core.ledger.tickets.get(ticket_id)
    model = core.ledger.models.get(ticket.model)
    if model is None or model.tenant != tenant:
        raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
    return ticket


# -- how much ----------------------------------------------------------------------------------------------------------


def leases_of(core: Core, tenant: str) -> list[Lease]:
    """Every lease of a tenant, live or lost."""
    ledger = core.ledger
    return [lease for lease in ledger.leases.values() if ledger.models[lease.model].tenant == tenant]


def private_pages(lease: Lease) -> int:
    """Pages that a lease holds for itself: its sequences' own, its stock, its quarantine."""
    own = sum(len(pages) for sequence in lease.sequences.values() for pages in sequence.own)
    return own + sum(map(len, lease.stock)) + len(lease.quarantine)


def private_pages_of(core: Core, tenant: str) -> int:
    """Pages that a tenant's leases hold for themselves, as its pools count them."""
    return sum(
        pool.own_counts[state]
        for model in core.ledger.models.values()
        if model.tenant == tenant
        for replica in model.replicas
        for pool in replica.place.pools
        for state in (PageState.PRIVATE, PageState.QUARANTINED)
    )


def usage(core: Core, tenant: str) -> dict[str, int]:
    """Current use of a tenant, by the names of the quotas."""
    models = [model for model in core.ledger.models.values() if model.tenant == tenant]
    leases = leases_of(core, tenant)
    return {
        "device_bytes": sum(pool_device_bytes(model) for model in models),
        "host_bytes": sum(pool_host_bytes(model) for model in models),
        "models": len(models),
        "pages": sum(map(pool_pages, models)),
        "leases": len(leases),
        "sequences": sum(len(lease.sequences) for lease in leases),
        "private_pages": private_pages_of(core, tenant),
    }
