"""Follow the blocks of a model on an event loop, as ``cachesvc_client.events`` does on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from kvcache.v1 import event_pb2

from cachesvc_client.aio.port import is_cancelled
from cachesvc_client.core.errors import EventsMissed, Maker, Unauthenticated, error_of
from cachesvc_client.records.event_batch import Batch, parse_batch
from cachesvc_client.wire.connection import DEFAULT_OPTIONS, AsyncChannelMaker, open_async_channel, subscription
from cachesvc_client.wire.credentials import Metadata, credentials_from, has_token
from cachesvc_client.wire.life import may_show
from cachesvc_client.wire.port import SUBSCRIBE
from cachesvc_client.wire.settings import ChannelOptions, default_socket


class AsyncEventSubscriber:
    """Subscriptions to the model of ``namespace``, on the running loop; ``close`` ends them.

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
        make_channel: AsyncChannelMaker = open_async_channel,
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
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False
        self._maker = Maker()

    async def subscribe(
        self, *, snapshot: bool = True, epoch: int = 0, after: int | None = None
    ) -> AsyncIterator[Batch]:
        """Subscribe once, as ``subscription`` says; ends without an error only at ``close``.

        Raises SubscriberTooSlow, EventsMissed (``after`` is too long ago), NotFound (the model was evicted), NotOwned,
        LimitExceeded, DaemonUnavailable, Unauthenticated, PermissionDenied.
        """
        request = subscription(self._namespace, snapshot=snapshot, epoch=epoch, after=after, storage=self._storage)
        call = self._open(request)
        if call is None:
            return
        try:
            async for message in call:
                yield parse_batch(message)
        except grpc.RpcError as failure:
            if not self._is_closed:
                raise error_of(failure) from failure
        except asyncio.CancelledError:
            if not self._is_closed or is_cancelled():
                raise
        finally:
            call.cancel()

    async def follow(self) -> AsyncIterator[Batch]:
        """A snapshot, then changes for as long as the daemon lives; after what was missed, a snapshot again."""
        while not self._is_closed:
            try:
                async for batch in self.subscribe(snapshot=True):
                    yield batch
            except EventsMissed:
                continue
            except Unauthenticated:  # a token file may hold another one by now
                if self._credentials.metadata() == self._used:
                    raise

    async def close(self) -> None:
        """End all subscriptions. Idempotent. Raises UsedAfterFork."""
        self._maker.check()
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncEventSubscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self, request: event_pb2.SubscribeRequest) -> Any:
        self._maker.check()
        if self._is_closed:
            return None
        self._used = used = self._credentials.metadata()
        if has_token(used) and not may_show(self._path):
            used = ()
        if self._channel is None:
            self._channel = self._make_channel(self._path, self._options)
        return self._channel.unary_stream(
            SUBSCRIBE.path,
            request_serializer=SUBSCRIBE.request.SerializeToString,
            response_deserializer=SUBSCRIBE.response.FromString,
        )(request, metadata=used)
