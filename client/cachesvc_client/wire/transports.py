"""Calls of one connection by gRPC and by a lane: every wait blocks the thread that calls."""

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
from collections.abc import Iterator
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import OperationError, StepRequest, StepResponse
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

# The blocking end of a lane: no thread of its own. A waiter for an answer reads, and hands other waiters theirs.
#
# thread A   send ── read ── [B's] ── read ── [A's] ── leaves; another waiter reads on thread B        send ──────── has
# its answer

log = logging.getLogger(__name__)


NUDGE: Final = object()
"""Value of ``BlockingLine.get`` after ``wake``."""


class ChannelClosed(grpc.RpcError):
    """A call met the end of its connection on this side."""


class ChannelMaker(Protocol):
    """Opens a channel for calls that block."""

    def __call__(self, socket_path: str, options: ChannelOptions) -> grpc.Channel:
        """A channel that connects on first use."""


def open_channel(socket_path: str, options: ChannelOptions) -> grpc.Channel:
    """A channel to the unix socket at ``socket_path``; it connects on first use."""
    return grpc.insecure_channel(unix_target(socket_path), options=options.as_grpc())


class Channels:
    """The gRPC channel of one connection, and its lane while it has one."""

    def __init__(self, make_channel: ChannelMaker, options: ChannelOptions) -> None:
        self._make_channel = make_channel
        self._options = options
        self._channel: grpc.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lane: BlockingLane | None = None

    def connect(self, socket_path: str) -> None:
        self._channel = self._make_channel(socket_path, self._options)

    def call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        lane, number = self._lane, number_of(method)
        if lane is not None and number and lane.has_room:
            return lane.call(number, method, request, timeout_s, metadata)
        try:
            answer: R = self._callable(method)(request, timeout=timeout_s, wait_for_ready=False, metadata=metadata)
        except ValueError as closed:  # what gRPC says of a channel that was closed meanwhile
            raise self._closed_or(closed) from closed
        return answer

    def open_line(self, method: Method[Q, R], metadata: Metadata) -> BlockingLine:
        assert self._channel is not None
        call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            return BlockingLine(call, metadata)
        except ValueError as closed:
            raise self._closed_or(closed) from closed

    @property
    def has_lane(self) -> bool:
        return self._lane is not None and not self._lane.why_broken

    def take_lane(self, end: socket.socket, metadata: Metadata, timeout_s: float) -> None:
        """Calls go by this lane from now on."""
        lane, before = BlockingLane(end), self._lane
        try:
            lane.greet(metadata, timeout_s)
        except BaseException:
            lane.close()
            raise
        self._lane = lane
        if before is not None:
            before.close()
        if self._ended.is_set():
            lane.end("the connection was closed")

    def open_steps(self, metadata: Metadata) -> StepLine:
        lane = self._lane
        return self.open_line(STEP, metadata) if lane is None or lane.why_broken else LaneSteps(lane, metadata)

    def wait_end(self, timeout_s: float | None) -> bool:
        return self._ended.wait(timeout_s)

    def end_calls(self) -> None:
        self._ended.set()
        if self._lane is not None:
            self._lane.end("the connection was closed")
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        self.end_calls()
        if self._lane is not None:
            self._lane.close()

    def _callable(self, method: Method[Q, R]) -> Any:
        assert self._channel is not None
        with self._lock:
            call = self._callables.get(method.path)
            if call is None:
                call = self._callables[method.path] = self._channel.unary_unary(
                    method.path,
                    request_serializer=method.request.SerializeToString,
                    response_deserializer=method.response.FromString,
                )
        return call

    def _closed_or(self, error: ValueError) -> Exception:
        return ChannelClosed(str(error)) if self._ended.is_set() else error


