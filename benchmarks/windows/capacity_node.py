"""The daemon's ledger and flows without its service: one model, one replica, copies that have arrived at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from cachesvc.flows.core import Core, Limits, resolve
from cachesvc.flows.leases import open_lease, process_arrived
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.flows.transfers import land
from cachesvc.ledger.ledger import Ledger
from cachesvc.ledger.tier_copies import Place
from cachesvc.memory.host_pool import FreeRanges
from cachesvc.model.answers import Wait
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Layout, device_bytes
from cachesvc.model.words import DONE, Run, TimelineSlot, Transfer, WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.questions.audit import verify_at_once
from cachesvc.swap.movers import Headroom
from cachesvc.swap.vault import Vault

Answer = TypeVar("Answer")
TOKEN = b"capacity-process"


class InstantMover:
    """Keeps the tickets whose bytes have moved until the node lands them."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def submit(self, transfer: Transfer) -> TimelineSlot:
        """All bytes are there at once."""
        self.arrived.append(transfer.ticket)
        return TimelineSlot(0, 1, 0, 1)

    def free_slots(self, model_id: int, replica_id: int) -> int:  # noqa: ARG002
        """All bytes are there at once, so there is always one."""
        return 1

    def expedite(self, ticket: int) -> None:
        """Nothing is slow here."""

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        """False for other replicas: there is only one."""
        return model > 0 and source_replica == target_replica

    def peer_rate(self, model: int, source_replica: int, target_replica: int) -> float:
        """0 for other replicas: there is only one."""
        return float(self.can_reach(model, source_replica, target_replica))

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        """Nothing is slow here."""


class CountedVault(Vault):
    """A pool of bytes that are only counted. There is no host tier, and models stay."""

    def __init__(self, device_bytes: int) -> None:
        self.capacity = device_bytes
        self.left = {"gpu-0": device_bytes}

    def devices(self) -> tuple[str, ...]:
        """One device."""
        return tuple(self.left)

    def headroom(self, without: Collection[int] = ()) -> Headroom:  # noqa: ARG002
        """Remaining headroom."""
        return Headroom(self.left, FreeRanges(()), self.capacity, 0)

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...], devices: tuple[str, ...]) -> None:
        """Nothing is there."""
        if any(pages):
            raise InvalidRequest(f"model {model} on {devices}: no host pages for {len(layout.groups)} groups here")

    def open_replica(
        self,
        model: int,  # noqa: ARG002
        replica: int,  # noqa: ARG002
        layout: Layout,
        devices: tuple[str, ...],
        pages: tuple[int, ...],
    ) -> None:
        """Count a slab."""
        for device in devices:
            self.left[device] -= device_bytes(layout, pages)

    def take_news(self, model: int) -> list[tuple[int, Run]]:  # noqa: ARG002
        """Nothing arrives."""
        return []

    announce = take_news

    def has_replica(self, model: int, replica: int) -> bool:  # noqa: ARG002
        """Nothing is ever lost."""
        return True

    def retire(self, model: int) -> None:
        """The model lives as long as the node."""

    def free_retired(self) -> None:
        """Do nothing: no model was evicted."""

    def close_retired(self, devices: Collection[str] | None = None) -> None:
        """Do nothing: no model was evicted."""


class Node:
    """One engine's lease on one model. ``now``: time that the flows get."""

    def __init__(self, layout: Layout, device_pages: tuple[int, ...], pool_bytes: int) -> None:
        self.mover = InstantMover()
        writing = WriteRule(WritePolicy.WRITE_BACK, threshold=2, remember=64)
        self.core = Core(Ledger(), self.mover, eviction_policy("lru"), writing, Limits())
        device, host = PoolRequest(device_pages), PoolRequest((0,) * len(layout.groups))
        request = RegisterRequest("m", layout, device_pool=device, host_pool=host)
        self.model = register(self.core, CountedVault(pool_bytes), request, 0.0).model
        process_arrived(self.core, TOKEN, 1, 1)
        self.lease = open_lease(self.core, self.model.id, 0, "engine", TOKEN, 0, 0.0).id
        self.now = 0.0

    @property
    def place(self) -> Place:
        """The device's pages."""
        return self.model.replicas[0].place

    def run(self, flow: Callable[..., Answer | Wait], *arguments: object) -> Answer:
        """Call a flow of the lease until it does not wait any more. Raises what the flow raises."""
        while True:
            answer = flow(self.core, resolve(self.core.ledger, self.lease, self.now), *arguments)
            while self.mover.arrived:
                land(self.core, self.mover.arrived.pop(0), DONE)
            if not isinstance(answer, Wait):
                return answer

    def problems(self) -> list[str]:
        """Inconsistencies of the ledger."""
        return verify_at_once(self.core)
