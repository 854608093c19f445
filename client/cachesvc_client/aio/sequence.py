"""The awaited twin of ``cachesvc_client.sequence.Sequence``, over the same record and the same operations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

from cachesvc.model.answers import Allocated, Published, Recycled, Swapped, TicketView
from cachesvc_client.errors import DaemonUnavailable, LeaseLost
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import LATER, LeaseRecord
from cachesvc_client.records.losses import lost_tokens
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.sequence import SequenceView
from cachesvc_client.wire.methods import Operation

T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncSequenceLease(Protocol):
    """What a sequence needs of its lease."""

    @property
    def record(self) -> LeaseRecord:
        """What is known of the lease."""

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """The pools that it attached in this process."""

    @property
    def is_lost(self) -> bool:
        """True once it is over for the daemon, or the daemon is gone."""

    async def settle(self, record: SequenceRecord) -> None:
        """Learn what became of a call whose answer never came."""

    async def flush(self) -> None:
        """Tell the daemon of growth from stock."""

    async def run(self, operation: Operation[T]) -> T:
        """Send an operation and take in its answer."""

    async def wait_tickets(self, tickets: tuple[int, ...], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait for transfers to end."""


class AsyncSequence(SequenceView):
    """An open sequence; one task uses it at a time. Effects, answers and errors are those of ``Sequence``."""

    def __init__(self, record: SequenceRecord, lease: AsyncSequenceLease) -> None:
        super().__init__(record)
        self._lease = lease

    async def allocate(self, blocks: int) -> Allocated:
        """As ``Sequence.allocate``."""
        return await self._run(lambda: self.record.allocate(blocks))

    async def publish(self, upto_blocks: int, keys: bytes = b"") -> Published:
        """As ``Sequence.publish``."""
        return await self._run(lambda: self.record.publish(upto_blocks, keys))

    async def recycle(self, computed_tokens: int, *, launch: int | None = None) -> Recycled:
        """As ``Sequence.recycle``."""
        return await self._run(lambda: self.record.recycle(computed_tokens, launch))

    def grow_from_stock(self, blocks: int = 1) -> None:
        """As ``Sequence.grow_from_stock``: no round trip, so nothing to await."""
        self.grow(self._lease.record, blocks)

    async def swap_out(self, *, launch: int | None = None) -> Swapped:
        """As ``Sequence.swap_out``."""
        return await self._run(lambda: self.record.swap_out(launch))

    async def swap_in(self) -> Swapped:
        """As ``Sequence.swap_in``."""
        return await self._run(self.record.swap_in)

    async def wait_loaded(self, timeout_s: float | None = None) -> None:
        """As ``Sequence.wait_loaded``."""
        if self.record.tickets:
            self.record.end_loads(await self._wait(self.record.tickets, timeout_s))

    def lost_tokens(self) -> range:
        """As ``Sequence.lost_tokens``: no round trip, so nothing to await."""
        return lost_tokens(self.record, self._lease.pools, self._lease.is_lost)

    async def wait_swapped(self, timeout_s: float | None = None) -> None:
        """As ``Sequence.wait_swapped``."""
        if self.record.swap_tickets:
            self.record.end_swap(await self._wait(self.record.swap_tickets, timeout_s))

    async def release(self, *, launch: int | None = None) -> int:
        """As ``Sequence.release``."""
        self.require_no_steps()
        if not self.record.is_released and self.record.end_later(launch):
            self._lease.record.hold(self.record)
            return 0
        is_asked_again = self.record.unanswered is not None
        try:
            await self._lease.settle(self.record)
            if not (is_asked_again and self.is_released):
                await self._lease.run(self.record.release(self._lease.record.stock))
        except (*LATER, asyncio.CancelledError):
            self._lease.record.orphans.append(self.record)
            raise
        self._lease.record.forget(self.record)
        return self.record.freed_pages

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_released:
            return
        try:
            await self.release()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless sequence=%s why=%s", self.id, gone)

    async def _wait(self, tickets: tuple[TicketView, ...], timeout_s: float | None) -> tuple[TicketView, ...]:
        return await self._lease.wait_tickets(tuple(ticket.id for ticket in tickets), timeout_s)

    async def _run(self, build: Callable[[], Operation[T]]) -> T:
        self.require_no_steps()
        await self._lease.settle(self.record)
        if self.record.growth:
            await self._lease.flush()
        return await self._lease.run(build())
