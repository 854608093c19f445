"""The two transports of calls, gRPC and a lane, and their streams: every wait blocks the thread that calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import OperationError, StepResponse
from kvcache.v1.lane_pb2 import LaneHello, LaneWelcome

from cachesvc.model.errors import ErrorCode, LimitExceeded
from cachesvc.model.text import unix_target
from cachesvc.wire.lane import (
    CANCEL,
    DEADLINE_UNIT_S,
    ERROR,
    HELLO,
    MAX_UNANSWERED_FRAMES,
    METHODS,
    MOST_DEADLINE,
    PING,
    VERSION,
    Frame,
    FrameReader,
    encode,
)
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER, GRPC_CODES, MAX_MESSAGE_BYTES, status_metadata
from cachesvc_client.core.errors import DaemonUnavailable, error_of, keep_from_children
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import STEP, Method, Q, R
from cachesvc_client.wire.settings import ChannelOptions

log = logging.getLogger(__name__)

ChannelMaker = Callable[[str, ChannelOptions], grpc.Channel]
"""Opens a channel to a unix socket for calls that block."""


def open_channel(socket_path: str, options: ChannelOptions) -> grpc.Channel:
    """A channel to the unix socket at ``socket_path``; it connects on first use."""
    return grpc.insecure_channel(unix_target(socket_path), options=options.as_grpc())


NUDGE: Final = object()
"""Value of ``BlockingLine.get`` after ``wake``."""


class BlockingLine:
    """A stream of gRPC, whose answers one thread reads. Raises ValueError where the channel is closed."""

    is_lane = False

    def __init__(self, call: Any, metadata: Metadata) -> None:
        self.metadata = metadata
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._requests.put
        self._call = call(iter(self._requests.get, None), wait_for_ready=False, metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="kvcache-line", daemon=True)
        self._reader.start()

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to return at once."""
        return self._answers.empty()

    def get(self, deadline_s: float) -> Any:
        """The next answer, the stream's end as an error, NUDGE, or None at the deadline."""
        try:
            return self._answers.get(timeout=max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            return None

    def wake(self) -> None:
        self._answers.put(NUDGE)

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except grpc.RpcError as failure:
            log.debug("line_ended why=%s", failure)
        self._requests.put(None)  # gRPC's own thread waits there
        self._answers.put(self._call)


# The client's end of a lane has no thread: a waiter for an answer reads, and hands other waiters theirs.
#
#     thread A   send ── read ── [B's] ── read ── [A's] ── leaves; another waiter reads on
#     thread B        send ──────── has its answer
#
# Tags distinguish calls. A call without an answer fails as a call of gRPC does, so retries, errors and losses are the
# same by either transport.

KEPT_FOR_STEPS = 4
"""Frames without an answer that calls which may wait leave to Steps; beyond, such a call goes by gRPC."""
ENDS_STREAM = frozenset({"INTERNAL", ErrorCode.UNAUTHENTICATED.value})
"""Refusals of a Step that gRPC has for its whole stream."""
LOOK_S = 0.1
"""A read that blocks looks at its deadline so often; where that is nearer, the read is preceded by a poll."""
SEND_S = 5.0
"""Time without progress after which a lane counts as broken, seconds: the daemon takes no bytes."""
_TIMEVAL = struct.Struct("@ll")
_STATUSES = {code.value: status for code, status in GRPC_CODES.items()}


class Inbox:
    """Answers that one caller waits for, in the order in which they came. ``tags``: those that are still to come."""

    __slots__ = ("came", "tags")

    def __init__(self) -> None:
        self.came: deque[Frame] = deque()
        self.tags: set[int] = set()


def encode_hello(tag: int, metadata: Metadata) -> bytes:
    """The first frame, with the credentials of the calls' metadata."""
    shown = dict(metadata).get(AUTHORIZATION_METADATA_KEY, "")
    token = shown.removeprefix(BEARER) if isinstance(shown, str) else ""
    return encode(HELLO, 0, 0, tag, LaneHello(version=VERSION, token=token).SerializeToString())


def traceparent(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""


def read_answer(method: Method[Any, R], frame: Frame) -> R:
    """The answer in a frame. Raises grpc.RpcError for a refusal."""
    if frame.flags & ERROR:
        raise refused(OperationError.FromString(frame.body))
    try:
        return method.response.FromString(frame.body)
    except DecodeError as unread:
        raise failure(grpc.StatusCode.INTERNAL, f"the answer is not a message of {method.name}") from unread


def refused(error: OperationError) -> grpc.RpcError:
    """A refusal in gRPC's form: a status, with its name in the trailing metadata."""
    status = _STATUSES.get(error.code)
    if status is None:
        return failure(grpc.StatusCode.INTERNAL, error.message)
    named = grpc.aio.Metadata(*status_metadata(error))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), named, error.message)


