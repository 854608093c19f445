"""A process's side of the daemon: connected, registered, with a lease, and brought back after a loss.

An engine's scheduler and each of its workers has one, be they in one process or in several.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc.model.layout import Layout
from cachesvc.model.text import unix_target
from cachesvc.model.words import MOST_KEYS
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER
from cachesvc_client import AttachedPool, CacheClient, CacheClientError, Lease, Registration, Timeouts
from cachesvc_client.layouts.families import Parts
from cachesvc_client.plugins.keeper import Announced, ConnectorRefused, Keeper, News
from cachesvc_client.wire.credentials import credentials_from

RESERVED_PAGES = 1
"""Kernels read and write block 0 for rows that are padding."""

SHOWN_CHARACTERS = 31
"""Most characters of an engine's id; with what ``new_instance`` adds it is the most that an instance may have."""

RETRY_S = 0.1
"""Pause between two attempts to reconnect: one on a socket without a listener costs a millisecond."""

FOLLOW_S = 30.0
"""Time that a worker may find a restarted daemon later than its scheduler."""

LOOK_S = 0.1
"""Time that a step waits for that, seconds. It computes nothing, but requests may end meanwhile."""

TIMEOUTS = Timeouts(call_s=2.0)
"""An engine's scheduler waits for a match: a daemon that hangs must not hold it for long."""

log = logging.getLogger(__name__)


class NodeSettings(Protocol):
    """Settings of an engine's plugin that its connection needs (``Settings``)."""

    @property
    def socket(self) -> str | None:
        """Path of the daemon's socket."""

    @property
    def token_file(self) -> str | None:
        """Path of the token."""

    @property
    def tenant_salt(self) -> str:
        """A tenant's secret."""

    @property
    def host_blocks(self) -> int | None:
        """Size of the host pool, in blocks."""

    @property
    def verify_steps(self) -> int:
        """Iterations between two page checks."""


@dataclass(frozen=True)
class Flags:
    """Names of the engine's options, for messages. ``engine``: its kind. ``unit``: what ``blocks`` counts of a block;
    ``padding``: blocks that it does not count."""

    engine: str
    blocks: str
    unit: int
    padding: int
    longest: str

    def sized(self, blocks: int) -> str:
        """Option with which an engine has this number of blocks."""
        return f"{self.blocks} {(blocks - self.padding) * self.unit}"


@dataclass(frozen=True)
class Share:
    """Pools that an engine registers: ``layout`` for ``pages`` blocks under the name ``model``, or where each group has
    a pool of its own, ``group_pages`` for each. ``devices``: the UUID of
    each rank's GPU; none for the daemon's first devices. ``display_name``: for operators. ``longest_blocks``: of a
    request; 0 where it does not matter. ``parts``: groups of the layout that each of the engine's is; without them,
    each is one."""

    model: str
    layout: Layout
    pages: int
    devices: tuple[str, ...] = ()
    display_name: str = ""
    longest_blocks: int = 0
    parts: tuple[Parts, ...] = ()
    group_pages: tuple[int, ...] = ()

    @property
    def slabs(self) -> tuple[str, ...]:
        """A group of each slab: groups of one pool lie on one. That of markers has none of an engine's tensors."""
        pools = (pool for pool in self.layout.pools if pool != (self.layout.marker,))
        return tuple(self.layout.groups[pool[0]].name for pool in pools)

    def each(self, pages: int) -> tuple[int, ...]:
        """Pages of the one pool, as said for each group; markers are left out."""
        return (pages,) * len(self.layout.own_groups)

    @property
    def device_pages(self) -> tuple[int, ...]:
        """Pages on the device, by group, those of markers too."""
        return self.layout.fill_pages(self.group_pages or self.each(self.pages))


def new_instance(engine_id: str) -> str:
    """The name under which the processes of one start of an engine share a lease. Its first worker makes it and tells
    the others: an engine's id may be another engine's too, where it was set by hand."""
    return f"{engine_id[:SHOWN_CHARACTERS]}-{secrets.token_hex(16)}"


