"""The way in for an engine: connect to the node's daemon, register a model, open leases, and come back after a loss."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from kvcache.v1 import engine_pb2

from cachesvc.model.layout import Layout
from cachesvc.wire.convert import layout_to_proto
from cachesvc_client.core.arguments import checks_arguments
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    InvalidRequest,
    LeaseLost,
    Maker,
    NotFound,
    NotSupported,
    Registration,
)
from cachesvc_client.lease import Lease, attach_pool, open_lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.methods import CLOSE, REGISTER
from cachesvc_client.wire.settings import (
    ChannelOptions,
    Retries,
    Timeouts,
    Transport,
    as_path,
    default_socket,
    default_transport,
)
from cachesvc_client.wire.transports import ChannelMaker, open_channel

DEFAULT_TIMEOUTS = Timeouts()
DEFAULT_RETRIES = Retries()
DEFAULT_OPTIONS = ChannelOptions()

log = logging.getLogger(__name__)


class CacheClient:
    """A client of the daemon behind ``socket_path``; left out, that of CACHESVC_SOCKET, else
    /run/cachesvc/cachesvc.sock. ``engine`` is the name that operators see.

    Once the daemon goes, every call raises DaemonUnavailable at once, until ``reconnect``. Calls are safe from several
    threads; connect, register, open and close from one. A process that forks must connect after the fork: in the child
    every use raises UsedAfterFork.

    ``token``, or ``token_file`` (read again when the daemon refuses what it held), else CACHESVC_TOKEN or
    CACHESVC_TOKEN_FILE of the environment: needed where the daemon runs with ``--tokens``. ``transport``, else
    CACHESVC_TRANSPORT: which way calls go; AUTO takes a lane where the daemon gives one.
    """

    @checks_arguments
    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retries: Retries = DEFAULT_RETRIES,
        options: ChannelOptions = DEFAULT_OPTIONS,
        engine: str = "engine",
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.socket_path = default_socket() if socket_path is None else as_path(os.fspath(socket_path))
        self.engine = engine
        self._timeouts = timeouts
        self._retries = retries
        self._options = options
        self._make_channel = make_channel
        self._credentials = credentials_from(token, token_file)
        self._transport = default_transport() if transport is None else transport
        self._connecting = threading.Lock()
        self._maker = Maker()
        self._connection: Connection | None = None
        self._is_closed = False
        self._registered: dict[tuple[int, int], tuple[engine_pb2.RegisterRequest, Layout]] = {}
        self._leases: list[Lease] = []
        self._pools: list[AttachedPool] = []
        self._on_lost: list[Callable[[], None]] = []
        self._open_ids = itertools.count(1)

    def __repr__(self) -> str:
        state = f"connected by {self.transport}" if self.connected else "not connected"
        return f"<CacheClient of {self.socket_path}, engine {self.engine!r}: {state}>"

    @property
    def connected(self) -> bool:
        """True while the daemon is there. False in a child of the process that connected."""
        return self._connection is not None and not (self._maker.is_elsewhere or self._connection.lost.is_set())

    @property
    def epoch(self) -> int:
        """Number of the daemon's life. Raises InvalidRequest before ``connect``."""
        return self._require_connection().life.epoch

    @property
    def transport(self) -> str:
        """Transport that calls of CacheService use now: "lane" or "grpc"; empty while not connected."""
        if not self.connected:
            return ""
        return "lane" if self._connection is not None and self._connection.has_lane else "grpc"

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

    @checks_arguments
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
        reserved_pages: int = 0,
        display_name: str = "",
        timeout_s: float | None = None,
    ) -> Registration:
        """Make or find the pools of a model.

        ``model`` names the weights, revision included; nothing is shared across two salts. ``devices``: UUIDs, one a
        rank (empty: the daemon's first). Each pool is asked for as pages for each group (those of a layout's markers
        may be left out: ``Layout.fill_pages``) or as a share in (0, 1] of what is left (neither: all that is left);
        pools that are there already stay as they are. ``reserved_pages``: number of first pages of every group on the
        device that the engines own and the daemon never grants; all engines of a model share them, and name the same
        number. ``display_name``: what operators see beside ``model``; nothing depends on it, and the first one stays.
        ``timeout_s``: instead of ``Timeouts.register_s``, for pools that are known to be there. Raises PoolExhausted
        with the numbers, InvalidRequest, LimitExceeded, Conflict (another number of reserved pages), NotSupported,
        DaemonUnavailable, DeadlineExceeded.
        """
        if not 0 <= reserved_pages < 1 << 32:
            raise InvalidRequest(f"{reserved_pages} is not a number of reserved pages")
        request = engine_pb2.RegisterRequest(
            model=model,
            layout=layout_to_proto(layout),
            tenant_salt=tenant_salt,
            devices=devices,
            device_pool=pool_share("device", device_pages, device_share),
            host_pool=pool_share("host", host_pages, host_share),
            reserved_pages=reserved_pages,
            display_name=display_name,
        )
        return self._register(request, layout, timeout_s)

    @checks_arguments
    def open_lease(self, registration: Registration, *, instance: str = "") -> Lease:
        """Open a lease and keep it alive. Raises NotFound (register again), LimitExceeded, DaemonUnavailable.

        ``instance``: a name of at most 64 characters that the processes of one engine share, such as a uuid. They get
        one lease, whichever opens it first (``Lease.joined``), for as long as one of them lives; each has sequences of
        its own, and one of them, which takes the steps, has the stock. Asked again, this client gives the same handle.
        """
        return self._open_lease(registration, instance)

    @checks_arguments
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

        While the daemon is there, it returns the leases that live, as they are: one that drains serves them until it
        goes, which ``on_lost`` and ``wait_lost`` tell.
        """
        with self._connecting:
            self._require_open()
            if self.connected:
                return tuple(lease for lease in self._leases if not lease.is_lost and not lease.record.is_closed)
            lost = [lease for lease in self._leases if not lease.record.is_closed]
            registered = dict(self._registered)
            before, connection = self._connection, self._new_connection()
            self._connection, self._leases, self._registered = connection, [], {}
            try:
                renewed = {key: self._register(*wish) for key, wish in registered.items()}
                wanted = [(renewed[lease.registration.key], lease.instance) for lease in lost]
                opened = tuple([self._open_lease(*wish) for wish in wanted])
            except (CacheClientError, KeyboardInterrupt):
                self._connection, self._leases, self._registered = before, lost, registered
                connection.close()
                raise
            if before is not None and before.life.epoch == connection.life.epoch:
                carry_over(before, connection, lost)
            return opened

    @checks_arguments
    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the daemon goes or the client is closed; False when ``timeout_s`` passes first."""
        if self._connection is None:
            raise InvalidRequest("not connected yet: use the client in a with block, or call connect() first")
        return self._connection.lost.wait(timeout_s)

    def close(self, *, quiesced: bool | None = None) -> None:
        """Close the leases as ``Lease.close`` does, unmap, and disconnect. Idempotent. Raises UsedAfterFork.

        Words that a stream still waits for stay mapped, and the loss of the daemon is still answered for them: close
        their pool again (``AttachedPool.close``) once the stream is synchronised.
        """
        self._maker.check()
        if self._is_closed:
            return
        self._is_closed = True
        for lease in list(self._leases):
            lease.close(quiesced=quiesced)
        connection = self._connection
        if connection is None:
            return
        for pool in self._pools:
            if quiesced is not False or not pool.is_on_gpu:
                pool.close()
        connection.close()

    def __enter__(self) -> CacheClient:
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)

    def _open_lease(self, registration: Registration, instance: str) -> Lease:
        connection = self._require_connection()
        if connection.life.epoch not in (0, registration.epoch):  # what its numbers name now may be another model
            raise NotFound.from_message(
                f"model {registration.model_id} was registered with a daemon that has gone; register it again"
            )
        for known in self._leases if instance else ():
            is_open = not known.is_lost and not known.record.is_closed
            if is_open and (known.instance, known.registration.key) == (instance, registration.key):
                return known
        lease = open_lease(connection, registration, self.engine, next(self._open_ids), instance)
        self._leases = [each for each in self._leases if not each.record.is_closed] + [lease]
        return lease

    def _register(
        self, request: engine_pb2.RegisterRequest, layout: Layout, timeout_s: float | None = None
    ) -> Registration:
        answer = self._require_connection().ask(REGISTER, request, timeout_s or self._timeouts.register_s)
        if answer.reserved_pages != request.reserved_pages:  # it would grant them
            pages = f"{answer.reserved_pages} pages, not {request.reserved_pages}"
            raise NotSupported(f"the daemon reserves {pages}: update it")
        if layout.has_shared_pools and (not answer.first_pages or any(answer.first_pages)):
            raise NotSupported("the daemon gives each group pages of its own, whatever pool it names: update it")
        registration = Registration(
            model_id=answer.model_id,
            replica=answer.replica,
            namespace=answer.namespace,
            device_pages=tuple(answer.device_pages),
            host_pages=tuple(answer.host_pages),
            devices=tuple(answer.devices),
            epoch=answer.epoch,
            layout=layout,
            existed=answer.existed,
            reserved_pages=answer.reserved_pages,
            weights_version=answer.weights_version,
            peer_address=answer.peer_address,
        )
        self._registered[registration.key] = (request, layout)
        return registration

    def _new_connection(self) -> Connection:
        connection = Connection(
            self.socket_path,
            self._make_channel,
            self._options,
            timeouts=self._timeouts,
            retries=self._retries,
            on_lost=self._lose,
            credentials=self._credentials,
            transport=self._transport,
        )
        started = time.monotonic()
        connection.start()
        way = "lane" if connection.has_lane else "grpc"
        log.info("connected path=%s transport=%s seconds=%.3f", self.socket_path, way, time.monotonic() - started)
        return connection

    def _require_open(self) -> None:
        self._maker.check()
        if self._is_closed:
            raise AlreadyClosed("this client was closed; make another one")

    def _require_connection(self) -> Connection:
        self._require_open()
        if self._connection is None:
            raise InvalidRequest("not connected yet: use the client in a with block, or call connect() first")
        self._connection.check()
        return self._connection

    def _lose(self) -> None:
        for callback in list(self._on_lost):
            callback()