def failure(status: grpc.StatusCode, details: str) -> grpc.RpcError:
    """Error of a call that the daemon did not answer."""
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def too_large(body: bytes) -> grpc.RpcError:
    """Error of gRPC for a message that is too large to send."""
    why = f"a message larger than max ({len(body)} vs. {MAX_MESSAGE_BYTES} bytes)"
    return failure(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


class BlockingLane:
    """A client's end of a lane. ``why_broken``: empty while it is open. ``metadata``: credentials that it has shown."""

    def __init__(self, end: socket.socket) -> None:
        self.why_broken = ""
        self.metadata: Metadata = ()
        self._socket = end
        self._reader = FrameReader()
        self._tags = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._is_reading = False
        self._sleeping = 0

    @property
    def has_room(self) -> bool:
        """True when a call that may wait can use this lane."""
        return not self.why_broken and len(self._inboxes) < MAX_UNANSWERED_FRAMES - KEPT_FOR_STEPS

    def forget(self) -> None:
        """Forget the lane in a child of this process: it is the parent's."""
        self._socket.close()

    def greet(self, metadata: Metadata, timeout_s: float) -> None:
        """Identify the caller. Raises DaemonUnavailable where the daemon refuses this lane or has another version."""
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(LOOK_S * 1e6)))
        keep_from_children(self)
        inbox = Inbox()
        self.send(encode_hello(self.enter(inbox), metadata), timeout_s)
        if not self.wait(inbox, time.monotonic() + timeout_s):
            raise DaemonUnavailable(f"no answer on the lane within {timeout_s:g} s")
        frame = inbox.came.popleft()
        if frame.flags & ERROR:
            raise DaemonUnavailable(f"the daemon refused the lane: {OperationError.FromString(frame.body).message}")
        welcome = LaneWelcome.FromString(frame.body)
        if welcome.version != VERSION or not set(METHODS.values()) <= set(welcome.methods):
            raise DaemonUnavailable(f"the daemon's lane has version {welcome.version}, this client has {VERSION}")
        self.metadata = metadata

    def call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        """Ask, and wait for the answer. Raises grpc.RpcError, also for a request that is too large."""
        deadline_s, body = time.monotonic() + timeout_s, request.SerializeToString()
        if len(body) > MAX_MESSAGE_BYTES:
            raise too_large(body)
        inbox, units = Inbox(), min(int(timeout_s / DEADLINE_UNIT_S) + 1, MOST_DEADLINE)
        tag = self.enter(inbox)
        try:
            self.send(encode(METHODS[method.name], 0, units, tag, body, traceparent(metadata)), timeout_s)
            if self.wait(inbox, deadline_s):
                return read_answer(method, inbox.came.popleft())
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        finally:
            if inbox.tags:
                self.leave(inbox)
                with contextlib.suppress(grpc.RpcError):  # the lane has ended, and the call with it
                    self.send(encode(CANCEL, 0, 0, tag, b""), LOOK_S)

    def ping(self, timeout_s: float) -> None:
        """Send a ping and wait for its answer. Raises grpc.RpcError."""
        inbox = Inbox()
        self.send(encode(PING, 0, 0, self.enter(inbox), b""), timeout_s)
        if not self.wait(inbox, time.monotonic() + timeout_s):
            self.leave(inbox)
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")

    def enter(self, inbox: Inbox) -> int:
        """A tag for a call whose answer goes to this inbox."""
        tag = next(self._tags)
        inbox.tags.add(tag)
        self._inboxes[tag] = inbox
        return tag

    def leave(self, inbox: Inbox) -> None:
        """Drop the waiter of these answers; the daemon still answers the calls."""
        for tag in inbox.tags:
            self._inboxes.pop(tag, None)
        inbox.tags.clear()

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

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a frame whole. Raises grpc.RpcError where that cannot be done: the lane has ended then."""
        rest, deadline_s = memoryview(data), math.inf
        with self._sending:
            if self.why_broken:
                raise self._broke()
            try:
                while True:
                    with contextlib.suppress(BlockingIOError):  # the daemon is slower
                        rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                    if not rest:
                        return
                    deadline_s = min(deadline_s, time.monotonic() + timeout_s)
                    self._await_room(deadline_s)
            except OSError as error:
                self.end(f"it broke: {error.strerror}")
                raise self._broke() from error
            except BaseException:  # a part may have gone out
                self.end("sending was interrupted")
                raise

    def _await_room(self, deadline_s: float) -> None:
        """Wait until the socket may take more. The daemon reads no further until its answers are read: so read what
        comes, unless another thread does."""
        if time.monotonic() >= deadline_s:
            self.end("the daemon takes no bytes")
            raise self._broke()
        with self._lock:
            is_mine = not self._is_reading
            self._is_reading = True
        try:
            if self._poll(select.POLLOUT | (select.POLLIN if is_mine else 0), LOOK_S) & select.POLLIN and is_mine:
                self._take(self._socket.recv_into(self._reader.room()), None)
        finally:
            if is_mine:
                self._is_reading = False
                self._wake()

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
        """Hand what was read to its waiters. Raises grpc.RpcError at the lane's end."""
        if not count:
            self.end("the daemon ended it")
            raise self._broke()
        self._reader.add(count)
        is_others = False
        try:
            while self._reader.end and (frame := self._reader.next()) is not None:
                inbox = self._inboxes.pop(frame.tag, None)
                if inbox is not None:  # else its caller has given it up
                    inbox.tags.discard(frame.tag)
                    inbox.came.append(frame)
                    is_others = is_others or inbox is not mine
        except LimitExceeded as wrong:
            self.end(str(wrong))
            raise self._broke() from wrong
        if is_others:
            self._wake()

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

    def _broke(self) -> grpc.RpcError:
        """Error of a broken lane, as of a broken gRPC call: the call may be sent again by gRPC."""
        return failure(grpc.StatusCode.UNAVAILABLE, f"the lane ended: {self.why_broken}")

    def _poll(self, what: int, timeout_s: float) -> int:
        """Events of ``what`` that the socket is ready for, or its error; 0 when the time has passed."""
        poll = select.poll()
        poll.register(self._socket, what)
        return next((events for _, events in poll.poll(timeout_s * 1000)), 0)


