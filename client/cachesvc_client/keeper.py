"""Keeps a lease alive: a beat every third of the silence limit, one at once where there is something to tell, and word
at once when the lease is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import grpc
from kvcache.v1 import lease_pb2

from cachesvc_client.errors import CacheClientError, DaemonUnavailable
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import KEEP_ALIVE

RECONNECT_PAUSE_S = 0.05
"""Between two beat streams: long enough for a connection to come back, short beside any silence limit."""

log = logging.getLogger(__name__)


class Keeper:
    """One thread for one lease. ``on_lost(error)`` is called from it, once, when the lease is over for the daemon."""

    def __init__(
        self, connection: Connection, record: LeaseRecord, on_lost: Callable[[CacheClientError], None]
    ) -> None:
        self._connection = connection
        self._record = record
        self._on_lost = on_lost
        self._stopped = threading.Event()
        self._call: grpc.Call | None = None
        self._used: Metadata = ()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._streams = 0
        self._thread = threading.Thread(target=self._run, name=f"kvcache-keeper-{record.id}", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def nudge(self) -> None:
        """Beat now: the record has something to tell."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop beating. Idempotent."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            error = self._keep()
            if error is not None:
                self._on_lost(error)
        except Exception:
            log.exception("keeper_failed lease=%s", self._record.id)

    def _keep(self) -> CacheClientError | None:
        """Beat until stopped (None) or until the lease is over (why)."""
        heard_s = time.monotonic()
        while True:
            failure: grpc.RpcError | None = None
            try:
                for answer in self._open():
                    heard_s = time.monotonic()
                    if (loss := self._record.note_beat(answer)) is not None:
                        return loss
            except grpc.RpcError as broken:
                failure = broken
            except DaemonUnavailable:  # the connection ended; it says so itself below
                failure = None
            if self._stopped.is_set():
                return None
            if self._connection.lost.is_set():
                return self._connection.gone()
            if (loss := self._record.judge_silence(failure, time.monotonic() - heard_s)) is not None:
                return loss
            if failure is not None and self._connection.proof.renew_stream(failure, self._used):
                log.info("keeper_token_renewed lease=%s", self._record.id)
                continue
            log.info("keeper_reconnects lease=%s", self._record.id)
            self._stopped.wait(RECONNECT_PAUSE_S)

    def _open(self) -> Iterator[lease_pb2.KeepAliveResponse]:
        with self._lock:
            if self._stopped.is_set():
                return
            self._streams += 1
            self._changed.notify_all()
            self._used = self._connection.proof.metadata
            call = self._connection.open_stream(KEEP_ALIVE, self._beats(self._streams))
            self._call = call
        yield from call

    def _beats(self, stream: int) -> Iterator[lease_pb2.KeepAliveRequest]:
        """Ends with its stream: gRPC goes on asking for the beats of one that broke, which may swallow no news."""
        while True:
            with self._changed:
                if self._stopped.is_set() or self._streams != stream:
                    return
                beat = self._record.build_beat()
            yield beat
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped.is_set() or self._streams != stream or self._record.has_news,
                    self._record.beat_interval_s,
                )
