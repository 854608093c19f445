"""Quotas of a tenant: memory, leases, sequences, pages, and calls a second.

A quota of 0 is none. Memory is counted from the ledger itself: pools belong to one namespace and a namespace to one
tenant, so what a tenant holds is what its pools count, and nothing has to be kept beside it.

Leases and models between tenants that have no quota on them: none takes all.

What is held for hours is not given back when the next tenant comes, so besides its share (``model.numbers``) a tenant
leaves a quarter of what the others have left: a new tenant always gets in. Where one tenant alone may work, it may take
everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from kvcache.v1 import inspect_pb2

from cachesvc.flows.core import Call, Core
from cachesvc.flows.registration import Budget
from cachesvc.ledger.sequence_state import AWAY
from cachesvc.model.errors import InvalidRequest, QuotaExceeded
from cachesvc.model.numbers import Bucket, most_of
from cachesvc.model.text import parse_amount
from cachesvc.questions.view import View, leases_of, private_pages, private_pages_of, usage

RATES = ("calls_per_second", "operations_per_second", "bytes_per_second")
_SIZES = ("device_bytes", "host_bytes", "bytes_per_second")

FREE_BYTES = 1024
"""Bytes of a message that are in the price of a call."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; 0: none. Raises InvalidRequest for a value that cannot be.

    ``device_bytes``, ``host_bytes``, ``pages``: of all its pools, on all devices. ``private_pages``: granted and not
    published, stock and quarantine included. ``calls_per_second`` counts messages of streams too,
    ``operations_per_second`` those of steps one by one, ``bytes_per_second`` what messages are longer than 1 KiB: each
    may be saved up for one second.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    models: int = 0
    pages: int = 0
    leases: int = 0
    sequences: int = 0
    private_pages: int = 0
    lease_sequences: int = 0
    lease_private_pages: int = 0
    calls_per_second: int = 0
    operations_per_second: int = 0
    bytes_per_second: int = 0
    calls_in_flight: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidRequest(f"quota {each.name}: {value!r} is no whole number from 0 (no limit) up")


NO_QUOTA = Quota()


def parse_quota(table: Any, where: str) -> Quota:
    """A quota from a table of names and numbers; sizes may have units. Raises InvalidRequest."""
    known = {each.name for each in fields(Quota)}
    if not isinstance(table, dict) or not set(table) <= known:
        raise InvalidRequest(f"{where}: known quotas are {', '.join(sorted(known))}")
    try:
        return Quota(**{name: parse_amount(value) if name in _SIZES else value for name, value in table.items()})
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from error


class Meter:
    """Current rates of one tenant. ``waiting_bytes``: of the messages of its calls that go on."""

    def __init__(self, tenant: str, quota: Quota) -> None:
        self.tenant = tenant
        self.in_flight = 0
        self.waiting_bytes = 0
        self.refused = 0
        self.use(quota)

    def use(self, quota: Quota) -> None:
        self.quota = quota
        self.buckets = {what: Bucket(getattr(quota, what)) for what in RATES}

    def admit(self, what: str, count: int, now: float) -> None:
        """Admit calls, operations of a step, or bytes of a message beyond its first ``FREE_BYTES``, by their rate
        ``what``. Raises QuotaExceeded."""
        bucket = self.buckets[what]
        if seconds := bucket.take(count, now):
            self.refused += 1
            raise QuotaExceeded(self.tenant, what, None, bucket.rate, f"try again in {seconds:.3f} s")