class LaneSteps:
    """A stream of steps by a lane, which needs no thread: the waiter for an answer reads it."""

    is_lane = True

    def __init__(self, lane: BlockingLane, metadata: Metadata) -> None:
        self.metadata = metadata
        self._lane = lane
        self._inbox = Inbox()
        self._ids: dict[int, int] = {}  # of requests, by tag: an answer that is a refusal has to name its own
        self._traceparent = traceparent(metadata)

    def put(self, request: cache_pb2.StepRequest) -> None:
        """Send a step. Where the lane has ended, the waiter for the answer gets the error."""
        lane, body, number = self._lane, request.SerializeToString(), METHODS["Step"]
        if lane.why_broken:
            return
        if len(body) > MAX_MESSAGE_BYTES:
            tag = -request.request_id  # none of the lane's own
            refusal = OperationError(code=ErrorCode.LIMIT.value, message=str(error_of(too_large(body))))
            self._ids[tag] = request.request_id
            self._inbox.came.append(Frame(number, ERROR, 0, tag, refusal.SerializeToString()))
            return
        tag = lane.enter(self._inbox)
        self._ids[tag] = request.request_id
        try:
            lane.send(encode(number, 0, 0, tag, body, self._traceparent), SEND_S)
        except grpc.RpcError as failure:
            log.debug("step_unsent why=%s", failure)

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to return at once."""
        try:
            return not self._lane.wait(self._inbox, -math.inf)
        except grpc.RpcError:
            return False

    def get(self, deadline_s: float) -> Any:
        """The next answer, the stream's end as an error, or None at the deadline. A refused step is an answer too,
        unless gRPC would end its stream with it."""
        try:
            if not self._lane.wait(self._inbox, deadline_s):
                return None
            frame = self._inbox.came.popleft()
            request_id = self._ids.pop(frame.tag)
            if frame.flags & ERROR:
                error = OperationError.FromString(frame.body)
                return refused(error) if error.code in ENDS_STREAM else StepResponse(request_id=request_id, error=error)
            return read_answer(STEP, frame)
        except grpc.RpcError as failure:
            return failure

    def close(self) -> None:
        self._lane.leave(self._inbox)


StepLine = BlockingLine | LaneSteps
"""A stream of steps, by either transport."""
