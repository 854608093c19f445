"""Leases and models between tenants that have no quota on them: none takes all.

What is held for hours is not given back when the next tenant comes, so besides its share (``model.sharing``) a tenant
leaves a quarter of what the others have left: a new tenant always gets in. Where one tenant alone may work, it may take
everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from cachesvc.flows.context.core import Core
from cachesvc.flows.models.tenant_budget import Budget
from cachesvc.model.numbers.sharing import most_of
from cachesvc.service.access.quota import Quota, Quotas


class SharedQuotas(Quotas):
    """Quotas, and shares where they say nothing. ``working``: the tenants that may hold something."""

    def __init__(
        self,
        core: Core,
        of: Callable[[str], Quota],
        tenants: Callable[[], Iterable[str]],
        working: Callable[[], Iterable[str]],
    ) -> None:
        super().__init__(core, of, tenants)
        self._working = working

    def check_open(self, tenant: str) -> int:
        """Check before a lease is opened; returns the tenant's quota of leases, 0 where it has none. Raises
        QuotaExceeded."""
        quota = super().check_open(tenant)
        ledger = self._core.ledger
        if not quota and self._is_shared(tenant):
            held = Counter(ledger.models[lease.model].tenant for lease in ledger.leases.values())
            most = most_of(tenant, held, self._core.limits.leases)
            if held[tenant] >= most:
                self._refuse(tenant, "leases", held[tenant] + 1, most, "close one; without a quota it is a share")
        return quota

    def budget(self, tenant: str) -> Budget:
        """Budget of its pools."""
        found = super().budget(tenant)
        if found.models or not self._is_shared(tenant):
            return found
        held = Counter(model.tenant for model in self._core.ledger.models.values())
        return replace(found, models=most_of(tenant, held, self._core.limits.models))

    def _is_shared(self, tenant: str) -> bool:
        return bool(set(self._working()) - {tenant})
