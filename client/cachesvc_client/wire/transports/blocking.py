"""The port of the blocking client: every wait blocks the thread that calls."""

from __future__ import annotations

import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
from kvcache.v1 import cache_pb2

from cachesvc_client.wire.channel import ChannelMaker
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import STEP, Method, Q, R
from cachesvc_client.wire.port import NUDGE, ChannelClosed, Lanes, Line, Running, StepLine, Work
from cachesvc_client.wire.settings import ChannelOptions
from cachesvc_client.wire.transports.blocking_lane import BlockingLane
from cachesvc_client.wire.transports.lane import Inbox, SentSteps, number_of

T = TypeVar("T")

log = logging.getLogger(__name__)


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the protocol to its end on this thread: on a BlockingPort it never suspends."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise AssertionError("a coroutine of the blocking client waited for an event loop")


class BlockingLock:
    """A lock of threads, for ``async with``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class BlockingPort:
    """``cachesvc_client.wire.port.Port`` over a channel whose calls block."""

    def __init__(self, make_channel: ChannelMaker, options: ChannelOptions) -> None:
        self._make_channel = make_channel
        self._options = options
        self._channel: grpc.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lane: BlockingLane | None = None

    def connect(self, socket_path: str) -> None:
        """Make the channel."""
        self._channel = self._make_channel(socket_path, self._options)

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        """Attempt a call once."""
        lane, number = self._lane, number_of(method)
        if lane is not None and number and lane.has_room:
            return lane.call(number, method, request, timeout_s, metadata)
        try:
            answer: R = self._callable(method)(request, timeout=timeout_s, wait_for_ready=False, metadata=metadata)
        except ValueError as closed:  # what gRPC says of a channel that was closed meanwhile
            raise self._closed_or(closed) from closed
        return answer

    def open_line(self, method: Method[Q, R], metadata: Metadata) -> Line:
        """Open a stream."""
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
    def lanes(self) -> Lanes:
        """The port itself."""
        return self

    @property
    def has_lane(self) -> bool:
        """True while calls go by a lane."""
        return self._lane is not None and not self._lane.why_broken

    async def take_lane(self, end: socket.socket, metadata: Metadata, timeout_s: float) -> None:
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
        """Open a stream of steps."""
        lane = self._lane
        return self.open_line(STEP, metadata) if lane is None or lane.why_broken else LaneSteps(lane, metadata)

    async def wait_end(self, timeout_s: float | None) -> bool:
        """Wait until ``end_calls``."""
        return self._ended.wait(timeout_s)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The caller's own thread may block."""
        return work()

    def spawn(self, work: Work, name: str) -> Running:
        """Begin a thread."""
        return _RunningThread(work, name)

    def send_later(self, work: Work) -> None:
        """Send at once."""
        drive(work)

    async def settle(self) -> None:
        """No-op: nothing was deferred."""

    def end_calls(self) -> None:
        """Close the channel."""
        self._ended.set()
        if self._lane is not None:
            self._lane.end("the connection was closed")
        if self._channel is not None:
            self._channel.close()

    def tell(self, callback: Callable[[], None]) -> None:
        """Call back in this thread."""
        callback()

    async def close(self) -> None:
        """Close the channel, and the lane."""
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
        """Send a request after those before it."""
        self._requests.put(request)

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to tell at once."""
        return self._answers.empty()

    async def get(self, deadline_s: float | None) -> Any:
        """The next answer, how the stream ended, NUDGE, or None at the deadline."""
        try:
            return self._answers.get(timeout=None if deadline_s is None else max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            return None

    def wake(self) -> None:
        """End a wait in ``get``."""
        self._answers.put(NUDGE)

    async def close(self) -> None:
        """End the stream."""
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
        """Send a step after those before it."""
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

    async def get(self, deadline_s: float | None) -> Any:
        """The next answer, how the stream ended, or None at the deadline."""
        try:
            if not self._lane.wait(self._inbox, math.inf if deadline_s is None else deadline_s):
                return None
        except grpc.RpcError as failure:
            return failure
        return self._sent.read(self._inbox.came.popleft())

    async def close(self) -> None:
        """End the stream."""
        self._lane.leave(self._inbox)


class _RunningThread:
    """A thread that drives a coroutine."""

    def __init__(self, work: Work, name: str) -> None:
        self._thread = threading.Thread(target=drive, args=(work,), name=name, daemon=True)
        self._thread.start()

    async def join(self) -> None:
        """Wait for its end, unless it is the work that asks."""
        if threading.current_thread() is not self._thread:
            self._thread.join()