class Node:
    """``instance``: of ``new_instance``: the name under which the engine's processes share a lease.
    ``attaches``: this process uses the slab of ``rank``. ``keeps``: it has a ``keeper`` for the lease, as the
    scheduler's process has; left out: where it uses no slab. ``comes_back``: look for a lost daemon. ``started_in``:
    what ``start`` took.
    """

    def __init__(
        self,
        settings: NodeSettings,
        instance: str,
        share: Share,
        *,
        attaches: bool,
        flags: Flags,
        keeps: bool | None = None,
        rank: int = 0,
    ) -> None:
        self._settings = settings
        self.instance = instance
        self.share = share
        self._attaches = attaches
        self._keeps = not attaches if keeps is None else keeps
        self._flags = flags
        self._rank = rank
        self.comes_back = True
        self._keeper: Keeper | None = None
        self._client = CacheClient(
            settings.socket, engine=f"{flags.engine}-{instance[:8]}", token_file=settings.token_file, timeouts=TIMEOUTS
        )
        self._lease: Lease | None = None
        self._pool: AttachedPool | None = None
        self._back: Lease | None = None
        self._kept: dict[str, tuple[int, int]] = {}
        self._followed = ("", 0.0)
        self._news = News()
        self._wake = threading.Event()
        self._came = threading.Event()
        self._changing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cachesvc-reattach", daemon=True)

    @property
    def lease(self) -> Lease:
        """The lease: the first one, or what ``move`` gave."""
        assert self._lease is not None
        return self._lease

    @property
    def pool(self) -> AttachedPool:
        """The slab that the lease's pages are in, where this process uses it."""
        assert self._pool is not None
        return self._pool

    @property
    def socket_path(self) -> str:
        return self._client.socket_path

    @property
    def back_id(self) -> str:
        """The new lease that waits to be taken, after the old one was lost; empty without one, or once it is lost."""
        back = self._back
        return "" if back is None or back.is_lost else back.id

    def page_check(self) -> PageCheck:
        """Page check for debugging, where the settings want it."""
        settings = self._settings
        model_id = self.lease.registration.model_id
        return PageCheck(self.socket_path, settings.token_file, model_id, settings.verify_steps)

    def start(self) -> None:
        """Connect, register, open a lease, attach. Raises ConnectorRefused (sizes, the longest request), and what
        these calls raise."""
        client, laps = self._client, Laps()
        self.started_in = laps
        client.connect()
        laps.lap("connect")
        registration = self._register()
        laps.lap("register")
        self._lease = self._watched(client.open_lease(registration, instance=self.instance))
        self._require_room(self._lease)
        laps.lap("lease")
        if self._attaches:
            self._pool = self._lease.attach(self._rank)
            laps.lap("attach")
        if self._keeps:
            self._keep(self._lease)  # until its first heartbeat this process sends them by itself
        client.on_lost(self._wake.set)
        self._thread.start()

    def announced_weights(self) -> Announced:
        """Ask for the version of weights that an operator announced last. Raises ConnectorRefused (sizes), and what
        ``register`` raises."""
        return announced_in(self._register(TIMEOUTS.call_s))

    def keep_address(self) -> None:
        """The engine's tensors lie on the slabs where they are mapped now: later slabs will be mapped there too."""
        memories = {name: self.pool.memory(name) for name in self.share.slabs}
        self._kept = {name: (memory.address, memory.size_bytes) for name, memory in memories.items()}

    def wait_back(self, timeout_s: float) -> bool:
        """Wait until there is a new lease."""
        return self._came.wait(timeout_s)

    def move(self, lease_id: str) -> bool:
        """Take the new lease, if it is this one; where this process uses the slab, the new one takes the place of the
        old one. Nothing uses pages of the old one, on a GPU no kernel either. False, or an error: it stays where it is,
        and may try again.

        Raises ConnectorRefused, where the next daemon's memory is of another kind, and what attaching and mapping
        raise."""
        back = self._back
        if back is None or back.id != lease_id:
            return False
        if self._attaches:
            self._pool = self._map(back)
        if self._keeps:
            self._keep(back)
        with self._changing:  # by now there may be the next one
            old, self._lease = self.lease, back
            if self._back is back:
                self._back = None
                self._came.clear()
        _give_up(old)
        return True

    def follow(self, lease_id: str) -> str:
        """Move, if that can be now, to the lease that the engine's scheduler has found; the lease whose slab the
        tensors lie on. Where the daemon goes again meanwhile, that is the old one. Raises ConnectorRefused where it
        could not move for ``FOLLOW_S``, or never can."""
        if lease_id == self.lease.id:
            return lease_id
        if lease_id != self._followed[0]:
            self._followed = lease_id, time.monotonic()
        why: Exception | str = "it does not find that daemon"
        try:
            if self.wait_back(LOOK_S) and self.move(lease_id):
                return lease_id
        except (CacheClientError, OSError) as error:
            log.debug("move_failed lease=%s why=%s", lease_id, error)
            why = error
            time.sleep(LOOK_S)  # the worker has nothing else to do, and its scheduler asks again at once
        if time.monotonic() - self._followed[1] > FOLLOW_S:
            raise ConnectorRefused(f"this worker could not follow its scheduler within {FOLLOW_S:g} s: {why}")
        return self.lease.id

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_keeper()
        self._client.close()

    def _register(self, timeout_s: float | None = None) -> Registration:
        """The pools, made or found. ``timeout_s``: for pools that are there. Raises ConnectorRefused (sizes), and what
        ``register`` raises."""
        settings, share = self._settings, self.share
        registration = self._client.register(
            share.model,
            share.layout,
            tenant_salt=_salt(settings.tenant_salt),
            devices=share.devices,
            device_pages=share.device_pages,
            host_pages=None if settings.host_blocks is None else share.each(settings.host_blocks),
            reserved_pages=RESERVED_PAGES,
            display_name=share.display_name,
            timeout_s=timeout_s,
        )
        found = registration.device_pages
        if found[0] != share.device_pages[0]:
            raise ConnectorRefused(
                f"the daemon's pool of {share.model} has {found[0]} blocks, and this engine has "
                f"{share.device_pages[0]}: start it with {self._flags.sized(found[0])}"
            )
        if found != share.device_pages:
            raise ConnectorRefused(
                f"the daemon's pools of {share.model} have {found} blocks by group, and this engine has "
                f"{share.device_pages}: start it with the options that size them for the other engines"
            )
        return registration

    def _require_room(self, lease: Lease) -> None:
        """Raises ConnectorRefused where the engine's longest request has more blocks than the daemon lets one have."""
        limit, longest = lease.record.blocks_per_sequence, self.share.longest_blocks
        if 0 < limit < longest:
            raised = f"the daemon with --blocks-per-sequence {longest} or more, or " if longest <= MOST_KEYS else ""
            raise ConnectorRefused(
                f"the longest request of this engine has {longest} blocks, and the daemon lets one have {limit}: start "
                f"{raised}the engine with a {self._flags.longest} of at most {limit * self.share.layout.block_tokens}"
            )

    def _map(self, lease: Lease) -> AttachedPool:
        """The slabs of a new lease, where the tensors are."""
        pool = lease.attach(self._rank)
        try:
            memories = {name: pool.memory(name) for name in self._kept}
            for name, memory in memories.items():
                if memory.size_bytes != self._kept[name][1] or not memory.can_map_over:
                    raise ConnectorRefused(
                        "the daemon came back with memory that is mapped in another way: start it as before"
                    )
            for name, memory in memories.items():
                memory.map_over(self._kept[name][0])
        except BaseException:
            pool.close()
            raise
        return pool

    def _keep(self, lease: Lease) -> None:
        self._end_keeper()
        self._keeper = Keeper(self.socket_path, lease.id, lease.record.beat_interval_s, self._settings.token_file)
        self._keeper.start()

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.end()
            self._keeper = None

    def _watched(self, lease: Lease) -> Lease:
        lease.on_lost(lambda _: self._wake.set())
        return lease

    def _run(self) -> None:
        try:
            while not self._is_closed:  # not by the event alone, which is cleared below too
                self._wake.wait()
                self._wake.clear()
                if (self._back or self.lease).is_lost and not self.comes_back:
                    log.error("daemon_gone restart this engine once the daemon is back")
                    return
                while self._is_wanting() and not self._come_back():
                    self._wake.clear()  # the lease and the connection report a loss
                    self._wake.wait(RETRY_S)
        except Exception:
            log.exception("reattach_failed")

    def _is_wanting(self) -> bool:
        return not self._is_closed and (self._back or self.lease).is_lost

    def _come_back(self) -> bool:
        """Try to get a new lease; True when there is one."""
        client, share = self._client, self.share
        self._came.clear()
        lease = None
        try:
            if client.connected:  # the daemon is there, and took the lease away: the pools may have gone with a mover
                lease = client.open_lease(self._register(), instance=self.instance)
            else:
                lease = client.reconnect()[-1]
            if (found := lease.registration.device_pages) != share.device_pages:
                raise ConnectorRefused(f"the daemon came back with {found} blocks, not {share.device_pages}")
            self._require_room(lease)
        except (CacheClientError, ConnectorRefused) as error:
            is_news = self._news.is_new(type(error))
            log.log(logging.WARNING if is_news else logging.DEBUG, "daemon_not_back why=%s", error)
            if lease is not None:
                _give_up(lease)
            return False
        self._news.end()
        with self._changing:
            self._back = self._watched(lease)
            self._came.set()
        log.warning("daemon_back blocks=%s", share.pages)
        return True


