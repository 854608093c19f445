"""One life of the daemon as this process sees it: channels for calls, and the life connection that says when it
ends.

A connection never comes back. Reconnecting makes a new one, and everything made under the old one stays lost.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import grpc
from kvcache.v1 import event_pb2, lease_pb2

from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    DaemonUnavailable,
    LimitExceeded,
    Maker,
    NotFound,
    QuotaExceeded,
    error_of,
    is_refusal,
)
from cachesvc_client.wire.credentials import Credentials, Metadata, Proof
from cachesvc_client.wire.life import GONE, LifeConnection, may_show, require_daemon
from cachesvc_client.wire.methods import Method, Q, R
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport
from cachesvc_client.wire.transports import BlockingLine, Channels, StepLine

NO_CREDENTIALS = Credentials()
INSIST_PAUSE_S = 0.1
"""A rate's bucket has another token by then, and a daemon at its limit of calls has ended some."""
LANE_PAUSE_S = 1.0
"""Pause after a lane broke before the next one is asked for, seconds; calls go by gRPC meanwhile."""

log = logging.getLogger(__name__)


class Attachments:
    """Count of the pools of a rank that this process has mapped under a lease. Safe to use from several threads.

    The daemon treats the process as no writer after a Detach of the rank: so only the last pool may send one.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def begin(self, lease_id: str, rank: int) -> None:
        """Count a pool that is about to be attached."""
        with self._lock:
            self._counts[lease_id, rank] += 1

    def end(self, lease_id: str, rank: int) -> bool:
        """Note that one was unmapped, or never came; True when it was the last."""
        with self._lock:
            self._counts[lease_id, rank] -= 1
            left = self._counts[lease_id, rank]
            if not left:
                del self._counts[lease_id, rank]
        return not left

    def has(self, lease_id: str, rank: int) -> bool:
        with self._lock:
            return (lease_id, rank) in self._counts


class Connection:
    """Calls with a deadline and bounded retries, all of which fail at once when the daemon goes.

    ``untold``: ends of leases that could not be reported any more. Where the same daemon is found again they matter: it
    knows that this process lives, and keeps the leases' pages back for it. ``proof``: what every call proves itself by.
    ``transport``: which way calls may go.
    """

    def __init__(
        self,
        socket_path: str,
        channels: Channels,
        *,
        timeouts: Timeouts,
        retries: Retries,
        on_lost: Callable[[], None],
        credentials: Credentials = NO_CREDENTIALS,
        transport: Transport = Transport.AUTO,
    ) -> None:
        self.socket_path = socket_path
        self.channels = channels
        self.timeouts = timeouts
        self.retries = retries
        self.life = LifeConnection(socket_path, timeouts.connect_s, self._lose)
        self.attachments = Attachments()
        self.untold: list[lease_pb2.CloseRequest] = []
        self.proof = Proof(credentials)
        self.maker = Maker()
        self._on_lost = on_lost
        self._is_closed = False
        self._takes_lanes = transport is Transport.AUTO
        self._lane_proof: Metadata | None = None
        self._lane_again_s: float | None = 0.0

    @property
    def lost(self) -> threading.Event:
        """Set for good when the daemon went away or this side closed."""
        return self.life.lost

    @property
    def process_token(self) -> bytes:
        """Token by which the daemon knows this process."""
        return self.life.process_token

    def start(self) -> None:
        """Connect. Raises DaemonUnavailable; UntrustedDaemon before a token has been shown to anybody."""
        try:
            self.channels.connect(self.socket_path)
            self.life.start()
            self.proof.start(self.life.process_token)
            if self.proof.has_token:
                require_daemon(self.life.path, self.life.daemon_uid)
                may_show(self.socket_path)
            self.keep_lane()
        except BaseException:
            self.close()
            raise

    def ask(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Send one request, again under the same contents where the way broke. Raises CacheClientError."""
        deadline_s = time.monotonic() + timeout_s
        attempts: Attempts | None = None
        headers = trace_headers()
        while True:
            self.check()
            if self.wants_lane:
                self.keep_lane()
            used = self.proof.metadata
            left_s = timeout_s if attempts is None else attempts.left_s(time.monotonic())
            try:
                return self.channels.call(method, request, left_s, (*headers, *used) if headers else used)
            except grpc.RpcError as failure:
                attempts = attempts or Attempts(self.retries, deadline_s)
                if self.proof.renew(failure, used):
                    continue
                self.judge(failure)
                pause_s = attempts.pause_after(failure, time.monotonic())
            self.channels.wait_end(pause_s)

    def insist(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """``ask`` for what ends something: a daemon that has no room for the call now is asked again in time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.ask(method, request, max(deadline_s - time.monotonic(), 0))
            except (LimitExceeded, QuotaExceeded):
                if time.monotonic() + INSIST_PAUSE_S >= deadline_s:
                    raise
            self.channels.wait_end(INSIST_PAUSE_S)

    def open_line(self, method: Method[Q, R]) -> BlockingLine:
        """A stream both ways. Raises DaemonUnavailable."""
        self.check()
        try:
            return self.channels.open_line(method, (*trace_headers(), *self.proof.metadata))
        except grpc.RpcError as failure:
            raise self.gone() from failure

    def open_steps(self) -> StepLine:
        """A stream of steps, by the lane where there is one. Raises DaemonUnavailable."""
        self.check()
        try:
            return self.channels.open_steps((*trace_headers(), *self.proof.metadata))
        except grpc.RpcError as failure:
            raise self.gone() from failure

    @property
    def has_lane(self) -> bool:
        return self.channels.has_lane

    @property
    def wants_lane(self) -> bool:
        """True while ``keep_lane`` has something to do, now or after a while."""
        return self._takes_lanes and not (self.channels.has_lane and self._lane_proof == self.proof.metadata)

    def keep_lane(self) -> None:
        """Have a lane that proves itself by what calls do now, where the daemon gives one: without it they go by
        gRPC. One that broke is made anew after a while."""
        if not self.wants_lane:
            return
        now_s = time.monotonic()
        if self._lane_again_s is None:  # it has just been seen to be broken
            self._lane_again_s = 0.0 if self.channels.has_lane else now_s + LANE_PAUSE_S
        if now_s < self._lane_again_s:
            return
        self._lane_again_s = now_s + LANE_PAUSE_S  # other threads do not try meanwhile
        used = self.proof.metadata
        try:
            end = self.life.fetch_lane()
            self.channels.take_lane(end, used, self.timeouts.connect_s)
        except NotFound as refused:
            self._takes_lanes = False
            log.info("lane_not_given path=%s why=%s", self.socket_path, refused)
        except (CacheClientError, grpc.RpcError) as broken:
            log.info("lane_not_taken path=%s why=%s", self.socket_path, broken)
        else:
            self._lane_proof, self._lane_again_s = used, None
            log.info("lane_taken path=%s", self.socket_path)

    @property
    def is_here(self) -> bool:
        """True in the process that made the connection, False in its children."""
        return not self.maker.is_elsewhere

    def check(self) -> None:
        """Raises DaemonUnavailable or AlreadyClosed where nothing can be asked here any more."""
        self.maker.check()
        if self.life.lost.is_set():
            raise self.gone()

    def judge(self, failure: grpc.RpcError | CacheClientError) -> None:
        """Raise DaemonUnavailable where a call failed because its daemon has gone, and report the loss.

        A daemon that stops closes its socket before clients notice its end, and the next one does not know what was
        held of the last: so a broken connection, and an unknown name, are reason to ask the socket which daemon serves
        it.
        """
        if self.lost.is_set():
            raise self.gone() from failure
        error = error_of(failure) if isinstance(failure, grpc.RpcError) else failure
        is_broken = isinstance(failure, grpc.RpcError) and is_broken_way(failure, error)
        if (is_broken or isinstance(error, NotFound)) and self.life.is_replaced():
            self.life.give_up()
            raise self.gone() from failure

    def gone(self) -> CacheClientError:
        """Error that explains why this connection takes no calls any more."""
        return AlreadyClosed("the client was closed; connect again") if self._is_closed else DaemonUnavailable(GONE)

    def close(self) -> None:
        """End the connection; calls under way fail. Idempotent. Raises UsedAfterFork."""
        self.maker.check()
        self._is_closed = True
        self.life.close()
        self.channels.close()

    def _lose(self) -> None:
        """Note the loss, from the thread that noticed it."""
        self.channels.end_calls()
        self._on_lost()


def trace_headers() -> tuple[tuple[str, str], ...]:
    """W3C headers of the span that records now: ``traceparent`` and, if there is one, ``tracestate``.

    OpenTelemetry is never imported here: a span can only record where the engine has imported it already.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    span = api.get_current_span()
    if not span.is_recording():
        return ()
    context = span.get_span_context()
    flags = int(context.trace_flags)
    headers: tuple[tuple[str, str], ...] = (
        ("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"),
    )
    state = context.trace_state.to_header()
    return (*headers, ("tracestate", state)) if state else headers


class Attempts:
    """The attempts of one call, under one request_id and one deadline (``time.monotonic()``)."""

    def __init__(self, retries: Retries, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._left = retries.attempts - 1
        self._pause_s = retries.pause_s

    def left_s(self, now_s: float) -> float:
        """Time until the deadline, never quite none: gRPC takes 0 for a call that has failed already."""
        return max(self._deadline_s - now_s, 0.001)

    def pause_after(self, failure: grpc.RpcError, now_s: float) -> float:
        """Seconds to wait before the next attempt. Raises the call's typed error where no attempt is left."""
        error = error_of(failure)
        if not is_broken_way(failure, error) or self._left == 0 or now_s + self._pause_s >= self._deadline_s:
            raise error from (None if is_refusal(failure) else failure)  # the daemon's sentence is whole
        self._left -= 1
        pause_s = self._pause_s
        self._pause_s *= 2
        return pause_s


def is_broken_way(failure: grpc.RpcError, error: CacheClientError) -> bool:
    """True when the connection broke; what the daemon itself refused is final."""
    return isinstance(error, DaemonUnavailable) and not is_refusal(failure)


DEFAULT_OPTIONS = ChannelOptions(first_reconnect_ms=2000, longest_reconnect_ms=2000)
"""Channel options of a subscriber, which is in no hurry."""


def subscription(
    namespace: bytes, *, snapshot: bool = True, epoch: int = 0, after: int | None = None, storage: bool = False
) -> event_pb2.SubscribeRequest:
    """Request for events: a snapshot first, or all behind change ``after`` of ``epoch``, or (neither) from now on.
    ``storage``: also changes of storage."""
    request = event_pb2.SubscribeRequest(namespace=namespace, snapshot=snapshot, epoch=epoch, storage=storage)
    if after is not None and not snapshot:
        request.after_sequence_number = after
    return request
