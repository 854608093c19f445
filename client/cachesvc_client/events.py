"""Follow the blocks of a model: where each has copies, as a snapshot and then change by change.

    with EventSubscriber(socket_path, registration.namespace) as events:
        mirror = BlockMirror()
        for batch in events.follow():
            mirror.apply(batch)

``follow`` begins with a snapshot and comes back with another one where it was cut off or the daemon no longer knows
what was missed. It ends with DaemonUnavailable when the daemon goes: subscribe anew when it is back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
from kvcache.v1 import event_pb2

from cachesvc_client.core.arguments import warn_renamed
from cachesvc_client.core.errors import EventsMissed, Maker, Unauthenticated, error_of
from cachesvc_client.records.event_batch import Batch, BlockMirror, CopyLocation, Kind, Part, Run, parse_batch
from cachesvc_client.wire.credentials import Metadata, credentials_from, has_token
from cachesvc_client.wire.life import may_show
from cachesvc_client.wire.methods import SUBSCRIBE
from cachesvc_client.wire.settings import ChannelOptions, default_socket
from cachesvc_client.wire.transports import ChannelMaker, open_channel

__all__ = ["Batch", "BlockMirror", "CopyLocation", "EventSubscriber", "Kind", "Part", "Run", "subscription"]


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


def __getattr__(name: str) -> object:
    if name == "Spot":
        warn_renamed("cachesvc_client.events.Spot", "CopyLocation")
        return CopyLocation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class EventSubscriber:
    """Subscriptions to the model of ``namespace``. Safe to ``close`` from another thread, which ends them.

    ``socket_path`` None: that of CACHESVC_SOCKET, else /run/cachesvc/cachesvc.sock.

    ``token``, or ``token_file`` (read for each subscription), else CACHESVC_TOKEN or CACHESVC_TOKEN_FILE of the
    environment: needed where the daemon runs with ``--tokens``, with the scope ``engine`` or ``read-only``.

    ``storage``: be told too what is written to storage and what goes from there, as far as the daemon knows.
    """

    def __init__(
        self,
        socket_path: str | None,
        namespace: bytes,
        *,
        options: ChannelOptions = DEFAULT_OPTIONS,
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
        storage: bool = False,
    ) -> None:
        self._path = default_socket() if socket_path is None else socket_path
        self._namespace = namespace
        self._storage = storage
        self._options = options
        self._make_channel = make_channel
        self._credentials = credentials_from(token, token_file)
        self._used: Metadata = ()
        self._channel: grpc.Channel | None = None
        self._calls: set[Any] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._maker = Maker()

    def subscribe(self, *, snapshot: bool = True, epoch: int = 0, after: int | None = None) -> Iterator[Batch]:
        """Subscribe once, as ``subscription`` says; ends without an error only at ``close``.

        Raises SubscriberTooSlow, EventsMissed (``after`` is too long ago), NotFound (the model was evicted), NotOwned,
        LimitExceeded, DaemonUnavailable, Unauthenticated, PermissionDenied.
        """
        request = subscription(self._namespace, snapshot=snapshot, epoch=epoch, after=after, storage=self._storage)
        call = self._open(request)
        if call is None:
            return
        try:
            for message in call:
                yield parse_batch(message)
        except grpc.RpcError as failure:
            if not self._is_closed:
                raise error_of(failure) from failure
        finally:
            with self._lock:
                self._calls.discard(call)
            call.cancel()

    def follow(self) -> Iterator[Batch]:
        """A snapshot, then changes for as long as the daemon lives; after what was missed, a snapshot again."""
        while not self._is_closed:
            try:
                yield from self.subscribe(snapshot=True)
            except EventsMissed:
                continue
            except Unauthenticated:  # a token file may hold another one by now
                if self._credentials.metadata() == self._used:
                    raise

    def close(self) -> None:
        """End all subscriptions. Idempotent. Raises UsedAfterFork."""
        self._maker.check()
        with self._lock:
            self._is_closed = True
            calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, request: event_pb2.SubscribeRequest) -> Any:
        self._maker.check()
        with self._lock:
            if self._is_closed:
                return None
            self._used = used = self._credentials.metadata()
            if has_token(used) and not may_show(self._path):
                used = ()
            if self._channel is None:
                self._channel = self._make_channel(self._path, self._options)
            call = self._channel.unary_stream(
                SUBSCRIBE.path,
                request_serializer=SUBSCRIBE.request.SerializeToString,
                response_deserializer=SUBSCRIBE.response.FromString,
            )(request, metadata=used)
            self._calls.add(call)
            return call
