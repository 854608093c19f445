"""The awaited twin of ``cachesvc_client.client.CacheClient``: one event loop, the same calls, values and errors."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from kvcache.v1 import engine_pb2

from cachesvc.model.layout import Layout
from cachesvc_client.aio.connection import AsyncConnection
from cachesvc_client.aio.lease import AsyncLease
from cachesvc_client.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    LeaseLost,
    NotFound,
)
from cachesvc_client.registration import Registration
from cachesvc_client.wire.channel import AsyncChannelMaker, open_async_channel
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.messages import build_register, parse_registration
from cachesvc_client.wire.methods import CLOSE, REGISTER
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, default_socket

log = logging.getLogger(__name__)


class AsyncCacheClient:
    """A client for one event loop; as ``CacheClient``. Made and used on the loop."""

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        options: ChannelOptions | None = None,
        engine: str = "engine",
        make_channel: AsyncChannelMaker = open_async_channel,
        token: str | None = None,
        token_file: str | None = None,
    ) -> None:
        self.socket_path = default_socket() if socket_path is None else socket_path
        self.engine = engine
        self._timeouts = timeouts if timeouts is not None else Timeouts()
        self._retries = retries if retries is not None else Retries()
        self._options = options if options is not None else ChannelOptions()
        self._make_channel = make_channel
        self._credentials = credentials_from(token, token_file)
        self._connection: AsyncConnection | None = None
        self._is_closed = False
        self._registered: dict[tuple[int, int], tuple[engine_pb2.RegisterRequest, Layout]] = {}
        self._leases: list[AsyncLease] = []
        self._on_lost: list[Callable[[], None]] = []
        self._open_ids = itertools.count(1)
        self._connecting = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """True while the daemon is there."""
        return self._connection is not None and not self._connection.lost.is_set()

    @property
    def epoch(self) -> int:
        """As ``CacheClient.epoch``."""
        return self._require_connection().life.epoch

    async def connect(self) -> AsyncCacheClient:
        """As ``CacheClient.connect``."""
        async with self._connecting:
            self._require_open()
            if not self.connected:
                self._connection = await self._new_connection()
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the loop whenever the daemon goes."""
        self._on_lost.append(callback)

    async def register(
        self,
        model: str,
        layout: Layout,
        *,
        tenant_salt: bytes = b"",
        devices: Seq[str] = (),
        device_pages: Seq[int] | None = None,
        device_share: float | None = None,
        host_pages: Seq[int] | None = None,
        host_share: float | None = None,
    ) -> Registration:
        """As ``CacheClient.register``."""
        request = build_register(
            model,
            layout,
            tenant_salt=tenant_salt,
            devices=devices,
            device_pages=device_pages,
            device_share=device_share,
            host_pages=host_pages,
            host_share=host_share,
        )
        return await self._register(request, layout)

    async def open_lease(self, registration: Registration) -> AsyncLease:
        """As ``CacheClient.open_lease``."""
        lease = AsyncLease(self._require_connection(), registration, self.engine, next(self._open_ids))
        await lease.start()
        self._leases = [each for each in self._leases if not each.record.is_closed] + [lease]
        return lease

    async def reconnect(self) -> tuple[AsyncLease, ...]:
        """As ``CacheClient.reconnect``."""
        async with self._connecting:
            self._require_open()
            if self.connected:
                raise Conflict("the daemon is connected; there is nothing to come back from")
            lost = [lease for lease in self._leases if not lease.record.is_closed]
            registered = dict(self._registered)
            before, connection = self._connection, await self._new_connection()
            self._connection, self._leases, self._registered = connection, [], {}
            try:
                renewed = {key: await self._register(*wish) for key, wish in registered.items()}
                opened = tuple([await self.open_lease(renewed[lease.registration.key]) for lease in lost])
            except (CacheClientError, asyncio.CancelledError):
                self._connection, self._leases, self._registered = before, lost, registered
                await connection.close()
                raise
            if before is not None and before.life.epoch == connection.life.epoch:
                await _carry_over(before, connection, lost)
            return opened

    async def close(self, *, quiesced: bool | None = None) -> None:
        """As ``CacheClient.close``."""
        if self._is_closed:
            return
        self._is_closed = True
        for lease in self._leases:
            await lease.close(quiesced=quiesced)
        if self._connection is not None:
            await self._connection.close()

    async def __aenter__(self) -> AsyncCacheClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(quiesced=None if kind is None else False)

    async def _register(self, request: engine_pb2.RegisterRequest, layout: Layout) -> Registration:
        answer = await self._require_connection().ask(REGISTER, request, self._timeouts.register_s)
        registration = parse_registration(answer, layout)
        self._registered[registration.key] = (request, layout)
        return registration

    async def _new_connection(self) -> AsyncConnection:
        connection = AsyncConnection(
            self.socket_path,
            timeouts=self._timeouts,
            retries=self._retries,
            options=self._options,
            make_channel=self._make_channel,
            on_lost=self._lose,
            credentials=self._credentials,
        )
        await connection.start()
        return connection

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosed("this client was closed; make another one")

    def _require_connection(self) -> AsyncConnection:
        self._require_open()
        if self._connection is None:
            raise DaemonUnavailable("not connected; connect() first")
        if self._connection.lost.is_set():
            raise self._connection.gone()
        return self._connection

    def _lose(self) -> None:
        for callback in list(self._on_lost):
            callback()


async def _carry_over(before: AsyncConnection, connection: AsyncConnection, lost: Seq[AsyncLease]) -> None:
    """As the blocking client's."""
    for lease in lost:
        lease.move(connection)
    untold = connection.untold = before.untold
    while untold:
        try:
            await connection.ask(CLOSE, untold[-1], connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", untold[-1].lease_id, over)
        except CacheClientError as gone:
            log.debug("close_untold lease=%s why=%s", untold[-1].lease_id, gone)
            return
        untold.pop()
