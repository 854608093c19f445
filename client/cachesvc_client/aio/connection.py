"""The awaited twin of ``wire.connection``: the same life connection and retry rule around an aio channel."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from kvcache.v1 import lease_pb2

from cachesvc_client.attachments import Attachments
from cachesvc_client.errors import AlreadyClosed, CacheClientError, DaemonUnavailable
from cachesvc_client.wire.attempts import Attempts
from cachesvc_client.wire.channel import AsyncChannelMaker
from cachesvc_client.wire.connection import GONE, NO_CREDENTIALS
from cachesvc_client.wire.credentials import Credentials, Proof
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.methods import Method, Q, R
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts
from cachesvc_client.wire.trace import trace_headers


class AsyncConnection:
    """One life of the daemon, for one event loop. It never comes back; reconnecting makes a new one."""

    def __init__(
        self,
        socket_path: str,
        *,
        timeouts: Timeouts,
        retries: Retries,
        options: ChannelOptions,
        make_channel: AsyncChannelMaker,
        on_lost: Callable[[], None],
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.socket_path = socket_path
        self.timeouts = timeouts
        self.retries = retries
        self.life = LifeConnection(socket_path, timeouts.connect_s, self._lose)
        self.attachments = Attachments()
        self.untold: list[lease_pb2.CloseRequest] = []
        self.gone_event = asyncio.Event()
        self._options = options
        self._make_channel = make_channel
        self._on_lost = on_lost
        self.proof = Proof(credentials)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[Any] = set()
        self._closed = False

    @property
    def lost(self) -> threading.Event:
        """Set for good when the daemon went away or this side closed."""
        return self.life.lost

    @property
    def process_token(self) -> bytes:
        """What the daemon knows this process by."""
        return self.life.process_token

    async def start(self) -> None:
        """Connect on the running loop. Raises DaemonUnavailable."""
        self._loop = asyncio.get_running_loop()
        self._channel = self._make_channel(self.socket_path, self._options)
        try:
            await asyncio.to_thread(self.life.start)
            self.proof.start(self.life.process_token)
        except CacheClientError:
            await self._channel.close()
            raise

    async def ask(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Send one request, again under the same contents where the way broke. Raises CacheClientError."""
        attempts = Attempts(self.retries, time.monotonic() + timeout_s)
        headers = trace_headers()
        while True:
            used = self.proof.metadata
            call = self._require_channel().unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )(
                request,
                timeout=attempts.left_s(time.monotonic()),
                wait_for_ready=False,
                metadata=(*headers, *used),
            )
            self._calls.add(call)
            try:
                answer: R = await call
            except grpc.RpcError as failure:
                if self.lost.is_set():
                    raise self.gone() from failure
                if self.proof.renew(failure, used):
                    continue
                pause_s = attempts.pause_after(failure, time.monotonic())
            except asyncio.CancelledError as cancelled:
                if self.gone_event.is_set() and not is_cancelled():
                    raise self.gone() from cancelled
                raise
            else:
                return answer
            finally:
                self._calls.discard(call)
            await self.pause(pause_s)

    def open_stream(self, method: Method[Q, R]) -> Any:
        """A stream both ways, to write to and read from; the daemon's end cancels it. Raises DaemonUnavailable."""
        call = self._require_channel().stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(wait_for_ready=False, metadata=(*trace_headers(), *self.proof.metadata))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def pause(self, seconds: float, until: asyncio.Event | None = None) -> None:
        """Wait, but no longer than the daemon lives, nor than until an event."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gone_event, until) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def gone(self) -> CacheClientError:
        """Why nothing can be asked here any more."""
        return AlreadyClosed("the client was closed; connect again") if self._closed else DaemonUnavailable(GONE)

    async def close(self) -> None:
        """End the connection; calls under way fail. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self.life.close)
        self._end_calls()
        if self._channel is not None:
            await self._channel.close()

    def _require_channel(self) -> grpc.aio.Channel:
        if self._channel is None or self.lost.is_set():
            raise self.gone()
        return self._channel

    def _end_calls(self) -> None:
        self.gone_event.set()
        for call in list(self._calls):
            call.cancel()

    def _lose(self) -> None:
        """Called by the life connection's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._lose_on_loop)

    def _lose_on_loop(self) -> None:
        self._end_calls()
        self._on_lost()


def is_cancelled() -> bool:
    """True when it is the running task that somebody cancelled, not only the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