def carry_over(before: Connection, connection: Connection, lost: Seq[Lease]) -> None:
    """Report closed leases to the same daemon, found again, and let it report the ends of the others."""
    for lease in lost:
        lease.record.move(connection)
    ends = connection.unreported = before.unreported  # one list: the next call reports a close that fails only now
    while ends:
        try:
            connection.ask(CLOSE, ends[-1], connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", ends[-1].lease_id, over)
        except CacheClientError as gone:
            log.debug("close_untold lease=%s why=%s", ends[-1].lease_id, gone)
            return
        ends.pop()


def pool_share(pool: str, pages: Seq[int] | None, share: float | None) -> engine_pb2.PoolShare | None:
    """Share of a register's request. Raises InvalidRequest for both at once."""
    if pages is not None and share is not None:
        raise InvalidRequest(f"give {pool}_pages or {pool}_share, not both")
    if pages is not None:
        return engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=pages))
    return engine_pb2.PoolShare(share=share) if share is not None else None


class Reattacher:
    """One thread for one client. ``on_back(leases)`` is called from it after each ``reconnect``, with what that gave.

    Pauses between attempts double from ``first_pause_s`` to ``longest_pause_s``: an attempt on a socket without a
    listener costs a millisecond, a pause costs every engine of the node that much of the daemon's return.
    """

    def __init__(
        self,
        client: CacheClient,
        on_back: Callable[[tuple[Lease, ...]], None],
        *,
        first_pause_s: float = 0.05,
        longest_pause_s: float = 0.25,
    ) -> None:
        self._client = client
        self._on_back = on_back
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-reattach", daemon=True)

    def start(self) -> None:
        """Watch the client from now on; one whose daemon is gone already is brought back too."""
        self._client.on_lost(self._wanted.set)
        if not self._client.connected:
            self._wanted.set()
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Reattacher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._wanted.wait() and not self._closed.is_set():
                self._wanted.clear()
                self._come_back()
        except AlreadyClosed:
            log.debug("reattach_ended path=%s", self._client.socket_path)
        except Exception:
            log.exception("reattach_failed path=%s", self._client.socket_path)

    def _come_back(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            if self._client.connected:  # another thread reconnected it
                return
            try:
                leases = self._client.reconnect()
            except AlreadyClosed:
                raise
            except CacheClientError as error:
                log.debug("reattach_waits path=%s why=%s", self._client.socket_path, error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, self._longest_pause_s)
            else:
                log.info("reattached path=%s leases=%s", self._client.socket_path, len(leases))
                self._on_back(leases)
                return
