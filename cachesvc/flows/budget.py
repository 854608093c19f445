"""What the pools of one tenant may take, of all devices and of the host; its own idle models make way for a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import QuotaExceeded
from cachesvc.model.geometry import device_bytes
from cachesvc.model.layout import Layout


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of pools, and models, that a tenant may have; 0: no limit."""

    tenant: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    models: int = 0

    @property
    def is_limited(self) -> bool:
        """False where nothing is bounded."""
        return bool(self.device_bytes or self.host_bytes or self.models)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of a budget: bytes on each device and host pages of every group; None: no limit."""

    device_bytes: int | None = None
    host_pages: int | None = None


def pool_device_bytes(model: Model) -> int:
    """Bytes of a model's device pools, over replicas and ranks."""
    return sum(device_bytes(model.layout, r.device_pages) * len(r.devices) for r in model.replicas)


def pool_host_bytes(model: Model) -> int:
    """Bytes of a model's host pools, over ranks."""
    return sum(count * host_page_bytes(model.layout, group) for group, count in enumerate(model.host_pages))


def host_page_bytes(layout: Layout, group: int) -> int:
    """Bytes that one host page of a group takes, over the ranks that keep one."""
    return layout.page_bytes(group) * layout.host_ranks(group)


def make_room(
    core: Core,
    budget: Budget,
    layout: Layout,
    device_pages: tuple[int, ...],
    host_pages: tuple[int, ...],
    *,
    is_new: bool,
    dismiss: Callable[[Model], None],
    keep: int | None,
) -> Room:
    """Check a wish (empty pages: a share) against the budget, with the tenant's longest idle models going first.

    ``is_new``: the model takes host pages too; ``keep``: one that must stay. Raises QuotaExceeded, which names what is
    short; nothing is dismissed for a wish that is above the whole budget.
    """
    if not budget.is_limited:
        return Room()
    groups = range(len(layout.groups))
    least_device = device_bytes(layout, device_pages or (1,) * len(groups)) * layout.ranks
    least_host = sum(count * host_page_bytes(layout, group) for group, count in enumerate(host_pages)) if is_new else 0
    wanted = (("device_bytes", least_device), ("host_bytes", least_host), ("models", int(is_new)))
    limits = {"device_bytes": budget.device_bytes, "host_bytes": budget.host_bytes, "models": budget.models}
    while True:
        mine = [model for model in core.ledger.models.values() if model.tenant == budget.tenant]
        used = {
            "device_bytes": sum(map(pool_device_bytes, mine)),
            "host_bytes": sum(map(pool_host_bytes, mine)),
            "models": len(mine),
        }
        short = [(what, more) for what, more in wanted if limits[what] and used[what] + more > limits[what]]
        if not short:
            break
        what, more = short[0]
        busy = {lease.model for lease in core.ledger.leases.values()}
        busy |= {ticket.model for ticket in core.ledger.tickets.running.values()}
        idle = [model for model in mine if model.id not in busy and model.id != keep]
        if more > limits[what] or not idle:
            raise QuotaExceeded(budget.tenant, what, used[what] + more, limits[what], "ask for fewer pages or a share")
        dismiss(min(idle, key=lambda model: (model.last_used, model.id)))
    per_block = sum(host_page_bytes(layout, group) for group in groups)
    return Room(
        (limits["device_bytes"] - used["device_bytes"]) // layout.ranks if budget.device_bytes else None,
        (limits["host_bytes"] - used["host_bytes"]) // per_block if budget.host_bytes else None,
    )
