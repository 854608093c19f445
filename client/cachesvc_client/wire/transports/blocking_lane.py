"""The blocking end of a lane: no thread of its own. A waiter for an answer reads, and hands other waiters theirs.

thread A   send ── read ── [B's] ── read ── [A's] ── leaves; another waiter reads on
thread B        send ──────── has its answer
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import struct
import threading
import time

import grpc
from kvcache.v1.cache_pb2 import StepRequest

from cachesvc.model.errors import LimitExceeded
from cachesvc.wire.lane import PING, encode
from cachesvc_client.core.errors import DaemonUnavailable
from cachesvc_client.core.fork import keep_from_children
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import Method, Q, R
from cachesvc_client.wire.transports.lane import (
    Inbox,
    LaneEnd,
    SentSteps,
    check_welcome,
    encode_call,
    encode_cancel,
    encode_hello,
    late,
    read_answer,
)

LOOK_S = 0.1
"""A read that blocks looks at its deadline so often; where that is nearer, the read is preceded by a poll."""
SEND_S = 5.0
"""Time without progress after which a lane counts as broken, seconds: the daemon takes no bytes."""
_TIMEVAL = struct.Struct("@ll")

log = logging.getLogger(__name__)


class BlockingLane(LaneEnd):
    """Safe to use from several threads."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._is_reading = False
        self._sleeping = 0

    def greet(self, metadata: Metadata, timeout_s: float) -> None:
        """Identify the caller. Raises DaemonUnavailable where no calls can go this way."""
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(LOOK_S * 1e6)))
        keep_from_children(self)
        inbox = Inbox()
        self._send(encode_hello(self._enter(inbox), metadata), timeout_s)
        if not self.wait(inbox, time.monotonic() + timeout_s):
            raise DaemonUnavailable(f"no answer on the lane within {timeout_s:g} s")
        check_welcome(inbox.came.popleft())

    def call(self, number: int, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        """Attempt a call once. Raises grpc.RpcError."""
        inbox, deadline_s = Inbox(), time.monotonic() + timeout_s
        tag = self._enter(inbox)
        try:
            self._send(encode_call(number, tag, request, timeout_s, metadata), timeout_s)
            if not self.wait(inbox, deadline_s):
                raise late()
            answer: R = read_answer(method, inbox.came.popleft())
        finally:
            if inbox.tags:
                self._give_up(inbox, tag)
        return answer

    def ping(self, timeout_s: float) -> None:
        """Send a ping and wait for its answer. Raises grpc.RpcError."""
        inbox = Inbox()
        self._send(encode(PING, 0, 0, self._enter(inbox), b""), timeout_s)
        if not self.wait(inbox, time.monotonic() + timeout_s):
            self.leave(inbox)
            raise late()

    def send_step(self, request: StepRequest, inbox: Inbox, sent: SentSteps) -> None:
        """Send a step whose answer goes to ``inbox``; where the lane has ended ``wait`` tells."""
        if self.why_broken:
            return
        if frame := self._encode_step(request, inbox, sent):
            self._send(frame, SEND_S)

    def wait(self, inbox: Inbox, deadline_s: float) -> bool:
        """Wait until something has come into the inbox; False at the deadline. Raises grpc.RpcError where nothing will
        come any more."""
        with self._lock:
            while not inbox.came and self._is_reading and not self.why_broken:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._sleep(left_s):
                    return bool(inbox.came)
            if inbox.came:
                return True
            if self.why_broken:
                raise self._broke()
            self._is_reading = True
        try:
            while not inbox.came:
                if not self._read(inbox, deadline_s):
                    return False
        except BaseException:  # what came may be half taken in: nothing after it could be read
            self.end("reading was interrupted")
            raise
        finally:
            self._is_reading = False  # first: an interrupt of what follows leaves it to the next waiter
            self._wake()
        return True

    def end(self, why: str) -> None:
        """Calls under way fail now. From any thread; idempotent."""
        with self._lock:
            if self.why_broken:
                return
            self.why_broken = why
            self._turn.notify_all()
        log.info("lane_ended why=%s", why)
        with contextlib.suppress(OSError):  # the daemon ended it first, or it is a child's
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and close the descriptor once no thread reads."""
        self.end("it was closed")
        with self._lock:
            while self._is_reading:
                self._sleep(math.inf)
        with self._sending:
            self._socket.close()

    def _sleep(self, seconds: float) -> bool:
        """Wait until another thread has read, with the lock held; False when the time has passed."""
        self._sleeping += 1
        try:
            return self._turn.wait(None if seconds == math.inf else seconds)
        finally:
            self._sleeping -= 1

    def _wake(self) -> None:
        """Wake all waiters: something was read, or no thread reads any more."""
        with self._lock:
            if self._sleeping:
                self._turn.notify_all()

    def _give_up(self, inbox: Inbox, tag: int) -> None:
        self.leave(inbox)
        with contextlib.suppress(grpc.RpcError):  # the lane has ended, and the call with it
            self._send(encode_cancel(tag), LOOK_S)

    def _read(self, inbox: Inbox, deadline_s: float) -> bool:
        """Read once what comes; False at the deadline. Raises grpc.RpcError at the lane's end."""
        left_s = deadline_s - time.monotonic()
        is_over = left_s <= 0
        if not is_over and left_s < LOOK_S and not self._poll(select.POLLIN, left_s):
            return False
        try:
            count = self._socket.recv_into(self._reader.room(), 0, socket.MSG_DONTWAIT if is_over else 0)
        except BlockingIOError:  # nothing has come, or LOOK_S has passed
            return not is_over
        except OSError as error:
            self.end(f"it broke: {error.strerror}")
            raise self._broke() from error
        self._take(count, inbox)
        return True

    def _take(self, count: int, mine: Inbox | None) -> None:
        if not count:
            self.end("the daemon ended it")
            raise self._broke()
        self._reader.add(count)
        try:
            is_others = self._hand_out(mine)
        except LimitExceeded as wrong:
            self.end(str(wrong))
            raise self._broke() from wrong
        if is_others:
            self._wake()

    def _send(self, data: bytes, timeout_s: float) -> None:
        """Send a frame whole. Raises grpc.RpcError where that cannot be done: the lane has ended then."""
        with self._sending:
            if self.why_broken:
                raise self._broke()
            try:
                sent = self._try_send(data)
                if sent < len(data):
                    self._send_rest(memoryview(data)[sent:], time.monotonic() + timeout_s)
            except OSError as error:
                self.end(f"it broke: {error.strerror}")
                raise self._broke() from error
            except BaseException:  # a part may have gone out
                self.end("sending was interrupted")
                raise

    def _try_send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_rest(self, rest: memoryview, deadline_s: float) -> None:
        """The daemon reads no further until its answers are read: so read what comes, unless another thread does."""
        while rest:
            if time.monotonic() >= deadline_s:
                self.end("the daemon takes no bytes")
                raise self._broke()
            with self._lock:
                is_mine = not self._is_reading
                self._is_reading = True
            try:
                ready = self._poll(select.POLLOUT | (select.POLLIN if is_mine else 0), LOOK_S)
                if is_mine and ready & select.POLLIN:
                    self._take(self._socket.recv_into(self._reader.room()), None)
            finally:
                if is_mine:
                    self._is_reading = False
                    self._wake()
            if ready & ~select.POLLIN:
                rest = rest[self._try_send(rest) :]

    def _poll(self, what: int, timeout_s: float) -> int:
        """Events of ``what`` that the socket is ready for, or its error; 0 when the time has passed."""
        poll = select.poll()
        poll.register(self._socket, what)
        return next((events for _, events in poll.poll(timeout_s * 1000)), 0)
