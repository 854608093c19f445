"""Memory of devices that this process drives itself: what ``shm`` and CUDA share, and the check of the links between
devices."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.copy_thread import Clock, CopyThread, CopyThreads
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import CopyJob, CopyStep, CopyStream, Handle, Slab, SlabBudget, SliceRunner
from cachesvc.memory.memcpy import Region, Regions
from cachesvc.memory.timeline import TIMELINE_WORDS, HostTimeline
from cachesvc.model.errors import CacheError, LedgerBroken, NotFound, Unavailable
from cachesvc.model.words import Direction


@dataclass
class Device:
    """A device at work: its words, streams and budget."""

    name: str
    timeline: HostTimeline
    copying: CopyThreads
    budget: SlabBudget


D = TypeVar("D", bound=Device)


class LocalBackend(ABC, Generic[D]):
    """Implements ``Backend``, and what a mover of one device needs beside it. ``neighbours``: views of the node's other
    devices, by device."""

    name: str

    def __init__(
        self,
        devices: Sequence[str],
        device_bytes: int,
        timeline_words: int = TIMELINE_WORDS,
        rules: CopyRules | None = None,
        clock: Clock = time.monotonic,
        neighbours: Mapping[str, Neighbours] | None = None,
    ) -> None:
        self._names = tuple(devices)
        self._device_bytes = device_bytes
        self._timeline_words = timeline_words
        self._rules = rules or CopyRules()
        self._clock = clock
        self._neighbours = neighbours or {}
        self._devices: dict[str, D] = {}  # while it runs
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._slabs: dict[int, Slab] = {}
        self._holds = Holds()
        self._regions = Regions({})  # replaced, never changed: copy threads read it without the lock
        self._running = False

    # -- of each kind --------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Acquire what is needed; raises a CacheError that says what is missing."""

    @abstractmethod
    def _allocate(self, at: D, size_bytes: int, charged_bytes: int) -> Slab:
        """Zeroed memory by ``_add_slab``. Raises Unavailable, and MemoryError where the device has no more."""

    @abstractmethod
    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Make host memory copyable; it must stay mapped until ``close``. Raises Unavailable."""

    @abstractmethod
    def open_peer(self, handle: Handle, fd: int | None) -> int:
        """Make another process's slab copyable; returns its region. Raises OSError, Unavailable."""

    @abstractmethod
    def close_peer(self, region: int) -> None:
        """Undo ``open_peer``: no copy reads from there any more."""

    @abstractmethod
    def close(self) -> None:
        """Stop the streams, then free everything. Idempotent."""

    def _working(self, device: str) -> D:
        """A device that runs. Raises NotFound, and Unavailable where it does not work."""
        return self._running_device(device)

    def _attempt(self, at: D, call: Callable[[], object]) -> None:
        """Give something of a device back, which may be broken."""
        del at
        call()

    def _free_bytes(self, at: D) -> int | None:
        """Bytes that the device itself has left; None where only the budget is a limit."""

    # -- the same for all ----------------------------------------------------------------------------------------------

    def devices(self) -> tuple[str, ...]:
        return self._names

    def capacity_bytes(self, device: str) -> int:
        """Bytes that slabs on ``device`` may take in all."""
        self._check(device)
        return self._device_bytes

    def create_slab(self, device: str, size_bytes: int) -> Slab:
        """Zeroed memory. Raises PoolExhausted (in bytes) when the budget or the device cannot hold it, Unavailable."""
        at = self._working(device)
        at.budget.take(size_bytes)
        try:
            return self._allocate(at, size_bytes, size_bytes)
        except MemoryError as error:
            at.budget.give_back(size_bytes)
            raise at.budget.exhausted(size_bytes, self._free_bytes(at)) from error
        except Unavailable:
            at.budget.give_back(size_bytes)
            raise

    def create_scratch(self, device: str, size_bytes: int) -> Slab:
        """Zeroed memory beside the budget. Freed with the backend. Raises Unavailable."""
        at = self._working(device)
        try:
            return self._allocate(at, size_bytes, 0)
        except MemoryError as error:
            raise Unavailable(f"GPU {device} has no {size_bytes} bytes left to check its links: {error}") from error

    def timeline(self, device: str) -> HostTimeline:
        return self._running_device(device).timeline

    def open_sheet(self, device: str, sheet: int, fd: int | None = None) -> None:
        """Make words of a model; or (``fd``) take over what another process made. Raises Unavailable."""
        self._working(device).timeline.open(sheet, fd)

    def close_sheet(self, device: str, sheet: int) -> None:
        """Forget a sheet: no copy writes to it any more."""
        if (at := self._found(device)) is not None:
            self._attempt(at, partial(at.timeline.close_sheet, sheet))

    def load_stream(self, device: str) -> CopyThread:
        return self._running_device(device).copying.streams[Direction.LOAD]

    def store_stream(self, device: str) -> CopyThread:
        return self._running_device(device).copying.streams[Direction.STORE]

    def peer_stream(self, device: str) -> CopyThread:
        """The stream for loads from other devices."""
        return self._running_device(device).copying.peers

    def can_reach(self, source: str, target: str) -> bool:
        self._check(source)
        self._check(target)
        return True

    def refused_peers(self) -> dict[tuple[str, str], str]:
        return {}

    def expedite(self, device: str, ticket: int) -> None:
        """A ticket's jobs on the device are awaited now."""
        if (at := self._found(device)) is not None:
            at.copying.expedite(ticket)

    def pause_background(self, device: str, seconds: float) -> None:
        """Start no slice of background stores for a while."""
        if (at := self._found(device)) is not None:
            at.copying.pause_background(seconds)

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget for every device."""
        for at in self._devices.values():
            at.copying.limit(direction, bytes_per_second)

    def fault(self, device: str) -> str:
        """Reason why the device is broken for this process; empty while it works."""
        self._check(device)
        return ""

    def has_host(self, device: str, region: int) -> bool:
        """True: chunks are registered for all devices at once."""
        del device, region
        return True

    def tell_hosts(self, on_host: Callable[[str], None]) -> None:
        """No-op, as ``has_host`` says."""

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        return {}

    def require_answer(self, device: str) -> None:
        """Raises Unavailable for a device that is known not to work."""

    def probe(self) -> None:
        """Find out which devices still work, for ``fault``. Waits for no answer that takes long."""

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region, which stays until they are read. Raises NotFound for a region that is unknown or being
        closed, and InvalidRequest for bytes outside of it."""
        with self._holds.hold(region):
            return self._regions.known[region].read(offset, size_bytes)

    def _copying(
        self, device: str, runners: Mapping[Direction, SliceRunner], peers: SliceRunner, timeline: HostTimeline
    ) -> CopyThreads:
        near = self._neighbours.get(device)
        return CopyThreads(device, self._rules, runners, timeline.write, self._clock, peers=peers, neighbours=near)

    def _add_slab(
        self, at: D, region: Region, handle: Handle, fd: int | None, charged_bytes: int, free: Callable[[], object]
    ) -> Slab:
        number = self._add_region(region)

        def drop(_: Slab) -> None:
            self._drop_region(number)  # first: no address is freed between its look-up and the copy that reads it
            del self._slabs[number]
            self._attempt(at, free)
            at.budget.give_back(charged_bytes)

        slab = self._slabs[number] = Slab(number, handle, fd, drop, region.address)
        return slab

    def _add_region(self, region: Region) -> int:
        with self._lock:
            number = next(self._ids)
            self._regions = Regions({**self._regions.known, number: region})
        self._holds.begin(number)
        return number

    def _drop_region(self, number: int) -> None:
        """Forget a region once its readers have finished."""
        self._holds.end(number)
        with self._lock:
            self._regions = Regions({one: region for one, region in self._regions.known.items() if one != number})

    def _check(self, device: str) -> None:
        if device not in self._names:
            raise NotFound("device", device, f"this backend has {', '.join(self._names)}")

    def _found(self, device: str) -> D | None:
        """The device; None before ``start`` and after ``close``. Raises NotFound."""
        self._check(device)
        return self._devices.get(device)

    def _running_device(self, device: str) -> D:
        self._check(device)
        self._check_running()
        return self._devices[device]

    def _check_running(self) -> None:
        if not self._running:
            raise Unavailable(f"the {self.name} backend is not running: start it first, and nothing works after close")