class BlockingLine:
    """A stream whose answers one thread reads. Raises ValueError where the channel is closed."""

    is_lane = False

    def __init__(self, call: Any, metadata: Metadata) -> None:
        self.metadata = metadata
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = call(self._take_requests(), wait_for_ready=False, metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="kvcache-line", daemon=True)
        self._reader.start()

    def put(self, request: Any) -> None:
        self._requests.put(request)

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to tell at once."""
        return self._answers.empty()

    def get(self, deadline_s: float | None) -> Any:
        """The next answer, how the stream ended, NUDGE, or None at the deadline."""
        try:
            return self._answers.get(timeout=None if deadline_s is None else max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            return None

    def wake(self) -> None:
        self._answers.put(NUDGE)

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()

    def _take_requests(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except grpc.RpcError as failure:
            log.debug("line_ended why=%s", failure)
        self._requests.put(None)  # gRPC's own thread waits there
        self._answers.put(self._call)


class LaneSteps:
    """A stream of steps by a lane, which needs no thread: the waiter for an answer reads it."""

    is_lane = True

    def __init__(self, lane: BlockingLane, metadata: Metadata) -> None:
        self.metadata = metadata
        self._lane = lane
        self._inbox = Inbox()
        self._sent = SentSteps(metadata)

    def put(self, request: cache_pb2.StepRequest) -> None:
        try:
            self._lane.send_step(request, self._inbox, self._sent)
        except grpc.RpcError as failure:  # the waiter for the answer gets the error
            log.debug("step_unsent why=%s", failure)

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to tell at once."""
        try:
            return not self._lane.wait(self._inbox, -math.inf)
        except grpc.RpcError:
            return False

    def get(self, deadline_s: float | None) -> Any:
        """The next answer, how the stream ended, or None at the deadline."""
        try:
            if not self._lane.wait(self._inbox, math.inf if deadline_s is None else deadline_s):
                return None
        except grpc.RpcError as failure:
            return failure
        return self._sent.read(self._inbox.came.popleft())

    def close(self) -> None:
        self._lane.leave(self._inbox)


StepLine = BlockingLine | LaneSteps
"""A stream of steps, by either transport."""
# A lane as the client has it: tags, frames and how it ends. ``blocking_lane`` reads and writes it.
#
# Tags distinguish calls. What is not answered any more fails as a call of gRPC does, so that retries, errors and losses
# are those of the protocol, whichever way a call took.

KEPT_FOR_STEPS = 4
"""Frames without an answer that calls which may wait leave to Steps; beyond, such a call goes by gRPC."""
ENDS_STREAM = frozenset({"INTERNAL", ErrorCode.UNAUTHENTICATED.value})
"""Refusals of a Step that gRPC has for its whole stream."""

_STEP = METHODS["Step"]
_STATUSES = {code.value: status for code, status in GRPC_CODES.items()}


class Inbox:
    """Answers that one caller waits for, in the order in which they came. ``tags``: those that are still to come."""

    __slots__ = ("came", "tags")

    def __init__(self) -> None:
        self.came: deque[Frame] = deque()
        self.tags: set[int] = set()


def number_of(method: Method[Any, Any]) -> int:
    """The call's number in frames; 0 where it goes by gRPC alone."""
    return METHODS.get(method.name, 0) if method.service == "CacheService" else 0


def encode_call(number: int, tag: int, request: Any, timeout_s: float | None, metadata: Metadata) -> bytes:
    """A call as a frame. Raises grpc.RpcError for one that is too large."""
    body = request.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise _too_large(body)
    units = 0 if timeout_s is None else min(int(timeout_s / DEADLINE_UNIT_S) + 1, MOST_DEADLINE)
    return encode(number, 0, units, tag, body, _traceparent(metadata) if metadata else "")


def encode_cancel(tag: int) -> bytes:
    """Encode a frame that cancels this call."""
    return encode(CANCEL, 0, 0, tag, b"")


def encode_hello(tag: int, metadata: Metadata) -> bytes:
    """The first frame, with the credentials of the calls' metadata."""
    shown = dict(metadata).get(AUTHORIZATION_METADATA_KEY, "")
    token = shown.removeprefix(BEARER) if isinstance(shown, str) else ""
    return encode(HELLO, 0, 0, tag, LaneHello(version=VERSION, token=token).SerializeToString())


def check_welcome(frame: Frame) -> None:
    """Raises DaemonUnavailable where the daemon does not let this lane in, or speaks otherwise."""
    if frame.flags & ERROR:
        raise DaemonUnavailable(f"the daemon refused the lane: {OperationError.FromString(frame.body).message}")
    welcome = LaneWelcome.FromString(frame.body)
    if welcome.version != VERSION or not set(METHODS.values()) <= set(welcome.methods):
        raise DaemonUnavailable(f"the daemon's lane has version {welcome.version}, this client has {VERSION}")


def read_answer(method: Method[Any, Any], frame: Frame) -> Any:
    """The answer in a frame. Raises grpc.RpcError for a refusal."""
    if frame.flags & ERROR:
        raise refused(OperationError.FromString(frame.body))
    try:
        return method.response.FromString(frame.body)
    except DecodeError as unread:
        raise failure(grpc.StatusCode.INTERNAL, f"the answer is not a message of {method.name}") from unread