class Quotas:
    """The quotas of all tenants against what the ledger holds, and shares where they say nothing. ``of(tenant)`` may
    answer anew after a reload, as may ``tenants()``, the configured ones, and ``working()``, those that may hold
    something; a tenant without another one that works has no share."""

    def __init__(
        self,
        core: Core,
        of: Callable[[str], Quota],
        tenants: Callable[[], Iterable[str]] = tuple,
        working: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._core = core
        self._of = of
        self._tenants = tenants
        self._working = working
        self._meters: dict[str, Meter] = {}

    def meter(self, tenant: str) -> Meter:
        """The tenant's meter, under the quota that it has now."""
        quota = self._of(tenant)
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = Meter(tenant, quota)
        elif meter.quota is not quota:
            meter.use(quota)
        return meter

    def budget(self, tenant: str) -> Budget:
        quota = self._of(tenant)
        models = quota.models
        if not models and self._is_shared(tenant):
            held = Counter(model.tenant for model in self._core.ledger.models.values())
            models = most_of(tenant, held, self._core.limits.models)
        return Budget(tenant, quota.device_bytes, quota.host_bytes, models, quota.pages)

    def check_open(self, tenant: str) -> int:
        """Check before a lease is opened; returns the tenant's quota of leases, 0 where it has none. Raises
        QuotaExceeded."""
        quota = self._of(tenant)
        if quota.leases and len(held := leases_of(self._core, tenant)) >= quota.leases:
            self._refuse(tenant, "leases", len(held) + 1, quota.leases, "close one")
        if not quota.leases and self._is_shared(tenant):
            ledger = self._core.ledger
            counts = Counter(ledger.models[lease.model].tenant for lease in ledger.leases.values())
            most = most_of(tenant, counts, self._core.limits.leases)
            if counts[tenant] >= most:
                self._refuse(tenant, "leases", counts[tenant] + 1, most, "close one; without a quota it is a share")
        return quota.leases

    def require_sequence(self, call: Call) -> None:
        """Check the quota before a sequence is opened. Raises QuotaExceeded."""
        tenant, lease = call.model.tenant, call.lease
        quota = self._of(tenant)
        if quota.lease_sequences and len(lease.sequences) >= quota.lease_sequences:
            self._refuse(tenant, "lease_sequences", len(lease.sequences) + 1, quota.lease_sequences, "release some")
        if quota.sequences:
            count = sum(len(each.sequences) for each in leases_of(self._core, tenant))
            if count >= quota.sequences:
                self._refuse(tenant, "sequences", count + 1, quota.sequences, "release some")

    def require_blocks(self, call: Call, sequence_id: int, blocks: int) -> None:
        """Check the quota before a sequence's tables become ``blocks`` long. Raises QuotaExceeded."""
        sequence = call.lease.sequences.get(sequence_id)
        if sequence is not None:
            fresh = max(0, blocks - max(sequence.blocks, sequence.hit_blocks))
            self._require_pages(call, fresh * call.lease.groups)

    def require_swapped(self, call: Call, sequence_id: int) -> None:
        """Check the quota before a sequence that is swapped out gets its pages back. Raises QuotaExceeded."""
        sequence = call.lease.sequences.get(sequence_id)
        if sequence is not None and sequence.state is AWAY:
            self._require_pages(call, sequence.swapped_pages)

    def cap_stock(self, call: Call, targets: tuple[int, ...]) -> tuple[int, ...]:
        """Stock targets that the quotas leave room for: a stock that cannot be filled is no error."""
        lease, tenant = call.lease, call.model.tenant
        quota = self._of(tenant)
        if not (quota.private_pages or quota.lease_private_pages):
            return targets
        left = sum(targets)
        if quota.private_pages:
            left = min(left, quota.private_pages - private_pages_of(self._core, tenant))
        if quota.lease_private_pages:
            left = min(left, quota.lease_private_pages - private_pages(lease))
        capped = []
        for group, target in enumerate(targets):
            have = len(lease.stock[group])
            more = max(0, min(target - have, left))
            left -= more
            capped.append(min(target, have + more))
        return tuple(capped)

    def _require_pages(self, call: Call, more: int) -> None:
        """A lease's pages are counted over its sequences only where its tenant has more than a lease may."""
        tenant = call.model.tenant
        quota = self._of(tenant)
        if not more or not (quota.private_pages or quota.lease_private_pages):
            return
        now = private_pages_of(self._core, tenant)
        if quota.private_pages and now + more > quota.private_pages:
            self._refuse(tenant, "private_pages", now + more, quota.private_pages, "publish or release some")
        if quota.lease_private_pages and now + more > quota.lease_private_pages:
            own = private_pages(call.lease) + more
            if own > quota.lease_private_pages:
                self._refuse(tenant, "lease_private_pages", own, quota.lease_private_pages, "publish or release some")

    def _refuse(self, tenant: str, what: str, got: int, limit: int, hint: str) -> NoReturn:
        self.meter(tenant).refused += 1
        raise QuotaExceeded(tenant, what, got, limit, hint)

    def tenants(self, view: View) -> list[inspect_pb2.TenantStatus]:
        """Use and limits of all tenants of the view that have models or are configured."""
        names = {model.tenant for model in view.models()} | set(filter(view.sight.covers, self._tenants()))
        return [
            inspect_pb2.TenantStatus(
                tenant=name,
                used=usage(self._core, name) | {"calls_in_flight": meter.in_flight, "refused": meter.refused},
                limits={what: limit for what, limit in asdict(self._of(name)).items() if limit},
            )
            for name in sorted(names)
            for meter in (self.meter(name),)
        ]

    def _is_shared(self, tenant: str) -> bool:
        return bool(set(self._working()) - {tenant})