def announced_in(registration: Registration) -> Announced:
    """Return the announcement that a registration was answered with."""
    return Announced((registration.epoch, registration.model_id), registration.weights_version)


def _give_up(lease: Lease) -> None:
    """Close a lease of which no page is used."""
    try:
        lease.close(quiesced=True)
    except CacheClientError as error:
        log.debug("lease_not_closed why=%s", error)


def _salt(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32).digest() if text else b""


# Debugging: has anything changed a page after it was sealed? The daemon compares checksums, and the engine waits.
#
# A kernel that writes where it should not, or a warm-up that does, harms other engines; this finds the engine that did.

DEADLINE_S = 600.0
"""Time limit of a check, seconds: it reads all sealed pages, at the daemon's ``--checksum-limit``."""


class PageChanged(RuntimeError):
    """Sealed pages are not what they were; the message names them."""


class PageCheck:
    """``steps``: iterations between two checks; 0: never. Used from one thread."""

    def __init__(self, socket_path: str, token_file: str | None, model_id: int, steps: int) -> None:
        self._socket_path = Path(socket_path).absolute()
        self._token_file = token_file
        self._model_id = model_id
        self._steps = steps
        self._seen = 0

    def step(self) -> None:
        """Count an iteration that has ended. Raises as ``check``."""
        self._seen += 1
        if self._steps and self._seen % self._steps == 0:
            self.check(f"iteration {self._seen}")

    def check(self, when: str) -> None:
        """Raises PageChanged, and ConnectorRefused where the daemon cannot tell."""
        if not self._steps:
            return
        token = credentials_from(None, self._token_file).read_token()
        proof = ((AUTHORIZATION_METADATA_KEY, BEARER + token),) if token else ()
        request = admin_pb2.VerifyRequest(checksums=True, model_id=self._model_id)
        try:
            with grpc.insecure_channel(unix_target(str(self._socket_path))) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                answer = admin.Verify(request, timeout=DEADLINE_S, metadata=proof)
        except grpc.RpcError as error:
            raise ConnectorRefused(
                f"verify_steps: the daemon did not verify ({error}); it takes a token that may read"
            ) from error
        if answer.checksums.mode != "all":
            raise ConnectorRefused(
                "verify_steps: the daemon takes no checksums of all pages: start it with --checksums all"
            )
        if not answer.ok or answer.checksums.mismatches:
            found = [*answer.problems, *(str(each).replace("\n", " ") for each in answer.checksums.mismatches)]
            raise PageChanged(f"at {when}: {'; '.join(found[:8])}")


class Laps:
    """Seconds of the parts of a start, in their order. Used from one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """A part has ended, and the next one begins."""
        now_s = time.perf_counter()
        self.seconds[part] = now_s - self._since_s
        self._since_s = now_s

    def __str__(self) -> str:
        return " ".join(f"{part}_s={seconds:.3f}" for part, seconds in self.seconds.items())
