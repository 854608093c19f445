"""The port of the awaited client: every wait suspends a task of one event loop, and every call goes by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from cachesvc_client.wire.connection import AsyncChannelMaker
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.port import NUDGE, STEP, ChannelClosed, Line, Method, Q, R, Running, StepLine, Work
from cachesvc_client.wire.settings import ChannelOptions

T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncPort:
    """``cachesvc_client.wire.port.Port`` over a channel of the running loop."""

    def __init__(self, make_channel: AsyncChannelMaker, options: ChannelOptions) -> None:
        self._make_channel = make_channel
        self._options = options
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._calls: set[Any] = set()
        self._later: set[asyncio.Task[None]] = set()

    def connect(self, socket_path: str) -> None:
        """Make the channel, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._channel = self._make_channel(socket_path, self._options)

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        assert self._channel is not None
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(request, timeout=timeout_s, wait_for_ready=False, metadata=metadata)
        self._calls.add(call)
        try:
            answer: R = await call
        except asyncio.CancelledError as cancelled:
            if self._ended.is_set() and not is_cancelled():
                raise ChannelClosed("the calls of this connection were ended") from cancelled
            raise
        finally:
            self._calls.discard(call)
        return answer

    def open_line(self, method: Method[Q, R], metadata: Metadata) -> Line:
        assert self._channel is not None
        call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(wait_for_ready=False, metadata=metadata)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return AsyncLine(call, metadata)

    lanes = None

    def open_steps(self, metadata: Metadata) -> StepLine:
        return self.open_line(STEP, metadata)

    async def wait_end(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may block in a thread, to its end."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])  # otherwise its result would have no owner
            if working.exception() is not None:
                log.debug("work_failed_after_its_caller_left why=%s", working.exception())
            raise

    def spawn(self, work: Work, name: str) -> Running:
        return _RunningTask(asyncio.create_task(work, name=name))

    def send_later(self, work: Work) -> None:
        """Run ``work`` as a task of the loop, or drop it where the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:
            work.close()

    async def settle(self) -> None:
        while self._later:
            await asyncio.wait(self._later)

    def end_calls(self) -> None:
        self.tell(self._end_calls)

    def tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(callback)

    async def close(self) -> None:
        self._end_calls()
        if self._channel is not None:
            await self._channel.close()

    def _begin(self, work: Work) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _end_calls(self) -> None:
        self._ended.set()
        for call in list(self._calls):
            call.cancel()


class AsyncLine:
    """A stream with a task that writes it and one that reads it: cancelling a read would end the call."""

    is_lane = False

    def __init__(self, call: Any, metadata: Metadata) -> None:
        self.metadata = metadata
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]

    def put(self, request: Any) -> None:
        self._requests.put_nowait(request)

    @property
    def is_silent(self) -> bool:
        """False where ``get`` has something to tell at once."""
        return self._answers.empty()

    async def get(self, deadline_s: float | None) -> Any:
        """The next answer, how the stream ended, NUDGE, or None at the deadline."""
        try:
            async with asyncio.timeout(None if deadline_s is None else max(deadline_s - time.monotonic(), 0)):
                return await self._answers.get()
        except TimeoutError:
            return None

    def wake(self) -> None:
        self._answers.put_nowait(NUDGE)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await call.write(await self._requests.get())
        except (grpc.RpcError, asyncio.InvalidStateError) as failure:  # the reader tells how it ended
            log.debug("line_unwritable why=%s", failure)

    async def _read(self, call: Any) -> None:
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                self._answers.put_nowait(answer)
        except grpc.RpcError as failure:
            log.debug("line_ended why=%s", failure)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.debug("line_ended with the connection")
        finally:
            call.cancel()
        self._answers.put_nowait(
            grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )
        )


class _RunningTask:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def join(self) -> None:
        """Wait for its end, unless it is the work that asks."""
        if asyncio.current_task() is not self._task:
            await asyncio.wait([self._task])


def is_cancelled() -> bool:
    """True when the running task itself was cancelled, not only the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
