"""What one engine holds: a lease on a model's replica, kept alive, and the sequences opened under it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, TypeVar

from kvcache.v1 import engine_pb2, lease_pb2

from cachesvc.model.answers import Prefetched, TicketView
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
from cachesvc_client.keeper import Keeper
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import ANSWER_MARGIN_S, LONGEST_WAIT_S, LeaseRecord, list_running
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.stock import Stock, stock_targets
from cachesvc_client.registration import Registration
from cachesvc_client.sequence import Sequence
from cachesvc_client.stepping import StepStream
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.messages import build_open, build_recycle, build_wait_tickets, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import ATTACH, CLOSE, DETACH, OPEN, RECYCLE, WAIT_TICKETS, Operation, no_action

T = TypeVar("T")

NEEDLESS = (AlreadyClosed, DaemonUnavailable, LeaseLost, NotFound, DeadlineExceeded, Unauthenticated)
"""Why a detach may fail without anything being wrong."""

log = logging.getLogger(__name__)


class Lease:
    """Made by ``CacheClient.open_lease``. Safe to use from several threads; each sequence and step stream from one.

    Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.
    """

    def __init__(self, connection: Connection, registration: Registration, engine: str, request_id: int) -> None:
        self.registration = registration
        self._connection = connection
        self._opening = (engine, request_id)
        self._record: LeaseRecord | None = None
        self._keeper: Keeper | None = None
        self._stream: StepStream | None = None
        self._pools: list[AttachedPool] = []
        self._callbacks: list[Callable[[CacheClientError], None]] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Open the lease and begin to beat. Raises NotFound (register again), LimitExceeded, DaemonUnavailable."""
        engine, request_id = self._opening
        request = build_open(self.registration, engine, self._connection.process_token, request_id)
        opened = self._connection.ask(OPEN, request, self._connection.timeouts.call_s)
        self._record = LeaseRecord(opened, self.registration)
        self._keeper = Keeper(self._connection, self._record, self._lose)
        self._keeper.start()

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
        """True once the daemon took the lease away or went away itself: recompute, and open a new one."""
        return self.record.loss is not None or (self._connection.lost.is_set() and not self.record.is_closed)

    @property
    def is_draining(self) -> bool:
        """True when the daemon wants to go: finish what runs, open nothing."""
        return self.record.is_draining

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """The pools that this lease attached in this process."""
        return tuple(self._pools)

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        """Call ``callback(error)`` once when the lease is lost, from a thread of the client's; at once if it is."""
        with self._lock:
            loss = self.record.loss
            if loss is None:
                self._callbacks.append(callback)
        if loss is not None:
            callback(loss)

    def attach(self, rank: int = 0) -> AttachedPool:
        """Map one rank's device pool into this process. Raises InvalidRequest (rank), NotSupported (kind of memory)."""
        self.record.check()
        pool = attach_pool(self._connection, self.registration, self.id, rank)
        self._pools.append(pool)
        return pool

    def match(self, keys: bytes, *, max_blocks: int = 0, sequence_id: int | None = None) -> Sequence:
        """Open a sequence on the longest hit of ``keys`` (packed, 32 bytes each, root to leaf), pinned.

        ``max_blocks`` limits the hit (0: no limit): a caller that must compute the last token leaves its block out.
        Raises InvalidRequest, LimitExceeded, Conflict (``sequence_id`` is open).
        """
        self._bury_orphans()
        record = self.record.new_sequence(sequence_id)
        try:
            self.run(record.open(keys, max_blocks))
        except DeadlineExceeded:
            self.record.orphans.append(record)
            raise
        return self.handle(record)

    def prefetch(self, keys: bytes) -> Prefetched:
        """Start to load a prefix towards the device; holds nothing once it is there. Raises PoolExhausted."""
        return self.run(self.record.prefetch(keys))

    def pause_write_backs(self, seconds: float) -> None:
        """Tell the daemon that decode is being hurt: it copies no backups off this lease's devices for ``seconds``.

        At most 1 at a time; tell it again for longer. Returns at once. Swaps and evictions that callers wait for go on.
        Raises InvalidRequest (more than 1 s).
        """
        self.record.ask_pause(seconds)
        assert self._keeper is not None
        self._keeper.nudge()

    def step(self, stock_pages: int | Seq[int] = 0) -> StepStream:
        """Open the lease's step stream. ``stock_pages``: pages to keep in stock, for every group or for each.

        Raises Conflict while the last one is open.
        """
        self.record.check()
        if self._stream is not None:
            raise Conflict("this lease has an open step stream; close it first")
        self.record.stock = Stock(stock_targets(stock_pages, self.registration.layout))
        self._stream = StepStream(self._connection, self)
        return self._stream

    def launch(self) -> int:
        """The number of an iteration of the engine's, asked for before the tables are read that its kernels get.

        Until ``completed`` says that it has ended nothing that it may use goes back to the daemon. Engines that compute
        one iteration at a time, and recycle and release in between, need neither.
        """
        return self.record.launches.begin()

    def completed(self, launch: int) -> None:
        """The kernels of ``launch``, and of all launches before it, have ended: releases that waited for them go.

        With an open step stream they go in a step that nobody waits for, so call it from that stream's thread. Raises
        InvalidRequest (no such launch), DeadlineExceeded (the next ``match`` sees to it).
        """
        self.record.launches.complete(launch)
        if not self.record.has_ended:
            return
        try:
            if self._stream is not None:
                self._stream.tell()
                return
            self._bury_orphans()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless lease=%s why=%s", self.id, gone)
        except LimitExceeded:  # too many steps are under way: the next one takes them along
            log.debug("release_waits_for_a_step lease=%s", self.id)

    def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended, done or failed; their views say which.

        Raises DeadlineExceeded while one still runs, NotFound for one that never was or ended long ago.
        """
        limit_s = self._connection.timeouts.wait_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self.record.check()
            slice_s = min(max(deadline_s - time.monotonic(), 0), LONGEST_WAIT_S)
            request = build_wait_tickets(self.id, tickets, int(slice_s * 1000))
            views = parse_tickets(self._connection.ask(WAIT_TICKETS, request, slice_s + ANSWER_MARGIN_S).tickets)
            running = list_running(views)
            if not running:
                return views
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"tickets {running} still run after {limit_s:g} s", was_answered=True)

    def close(self, *, quiesced: bool | None = None) -> None:
        """End the lease with all that it holds, unmap its pools, stop beating. Idempotent.

        ``quiesced``: no kernel of this engine uses the pool any more, so its private pages come back at once. Say False
        where that is not sure: they come back when the process ends, and a pool on a GPU stays mapped until then. Left
        out, it is so unless a launch is under way.
        """
        if self.record.is_closed:
            return
        quiesced = self.record.is_quiesced(quiesced)
        if self._stream is not None:
            self._stream.close()
        for pool in self._pools:
            if quiesced or not pool.is_on_gpu:  # a kernel that still runs must not find its memory gone
                pool.close()
        self.record.is_closed = True
        if self._keeper is not None:
            self._keeper.close()
        request = lease_pb2.CloseRequest(lease_id=self.id, quiesced=quiesced)
        try:
            self._connection.ask(CLOSE, request, self._connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", self.id, over)
        except (AlreadyClosed, DaemonUnavailable, DeadlineExceeded, Unauthenticated) as gone:
            log.debug("close_untold lease=%s why=%s", self.id, gone)
            self._connection.untold.append(request)

    def move(self, connection: Connection) -> None:
        """The same daemon was found again: this lease is lost, and its end will be told over ``connection``."""
        self._lose(self._connection.gone())
        self._connection = connection

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)

    def handle(self, record: SequenceRecord) -> Sequence:
        """A handle for an open sequence of this lease."""
        return Sequence(record, self)

    def run(self, operation: Operation[T]) -> T:
        """Send an operation under a fresh request_id and take in its answer."""
        try:
            self.record.address(operation)
        except CacheClientError as error:
            operation.end_with(error)
            raise
        return self._send(operation)

    def settle(self, record: SequenceRecord) -> None:
        """Ask again for an answer that never came, under its own request_id."""
        operation = record.unanswered
        if operation is None:
            return
        record.unanswered = None
        try:
            self._send(operation)
        except (DeadlineExceeded, DaemonUnavailable, LeaseLost):
            raise
        except CacheClientError as refusal:  # it was refused: nothing happened, and its caller has moved on
            log.debug("unanswered_was_refused sequence=%s why=%s", record.id, refusal)

    def flush(self) -> None:
        """Tell the daemon of growth from stock now, by a step of its own."""
        if self._stream is not None:
            self._stream.submit()

    def end_step(self) -> None:
        """The step stream was closed: its stock goes back."""
        self._stream = None
        stock, self.record.stock = self.record.stock, None
        pages = stock.drain() if stock is not None else ()
        if not pages:
            return
        try:
            self.run(Operation(RECYCLE, build_recycle(0, 0, pages), parse_recycle, no_action))
        except CacheClientError as error:  # the stock goes back with the lease
            log.debug("stock_not_returned lease=%s why=%s", self.id, error)

    def _send(self, operation: Operation[T]) -> T:
        try:
            answer: Any = self._connection.ask(operation.method, operation.request, self._connection.timeouts.call_s)
        except CacheClientError as error:
            operation.end_with(error)
            if isinstance(error, LeaseLost):
                self._lose(error)
            raise
        return operation.apply(answer)

    def _bury_orphans(self) -> None:
        """Release sequences that nobody uses any more, or whose Match or Release got no answer: they may hold pins."""
        while (record := self.record.take_orphan(and_ended=self._stream is None)) is not None:
            try:
                self.settle(record)
                if not record.is_released:
                    self.run(record.release(None))
            except NotFound as gone:  # nothing is held, which is what was wanted
                log.debug("release_needless lease=%s why=%s", self.id, gone)
            except BaseException:
                self.record.orphans.append(record)
                raise
            self.record.forget(record)

    def _lose(self, error: CacheClientError) -> None:
        if not self.record.lose(error):
            return
        log.warning("lease_lost lease=%s why=%s", self.id, error)
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


def attach_pool(connection: Connection, registration: Registration, lease_id: str, rank: int) -> AttachedPool:
    """Map one rank's pool for this process, under a lease that may be another process's."""
    timeouts = connection.timeouts
    token = connection.process_token
    request = engine_pb2.AttachRequest(lease_id=lease_id, rank=rank, process_token=token)
    connection.attachments.begin(lease_id, rank)
    try:
        attached = connection.ask(ATTACH, request, timeouts.attach_s)
    except CacheClientError:
        connection.attachments.end(lease_id, rank)
        raise

    def detach() -> None:
        if not connection.attachments.end(lease_id, rank):
            return
        request = engine_pb2.DetachRequest(lease_id=lease_id, rank=rank, process_token=token)
        try:
            connection.ask(DETACH, request, timeouts.close_s)
        except NEEDLESS as gone:  # nobody must know
            log.debug("detach_needless lease=%s rank=%s why=%s", lease_id, rank, gone)

    pool = AttachedPool(registration.layout, rank, attached, connection.life, detach)
    pool.start()
    return pool
