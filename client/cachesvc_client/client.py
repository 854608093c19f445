"""The way in for an engine: connect to the node's daemon, register a model, open leases, and come back after a loss."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from kvcache.v1 import engine_pb2

from cachesvc.model.layout import Layout
from cachesvc_client.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    LeaseLost,
    NotFound,
)
from cachesvc_client.lease import Lease, attach_pool
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.registration import Registration
from cachesvc_client.wire.channel import ChannelMaker, open_channel
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.messages import build_register, parse_registration
from cachesvc_client.wire.methods import CLOSE, REGISTER
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, default_socket

DEFAULT_TIMEOUTS = Timeouts()
DEFAULT_RETRIES = Retries()
DEFAULT_OPTIONS = ChannelOptions()

log = logging.getLogger(__name__)


class CacheClient:
    """A client of the daemon behind ``socket_path``; left out, that of CACHESVC_SOCKET, else
    /run/cachesvc/cachesvc.sock. ``engine`` is the name that operators see.

    Once the daemon goes, every call raises DaemonUnavailable at once, until ``reconnect``. Calls are safe from several
    threads; connect, register, open and close from one. A process that forks must connect after the fork.

    ``token``, or ``token_file`` (read again when the daemon refuses what it held), else CACHESVC_TOKEN or
    CACHESVC_TOKEN_FILE of the environment: needed where the daemon runs with ``--tokens``.
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retries: Retries = DEFAULT_RETRIES,
        options: ChannelOptions = DEFAULT_OPTIONS,
        engine: str = "engine",
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
    ) -> None:
        self.socket_path = default_socket() if socket_path is None else socket_path
        self.engine = engine
        self._timeouts = timeouts
        self._retries = retries
        self._options = options
        self._make_channel = make_channel
        self._credentials = credentials_from(token, token_file)
        self._connection: Connection | None = None
        self._is_closed = False
        self._registered: dict[tuple[int, int], tuple[engine_pb2.RegisterRequest, Layout]] = {}
        self._leases: list[Lease] = []
        self._pools: list[AttachedPool] = []
        self._on_lost: list[Callable[[], None]] = []
        self._open_ids = itertools.count(1)
        self._connecting = threading.Lock()

    @property
    def connected(self) -> bool:
        """True while the daemon is there."""
        return self._connection is not None and not self._connection.lost.is_set()

    @property
    def epoch(self) -> int:
        """Which life of the daemon this is. Raises DaemonUnavailable before ``connect``."""
        return self._require_connection().life.epoch

    def connect(self) -> CacheClient:
        """Connect; returns the client. Raises DaemonUnavailable, and does nothing while connected."""
        with self._connecting:
            self._require_open()
            if not self.connected:
                self._connection = self._new_connection()
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` whenever the daemon goes, from the thread that notices it: it must not block."""
        self._on_lost.append(callback)

    def register(
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
        """Make or find the pools of a model.

        ``model`` names the weights, revision included; nothing is shared across two salts. ``devices``: UUIDs, one a
        rank (empty: the daemon's first). Each pool is asked for as pages for each group (those of a layout's markers
        may be left out: ``Layout.fill_pages``) or as a share in (0, 1] of what is left (neither: all that is left);
        pools that are there already stay as they are. Raises PoolExhausted with the numbers, InvalidRequest,
        LimitExceeded, DaemonUnavailable, DeadlineExceeded.
        """
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
        return self._register(request, layout)

    def open_lease(self, registration: Registration) -> Lease:
        """Open a lease and keep it alive. Raises NotFound (register again), LimitExceeded, DaemonUnavailable."""
        connection = self._require_connection()
        lease = Lease(connection, registration, self.engine, next(self._open_ids))
        lease.start()
        self._leases = [each for each in self._leases if not each.record.is_closed] + [lease]
        return lease

    def attach(self, registration: Registration, lease_id: str, rank: int = 0) -> AttachedPool:
        """Map one rank's pool in a worker process, under its scheduler's lease. Raises LeaseLost, NotFound."""
        pool = attach_pool(self._require_connection(), registration, lease_id, rank)
        self._pools.append(pool)
        return pool

    def reconnect(self) -> tuple[Lease, ...]:
        """Connect anew after the daemon went; register again, and open a lease for each that was open, in that order.

        Returns the new leases; the old ones and all made under them stay lost, and the engine recomputes what it had
        there. Close the old ones once no kernel uses their pages: where only the connection broke, the daemon keeps
        these back until then. Attach again under the new ones. Pools of the old ones still hold their GPU memory: close
        them first, or the new daemon has no room for its own. Raises DaemonUnavailable (not back yet), PoolExhausted
        (it came back smaller), and what ``register`` raises; call it again then.
        """
        with self._connecting:
            self._require_open()
            if self.connected:
                raise Conflict("the daemon is connected; there is nothing to come back from")
            lost = [lease for lease in self._leases if not lease.record.is_closed]
            registered = dict(self._registered)
            before, connection = self._connection, self._new_connection()
            self._connection, self._leases, self._registered = connection, [], {}
            try:
                renewed = {key: self._register(*wish) for key, wish in registered.items()}
                opened = tuple([self.open_lease(renewed[lease.registration.key]) for lease in lost])
            except CacheClientError:
                connection.close()
                self._connection, self._leases, self._registered = before, lost, registered
                raise
            if before is not None and before.life.epoch == connection.life.epoch:
                carry_over(before, connection, lost)
            return opened

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the daemon goes or the client is closed; False when ``timeout_s`` passes first."""
        if self._connection is None:
            raise DaemonUnavailable("not connected; connect() first")
        return self._connection.lost.wait(timeout_s)

    def close(self, *, quiesced: bool | None = None) -> None:
        """Close the leases as ``Lease.close`` does, unmap, and disconnect. Idempotent.

        Streams that still wait for a load are released, for nobody would tell them of its end: what they compute is
        void, and the words stay mapped (``AttachedPool.close`` again, once they are synchronised).
        """
        if self._is_closed:
            return
        self._is_closed = True
        for lease in list(self._leases):
            lease.close(quiesced=quiesced)
        for pool in self._pools:
            if quiesced is not False or not pool.is_on_gpu:
                pool.close()
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> CacheClient:
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)

    def _register(self, request: engine_pb2.RegisterRequest, layout: Layout) -> Registration:
        connection = self._require_connection()
        registration = parse_registration(connection.ask(REGISTER, request, self._timeouts.register_s), layout)
        self._registered[registration.key] = (request, layout)
        return registration

    def _new_connection(self) -> Connection:
        connection = Connection(
            self.socket_path,
            timeouts=self._timeouts,
            retries=self._retries,
            options=self._options,
            make_channel=self._make_channel,
            on_lost=self._lose,
            credentials=self._credentials,
        )
        started = time.monotonic()
        connection.start()
        log.info("connected path=%s seconds=%.3f", self.socket_path, time.monotonic() - started)
        return connection

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosed("this client was closed; make another one")

    def _require_connection(self) -> Connection:
        self._require_open()
        connection = self._connection
        if connection is None:
            raise DaemonUnavailable("not connected; connect() first")
        if connection.lost.is_set():
            raise connection.gone()
        return connection

    def _lose(self) -> None:
        for callback in list(self._on_lost):
            callback()


def carry_over(before: Connection, connection: Connection, lost: Seq[Lease]) -> None:
    """The same daemon was found again: tell it which leases were closed meanwhile, and let the others' ends be told."""
    for lease in lost:
        lease.move(connection)
    untold = connection.untold = before.untold  # one list: a close that fails only now is told the next time
    while untold:
        try:
            connection.ask(CLOSE, untold[-1], connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", untold[-1].lease_id, over)
        except CacheClientError as gone:
            log.debug("close_untold lease=%s why=%s", untold[-1].lease_id, gone)
            return
        untold.pop()
