"""Device memory without a device: memfd slabs, threads for copy engines, a shared word for the stream's.

It is the default where there is no GPU, and goes through the same planner, timeline and client as CUDA. Other
processes map a slab by its descriptor, which travels over the life socket under the handle's token.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.copy_thread import CopyThread, CopyThreads, WriteWord
from cachesvc.memory.extents import map_memfd, sealed_memfd, yield_to_callers
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, Handle, Slice, SliceRunner
from cachesvc.memory.memcpy import check_bounds, run_copies
from cachesvc.memory.timeline import TIMELINE_WORDS, Holds, HostTimeline
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, PoolExhausted, Unavailable
from cachesvc.model.words import Direction

TOKEN_BYTES = 16


class ShmSlab:
    """A memfd in place of device memory."""

    def __init__(self, region: int, size_bytes: int, fd: int, on_close: Callable[[ShmSlab], None]) -> None:
        self.region = region
        self.handle = Handle("memfd", secrets.token_bytes(TOKEN_BYTES), size_bytes)
        self.fd: int | None = fd
        self._on_close = on_close

    def close(self) -> None:
        """Free the memory once its readers have finished. Raises LedgerBroken when it was freed before."""
        if self.fd is None:
            raise LedgerBroken(f"slab of region {self.region} was closed before")
        self._on_close(self)
        os.close(self.fd)
        self.fd = None


class ShmRunner:
    """Copies while it is asked to start: nothing is on its way afterwards."""

    depth = 1
    only_queues = False

    def __init__(self, copy: Callable[[CopyBatch], None], write_word: WriteWord) -> None:
        self._copy = copy
        self._write_word = write_word

    def begin(self) -> None:
        """Let calls go first: copies are made by the processor that serves them."""
        yield_to_callers()

    def submit(self, piece: Slice) -> None:
        """Copy, then set the word. Raises CopyOutOfBounds, with nothing copied."""
        if len(piece.copies):
            self._copy(piece.copies)
        if piece.word_value is not None and piece.job.word is not None:
            self._write_word(piece.job.word, piece.word_value)

    def wait(self, started: object) -> None:
        """No-op: the slice has landed already."""


class ShmBackend:
    """``devices`` pretended devices ``shm-0``, ``shm-1``, ... of ``device_bytes`` each.

    ``fault_copies``: the share of copy slices that are made to fail. ``names``: of the devices, where they are others.
    ``neighbours``: views of the node's other devices, by device.
    """

    name = "shm"

    def __init__(
        self,
        devices: int,
        device_bytes: int,
        *,
        timeline_words: int = TIMELINE_WORDS,
        rules: CopyRules | None = None,
        fault_copies: float = 0.0,
        names: Sequence[str] = (),
        neighbours: Mapping[str, Neighbours] | None = None,
    ) -> None:
        self._fault_copies = fault_copies
        self._devices = tuple(names) or tuple(f"shm-{i}" for i in range(devices))
        self._device_bytes = device_bytes
        self._timeline_words = timeline_words
        self._rules = rules or CopyRules()
        self._neighbours = neighbours or {}
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._used = dict.fromkeys(self._devices, 0)
        self._slabs: dict[int, ShmSlab] = {}
        self._holds = Holds()
        self._regions: dict[int, memoryview] = {}
        self._sizes: dict[int, int] = {}
        self._timelines: dict[str, HostTimeline] = {}
        self._copying: dict[str, CopyThreads] = {}
        self._running = False

    def devices(self) -> tuple[str, ...]:
        return self._devices

    def capacity_bytes(self, device: str) -> int:
        """Bytes that slabs on ``device`` may take in all."""
        self._check_device(device)
        return self._device_bytes

    def start(self) -> None:
        """Make the timelines and start the copy threads of each device."""
        self._running = True
        for device in self._devices:
            timeline = self._timelines[device] = HostTimeline(self._timeline_words)
            runners = {direction: self._runner(timeline) for direction in Direction}
            peers = self._runner(timeline)
            self._copying[device] = CopyThreads(
                device, self._rules, runners, timeline.write, peers=peers, neighbours=self._neighbours.get(device)
            )
            self._copying[device].start()

    def create_slab(self, device: str, size_bytes: int) -> ShmSlab:
        """Zeroed memory. Raises PoolExhausted (in bytes) when the device's budget cannot hold it, Unavailable."""
        self._check_running()
        self._check_device(device)
        with self._lock:
            free = self._device_bytes - self._used[device]
            if not 0 < size_bytes <= free:
                raise PoolExhausted(
                    pool=f"device {device} (bytes)",
                    wanted=size_bytes,
                    free=free,
                    evictable=0,
                    pinned=self._used[device],
                    quarantined=0,
                    capacity=self._device_bytes,
                )
            self._used[device] += size_bytes
        try:
            return self._map_slab(device, size_bytes, size_bytes)
        except Unavailable:
            self._give_back(device, size_bytes)
            raise

    def create_scratch(self, device: str, size_bytes: int) -> ShmSlab:
        """Zeroed memory beside the budget. Raises Unavailable."""
        self._check_running()
        self._check_device(device)
        return self._map_slab(device, size_bytes, 0)

    def timeline(self, device: str) -> HostTimeline:
        self._check_running()
        self._check_device(device)
        return self._timelines[device]

    def open_sheet(self, device: str, sheet: int, fd: int | None = None) -> None:
        """Make words of a model; or (``fd``) take over what another process made. Raises Unavailable."""
        self.timeline(device).open(sheet, fd)

    def close_sheet(self, device: str, sheet: int) -> None:
        """Forget a sheet: no copy writes to it any more."""
        self._check_device(device)
        if (timeline := self._timelines.get(device)) is not None:  # None: not running
            timeline.close_sheet(sheet)

    def load_stream(self, device: str) -> CopyThread:
        self._check_running()
        self._check_device(device)
        return self._copying[device].streams[Direction.LOAD]

    def store_stream(self, device: str) -> CopyThread:
        self._check_running()
        self._check_device(device)
        return self._copying[device].streams[Direction.STORE]

    def peer_stream(self, device: str) -> CopyThread:
        """The stream for loads from other devices."""
        self._check_running()
        self._check_device(device)
        return self._copying[device].peers

    def can_reach(self, source: str, target: str) -> bool:
        self._check_device(source)
        self._check_device(target)
        return True

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """None: copies between them are within one process's memory."""
        return {}

    def expedite(self, device: str, ticket: int) -> None:
        """A ticket's jobs on the device are awaited now."""
        self._check_device(device)
        if (copying := self._copying.get(device)) is not None:  # None: not running
            copying.expedite(ticket)

    def pause_background(self, device: str, seconds: float) -> None:
        """Start no slice of background stores for a while."""
        self._check_device(device)
        if (copying := self._copying.get(device)) is not None:  # None: not running
            copying.pause_background(seconds)

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget for every device."""
        for copying in self._copying.values():
            copying.limit(direction, bytes_per_second)

    def fault(self, device: str) -> str:
        """Return no fault: the memory is the machine's own."""
        self._check_device(device)
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
        """No-op: there is no driver to ask."""

    def probe(self) -> None:
        """No-op: there is no driver to ask."""

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Make host memory copyable; it must stay mapped until ``close``."""
        del fd
        self._check_running()
        return self._add_region(buffer)

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        """Make another process's slab copyable; returns its region. Raises OSError."""
        self._check_running()
        assert fd is not None
        return self._add_region(map_memfd(fd, handle.size_bytes))

    def close_peer(self, region: int) -> None:
        """Undo ``open_peer``: no copy reads from there any more."""
        self._holds.end(region)
        with self._lock:
            del self._regions[region], self._sizes[region]

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region, which stays until they are read. Raises NotFound for a region that is unknown or being
        closed, and InvalidRequest for bytes outside of it."""
        with self._holds.hold(region):
            view = self._view(region)
            if offset < 0 or size_bytes < 0 or offset + size_bytes > view.nbytes:
                raise InvalidRequest(f"bytes [{offset}, {offset + size_bytes}) are outside of {view.nbytes} bytes")
            return bytes(view[offset : offset + size_bytes])

    def close(self) -> None:
        """Stop the streams, then free every slab and timeline. Idempotent."""
        self._running = False
        for copying in self._copying.values():
            copying.close()
        for slab in list(self._slabs.values()):
            slab.close()
        for region in list(self._regions):  # of the host
            self._holds.end(region)
        for timeline in self._timelines.values():
            timeline.close()
        with self._lock:  # nothing may keep a mapping alive: streams and backend know each other
            for known in (self._copying, self._timelines, self._regions, self._sizes):
                known.clear()

    def _view(self, region: int) -> memoryview:
        return self._regions[region]

    def _runner(self, timeline: HostTimeline) -> SliceRunner:
        runner = ShmRunner(self._copy, timeline.write)
        return FaultyRunner(runner, self._fault_copies, secrets.randbits(32)) if self._fault_copies else runner

    def _copy(self, copies: CopyBatch) -> None:
        check_bounds(copies, self._sizes)
        run_copies(copies, self._regions)

    def _map_slab(self, device: str, size_bytes: int, charged_bytes: int) -> ShmSlab:
        with ExitStack() as undo:
            try:
                fd = sealed_memfd(f"kvcache-{device}", size_bytes)
                undo.callback(os.close, fd)
                region = self._add_region(map_memfd(fd, size_bytes))
            except OSError as error:
                raise Unavailable(
                    f"no memory file for a slab on {device}: {error}; see ulimit -n and free memory"
                ) from error
            undo.pop_all()

        def drop(slab: ShmSlab) -> None:
            self._holds.end(slab.region)
            with self._lock:
                del self._slabs[slab.region], self._regions[slab.region], self._sizes[slab.region]
            self._give_back(device, charged_bytes)

        slab = ShmSlab(region, size_bytes, fd, drop)
        with self._lock:
            self._slabs[region] = slab
        return slab

    def _add_region(self, buffer: memoryview) -> int:
        with self._lock:
            region = next(self._ids)
            self._regions[region] = buffer
            self._sizes[region] = buffer.nbytes
        self._holds.begin(region)
        return region

    def _give_back(self, device: str, size_bytes: int) -> None:
        with self._lock:
            self._used[device] -= size_bytes

    def _check_device(self, device: str) -> None:
        if device not in self._used:
            raise NotFound("device", device, f"this backend has {', '.join(self._devices)}")

    def _check_running(self) -> None:
        if not self._running:
            raise Unavailable("the shm backend is not running: start it first, and nothing works after close")


# Fault injection for copies, for tests of the recovery: enabled by the flag ``--fault-copies`` alone.
#
# A fault is either a slice of which nothing was copied, or one that broke half way: then its target holds some new
# bytes and some old ones, as after a fault of a real copy engine. Its word is not set, and its job fails.

_HEIGHT = COPY_FIELDS.index("height")


class InjectedFault(RuntimeError):
    """A copy was made to fail."""


class FaultyRunner:
    """A runner of which ``rate`` (0 to 1) of the slices fail. Used by one thread at a time, as any runner."""

    def __init__(self, runner: SliceRunner, rate: float, seed: int) -> None:
        self.depth = runner.depth
        self.only_queues = False
        self._runner = runner
        self._rate = rate
        self._rng = random.Random(seed)

    def begin(self) -> None:
        self._runner.begin()

    def submit(self, piece: Slice) -> object:
        """Start the slice, or a half of it and no word. Raises InjectedFault."""
        if self._rng.random() >= self._rate:
            return self._runner.submit(piece)
        half = piece.copies[: (len(piece.copies) + 1) // 2].copy()
        if self._rng.random() < 0.5 or not len(half):
            raise InjectedFault("a copy was made to fail before it began (--fault-copies)")
        half[-1, _HEIGHT] = (half[-1, _HEIGHT] + 1) // 2
        self._runner.wait(self._runner.submit(replace(piece, copies=half, word_value=None)))
        raise InjectedFault("a copy was made to fail half way (--fault-copies)")

    def wait(self, started: object) -> None:
        self._runner.wait(started)
