"""The way in for an engine: connect to the node's daemon, register a model, open leases, and come back after a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from cachesvc.model.layout import Layout
from cachesvc_client.aio.client import DEFAULT_OPTIONS, DEFAULT_RETRIES, DEFAULT_TIMEOUTS, ClientCalls
from cachesvc_client.aio.lease import AsyncLease
from cachesvc_client.core.arguments import checks_arguments
from cachesvc_client.core.registration import Registration
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.wire.channel import ChannelMaker, open_channel
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport
from cachesvc_client.wire.transports.blocking import BlockingLock, BlockingPort, drive


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
        credentials = credentials_from(token, token_file)

        def make_port() -> BlockingPort:
            return BlockingPort(make_channel, options)

        self._calls = ClientCalls(
            socket_path, engine, timeouts, retries, credentials, transport, make_port, connecting=BlockingLock()
        )
        self.socket_path = self._calls.socket_path
        self.engine = engine
        self._leases: dict[AsyncLease, Lease] = {}

    def __repr__(self) -> str:
        state = f"connected by {self.transport}" if self.connected else "not connected"
        return f"<CacheClient of {self.socket_path}, engine {self.engine!r}: {state}>"

    @property
    def connected(self) -> bool:
        """True while the daemon is there. False in a child of the process that connected."""
        return self._calls.connected

    @property
    def epoch(self) -> int:
        """Number of the daemon's life. Raises InvalidRequest before ``connect``."""
        return self._calls.epoch

    @property
    def transport(self) -> str:
        """Transport that calls of CacheService use now: "lane" or "grpc"; empty while not connected."""
        return self._calls.transport

    def connect(self) -> CacheClient:
        """Connect; returns the client. Raises DaemonUnavailable, and does nothing while connected."""
        drive(self._calls.connect())
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` whenever the daemon goes, from the thread that notices it or on the loop: it must not
        block."""
        self._calls.on_lost(callback)

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
        registering = self._calls.register(
            model,
            layout,
            tenant_salt=tenant_salt,
            devices=devices,
            device_pages=device_pages,
            device_share=device_share,
            host_pages=host_pages,
            host_share=host_share,
            reserved_pages=reserved_pages,
            display_name=display_name,
            timeout_s=timeout_s,
        )
        return drive(registering)

    def open_lease(self, registration: Registration, *, instance: str = "") -> Lease:
        """Open a lease and keep it alive. Raises NotFound (register again), LimitExceeded, DaemonUnavailable.

        ``instance``: a name of at most 64 characters that the processes of one engine share, such as a uuid. They get
        one lease, whichever opens it first (``Lease.joined``), for as long as one of them lives; each has sequences of
        its own, and one of them, which takes the steps, has the stock. Asked again, this client gives the same handle.
        """
        return self._show(drive(self._calls.open_lease(registration, instance=instance)))

    def attach(self, registration: Registration, lease_id: str, rank: int = 0) -> AttachedPool:
        """Map one rank's pool in a worker process, under its scheduler's lease. Raises LeaseLost, NotFound."""
        return drive(self._calls.attach(registration, lease_id, rank))

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
        return tuple([self._show(lease) for lease in drive(self._calls.reconnect())])

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the daemon goes or the client is closed; False when ``timeout_s`` passes first."""
        return drive(self._calls.wait_lost(timeout_s))

    def close(self, *, quiesced: bool | None = None) -> None:
        """Close the leases as ``Lease.close`` does, unmap, and disconnect. Idempotent. Raises UsedAfterFork.

        Words that a stream still waits for stay mapped, and the loss of the daemon is still answered for them: close
        their pool again (``AttachedPool.close``) once the stream is synchronised.
        """
        drive(self._calls.close(quiesced=quiesced))

    def __enter__(self) -> CacheClient:
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)

    def _show(self, lease: AsyncLease) -> Lease:
        """Handle of a lease, one for each."""
        known = self._leases.get(lease)
        if known is not None:
            return known
        self._leases = {calls: shown for calls, shown in self._leases.items() if not calls.record.is_closed}
        shown = self._leases[lease] = Lease(lease)
        return shown