# Counted holds on regions: memory is not freed before its readers have finished.
#
# Copies need none: the ledger closes no pool that a ticket touches. Readers beside it (checksums, verification) look a
# page up on one thread while another one may be closing the page's slab.


class Holds:
    """Open regions, and how many hold each. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count: dict[int, int] = {}
        self._ending: set[int] = set()

    def begin(self, region: int) -> None:
        """The region may be held from now on. Numbers are not used again."""
        with self._changed:
            self._count[region] = 0

    @contextmanager
    def hold(self, region: int) -> Iterator[None]:
        """Keep a region's memory for a while. Raises NotFound where it is unknown, closed, or being closed."""
        with self._changed:
            if region not in self._count or region in self._ending:
                raise NotFound("region", region, "its slab was closed")
            self._count[region] += 1
        try:
            yield
        finally:
            with self._changed:
                self._count[region] -= 1
                self._changed.notify_all()

    def end(self, region: int) -> None:
        """Allow no new hold on the region, and wait for its holders. Raises LedgerBroken for a second time."""
        with self._changed:
            if region not in self._count or region in self._ending:
                raise LedgerBroken(f"region {region} was closed before")
            self._ending.add(region)
            while self._count[region]:
                self._changed.wait()
            self._ending.remove(region)
            del self._count[region]


# Check of the way from one device's memory into another one's, before a load uses it.
#
# A driver's word that one GPU reaches another is about models and topology. Behind a translating IOMMU, or without a
# bridge, it says yes, and copies bring wrong bytes or do not end. So each device has a stamp, random bytes in memory
# beside its pool; another device pulls them by the stream of its peer loads, and compares them on the host.
#
# A pull that came late leaves the bytes of its own stamp, so it can make a later check fail, but never pass.

