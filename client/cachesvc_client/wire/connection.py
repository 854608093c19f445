"""One life of the daemon as this process sees it: calls by gRPC and by a lane, and the life connection that says when
it ends.

A connection never comes back. Reconnecting makes a new one, and everything made under the old one stays lost.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from kvcache.v1 import lease_pb2

from cachesvc.wire.lane import METHODS
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
from cachesvc_client.wire.credentials import Credentials, Metadata, Proof, has_token
from cachesvc_client.wire.life import GONE, LifeConnection, may_show, require_daemon
from cachesvc_client.wire.methods import STEP, Method, Q, R
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport
from cachesvc_client.wire.transports import BlockingLane, BlockingLine, ChannelMaker, LaneSteps, StepLine

INSIST_PAUSE_S = 0.1
"""A rate's bucket has another token by then, and a daemon at its limit of calls has ended some."""
LANE_PAUSE_S = 1.0
"""Pause after a lane broke before the next one is asked for, seconds; calls go by gRPC meanwhile."""

log = logging.getLogger(__name__)


class ChannelClosed(grpc.RpcError):
    """A call met the end of its connection on this side."""


class Connection:
    """Calls with a deadline and bounded retries, all of which fail at once when the daemon goes.

    ``unreported``: ends of leases that could not be reported. Where the same daemon is found again they matter: it
    knows that this process lives, and keeps the leases' pages back for it. ``proof``: credentials of every call.
    """

    def __init__(
        self,
        socket_path: str,
        make_channel: ChannelMaker,
        options: ChannelOptions,
        *,
        timeouts: Timeouts,
        retries: Retries,
        on_lost: Callable[[], None],
        credentials: Credentials,
        transport: Transport,
    ) -> None:
        self.socket_path = socket_path
        self.timeouts = timeouts
        self.retries = retries
        self.life = LifeConnection(socket_path, timeouts.connect_s, self._lose)
        self.lost = self.life.lost
        self.unreported: list[lease_pb2.CloseRequest] = []
        self.proof = Proof(credentials)
        self.maker = Maker()
        self._make_channel = make_channel
        self._options = options
        self._on_lost = on_lost
        self._is_closed = False
        self._channel: grpc.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._lane: BlockingLane | None = None
        self._lane_from_s = 0.0 if transport is Transport.AUTO else math.inf  # when a lane may be asked for; inf: never
        self._attached: Counter[tuple[str, int]] = Counter()

    def start(self) -> None:
        """Connect. Raises DaemonUnavailable; UntrustedDaemon before a token has been sent."""
        try:
            self._channel = self._make_channel(self.socket_path, self._options)
            self.life.start()
            self.proof.start(self.life.process_token)
            if has_token(self.proof.metadata):
                require_daemon(self.life.path, self.life.daemon_uid)
                may_show(self.socket_path)
            self.keep_lane()
        except BaseException:
            self.close()
            raise

    def ask(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Send one request, again under the same contents where the connection broke. Raises CacheClientError."""
        deadline_s = time.monotonic() + timeout_s
        pauses = self.retries.pauses()
        headers = trace_headers()
        while True:
            self.check()
            lane, used = self._lane, self.proof.metadata
            if lane is None or lane.why_broken or lane.metadata != used:
                lane = self.keep_lane()
            left_s = max(deadline_s - time.monotonic(), 0.001)  # gRPC takes 0 for a call that has failed already
            shown = (*headers, *used) if headers else used
            try:
                if lane is not None and method.name in METHODS and lane.has_room:
                    return lane.call(method, request, left_s, shown)
                return self._call(method, request, left_s, shown)
            except grpc.RpcError as failure:
                if self.proof.renew(failure, used):
                    continue
                self.judge(failure)
                pause_s = pause_after(failure, pauses, deadline_s)
            self.lost.wait(pause_s)

    def insist(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """``ask`` for what ends something: a daemon that has no room for the call now is asked again in time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.ask(method, request, max(deadline_s - time.monotonic(), 0))
            except (LimitExceeded, QuotaExceeded):
                if time.monotonic() + INSIST_PAUSE_S >= deadline_s:
                    raise
            self.lost.wait(INSIST_PAUSE_S)

    def open_line(self, method: Method[Q, R]) -> BlockingLine:
        """A stream of gRPC. Raises DaemonUnavailable."""
        self.check()
        assert self._channel is not None
        call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            return BlockingLine(call, (*trace_headers(), *self.proof.metadata))
        except ValueError as closed:
            if not self.lost.is_set():
                raise
            raise self.gone() from closed

    def open_steps(self) -> StepLine:
        """A stream of steps, by the lane where there is one. Raises DaemonUnavailable."""
        self.check()
        lane = self._lane
        if lane is None or lane.why_broken:
            return self.open_line(STEP)
        return LaneSteps(lane, (*trace_headers(), *self.proof.metadata))

    @property
    def has_lane(self) -> bool:
        return self._lane is not None and not self._lane.why_broken

    @property
    def wants_lane(self) -> bool:
        """True while ``keep_lane`` has something to do, now or after a while."""
        lane = self._lane
        is_kept = lane is not None and not lane.why_broken and lane.metadata == self.proof.metadata
        return not is_kept and self._lane_from_s < math.inf

    def keep_lane(self) -> BlockingLane | None:
        """The lane for calls, with the credentials that calls have now, where the daemon gives one; None: calls go by
        gRPC. A broken lane is replaced after a while."""
        if not self.wants_lane:
            return self._lane
        now_s, lane = time.monotonic(), self._lane
        if lane is not None and lane.why_broken:
            self._lane, self._lane_from_s = None, now_s + LANE_PAUSE_S
            lane.close()
        if now_s < self._lane_from_s:
            return self._lane
        self._lane_from_s = now_s + LANE_PAUSE_S  # other threads do not try meanwhile
        try:
            self._take_lane()
        except NotFound as refused:
            self._lane_from_s = math.inf
            log.info("lane_not_given path=%s why=%s", self.socket_path, refused)
        except (CacheClientError, grpc.RpcError) as broken:
            log.info("lane_not_taken path=%s why=%s", self.socket_path, broken)
        else:
            self._lane_from_s = 0.0
            log.info("lane_taken path=%s", self.socket_path)
        return self._lane

    def check(self) -> None:
        """Raises DaemonUnavailable or AlreadyClosed where nothing can be asked here any more."""
        self.maker.check()
        if self.lost.is_set():
            raise self.gone()

    def judge(self, failure: grpc.RpcError | CacheClientError) -> None:
        """Raise DaemonUnavailable where a call failed because its daemon has gone, and report the loss.

        A daemon that stops closes its socket before clients notice its end, and the next one does not know the leases
        of the last: so a broken connection, and an unknown name, are reason to ask the socket which daemon serves it.
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

    def attach(self, lease_id: str, rank: int) -> None:
        """Count a pool of a rank that is about to be attached under a lease."""
        with self._lock:
            self._attached[lease_id, rank] += 1

    def detach(self, lease_id: str, rank: int) -> bool:
        """Note that one was unmapped, or never came; True when it was the last. The daemon treats the process as no
        writer after a Detach of the rank, so only the last pool may send one."""
        with self._lock:
            left = self._attached[lease_id, rank] = self._attached[lease_id, rank] - 1
            if not left:
                del self._attached[lease_id, rank]
        return not left

    def close(self) -> None:
        """End the connection; calls under way fail. Idempotent. Raises UsedAfterFork."""
        self.maker.check()
        self._is_closed = True
        self.life.close()
        self._end_calls()
        if self._lane is not None:
            self._lane.close()

    def _lose(self) -> None:
        """Note the loss, from the thread that noticed it."""
        self._end_calls()
        self._on_lost()

    def _end_calls(self) -> None:
        if self._lane is not None:
            self._lane.end("the connection was closed")
        if self._channel is not None:
            self._channel.close()

    def _call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        assert self._channel is not None
        with self._lock:
            call = self._callables.get(method.path)
            if call is None:
                call = self._callables[method.path] = self._channel.unary_unary(
                    method.path,
                    request_serializer=method.request.SerializeToString,
                    response_deserializer=method.response.FromString,
                )
        try:
            answer: R = call(request, timeout=timeout_s, wait_for_ready=False, metadata=metadata)
        except ValueError as closed:  # gRPC's error for a channel that was closed meanwhile
            if not self.lost.is_set():
                raise
            raise ChannelClosed(str(closed)) from closed
        return answer

    def _take_lane(self) -> None:
        lane, before = BlockingLane(self.life.fetch_lane()), self._lane
        try:
            lane.greet(self.proof.metadata, self.timeouts.connect_s)
        except BaseException:
            lane.close()
            raise
        self._lane = lane
        if before is not None:
            before.close()
        if self.lost.is_set():
            lane.end("the connection was closed")


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


def pause_after(failure: grpc.RpcError, pauses: Iterator[float], deadline_s: float) -> float:
    """Seconds to wait before the next attempt of a call. Raises its typed error where no attempt is left."""
    error, pause_s = error_of(failure), next(pauses, math.inf)
    if not is_broken_way(failure, error) or time.monotonic() + pause_s >= deadline_s:
        raise error from (None if is_refusal(failure) else failure)  # the daemon's sentence is whole
    return pause_s


def is_broken_way(failure: grpc.RpcError, error: CacheClientError) -> bool:
    """True when the connection broke; a refusal by the daemon itself is final."""
    return isinstance(error, DaemonUnavailable) and not is_refusal(failure)
