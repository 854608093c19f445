"""Awaited end of a lane: reads on the event loop, and wakes the task that awaits the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from kvcache.v1.cache_pb2 import StepRequest

from cachesvc.model.errors import LimitExceeded
from cachesvc_client.errors import DaemonUnavailable
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.fork import keep_from_children
from cachesvc_client.wire.lane import (
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
from cachesvc_client.wire.methods import Method, Q, R

log = logging.getLogger(__name__)


class AsyncInbox(Inbox):
    """An inbox that one task awaits."""

    __slots__ = ("awaited",)

    def __init__(self) -> None:
        super().__init__()
        self.awaited: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something has come, or nothing will."""
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_result(None)


class AsyncLane(LaneEnd):
    """Used on one event loop."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._awaiting: set[AsyncInbox] = set()

    async def greet(self, metadata: Metadata, timeout_s: float) -> None:
        """Identify the caller. Raises DaemonUnavailable where no calls can go this way."""
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        keep_from_children(self)
        inbox = AsyncInbox()
        self._send(encode_hello(self._enter(inbox), metadata))
        if not await self.wait(inbox, timeout_s):
            raise DaemonUnavailable(f"no answer on the lane within {timeout_s:g} s")
        check_welcome(inbox.came.popleft())

    async def call(self, number: int, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        """One attempt of a call. Raises grpc.RpcError."""
        inbox = AsyncInbox()
        tag = self._enter(inbox)
        try:
            self._send(encode_call(number, tag, request, timeout_s, metadata))
            if not await self.wait(inbox, timeout_s):
                raise late()
            answer: R = read_answer(method, inbox.came.popleft())
        finally:
            if inbox.tags:
                self.leave(inbox)
                self._send(encode_cancel(tag))
        return answer

    def send_step(self, request: StepRequest, inbox: AsyncInbox, sent: SentSteps) -> None:
        """Send a step whose answer goes to ``inbox``; where the lane has ended ``wait`` tells."""
        if frame := self._encode_step(request, inbox, sent):
            self._send(frame)

    async def wait(self, inbox: AsyncInbox, timeout_s: float | None) -> bool:
        """Wait until something has come into the inbox; False when the time passes first. Raises grpc.RpcError where
        nothing will come any more."""
        if not inbox.came and not self.why_broken:
            inbox.awaited = self._loop.create_future()
            self._awaiting.add(inbox)
            timer = None if timeout_s is None else self._loop.call_later(timeout_s, inbox.wake)
            try:
                await inbox.awaited
            finally:
                inbox.awaited = None
                self._awaiting.discard(inbox)
                if timer is not None:
                    timer.cancel()
        if not inbox.came and self.why_broken:
            raise self._broke()
        return bool(inbox.came)

    def end(self, why: str) -> None:
        """Calls under way fail now. Idempotent."""
        if self.why_broken:
            return
        self.why_broken = why
        log.info("lane_ended why=%s", why)
        self._loop.remove_reader(self._socket)
        if self._unsent:
            self._loop.remove_writer(self._socket)
        self._socket.close()
        self._wake(list(self._awaiting))

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self._reader.room())
            if not count:
                self.end("the daemon ended it")
                return
            self._reader.add(count)
            self._hand_out(None)
        except BlockingIOError:
            return
        except LimitExceeded as wrong:
            self.end(str(wrong))
            return
        except OSError as error:
            self.end(f"it broke: {error.strerror}")
            return
        self._wake([inbox for inbox in self._awaiting if inbox.came])

    def _wake(self, inboxes: list[AsyncInbox]) -> None:
        for inbox in inboxes:
            inbox.wake()

    def _send(self, data: bytes) -> None:
        """Send a frame, or keep what the socket does not take. Where the lane has ended, the waiters get an error."""
        if self.why_broken:
            return
        if self._unsent:
            self._unsent += data
            return
        self._try(lambda: self._first_part(data))

    def _first_part(self, data: bytes) -> None:
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.send(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket, self._try, self._next_part)

    def _next_part(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self._socket.send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _try(self, send: Callable[[], None]) -> None:
        try:
            send()
        except OSError as error:
            self.end(f"it broke: {error.strerror}")