def _too_large(body: bytes) -> grpc.RpcError:
    """Error of gRPC for a message that is too large to send."""
    why = f"a message larger than max ({len(body)} vs. {MAX_MESSAGE_BYTES} bytes)"
    return failure(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


def late() -> grpc.RpcError:
    """Error of a call without an answer in time."""
    return failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")


def refused(error: OperationError) -> grpc.RpcError:
    """A refusal as gRPC tells it: by a status, and its name in the trailing metadata."""
    status = _STATUSES.get(error.code)
    if status is None:
        return failure(grpc.StatusCode.INTERNAL, error.message)
    named = grpc.aio.Metadata(*status_metadata(error))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), named, error.message)


def failure(status: grpc.StatusCode, details: str) -> grpc.RpcError:
    """Error of a call that the daemon did not answer."""
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SentSteps:
    """The steps of one stream: their ``ids`` by tag, for an answer that is a refusal has to name the request."""

    def __init__(self, metadata: Metadata) -> None:
        self.ids: dict[int, int] = {}
        self.traceparent = _traceparent(metadata)

    def read(self, frame: Frame) -> StepResponse | grpc.RpcError:
        """An answer as the stream of gRPC has it: a refused step is an answer, unless it ends the stream."""
        request_id = self.ids.pop(frame.tag)
        if frame.flags & ERROR:
            error = OperationError.FromString(frame.body)
            return refused(error) if error.code in ENDS_STREAM else StepResponse(request_id=request_id, error=error)
        try:
            answer: StepResponse = read_answer(STEP, frame)
        except grpc.RpcError as unread:
            return unread
        return answer


def _traceparent(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""


LOOK_S = 0.1
"""A read that blocks looks at its deadline so often; where that is nearer, the read is preceded by a poll."""
SEND_S = 5.0
"""Time without progress after which a lane counts as broken, seconds: the daemon takes no bytes."""
_TIMEVAL = struct.Struct("@ll")


class BlockingLane:
    """A client's end of a lane: tags, frames, and why it ended (``why_broken``, empty while it is open)."""

    def __init__(self, end: socket.socket) -> None:
        self.why_broken = ""
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
        """True when a call may go this way."""
        return not self.why_broken and len(self._inboxes) < MAX_UNANSWERED_FRAMES - KEPT_FOR_STEPS

    def forget(self) -> None:
        """Forget the lane in a child of this process: it is the parent's."""
        self._socket.close()

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

    def leave(self, inbox: Inbox) -> None:
        """Drop the waiter of these answers; what was asked for goes on."""
        self._leave(inbox, tuple(inbox.tags))

    def _enter(self, inbox: Inbox) -> int:
        """A tag for a call whose answer goes to this inbox."""
        tag = next(self._tags)
        inbox.tags.add(tag)
        self._inboxes[tag] = inbox
        return tag

    def _leave(self, inbox: Inbox, tags: tuple[int, ...]) -> None:
        for tag in tags:
            self._inboxes.pop(tag, None)
            inbox.tags.discard(tag)

    def _encode_step(self, request: StepRequest, inbox: Inbox, sent: SentSteps) -> bytes:
        """A step as a frame; empty for one that is too large, which has its refusal in the inbox."""
        tag, body = self._enter(inbox), request.SerializeToString()
        sent.ids[tag] = request.request_id
        if len(body) <= MAX_MESSAGE_BYTES:
            return encode(_STEP, 0, 0, tag, body, sent.traceparent)
        error = OperationError(code=ErrorCode.LIMIT.value, message=str(error_of(_too_large(body))))
        self._leave(inbox, (tag,))
        inbox.came.append(Frame(_STEP, ERROR, 0, tag, error.SerializeToString()))
        return b""

    def _hand_out(self, mine: Inbox | None) -> bool:
        """Hand arrived answers to their waiters; True where some of them are not ``mine``. Raises LimitExceeded."""
        is_others = False
        while self._reader.end and (frame := self._reader.next()) is not None:
            inbox = self._inboxes.pop(frame.tag, None)
            if inbox is not None:  # else its caller has given it up
                inbox.tags.discard(frame.tag)
                inbox.came.append(frame)
                is_others = is_others or inbox is not mine
        return is_others

    def _broke(self) -> grpc.RpcError:
        """Error of a broken lane, as of a broken gRPC call: the call may be sent again by another way."""
        return failure(grpc.StatusCode.UNAVAILABLE, f"the lane ended: {self.why_broken}")

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
