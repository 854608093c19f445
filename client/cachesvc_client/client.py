"""The way in for an engine: connect to the node's daemon, register a model, open leases, and come back after a loss."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from cachesvc.model.answers import Expected, Prefetched, TicketView
from cachesvc.model.layout import Layout
from cachesvc_client.aio.client import DEFAULT_OPTIONS, DEFAULT_RETRIES, DEFAULT_TIMEOUTS, ClientCalls
from cachesvc_client.aio.lease import AsyncLease
from cachesvc_client.core.arguments import Retention, checks_arguments
from cachesvc_client.core.errors import AlreadyClosed, CacheClientError, Registration
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.views import LeaseView
from cachesvc_client.sequence import Sequence, StepStream
from cachesvc_client.wire.connection import ChannelMaker, open_channel
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport
from cachesvc_client.wire.transports import BlockingLock, BlockingPort, drive


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


class Lease(LeaseView):
    """Made by ``CacheClient.open_lease``. Safe to use from several threads; each sequence and step stream from one.

    Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.
    """

    def __init__(self, calls: AsyncLease) -> None:
        super().__init__(calls.record)
        self._calls = calls

    def attach(self, rank: int = 0) -> AttachedPool:
        """Map one rank's device pool into this process. Raises InvalidRequest (rank), NotSupported (kind of memory)."""
        return drive(self._calls.attach(rank))

    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
    ) -> Sequence:
        """Open a sequence on the longest hit of ``keys`` (packed, 32 bytes each, root to leaf), pinned.

        ``max_blocks`` limits the hit (0: no limit): a caller that must compute the last token leaves its block out.
        ``waited_seconds``: how long the request has waited in the engine already; eviction learns from it.
        ``expected``: what another node computes of it; ``coming_blocks`` says how much is still on its way.
        ``retention``: what the engine expects of these blocks, a hint for eviction. Raises DaemonDraining,
        InvalidRequest, LimitExceeded, Conflict (``sequence_id`` is open).
        """
        return Sequence(
            drive(
                self._calls.match(
                    keys,
                    max_blocks=max_blocks,
                    sequence_id=sequence_id,
                    waited_seconds=waited_seconds,
                    expected=expected,
                    retention=retention,
                )
            )
        )

    def prefetch(self, keys: PackedKeys) -> Prefetched:
        """Start to load a prefix towards the device; holds nothing once it is there. Raises PoolExhausted."""
        return drive(self._calls.prefetch(keys))

    def pause_write_backs(self, seconds: float) -> None:
        """Report that decode suffers: the daemon copies no backups off this lease's devices for ``seconds``. At most 1
        at a time; call again for longer. Returns at once. Swaps and evictions that callers wait for go on. Raises
        InvalidRequest (more than 1 s).
        """
        drive(self._calls.pause_write_backs(seconds))

    def make_sure(self, timeout_s: float) -> None:
        """Validate all reads of the lease's pages up to now. While ``is_sure`` this asks nothing; else it asks the
        daemon, which knows whether it revoked the lease as silent and granted its pages to others.

        Raises LeaseLost (it did: nothing that was computed from them since may be used), DaemonUnavailable (unknown:
        the same), DeadlineExceeded.
        """
        drive(self._calls.make_sure(timeout_s))

    def step(self, stock_pages: int | Seq[int] = 0) -> StepStream:
        """Open the lease's step stream. ``stock_pages``: pages to keep in stock, for every group or for each.

        Raises Conflict while the last one is open, NotSupported (the daemon is of release 0.1, which knows no columns).
        """
        return StepStream(self._calls.step(stock_pages), self._calls.calls)

    def completed(self, launch: int) -> None:
        """Note that the kernels of ``launch`` and of all earlier launches have ended, and send the releases that
        waited.

        With an open step stream they go in a step without a waiter, so call it where that stream is used. Raises
        InvalidRequest (no such launch), DeadlineExceeded (the next ``match`` sees to it).
        """
        drive(self._calls.completed(launch))

    def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended, done or failed; their views say which.

        Raises DeadlineExceeded while one still runs, NotFound for one that never was or ended long ago.
        """
        return drive(self._calls.wait_tickets(tickets, timeout_s))

    def close(self, *, quiesced: bool | None = None, for_all: bool = False) -> None:
        """End the lease with all that it holds, unmap its pools, stop beating. Idempotent. That of an instance ends
        with its last process, and what the others hold stays; ``for_all``: it ends now, for all of them.

        ``quiesced``: no kernel of this engine uses the pool any more, so its private pages come back at once. Say False
        where that is not sure: they come back when the process ends, and a pool on a GPU stays mapped until then. Left
        out, it is so unless a launch is under way. Raises UsedAfterFork.
        """
        drive(self._calls.close(quiesced=quiesced, for_all=for_all))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)


log = logging.getLogger(__name__)


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
