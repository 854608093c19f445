"""Tenants as operators see them: what each holds, and what it may hold."""

from __future__ import annotations

from dataclasses import asdict

from kvcache.v1 import inspect_pb2

from cachesvc.flows.core import Core
from cachesvc.service.access.auth import caller
from cachesvc.service.access.quota import NO_QUOTA, Quotas


async def list_tenants(core: Core, quotas: Quotas | None) -> inspect_pb2.ListTenantsResponse:
    """Every tenant that has models or is named by the tokens' file, as far as the caller may see it."""
    known = Quotas(core, lambda _: NO_QUOTA) if quotas is None else quotas
    names = {model.tenant for model in core.ledger.models.values()} | known.tenants()
    who = caller()
    return inspect_pb2.ListTenantsResponse(
        tenants=[
            inspect_pb2.TenantStatus(
                tenant=name,
                used=known.use(name),
                limits={what: limit for what, limit in asdict(known.quota_of(name)).items() if limit},
            )
            for name in sorted(names)
            if who.sees(name)
        ]
    )