STAMP_BYTES = 2 << 20
"""A whole page of a GPU: each of its small pages and every channel of its memory takes part."""
ROW_BYTES = 64 << 10
SEED_BYTES = 16
TRIES = 3
"""A copy that reports its failure is made again: the check is for those that report none."""
LOOKS, LOOK_SECONDS = 50, 0.1
"""Time limit of a copy: 5 s for 2 MiB. Looks are counted and not the clock, so that a process that was stopped or found
no processor meanwhile accuses no device."""
CHECK_TICKET = -1


class PullHangs(Unavailable):
    """A copy did not end in its time: it may still land, and others on its stream wait behind it."""


class Stamp(NamedTuple):
    """Stamp of a device: where it is, and the seed of its bytes."""

    slab: Slab
    seed: bytes


class PeerCheck:
    """Stamp of one device, and the checks of ways into it. Used by one thread at a time; the backend runs."""

    def __init__(self, backend: LocalBackend[Any], device: str) -> None:
        self._backend = backend
        self._device = device
        self._stamp: Stamp | None = None
        self._landing: Slab | None = None

    def stamp(self) -> Stamp:
        """The device's stamp, written at the first call. Raises Unavailable, also where it reads back wrong."""
        if self._stamp is None:
            seed = secrets.token_bytes(SEED_BYTES)
            page = memoryview(mmap.mmap(-1, STAMP_BYTES))
            page[:] = bytes_of(seed)
            slab, host = self._backend.create_scratch(self._device, STAMP_BYTES), self._backend.register_host(page)
            self._copy(self._backend.load_stream(self._device), host, slab.region)
            self._compare(slab, seed)
            self._stamp = Stamp(slab, seed)
        return self._stamp

    def verify(self, region: int, seed: bytes) -> None:
        """Pull another device's stamp, which is in ``region`` here. Raises PullHangs, and Unavailable that says what is
        wrong with the way."""
        if self._landing is None:
            self._landing = self._backend.create_scratch(self._device, STAMP_BYTES)
        self._copy(self._backend.peer_stream(self._device), region, self._landing.region)
        self._compare(self._landing, seed)

    def _copy(self, stream: CopyStream, source: int, target: int) -> None:
        row = [source, 0, target, 0, ROW_BYTES, STAMP_BYTES // ROW_BYTES, ROW_BYTES, ROW_BYTES]
        step = CopyStep(np.array([row], np.int64), size_bytes=STAMP_BYTES)
        for left in reversed(range(TRIES)):
            error = _carry_out(stream, step)
            if error is None:
                return
            if isinstance(error, CacheError) or not left:
                raise Unavailable(f"a copy of {STAMP_BYTES} bytes failed: {error}") from error

    def _compare(self, slab: Slab, seed: bytes) -> None:
        try:
            read = self._backend.read(slab.region, 0, STAMP_BYTES)
        except RuntimeError as error:
            raise Unavailable(f"{STAMP_BYTES} bytes could not be read back: {error}") from error
        found = np.frombuffer(read, np.uint8)
        wrong = np.flatnonzero(found != np.frombuffer(bytes_of(seed), np.uint8))
        if len(wrong):
            raise Unavailable(f"{len(wrong)} of {STAMP_BYTES} bytes came wrong, the first at {wrong[0]}")


def refused_of(backend: LocalBackend[Any], pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Check the ways between devices of one process; return the pairs (source, target) that failed, and why."""
    checks = {device: PeerCheck(backend, device) for device in backend.devices()}
    refused, hung = dict[tuple[str, str], str](), dict[str, str]()
    for source, target in sorted(pairs):
        try:
            if why := hung.get(target):
                raise PullHangs(f"not checked: {why}")
            stamp = checks[source].stamp()
            checks[target].verify(stamp.slab.region, stamp.seed)
        except CacheError as wrong:
            refused[source, target] = str(wrong)
            if isinstance(wrong, PullHangs):
                hung.setdefault(target, str(wrong))
    return refused


def bytes_of(seed: bytes) -> bytes:
    """Bytes of the stamp with this seed, the same in every process."""
    return hashlib.shake_128(seed).digest(STAMP_BYTES)


def _carry_out(stream: CopyStream, step: CopyStep) -> Exception | None:
    """Make a copy, and wait; returns what broke. Raises PullHangs, and what ``submit`` does."""
    over, ends = threading.Event(), list[Exception | None]()

    def done(error: Exception | None) -> None:
        ends.append(error)
        over.set()

    stream.submit(CopyJob(CHECK_TICKET, (step,), None, None, 0, done, size_bytes=STAMP_BYTES))
    if not any(over.wait(LOOK_SECONDS) for _ in range(LOOKS)):
        raise PullHangs(f"a copy of {STAMP_BYTES} bytes did not end in {LOOKS * LOOK_SECONDS:g} s")
    return ends[0]
