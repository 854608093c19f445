"""Keeps a lease alive: a heartbeat every third of the silence limit, one at once for a pending report, and a callback
at once when the lease is lost."""

from __future__ import annotations

import logging
import time
from collections import deque

import grpc
from kvcache.v1 import lease_pb2

from cachesvc_client.core.errors import AlreadyClosed, CacheClientError, DaemonUnavailable, DeadlineExceeded
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.methods import KEEP_ALIVE
from cachesvc_client.wire.port import NUDGE, Line, Running

RECONNECT_PAUSE_S = 0.05
"""Between two beat streams: long enough for a connection to come back, short beside any silence limit."""

log = logging.getLogger(__name__)


class Keeping:
    """The beats of one lease. ``record.lose`` is called from them when it is over for the daemon."""

    def __init__(self, connection: Connection, record: LeaseRecord) -> None:
        self._connection = connection
        self._record = record
        self._line: Line | None = None
        self._running: Running | None = None
        self._is_ended = False
        self._heard_s = 0.0

    def start(self) -> None:
        """Begin to beat."""
        self._running = self._connection.port.spawn(self._run(), f"kvcache-keeper-{self._record.id}")

    def nudge(self) -> None:
        """Beat now: the record has something to tell. Where no stream is open, the first beat of the next one does."""
        line = self._line
        if line is not None:
            line.wake()

    async def close(self) -> None:
        """Stop beating. Idempotent."""
        self._is_ended = True
        self.nudge()
        if self._running is not None:
            await self._running.join()

    async def make_sure(self, timeout_s: float) -> None:
        """Beat beside the stream, and wait for the answer: the lease lives, or is lost here too. Raises LeaseLost,
        DaemonUnavailable, AlreadyClosed, DeadlineExceeded."""
        connection, record = self._connection, self._record
        deadline_s = time.monotonic() + timeout_s
        while True:
            record.check()
            line, sent_s = connection.open_line(KEEP_ALIVE), time.monotonic()
            try:
                line.put(lease_pb2.KeepAliveRequest(lease_id=record.id))
                came = await line.get(deadline_s)
            finally:
                await line.close()
            if isinstance(came, lease_pb2.KeepAliveResponse):
                self._take(came, sent_s)
                return
            if came is None or time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"lease {record.id}: no beat was answered within {timeout_s:g} s")
            await connection.judge(came)
            if (loss := record.judge_silence(came, 0)) is not None:
                record.lose(loss)
            elif not connection.proof.renew_stream(came, line.metadata):
                await connection.port.wait_end(RECONNECT_PAUSE_S)

    async def _run(self) -> None:
        try:
            error = await self._keep()
            if error is not None:
                self._record.lose(error)
        except Exception:
            log.exception("keeper_failed lease=%s", self._record.id)

    async def _keep(self) -> CacheClientError | None:
        """Beat until stopped (None) or until the lease is over (why)."""
        connection = self._connection
        self._heard_s = time.monotonic()
        while not self._is_ended:
            try:
                line = self._line = connection.open_line(KEEP_ALIVE)
                try:
                    failure = await self._beat(line)
                    silent_s = time.monotonic() - self._heard_s
                finally:
                    self._line = None
                    await line.close()
                if failure is None:
                    continue  # stopped, or with a new token
                await connection.judge(failure)
            except (DaemonUnavailable, AlreadyClosed) as gone:
                return gone
            if (loss := self._record.judge_silence(failure, silent_s)) is not None:
                return loss
            if connection.proof.renew_stream(failure, line.metadata):
                log.info("keeper_token_renewed lease=%s", self._record.id)
                continue
            log.info("keeper_reconnects lease=%s", self._record.id)
            await connection.port.wait_end(RECONNECT_PAUSE_S)
        return None

    async def _beat(self, line: Line) -> grpc.RpcError | None:
        """Beat until stopped or until the token was replaced (None), or until the stream has ended (how). Raises
        DaemonUnavailable."""
        record, sent_s = self._record, deque[float]()
        while not self._is_ended:
            sent_s.append(record.tenure.begin_beat())
            line.put(record.build_beat())
            next_s = time.monotonic() + record.beat_interval_s
            while not self._is_ended:
                came = await line.get(next_s)
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
