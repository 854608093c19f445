"""The awaited twin of ``cachesvc_client.lease``, over the same record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from kvcache.v1 import engine_pb2, lease_pb2

from cachesvc.model.answers import Prefetched, TicketView
from cachesvc_client.aio.connection import AsyncConnection, is_cancelled
from cachesvc_client.aio.sequence import AsyncSequence
from cachesvc_client.aio.stepping import AsyncStepStream
from cachesvc_client.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    LimitExceeded,
    NotFound,
    Unauthenticated,
)
from cachesvc_client.keeper import RECONNECT_PAUSE_S
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import ANSWER_MARGIN_S, LONGEST_WAIT_S, LeaseRecord, list_running
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.stock import Stock, stock_targets
from cachesvc_client.registration import Registration
from cachesvc_client.wire.messages import build_open, build_recycle, build_wait_tickets, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import (
    ATTACH,
    CLOSE,
    DETACH,
    KEEP_ALIVE,
    OPEN,
    RECYCLE,
    WAIT_TICKETS,
    Operation,
    no_action,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncLease:
    """Made by ``AsyncCacheClient.open_lease``; as ``Lease``. The pools it attaches wait in threads, not on the loop:
    ``await asyncio.to_thread(pool.wait_layer, ticket, layer, timeout_s)``."""

    def __init__(self, connection: AsyncConnection, registration: Registration, engine: str, request_id: int) -> None:
        self.registration = registration
        self._connection = connection
        self._opening = (engine, request_id)
        self._record: LeaseRecord | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._stream: AsyncStepStream | None = None
        self._pools: list[AttachedPool] = []
        self._ranks: set[int] = set()
        self._callbacks: list[Callable[[CacheClientError], None]] = []

    async def start(self) -> None:
        """As ``Lease.start``."""
        engine, request_id = self._opening
        request = build_open(self.registration, engine, self._connection.process_token, request_id)
        opened = await self._connection.ask(OPEN, request, self._connection.timeouts.call_s)
        self._record = LeaseRecord(opened, self.registration)
        self._keeper = asyncio.create_task(self._keep_alive(), name=f"kvcache-keeper-{opened.lease_id}")

    @property
    def record(self) -> LeaseRecord:
        """What is known of the lease; for handles made under it."""
        assert self._record is not None
        return self._record

    @property
    def id(self) -> str:
        """The lease_id: hand it to worker processes, for ``CacheClient.attach``."""
        return self.record.id

    @property
    def is_lost(self) -> bool:
        """As ``Lease.is_lost``."""
        return self.record.loss is not None or (self._connection.lost.is_set() and not self.record.is_closed)

    @property
    def is_draining(self) -> bool:
        """As ``Lease.is_draining``."""
        return self.record.is_draining

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """As ``Lease.pools``."""
        return tuple(self._pools)

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        """Call ``callback(error)`` on the loop, once, when the lease is lost; at once if it is."""
        if self.record.loss is not None:
            callback(self.record.loss)
        else:
            self._callbacks.append(callback)

    async def attach(self, rank: int = 0) -> AttachedPool:
        """As ``Lease.attach``; the lease's ``close`` closes the pool."""
        self.record.check()
        connection, attachments = self._connection, self._connection.attachments
        request = engine_pb2.AttachRequest(lease_id=self.id, rank=rank, process_token=connection.process_token)
        attachments.begin(self.id, rank)
        try:
            attached = await connection.ask(ATTACH, request, connection.timeouts.attach_s)
        except (CacheClientError, asyncio.CancelledError):
            attachments.end(self.id, rank)
            raise
        self._ranks.add(rank)
        pool = AttachedPool(
            self.registration.layout,
            rank,
            attached,
            connection.life,
            lambda: attachments.end(self.id, rank),  # told at the lease's close: a pool cannot await
        )
        starting = asyncio.ensure_future(asyncio.to_thread(pool.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread goes on: what it maps would be nobody's
            await asyncio.wait([starting])
            await asyncio.to_thread(pool.close)
            raise
        self._pools.append(pool)
        return pool

    async def match(self, keys: bytes, *, max_blocks: int = 0, sequence_id: int | None = None) -> AsyncSequence:
        """As ``Lease.match``."""
        await self._bury_orphans()
        record = self.record.new_sequence(sequence_id)
        try:
            await self.run(record.open(keys, max_blocks))
        except (DeadlineExceeded, asyncio.CancelledError):
            self.record.orphans.append(record)
            raise
        return self.handle(record)

    async def prefetch(self, keys: bytes) -> Prefetched:
        """As ``Lease.prefetch``."""
        return await self.run(self.record.prefetch(keys))

    async def pause_write_backs(self, seconds: float) -> None:
        """As ``Lease.pause_write_backs``."""
        self.record.ask_pause(seconds)
        self._news.set()

    def step(self, stock_pages: int | Seq[int] = 0) -> AsyncStepStream:
        """As ``Lease.step``."""
        self.record.check()
        if self._stream is not None:
            raise Conflict("this lease has an open step stream; close it first")
        self.record.stock = Stock(stock_targets(stock_pages, self.registration.layout))
        self._stream = AsyncStepStream(self._connection, self)
        return self._stream

    def launch(self) -> int:
        """As ``Lease.launch``: no round trip, so nothing to await."""
        return self.record.launches.begin()

    async def completed(self, launch: int) -> None:
        """As ``Lease.completed``."""
        self.record.launches.complete(launch)
        if not self.record.has_ended:
            return
        try:
            if self._stream is not None:
                await self._stream.tell()
                return
            await self._bury_orphans()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless lease=%s why=%s", self.id, gone)
        except LimitExceeded:  # too many steps are under way: the next one takes them along
            log.debug("release_waits_for_a_step lease=%s", self.id)

    async def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """As ``Lease.wait_tickets``."""
        limit_s = self._connection.timeouts.wait_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self.record.check()
            slice_s = min(max(deadline_s - time.monotonic(), 0), LONGEST_WAIT_S)
            request = build_wait_tickets(self.id, tickets, int(slice_s * 1000))
            answer = await self._connection.ask(WAIT_TICKETS, request, slice_s + ANSWER_MARGIN_S)
            views = parse_tickets(answer.tickets)
            running = list_running(views)
            if not running:
                return views
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"tickets {running} still run after {limit_s:g} s", was_answered=True)

    async def close(self, *, quiesced: bool | None = None) -> None:
        """As ``Lease.close``."""
        if self.record.is_closed:
            return
        quiesced = self.record.is_quiesced(quiesced)
        if self._stream is not None:
            await self._stream.close()
        for pool in self._pools:
            if quiesced or not pool.is_on_gpu:  # a kernel that still runs must not find its memory gone
                await asyncio.to_thread(pool.close)  # a driver may take its time
        for rank in sorted(self._ranks):
            if self._connection.attachments.has(self.id, rank):
                continue
            token = self._connection.process_token
            await self._tell(DETACH, engine_pb2.DetachRequest(lease_id=self.id, rank=rank, process_token=token))
        self.record.is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._tell(CLOSE, lease_pb2.CloseRequest(lease_id=self.id, quiesced=quiesced))

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(quiesced=None if kind is None else False)

    def handle(self, record: SequenceRecord) -> AsyncSequence:
        """A handle for an open sequence of this lease."""
        return AsyncSequence(record, self)

    async def run(self, operation: Operation[T]) -> T:
        """Send an operation under a fresh request_id and take in its answer."""
        try:
            self.record.address(operation)
        except CacheClientError as error:
            operation.end_with(error)
            raise
        return await self._send(operation)

    async def settle(self, record: SequenceRecord) -> None:
        """As ``Lease.settle``."""
        operation = record.unanswered
        if operation is None:
            return
        record.unanswered = None
        try:
            await self._send(operation)
        except (DeadlineExceeded, DaemonUnavailable, LeaseLost):
            raise
        except CacheClientError as refusal:  # it was refused: nothing happened, and its caller has moved on
            log.debug("unanswered_was_refused sequence=%s why=%s", record.id, refusal)

    async def flush(self) -> None:
        """As ``Lease.flush``."""
        if self._stream is not None:
            await self._stream.submit()

    async def end_step(self) -> None:
        """As ``Lease.end_step``."""
        self._stream = None
        stock, self.record.stock = self.record.stock, None
        pages = stock.drain() if stock is not None else ()
        if not pages:
            return
        try:
            await self.run(Operation(RECYCLE, build_recycle(0, 0, pages), parse_recycle, no_action))
        except CacheClientError as error:  # the stock goes back with the lease
            log.debug("stock_not_returned lease=%s why=%s", self.id, error)

    async def _send(self, operation: Operation[T]) -> T:
        try:
            answer: Any = await self._connection.ask(
                operation.method, operation.request, self._connection.timeouts.call_s
            )
        except CacheClientError as error:
            operation.end_with(error)
            if isinstance(error, LeaseLost):
                self._lose(error)
            raise
        except asyncio.CancelledError:  # the call may have been carried out: the next one asks
            if operation.owner is not None:
                operation.owner.unanswered = operation
            raise
        return operation.apply(answer)

    async def _tell(self, method: Any, request: Any) -> None:
        """A last word: not worth an error where the other side is gone."""
        try:
            await self._connection.ask(method, request, self._connection.timeouts.close_s)
        except (AlreadyClosed, DaemonUnavailable, LeaseLost, NotFound, DeadlineExceeded, Unauthenticated) as gone:
            log.debug("told_nobody lease=%s why=%s", self.id, gone)
            if isinstance(request, lease_pb2.CloseRequest) and not isinstance(gone, LeaseLost | NotFound):
                self._connection.untold.append(request)

    def move(self, connection: AsyncConnection) -> None:
        """As ``Lease.move``."""
        self._lose(self._connection.gone())
        self._connection = connection

    async def _bury_orphans(self) -> None:
        while (record := self.record.take_orphan(and_ended=self._stream is None)) is not None:
            try:
                await self.settle(record)
                if not record.is_released:
                    await self.run(record.release(None))
            except NotFound as gone:  # nothing is held, which is what was wanted
                log.debug("release_needless lease=%s why=%s", self.id, gone)
            except BaseException:
                self.record.orphans.append(record)
                raise
            self.record.forget(record)

    async def _keep_alive(self) -> None:
        """The keeper: beats until it is cancelled or the lease is over."""
        record, connection = self.record, self._connection
        heard_s = time.monotonic()
        loss: CacheClientError | None = None
        while loss is None:
            failure: grpc.RpcError | None = None
            used = connection.proof.metadata
            try:
                call = connection.open_stream(KEEP_ALIVE)
                with contextlib.closing(_Cancelling(call)):
                    while loss is None:
                        self._news.clear()
                        await call.write(record.build_beat())
                        answer = await call.read()
                        if answer is grpc.aio.EOF:
                            break
                        heard_s = time.monotonic()
                        loss = record.note_beat(answer)
                        await connection.pause(record.beat_interval_s, self._news)
            except grpc.RpcError as broken:
                failure = broken
            except (asyncio.CancelledError, asyncio.InvalidStateError, DaemonUnavailable):
                if is_cancelled():
                    raise
            if connection.lost.is_set():
                loss = connection.gone()
            loss = loss or record.judge_silence(failure, time.monotonic() - heard_s)
            if loss is None and failure is not None and connection.proof.renew_stream(failure, used):
                continue
            if loss is None:
                await connection.pause(RECONNECT_PAUSE_S)
        self._lose(loss)

    def _lose(self, error: CacheClientError) -> None:
        if not self.record.lose(error):
            return
        log.warning("lease_lost lease=%s why=%s", self.id, error)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


class _Cancelling:
    """Ends a call with a block."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
