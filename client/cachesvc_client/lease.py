"""Lease of one engine on a model's replica, kept alive, with the sequences opened under it.

Keeps a lease alive: a heartbeat every third of the silence limit, one at once for a pending report, and a callback
at once when the lease is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

import grpc
import numpy as np
import numpy.typing as npt
from kvcache.v1 import engine_pb2, lease_pb2

from cachesvc.model.answers import Expected, Prefetched, TicketView
from cachesvc_client.core.arguments import Retention, explains_arguments
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    LimitExceeded,
    NotFound,
    NotSupported,
    Registration,
    Unauthenticated,
)
from cachesvc_client.core.keys import BlockHasher, ExtraKey, PackedKeys
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.entries import Stock, stock_targets
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.sequence import Sequence, StepStream
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.methods import ATTACH, DETACH, KEEP_ALIVE, OPEN
from cachesvc_client.wire.transports import NUDGE, BlockingLine

log = logging.getLogger(__name__)


def open_lease(
    connection: Connection, registration: Registration, engine: str, request_id: int, instance: str = ""
) -> Lease:
    """Open a lease, or join that of an ``instance``, and begin to beat. Raises NotFound (register again),
    LimitExceeded, NotSupported (a daemon that knows no instances), DaemonUnavailable."""
    asked_s = time.monotonic()
    request = lease_pb2.OpenRequest(
        model_id=registration.model_id,
        replica=registration.replica,
        engine=engine,
        process_token=connection.life.process_token,
        request_id=request_id,
        instance_id=instance,
        namespace=registration.namespace,
    )
    opened = connection.ask(OPEN, request, connection.timeouts.call_s)
    record = LeaseRecord(opened, registration, connection, asked_s)
    if record.instance != instance:
        record.close(quiesced=True)
        raise NotSupported("this daemon lets no processes share a lease: update it")
    keeping = Keeping(connection, record)
    keeping.start()
    return Lease(record, keeping)


class Lease:
    """Made by ``CacheClient.open_lease``. Safe to use from several threads; each sequence and step stream from one.

    Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.
    """

    def __init__(self, record: LeaseRecord, keeping: Keeping) -> None:
        self.record = record
        self._keeping = keeping
        self._stream: StepStream | None = None

    def __repr__(self) -> str:
        """State; of the id, which is a key to the lease, its beginning."""
        state = "closed" if self.record.is_closed else "lost" if self.is_lost else "live"
        on = self.registration
        return f"<{type(self).__name__} {self.id[:12]} on model {on.model_id}, replica {on.replica}: {state}>"

    @property
    def id(self) -> str:
        """The lease_id: hand it to worker processes, for ``CacheClient.attach``."""
        return self.record.id

    @property
    def instance(self) -> str:
        """The name under which processes of one engine share it; empty where none do."""
        return self.record.instance

    @property
    def joined(self) -> bool:
        """True where another process of the instance had opened it."""
        return self.record.joined

    @property
    def registration(self) -> Registration:
        """The model and replica that it is on."""
        return self.record.registration

    @property
    def is_lost(self) -> bool:
        """True once the daemon took the lease away or went away itself: recompute, and open a new one."""
        return self.record.is_lost

    @property
    def is_sure(self) -> bool:
        """True where it is known, without a call, that what was read of the lease's pages up to now was its own: no
        other engine can have got them. False while heartbeats are late, once the process was stopped (``make_sure``),
        and in a child of the process that opened the lease."""
        return self.record.is_sure

    @property
    def is_draining(self) -> bool:
        """True when the daemon wants to go: finish what runs, open nothing."""
        return self.record.is_draining

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """The pools that this lease attached in this process."""
        return tuple(self.record.pools)

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        """Call ``callback(error)`` once when the lease is lost, from a thread of the client's or on its loop; at once
        if it is. It must not block."""
        self.record.on_lost(callback)

    def hasher(self, tokens: Seq[int] | npt.NDArray[np.integer] = (), extras: Seq[ExtraKey] = ()) -> BlockHasher:
        """Keys of a prompt under this lease's namespace, in blocks of its layout; ``extend`` adds the tokens to come.

        ``extras``: what decides KV beside the tokens. Raises InvalidRequest.
        """
        hasher = BlockHasher(self.registration.namespace, self.registration.layout.block_tokens, tuple(extras))
        hasher.extend(tokens)
        return hasher

    def launch(self) -> int:
        """The number of an iteration of the engine's, asked for before the tables are read that its kernels get.

        Until ``completed`` says that it has ended nothing that it may use goes back to the daemon. Engines that compute
        one iteration at a time, and recycle and release in between, need neither.
        """
        return self.record.launches.begin()

    @explains_arguments
    def attach(self, rank: int = 0) -> AttachedPool:
        """Map one rank's device pool into this process. Raises InvalidRequest (rank), NotSupported (kind of memory)."""
        self.record.check()
        pool = attach_pool(self.record.connection, self.registration, self.id, rank)
        self.record.pools.append(pool)
        return pool

    @explains_arguments
    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
    ) -> Sequence:
        """Open a sequence on the longest hit of ``keys`` (packed, 32 bytes each, root to leaf), pinned.

        ``max_blocks`` limits the hit (0: no limit): a caller that must compute the last token leaves its block out.
        ``waited_seconds``: how long the request has waited in the engine already; eviction learns from it.
        ``expected``: what another node computes of it; ``coming_blocks`` says how much is still on its way.
        ``retention``: what the engine expects of these blocks, a hint for eviction. Raises DaemonDraining,
        InvalidRequest, LimitExceeded, Conflict (``sequence_id`` is open).
        """
        if self.record.orphans or self.record.ending:
            self.record.release_abandoned()
        record = self.record.new_sequence(sequence_id)
        try:
            record.retention = retention
            self.record.run(record.open(keys, max_blocks, waited_seconds, expected))
        except (DeadlineExceeded, KeyboardInterrupt):
            self.record.orphans.append(record)
            raise
        return Sequence(record, self.record)

    @explains_arguments
    def prefetch(self, keys: PackedKeys) -> Prefetched:
        """Start to load a prefix towards the device; holds nothing once it is there. Raises PoolExhausted."""
        return self.record.run(self.record.prefetch(keys))

    @explains_arguments
    def pause_write_backs(self, seconds: float) -> None:
        """Report that decode suffers: the daemon copies no backups off this lease's devices for ``seconds``. At most 1
        at a time; call again for longer. Returns at once. Swaps and evictions that callers wait for go on. Raises
        InvalidRequest (more than 1 s).
        """
        self.record.ask_pause(seconds)
        self._keeping.nudge()

    @explains_arguments
    def make_sure(self, timeout_s: float) -> None:
        """Validate all reads of the lease's pages up to now. While ``is_sure`` this asks nothing; else it asks the
        daemon, which knows whether it revoked the lease as silent and granted its pages to others.

        Raises LeaseLost (it did: nothing that was computed from them since may be used), DaemonUnavailable (unknown:
        the same), DeadlineExceeded.
        """
        if not self.record.is_sure:
            self._keeping.make_sure(timeout_s)

    @explains_arguments
    def step(self, stock_pages: int | Seq[int] = 0) -> StepStream:
        """Open the lease's step stream. ``stock_pages``: pages to keep in stock, for every group or for each.

        Raises Conflict while the last one is open, NotSupported (the daemon is of release 0.1, which knows no columns).
        """
        self.record.check()
        if not self.record.has_columns:
            raise NotSupported("this daemon takes no steps by columns: upgrade it to release 0.2 or later")
        if self.record.stock is not None:
            raise Conflict("this lease has an open step stream; close it first")
        layout = self.registration.layout
        self.record.stock = Stock(stock_targets(stock_pages, layout), layout.pools)
        self._stream = StepStream(self.record)
        self.record.flush = self._stream.submit
        return self._stream

    @explains_arguments
    def completed(self, launch: int) -> None:
        """Note that the kernels of ``launch`` and of all earlier launches have ended, and send the releases that
        waited.

        With an open step stream they go in a step without a waiter, so call it where that stream is used. Raises
        InvalidRequest (no such launch), DeadlineExceeded (the next ``match`` sees to it).
        """
        self.record.launches.complete(launch)
        if not self.record.has_ended:
            return
        try:
            if self._stream is not None and self.record.stock is not None:
                self._stream.tell()
                return
            self.record.release_abandoned()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless lease=%s why=%s", self.id, gone)
        except LimitExceeded:  # too many steps are under way: the next one takes them along
            log.debug("release_waits_for_a_step lease=%s", self.id)

    @explains_arguments
    def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended, done or failed; their views say which.

        Raises DeadlineExceeded while one still runs, NotFound for one that never was or ended long ago.
        """
        return self.record.wait_tickets(tickets, timeout_s)

    def close(self, *, quiesced: bool | None = None, for_all: bool = False) -> None:
        """End the lease with all that it holds, unmap its pools, stop beating. Idempotent. That of an instance ends
        with its last process, and what the others hold stays; ``for_all``: it ends now, for all of them.

        ``quiesced``: no kernel of this engine uses the pool any more, so its private pages come back at once. Say False
        where that is not sure: they come back when the process ends, and a pool on a GPU stays mapped until then. Left
        out, it is so unless a launch is under way. Raises UsedAfterFork.
        """
        self.record.connection.maker.check()
        if self.record.is_closed:
            return
        if quiesced is None:
            quiesced = not self.record.launches.are_under_way
        if self._stream is not None:
            self._stream.close()
        for pool in self.pools:
            if quiesced or not pool.is_on_gpu:  # a kernel that still runs must not find its memory gone
                pool.close()
        self.record.is_closed = True
        self._keeping.close()
        self.record.close(quiesced=quiesced, for_all=for_all)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)


NEEDLESS = (AlreadyClosed, DaemonUnavailable, LeaseLost, NotFound, DeadlineExceeded, Unauthenticated)
"""Errors of a detach that do no harm."""


def attach_pool(connection: Connection, registration: Registration, lease_id: str, rank: int) -> AttachedPool:
    """Map one rank's pool for this process, under a lease that may be another process's."""
    token = connection.life.process_token
    request = engine_pb2.AttachRequest(lease_id=lease_id, rank=rank, process_token=token)
    connection.attach(lease_id, rank)
    try:
        attached = connection.ask(ATTACH, request, connection.timeouts.attach_s)
    except BaseException:
        connection.detach(lease_id, rank)
        raise

    def unmapped() -> None:
        if not connection.detach(lease_id, rank):
            return
        request = engine_pb2.DetachRequest(lease_id=lease_id, rank=rank, process_token=token)
        try:
            connection.insist(DETACH, request, connection.timeouts.close_s)
        except NEEDLESS as gone:  # the caller needs no report
            log.debug("detach_needless lease=%s rank=%s why=%s", lease_id, rank, gone)

    pool = AttachedPool(registration.layout, rank, attached, connection.life, unmapped)
    try:
        pool.start()
    except BaseException:
        pool.close()
        raise
    return pool


RECONNECT_PAUSE_S = 0.05
"""Between two beat streams: long enough for a connection to come back, short beside any silence limit."""


class Keeping:
    """The beats of one lease. ``record.lose`` is called from them when it is over for the daemon."""

    def __init__(self, connection: Connection, record: LeaseRecord) -> None:
        self._connection = connection
        self._record = record
        self._line: BlockingLine | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvcache-keeper-{record.id}", daemon=True)
        self._is_ended = False
        self._heard_s = 0.0
        self.start = self._thread.start

    def nudge(self) -> None:
        """Beat now: the record has something to tell. Where no stream is open, the first beat of the next one does."""
        line = self._line
        if line is not None:
            line.wake()

    def close(self) -> None:
        self._is_ended = True
        self.nudge()
        if threading.current_thread() is not self._thread:  # a loss that it reports may close the lease
            self._thread.join()

    def make_sure(self, timeout_s: float) -> None:
        """Beat beside the stream, and wait for the answer: the lease lives, or is lost here too. Raises LeaseLost,
        DaemonUnavailable, AlreadyClosed, DeadlineExceeded."""
        connection, record = self._connection, self._record
        deadline_s = time.monotonic() + timeout_s
        while True:
            record.check()
            line, sent_s = connection.open_line(KEEP_ALIVE), time.monotonic()
            try:
                line.put(lease_pb2.KeepAliveRequest(lease_id=record.id))
                came = line.get(deadline_s)
            finally:
                line.close()
            if isinstance(came, lease_pb2.KeepAliveResponse):
                self._take(came, sent_s)
                return
            if came is None or time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"lease {record.id}: no beat was answered within {timeout_s:g} s")
            connection.judge(came)
            if (loss := record.judge_silence(came, 0)) is not None:
                record.lose(loss)
            elif not connection.proof.renew_stream(came, line.metadata):
                connection.lost.wait(RECONNECT_PAUSE_S)

    def _run(self) -> None:
        try:
            self._heard_s = time.monotonic()
            while not self._is_ended:
                self._keep()
        except (DaemonUnavailable, AlreadyClosed) as gone:
            self._lose(gone)
        except Exception:
            log.exception("keeper_failed lease=%s", self._record.id)

    def _lose(self, error: CacheClientError) -> None:
        self._is_ended = True
        self._record.lose(error)

    def _keep(self) -> None:
        """Beat over one stream. Raises DaemonUnavailable, AlreadyClosed."""
        connection = self._connection
        line = self._line = connection.open_line(KEEP_ALIVE)
        try:
            failure = self._beat(line)
            silent_s = time.monotonic() - self._heard_s
        finally:
            self._line = None
            line.close()
        if failure is None:
            return  # stopped, or with a new token
        connection.judge(failure)
        if (loss := self._record.judge_silence(failure, silent_s)) is not None:
            self._lose(loss)
        elif connection.proof.renew_stream(failure, line.metadata):
            log.info("keeper_token_renewed lease=%s", self._record.id)
        else:
            log.info("keeper_reconnects lease=%s", self._record.id)
            connection.lost.wait(RECONNECT_PAUSE_S)

    def _beat(self, line: BlockingLine) -> grpc.RpcError | None:
        """Beat until stopped or until the token was replaced (None), or until the stream has ended (how). Raises
        DaemonUnavailable."""
        record, sent_s = self._record, deque[float]()
        while not self._is_ended:
            sent_s.append(record.tenure.begin_beat())
            line.put(record.build_beat())
            next_s = time.monotonic() + record.beat_interval_s
            while not self._is_ended:
                came = line.get(next_s)
                if came is None or came is NUDGE:
                    break
                if isinstance(came, grpc.RpcError):
                    record.tenure.break_off()
                    return came
                self._heard_s = time.monotonic()
                self._take(came, sent_s.popleft())
                record.is_draining = came.draining
                if came.token_grace_ms and self._connection.proof.replace(line.metadata, came.token_grace_ms / 1000):
                    return None
        return None

    def _take(self, answer: lease_pb2.KeepAliveResponse, sent_s: float) -> None:
        """A beat that was sent then was answered. Raises DaemonUnavailable: by another life of the daemon."""
        if answer.epoch != self._record.epoch:
            self._connection.life.give_up()
            raise self._connection.gone()
        self._record.tenure.end_beat(sent_s)
