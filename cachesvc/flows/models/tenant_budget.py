"""Budget of one tenant's pools: of all devices, of the host, and of the daemon's own memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.ledger.ledger import Model, PendingReplica, Replica
from cachesvc.model.errors import QuotaExceeded
from cachesvc.model.geometry import device_bytes, host_bytes


class Memory(NamedTuple):
    """Bytes of pools, over all replicas and ranks, of how many models, and pages of all groups: the daemon keeps some
    bytes for each, whatever its size."""

    device_bytes: int
    host_bytes: int
    models: int
    pages: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of pools, models, and pages that a tenant may have; 0: no limit."""

    tenant: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    models: int = 0
    pages: int = 0

    @property
    def is_limited(self) -> bool:
        """False where nothing is bounded."""
        return bool(self.device_bytes or self.host_bytes or self.models or self.pages)

    def refusal(self, used: Memory, more: Memory) -> QuotaExceeded | None:
        """Reason why a tenant that uses ``used`` may not have ``more``, or None."""
        for what, has, wants in zip(Memory._fields, used, more, strict=True):
            limit = getattr(self, what)
            if limit and has + wants > limit:
                return QuotaExceeded(self.tenant, what, has + wants, limit, "ask for fewer pages or a share")
        return None


def memory_of(models: Iterable[Model]) -> Memory:
    """Memory of some models' pools."""
    each = list(models)
    return Memory(
        sum(map(pool_device_bytes, each)), sum(map(pool_host_bytes, each)), len(each), sum(map(pool_pages, each))
    )


def pool_device_bytes(model: Model) -> int:
    """Bytes of a model's device pools, over replicas and ranks, of those that are being made too."""
    every: list[Replica | PendingReplica] = [*model.replicas, *model.coming.values()]
    return sum(device_bytes(model.layout, each.device_pages) * len(each.devices) for each in every)


def pool_host_bytes(model: Model) -> int:
    """Bytes of a model's host pools, over ranks."""
    return host_bytes(model.layout, model.host_pages)


def pool_pages(model: Model) -> int:
    """Pages of a model's pools, over replicas, groups and the host."""
    layout = model.layout
    every: list[Replica | PendingReplica] = [*model.replicas, *model.coming.values()]
    on_devices = sum(layout.device_page_total(each.device_pages) for each in every)
    return on_devices + layout.host_page_total(model.host_pages)
