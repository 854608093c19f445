"""Lease of one engine on a model's replica, kept alive, with the sequences opened under it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from types import TracebackType

from cachesvc.model.answers import Expected, Prefetched, TicketView
from cachesvc_client.aio.attaching import attach_pool
from cachesvc_client.aio.keeping import Keeping
from cachesvc_client.aio.lease_calls import LeaseCalls
from cachesvc_client.aio.opening import Opening
from cachesvc_client.aio.sequence import AsyncSequence
from cachesvc_client.aio.stepping import AsyncStepStream
from cachesvc_client.core.arguments import explains_arguments
from cachesvc_client.core.errors import (
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    LimitExceeded,
    NotSupported,
)
from cachesvc_client.core.hints import Retention
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.core.registration import Registration
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.stock import Stock, stock_targets
from cachesvc_client.records.views import LeaseView
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.messages import build_open
from cachesvc_client.wire.methods import OPEN
from cachesvc_client.wire.port import INTERRUPTS

log = logging.getLogger(__name__)


async def open_lease(
    connection: Connection, registration: Registration, engine: str, request_id: int, instance: str = ""
) -> AsyncLease:
    """Open a lease, or join that of an ``instance``, and begin to beat. Raises NotFound (register again),
    LimitExceeded, NotSupported (a daemon that knows no instances), DaemonUnavailable."""
    token, asked_s = connection.process_token, time.monotonic()
    opened = await connection.ask(
        OPEN, build_open(registration, engine, token, request_id, instance), connection.timeouts.call_s
    )
    record = LeaseRecord(opened, registration, connection.lost, token, asked_s)
    if record.instance != instance:
        await LeaseCalls(connection, record).end(quiesced=True)
        raise NotSupported("this daemon lets no processes share a lease: update it")
    keeping = Keeping(connection, record)
    keeping.start()
    return AsyncLease(LeaseCalls(connection, record), keeping)


class AsyncLease(LeaseView):
    """Made by ``AsyncCacheClient.open_lease``. Safe to use from several tasks; each sequence and step stream from one.

    Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed. The pools that it attaches
    wait in threads, not on the loop: ``await asyncio.to_thread(pool.wait_layer, ticket, layer, timeout_s)``. ``calls``:
    for handles made under it.
    """

    def __init__(self, calls: LeaseCalls, keeping: Keeping) -> None:
        super().__init__(calls.record)
        self.calls = calls
        self._keeping = keeping

    def attach(self, rank: int = 0) -> Opening[AttachedPool]:
        """Map one rank's device pool into this process. Raises InvalidRequest (rank), NotSupported (kind of memory)."""
        return Opening(self._attach(rank))

    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
    ) -> Opening[AsyncSequence]:
        """Open a sequence on the longest hit of ``keys`` (packed, 32 bytes each, root to leaf), pinned.

        ``max_blocks`` limits the hit (0: no limit): a caller that must compute the last token leaves its block out.
        ``waited_seconds``: how long the request has waited in the engine already; eviction learns from it.
        ``expected``: what another node computes of it; ``coming_blocks`` says how much is still on its way.
        ``retention``: what the engine expects of these blocks, a hint for eviction. Raises DaemonDraining,
        InvalidRequest, LimitExceeded, Conflict (``sequence_id`` is open).
        """
        return Opening(self._match(keys, max_blocks, sequence_id, waited_seconds, expected, retention))

    @explains_arguments
    async def prefetch(self, keys: PackedKeys) -> Prefetched:
        """Start to load a prefix towards the device; holds nothing once it is there. Raises PoolExhausted."""
        return await self.calls.run(self.record.prefetch(keys))

    @explains_arguments
    async def pause_write_backs(self, seconds: float) -> None:
        """Report that decode suffers: the daemon copies no backups off this lease's devices for ``seconds``. At most 1
        at a time; call again for longer. Returns at once. Swaps and evictions that callers wait for go on. Raises
        InvalidRequest (more than 1 s).
        """
        self.record.ask_pause(seconds)
        self._keeping.nudge()

    @explains_arguments
    async def make_sure(self, timeout_s: float) -> None:
        """Validate all reads of the lease's pages up to now. While ``is_sure`` this asks nothing; else it asks the
        daemon, which knows whether it revoked the lease as silent and granted its pages to others.

        Raises LeaseLost (it did: nothing that was computed from them since may be used), DaemonUnavailable (unknown:
        the same), DeadlineExceeded.
        """
        if not self.record.is_sure:
            await self._keeping.make_sure(timeout_s)

    @explains_arguments
    def step(self, stock_pages: int | Seq[int] = 0) -> AsyncStepStream:
        """Open the lease's step stream. ``stock_pages``: pages to keep in stock, for every group or for each.

        Raises Conflict while the last one is open, NotSupported (the daemon is of release 0.1, which knows no columns).
        """
        self.record.check()
        if not self.record.has_columns:
            raise NotSupported("this daemon takes no steps by columns: upgrade it to release 0.2 or later")
        if self.calls.stream is not None:
            raise Conflict("this lease has an open step stream; close it first")
        layout = self.registration.layout
        self.record.stock = Stock(stock_targets(stock_pages, layout), layout.pools)
        stream = self.calls.stream = AsyncStepStream(self.calls)
        return stream

    @explains_arguments
    async def completed(self, launch: int) -> None:
        """Note that the kernels of ``launch`` and of all earlier launches have ended, and send the releases that
        waited.

        With an open step stream they go in a step without a waiter, so call it where that stream is used. Raises
        InvalidRequest (no such launch), DeadlineExceeded (the next ``match`` sees to it).
        """
        self.record.launches.complete(launch)
        if not self.record.has_ended:
            return
        try:
            if self.calls.stream is not None:
                await self.calls.stream.tell()
                return
            await self.calls.release_abandoned()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless lease=%s why=%s", self.id, gone)
        except LimitExceeded:  # too many steps are under way: the next one takes them along
            log.debug("release_waits_for_a_step lease=%s", self.id)

    @explains_arguments
    async def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended, done or failed; their views say which.

        Raises DeadlineExceeded while one still runs, NotFound for one that never was or ended long ago.
        """
        return await self.calls.wait_tickets(tickets, timeout_s)

    async def close(self, *, quiesced: bool | None = None, for_all: bool = False) -> None:
        """End the lease with all that it holds, unmap its pools, stop beating. Idempotent. That of an instance ends
        with its last process, and what the others hold stays; ``for_all``: it ends now, for all of them.

        ``quiesced``: no kernel of this engine uses the pool any more, so its private pages come back at once. Say False
        where that is not sure: they come back when the process ends, and a pool on a GPU stays mapped until then. Left
        out, it is so unless a launch is under way. Raises UsedAfterFork.
        """
        connection = self.calls.connection
        connection.maker.check()
        if self.record.is_closed:
            return
        quiesced = self.record.is_quiesced(quiesced)
        if self.calls.stream is not None:
            await self.calls.stream.close()
        for pool in self.pools:
            if quiesced or not pool.is_on_gpu:  # a kernel that still runs must not find its memory gone
                await connection.port.in_thread(pool.close)
        await connection.port.settle()
        self.record.is_closed = True
        await self._keeping.close()
        await self.calls.end(quiesced=quiesced, for_all=for_all)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(quiesced=None if kind is None else False)

    @explains_arguments
    async def _attach(self, rank: int) -> AttachedPool:
        self.record.check()
        pool = await attach_pool(self.calls.connection, self.registration, self.id, rank)
        self.record.pools.append(pool)
        return pool

    @explains_arguments
    async def _match(
        self,
        keys: PackedKeys,
        max_blocks: int,
        sequence_id: int | None,
        waited_seconds: float,
        expected: Expected | None,
        retention: Retention,
    ) -> AsyncSequence:
        if self.record.orphans or self.record.ending:
            await self.calls.release_abandoned()
        record = self.record.new_sequence(sequence_id)
        try:
            record.retention = retention
            await self.calls.run(record.open(keys, max_blocks, waited_seconds, expected))
        except (DeadlineExceeded, *INTERRUPTS):
            self.record.orphans.append(record)
            raise
        return AsyncSequence(record, self.calls)
