"""One life of the daemon as this process sees it: a channel for calls, and the life connection that says when it ends.

A connection never comes back. Reconnecting makes a new one, and everything made under the old one stays lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from kvcache.v1 import lease_pb2

from cachesvc_client.attachments import Attachments
from cachesvc_client.errors import AlreadyClosed, CacheClientError, DaemonUnavailable
from cachesvc_client.wire.attempts import Attempts
from cachesvc_client.wire.channel import ChannelMaker
from cachesvc_client.wire.credentials import Credentials, Proof
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.methods import Method, Q, R
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts
from cachesvc_client.wire.trace import trace_headers

NO_CREDENTIALS = Credentials()
GONE = "the daemon went away; go on without the cache, reconnect and recompute"


class Connection:
    """Calls with a deadline and bounded retries, all of which fail at once when the daemon goes.

    ``untold``: ends of leases that could not be told any more. Where the same daemon is found again they matter: it
    knows that this process lives, and keeps the leases' pages back for it. ``proof``: what every call proves itself by.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeouts: Timeouts,
        retries: Retries,
        options: ChannelOptions,
        make_channel: ChannelMaker,
        on_lost: Callable[[], None],
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.socket_path = socket_path
        self.timeouts = timeouts
        self.retries = retries
        self.life = LifeConnection(socket_path, timeouts.connect_s, self._lose)
        self.attachments = Attachments()
        self.untold: list[lease_pb2.CloseRequest] = []
        self._options = options
        self._make_channel = make_channel
        self._on_lost = on_lost
        self.proof = Proof(credentials)
        self._channel: grpc.Channel | None = None
        self._closed = False
        self._callables: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def lost(self) -> threading.Event:
        """Set for good when the daemon went away or this side closed."""
        return self.life.lost

    @property
    def process_token(self) -> bytes:
        """What the daemon knows this process by."""
        return self.life.process_token

    def start(self) -> None:
        """Connect. Raises DaemonUnavailable."""
        channel = self._make_channel(self.socket_path, self._options)
        self._channel = channel
        try:
            self.life.start()
            self.proof.start(self.life.process_token)
        except CacheClientError:
            channel.close()
            raise

    def ask(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Send one request, again under the same contents where the way broke. Raises CacheClientError."""
        attempts = Attempts(self.retries, time.monotonic() + timeout_s)
        headers = trace_headers()
        while True:
            call = self._callable(method)
            used = self.proof.metadata
            try:
                answer: R = call(
                    request,
                    timeout=attempts.left_s(time.monotonic()),
                    wait_for_ready=False,
                    metadata=(*headers, *used),
                )
            except grpc.RpcError as failure:
                if self.lost.is_set():
                    raise self.gone() from failure
                if self.proof.renew(failure, used):
                    continue
                pause_s = attempts.pause_after(failure, time.monotonic())
            except ValueError as failure:  # what gRPC says of a channel that was closed meanwhile
                if self.lost.is_set():
                    raise self.gone() from failure
                raise
            else:
                return answer
            self.lost.wait(pause_s)

    def open_stream(self, method: Method[Q, R], requests: Iterator[Q]) -> Any:
        """A stream both ways: a grpc.Call to iterate over for the answers. Raises DaemonUnavailable."""
        channel = self._require_channel()
        try:
            return channel.stream_stream(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )(requests, wait_for_ready=False, metadata=(*trace_headers(), *self.proof.metadata))
        except ValueError as failure:
            raise self.gone() from failure

    def gone(self) -> CacheClientError:
        """Why nothing can be asked here any more."""
        return AlreadyClosed("the client was closed; connect again") if self._closed else DaemonUnavailable(GONE)

    def close(self) -> None:
        """End the connection; calls under way fail. Idempotent."""
        self._closed = True
        self.life.close()
        if self._channel is not None:
            self._channel.close()

    def _callable(self, method: Method[Q, R]) -> Any:
        channel = self._require_channel()
        with self._lock:
            call = self._callables.get(method.path)
            if call is None:
                call = self._callables[method.path] = channel.unary_unary(
                    method.path,
                    request_serializer=method.request.SerializeToString,
                    response_deserializer=method.response.FromString,
                )
        return call

    def _require_channel(self) -> grpc.Channel:
        if self._channel is None or self.lost.is_set():
            raise self.gone()
        return self._channel

    def _lose(self) -> None:
        assert self._channel is not None
        self._channel.close()  # calls under way end now, not at their deadlines
        self._on_lost()
