"""The host tier's memory: chunks that several threads fill while the daemon already serves.

    start    threads map each chunk, place it on the node and populate it slice by slice; when it is full they
             register it with the backend and call on_ready(chunk)
    reserve  gives extents of pages, none across a chunk, that the slab's devices can reach, on the node of one of them,
    where there is room; those that were used before are zeroed first

A page is usable once its chunk is registered and, after an earlier slab, its bytes are zeroed:
``ready_pages``.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from cachesvc.memory import numa
from cachesvc.memory.extents import (
    Extent,
    ExtentTable,
    address_of,
    map_anonymous,
    map_memfd,
    populate,
    populate_file,
    sealed_memfd,
    yield_to_callers,
    zero,
)
from cachesvc.memory.interface import DeviceMemory
from cachesvc.memory.numa import MemoryLimit, memory_limits
from cachesvc.model.errors import CacheError, InvalidRequest, LedgerBroken, PoolExhausted, Unavailable
from cachesvc.model.words import Run

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1 << 30
"""Largest chunk: a larger registration holds a driver-wide lock for too long."""
SLICE_BYTES = 32 << 20
"""Bytes that a thread populates or zeroes before it checks whether to stop: some 10 ms."""
REACH_SECONDS = 1.0
"""Time for a device's own mover to pin chunks that others have already, seconds: each pins on a thread of its own."""

Bind = Callable[[int, int, int | None], numa.Placement]
"""Signature of ``numa.bind``: the seam for machines that are made up."""


@dataclass(slots=True)
class _Chunk:
    size_bytes: int
    node: int | None = None
    view: memoryview | None = None
    fd: int | None = None
    region: int | None = None
    next_slice: int = 0  # bytes handed to the threads so far
    left_bytes: int = field(default=0)


class HostPool:
    """``total_bytes`` of host memory in chunks of ``chunk_bytes``.

    ``nodes``: the NUMA node of each device that has one; chunks are divided among them by their devices.
    """

    def __init__(
        self,
        total_bytes: int,
        chunk_bytes: int,
        threads: int,
        nodes: Mapping[str, int] | None,
        backend: DeviceMemory,
        *,
        in_files: bool = False,
        on_ready: Callable[[int], None] | None = None,
        limits: Callable[[], tuple[MemoryLimit, ...]] = memory_limits,
        bind: Bind = numa.bind,
    ) -> None:
        """``in_files``: chunks are memory files, for processes beside this one to map. ``on_ready(chunk)`` is called
        from a pool thread. Raises InvalidRequest for sizes that cannot be."""
        if not ALIGN_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % ALIGN_BYTES:
            raise InvalidRequest(f"chunk_bytes must be a multiple of {ALIGN_BYTES} up to {MAX_CHUNK_BYTES}")
        if threads < 1 or total_bytes < 0:
            raise InvalidRequest(f"a host pool of {total_bytes} bytes by {threads} threads")
        self.total_bytes = total_bytes // ALIGN_BYTES * ALIGN_BYTES
        sizes = [min(chunk_bytes, self.total_bytes - at) for at in range(0, self.total_bytes, chunk_bytes)]
        self.nodes = dict(nodes or {})
        self.failure: Exception | None = None
        self._backend = backend
        self._in_files = in_files
        self._on_ready = on_ready
        self._limits = limits
        self._bind = bind
        places = divide(sizes, Counter(self.nodes.values()))
        self._chunks = [_Chunk(size, node, left_bytes=size) for size, node in zip(sizes, places, strict=True)]
        self._free = FreeRanges(sizes, places)
        self._used = UsedBytes()
        self._slabs: set[HostSlab] = set()
        self._dirty: deque[tuple[HostSlab, HostExtent]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._began = 0.0
        self._threads = [
            threading.Thread(target=self._fill, name=f"host-pool-{i}", daemon=True) for i in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._clean, name="host-pool-zero", daemon=True))

    def start(self) -> None:
        """Begin to fill; returns at once. Raises InvalidRequest when this much memory cannot be had."""
        for limit in self._limits()[:1]:
            if self.total_bytes > limit.available_bytes:
                raise InvalidRequest(
                    f"host pool of {self.total_bytes} bytes, but {limit.source} leaves "
                    f"{limit.available_bytes}; ask for less host memory or raise the limit"
                )
        self._began = time.monotonic()
        self._backend.tell_hosts(self.reach)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop filling and let go of the memory; the backend keeps what it has registered. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for chunk in self._chunks:
            chunk.view = None
            if chunk.fd is not None:
                os.close(chunk.fd)
                chunk.fd = None

    def join_filling(self) -> None:
        """Wait until every chunk has come, or filling has failed or been stopped."""
        for thread in self._threads[:-1]:
            thread.join()

    @property
    def ready_chunks(self) -> int:
        return sum(chunk.region is not None for chunk in self._chunks)

    @property
    def chunks(self) -> int:
        return len(self._chunks)

    @property
    def free_bytes(self) -> int:
        """Number of bytes that no slab holds."""
        with self._changed:
            return self._free.free_bytes

    def plan(self, without: Iterable[HostSlab] = ()) -> FreeRanges:
        """A copy of what is free, or would be without these slabs, which may be released meanwhile."""
        with self._changed:
            self._free.lacking = self._unreached()
            free = self._free.copy()  # on its own from here on
            gone = [slab.places for slab in without if not slab.is_released]
        if gone:
            free.give_back(np.concatenate(gone))
        return free

    def reserve(self, page_bytes: int, pages: int, device: str = "", devices: frozenset[str] = frozenset()) -> HostSlab:
        """Pages for one group and rank, within reach of ``devices`` (see ``serve``) and near ``device`` while there is
        room; usable as ``ready_pages`` tells.

        Raises PoolExhausted with the numbers.
        """
        if page_bytes < 1 or pages < 0:
            raise InvalidRequest(f"{pages} host pages of {page_bytes} bytes")
        with self._changed:
            if self._stopping:
                raise Unavailable("the host pool is closed")
            self._free.lacking = self._unreached()
            pieces = self._free.take(page_bytes, pages, self.nodes.get(device), devices)
            if pieces is None:
                raise self._exhausted(page_bytes, pages)
            slab = HostSlab(page_bytes, pieces, devices)
            self._slabs.add(slab)
            for extent in slab.extents:
                self._make_usable(slab, extent)
            slab.refresh()
            self._changed.notify_all()
        return slab

    def release(self, slab: HostSlab) -> None:
        """Take pages back, after their last access. Raises LedgerBroken for a slab that was released before."""
        with self._changed:
            if slab.is_released or slab not in self._slabs:
                raise LedgerBroken("the host slab was released before, or is of another pool")
            slab.is_released = True
            slab.watchers.clear()
            self._slabs.remove(slab)
            for extent in slab.extents:
                if extent.is_ready:
                    self._used.mark(extent.place)
            self._free.give_back(slab.places)

    def ready_pages(self, slab: HostSlab, on_more: OnPages | None = None) -> list[Run]:
        """Page ids that are usable now; ``on_more`` is called from a pool thread for each run that comes later.

        A call that was on its way when the slab was released may still arrive.
        """
        with self._changed:
            if on_more is not None and not slab.is_released:
                slab.watchers.append(on_more)
            return slab.ready_runs()

    def chunk_view(self, chunk: int) -> memoryview:
        """The bytes of a chunk that has come. Raises InvalidRequest for one that has not."""
        with self._changed:
            view = self._chunks[chunk].view
        if view is None:
            raise InvalidRequest(f"chunk {chunk} of the host pool is not there")
        return view

    def view(self, slab: HostSlab, page: int) -> memoryview:
        """The bytes of a page. Raises InvalidRequest for one that is not usable."""
        with self._changed:
            for extent in slab.extents:
                local = page - extent.first_page
                view = self._chunks[extent.place.chunk].view
                if 0 <= local < extent.pages and extent.is_ready and view is not None:
                    start = extent.place.offset + local * slab.page_bytes
                    return view[start : start + slab.page_bytes]
        raise InvalidRequest(f"host page {page} of {slab.pages} is not usable")

    def _exhausted(self, page_bytes: int, pages: int) -> PoolExhausted:
        capacity = sum(chunk.size_bytes // page_bytes for chunk in self._chunks)
        free = self._free.room(page_bytes)
        return PoolExhausted(
            pool=f"host pool (pages of {page_bytes} bytes)",
            wanted=pages,
            free=free,
            evictable=0,
            pinned=capacity - free,
            quarantined=0,
            capacity=capacity,
        )

    def serve(self, slab: HostSlab, devices: frozenset[str]) -> None:
        """Have pages of a slab become usable once these devices can reach them, and no others are waited for. Those
        that are usable stay so."""
        with self._changed:
            slab.devices = devices
            news = self._settle_all([slab])
        self._tell(news)

    def require_reach(self, slab: HostSlab, devices: Iterable[str]) -> None:
        """Raises Unavailable where one of the devices lacks pages of the slab that are usable, and goes on lacking them
        for ``REACH_SECONDS``."""

        def lacking() -> list[str]:
            return [each for extent in slab.extents if extent.is_ready for each in self._lacking(devices, extent)]

        with self._changed:
            if not self._changed.wait_for(lambda: not lacking(), REACH_SECONDS):
                raise Unavailable(
                    f"device {lacking()[0]} cannot reach host memory that this model uses: its mover has not pinned "
                    "it; go on without the cache and see cachesvc status, or register on another device"
                )

    def reach(self, device: str) -> None:
        """A device can reach more chunks than before; any thread."""
        with self._changed:
            news = self._settle_all([slab for slab in self._slabs if device in slab.devices])
            self._changed.notify_all()
        self._tell(news)

    def _settle_all(self, slabs: Iterable[HostSlab]) -> list[tuple[OnPages, Run]]:
        """Under the lock: extents that are ready from now on, for those that watch them."""
        news: list[tuple[OnPages, Run]] = []
        for slab in slabs:
            come = [extent for extent in slab.extents if not extent.is_ready and self._settle(slab, extent)]
            if come:
                slab.refresh()
            news += [(tell, extent.run) for extent in come for tell in slab.watchers]
        return news

    def _make_usable(self, slab: HostSlab, extent: HostExtent) -> None:
        """Under the lock: ready now, after zeroing, or when its chunk comes and the slab's devices have that."""
        extent.region = self._chunks[extent.place.chunk].region
        if self._used.overlap(extent.place):
            self._dirty.append((slab, extent))
        else:
            extent.is_clean = True
            self._settle(slab, extent)

    def _settle(self, slab: HostSlab, extent: HostExtent) -> bool:
        is_usable = extent.is_clean and extent.region is not None and not slab.is_released
        extent.is_ready = is_usable and not self._lacking(slab.devices, extent)
        return extent.is_ready

    def _lacking(self, devices: Iterable[str], extent: HostExtent) -> list[str]:
        region = extent.region
        return [each for each in devices if region is None or not self._backend.has_host(each, region)]

    def _unreached(self) -> dict[str, Flags]:
        """By device, chunks that have come and that it cannot reach."""
        regions = [chunk.region for chunk in self._chunks]
        return {
            device: np.array([each is not None and not self._backend.has_host(device, each) for each in regions], bool)
            for device in self._backend.devices()
        }

    def _fill(self) -> None:
        yield_to_callers()
        try:
            while (work := self._next_slice()) is not None:
                index, start, size_bytes = work
                chunk = self._chunks[index]
                view = chunk.view
                assert view is not None
                fill = populate if chunk.fd is None else populate_file
                fill(view, start, size_bytes)
                with self._changed:
                    chunk.left_bytes -= size_bytes
                    is_full = not chunk.left_bytes
                if is_full:
                    self._announce(index, self._backend.register_host(view, chunk.fd))
        except Exception as error:  # the root of a thread: the pool stays as large as it has become
            with self._changed:
                is_first, self.failure = self.failure is None, self.failure or error
            if is_first:
                is_ours = not isinstance(error, OSError | CacheError)  # memory that ran out needs no traceback
                log.error(
                    "host_pool_filling_failed ready_chunks=%d chunks=%d reason=%s",
                    self.ready_chunks,
                    self.chunks,
                    error,
                    exc_info=is_ours,
                )

    def _next_slice(self) -> tuple[int, int, int] | None:
        """(chunk, start, bytes) to populate next, in order of address; None when there is no more to do."""
        with self._changed:
            for index, chunk in enumerate(self._chunks):
                if self._stopping or self.failure is not None:
                    return None
                if chunk.next_slice < chunk.size_bytes:
                    if chunk.view is None:
                        chunk.view = self._map(chunk)
                    start = chunk.next_slice
                    size_bytes = min(SLICE_BYTES, chunk.size_bytes - start)
                    chunk.next_slice += size_bytes
                    return index, start, size_bytes
        return None

    def _map(self, chunk: _Chunk) -> memoryview:
        if self._in_files:
            chunk.fd = sealed_memfd("kvcache-host", chunk.size_bytes)
            view = map_memfd(chunk.fd, chunk.size_bytes)
        else:
            view = map_anonymous(chunk.size_bytes)
        self._bind(address_of(view), chunk.size_bytes, chunk.node)
        return view

    def _announce(self, index: int, region: int) -> None:
        """A chunk has come, and the backend knows it."""
        with self._changed:
            self._chunks[index].region = region
            for extent in (extent for slab in self._slabs for extent in slab.extents):
                if extent.place.chunk == index:
                    extent.region = region
            news = self._settle_all(self._slabs)
            is_whole = all(chunk.region is not None for chunk in self._chunks)
        if is_whole:
            log.info("host_pool_whole bytes=%d seconds=%.3f", self.total_bytes, time.monotonic() - self._began)
        self._tell(news)
        if self._on_ready is not None:
            self._on_ready(index)

    def _clean(self) -> None:
        """Root of the zeroing thread. It is the only one and works in order: what a released slab had
        queued ends before the next slab's own zeroing of the same bytes begins."""
        while True:
            with self._changed:
                while not self._dirty and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                slab, extent = self._dirty.popleft()
            if self._zero(slab, extent):
                with self._changed:
                    extent.is_clean = True
                    news = self._settle_all([slab])
                self._tell(news)

    def _zero(self, slab: HostSlab, extent: HostExtent) -> bool:
        """Zero an extent; False where the slab or the pool went first."""
        place = extent.place
        view = self._chunks[place.chunk].view
        assert view is not None
        for start in range(place.offset, place.end, SLICE_BYTES):
            if self._stopping or slab.is_released:
                return False
            zero(view, start, min(SLICE_BYTES, place.end - start))
        return True

    def _tell(self, news: list[tuple[OnPages, Run]]) -> None:
        for tell, run in news:
            try:
                tell(run)
            except Exception:
                log.exception("host_pages_callback_failed first_page=%d pages=%d", run.first, run.count)


def divide(sizes: Sequence[int], devices: Mapping[int, int]) -> list[int | None]:
    """The NUMA node of each chunk: every node gets bytes by its number of ``devices``, from the first chunks on."""
    got = dict.fromkeys(sorted(devices), 0)
    nodes: list[int | None] = []
    for size in sizes:
        node = min(got, key=lambda one: (got[one] + size) / devices[one], default=None)
        if node is not None:
            got[node] += size
        nodes.append(node)
    return nodes


OnPages = Callable[[Run], None]


@dataclass(slots=True)
class HostExtent:
    """``pages`` pages from ``first_page`` on in ``place``. ``is_clean``: zeroed; ``is_ready``: populated too, and
    registered with all devices of the slab."""

    first_page: int
    pages: int
    place: ByteRange
    region: int | None = None
    is_clean: bool = False
    is_ready: bool = False

    @property
    def run(self) -> Run:
        return Run(self.first_page, self.pages)


class HostSlab:
    """Pages 0 .. ``pages`` - 1 of ``page_bytes``; made by ``HostPool.reserve`` and guarded by the pool's lock.

    ``places``: its bytes as columns (``columns_of``). ``devices``: those that copy from and to it.
    """

    def __init__(
        self, page_bytes: int, pieces: list[tuple[int, ByteRange]], devices: frozenset[str] = frozenset()
    ) -> None:
        self.page_bytes = page_bytes
        self.devices = devices
        self.extents: list[HostExtent] = []
        first = 0
        for count, place in pieces:
            self.extents.append(HostExtent(first, count, place))
            first += count
        self.pages = first
        self.places = columns_of(place for _, place in pieces)
        self.is_released = False
        self.table = ExtentTable(())
        self.watchers: list[OnPages] = []

    def ready_runs(self) -> list[Run]:
        return [extent.run for extent in self.extents if extent.is_ready]

    def refresh(self) -> None:
        self.table = ExtentTable(
            Extent(extent.first_page, extent.pages, extent.region, extent.place.offset)
            for extent in self.extents
            if extent.is_ready and extent.region is not None
        )


# First-fit over the free bytes of the host pool's chunks, and which bytes were ever used. The pool's lock guards both.
#
# A copy of the free ranges is cheap: a planner takes from one and throws it away.

ALIGN_BYTES = 4096

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ByteRange:
    chunk: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class FreeRanges:
    """Free ranges as columns sorted by chunk and offset, replaced and never written to; neighbours are one range."""

    def __init__(self, chunks: Iterable[int], nodes: Sequence[int | None] = ()) -> None:
        """``chunks``: size in bytes of each, multiples of ``ALIGN_BYTES``; ``nodes``: the NUMA node of each, or none
        at all."""
        self._sizes: Int64s = np.array(list(chunks), np.int64)
        self._chunks: Int64s = np.arange(len(self._sizes), dtype=np.int64)
        self._offsets: Int64s = np.zeros_like(self._sizes)
        self._nodes: Int64s = np.array([-1 if node is None else node for node in nodes], np.int64)
        self.lacking: Mapping[str, Flags] = {}
        """By device, chunks that have come and that it cannot reach; a copy keeps those of its time."""

    def copy(self) -> Self:
        return copy.copy(self)

    @property
    def free_bytes(self) -> int:
        return int(self._sizes.sum())

    def room(self, page_bytes: int) -> int:
        """Pages that fit; none crosses the border of a chunk."""
        return int((self._sizes // page_bytes).sum())

    def take(
        self, page_bytes: int, pages: int, node: int | None = None, readers: Collection[str] = ()
    ) -> list[tuple[int, ByteRange]] | None:
        """(pages, bytes) pieces that hold ``pages`` in all; None, changing nothing, if short.

        Chunks that all ``readers`` can reach come first, then those on ``node``, those that every device can reach,
        which may be a reader one day, and lowest addresses.
        """
        if not pages:
            return []
        order = self._order(node, readers)
        held = np.cumsum(self._sizes[order] // page_bytes)
        if not len(held) or held[-1] < pages:
            return None
        last = int(np.searchsorted(held, pages))
        counts = np.diff(held[: last + 1], prepend=0)
        counts[last] -= held[last] - pages
        chosen = order[: last + 1][counts > 0]
        counts = counts[counts > 0]
        taken = np.zeros_like(self._sizes)
        taken[chosen] = -(-counts * page_bytes // ALIGN_BYTES) * ALIGN_BYTES
        columns = (counts, self._chunks[chosen], self._offsets[chosen], taken[chosen])
        self._offsets = self._offsets + taken
        self._sizes = self._sizes - taken
        self._keep(self._sizes > 0)
        return [
            (count, ByteRange(chunk, offset, size))
            for count, chunk, offset, size in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def give_back(self, back: Int64s) -> None:
        """Return what ``take`` gave, as columns (``columns_of``)."""
        self._chunks, self._offsets, self._sizes = (
            np.concatenate(columns) for columns in zip((self._chunks, self._offsets, self._sizes), back.T, strict=True)
        )
        self._keep(np.lexsort((self._offsets, self._chunks)))
        if not len(self._sizes):
            return
        ends = self._offsets[:-1] + self._sizes[:-1]
        is_joined = (self._chunks[1:] == self._chunks[:-1]) & (self._offsets[1:] == ends)
        heads = np.flatnonzero(np.concatenate(([True], ~is_joined)))
        sizes = np.add.reduceat(self._sizes, heads)
        self._keep(heads)
        self._sizes = sizes

    def _order(self, node: int | None, readers: Collection[str]) -> npt.NDArray[np.intp]:
        is_far = np.zeros(len(self._chunks), bool)
        if node is not None and len(self._nodes):
            is_far = self._nodes[self._chunks] != node
        return np.lexsort((self._lacked_by(self.lacking), is_far, self._lacked_by(readers)))

    def _lacked_by(self, devices: Collection[str]) -> Flags:
        is_lacked = np.zeros(len(self._chunks), bool)
        for lacked in (self.lacking[device] for device in devices if device in self.lacking):
            is_lacked |= lacked[self._chunks]
        return is_lacked

    def _keep(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> None:
        self._chunks, self._offsets, self._sizes = self._chunks[which], self._offsets[which], self._sizes[which]


def columns_of(ranges: Iterable[ByteRange]) -> Int64s:
    """``[ranges, 3]``: chunk, offset and size of each."""
    return np.array([(one.chunk, one.offset, one.size_bytes) for one in ranges], np.int64).reshape(-1, 3)


class UsedBytes:
    """Bytes that were used before: they are zeroed before they serve again. They only grow."""

    def __init__(self) -> None:
        self._spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by chunk: sorted, apart

    def mark(self, place: ByteRange) -> None:
        spans = self._spans[place.chunk]
        first = bisect_left(spans, (place.offset, 0))
        if first and spans[first - 1][1] >= place.offset:
            first -= 1
        last = first
        while last < len(spans) and spans[last][0] <= place.end:
            last += 1
        met = [(place.offset, place.end), *spans[first:last]]
        spans[first:last] = [(min(start for start, _ in met), max(end for _, end in met))]

    def overlap(self, place: ByteRange) -> bool:
        """True where any of these bytes were used."""
        spans = self._spans[place.chunk]
        at = bisect_left(spans, (place.end, 0))  # the last one that begins before the end
        return at > 0 and spans[at - 1][1] > place.offset


# Budget of the node's background copies, where the host's memory and no link limits what all devices copy at once.
#
# One page of shared memory, which the daemon makes and the mover of each device maps. The daemon writes the head. Each
# mover writes the line of its device and reads the others' between two slices, so no copy costs a call:
#
#     line 0      bytes a second of all background copies together while an awaited copy runs anywhere; 0: no limit
#     line 1 ..   of one device: until when its awaited copies count, until when its background copies do (ns)
#
# Both times are leases that end by themselves: a mover that dies or hangs holds nothing back for longer than
# ``LEASE_S``. A device holds its background copies back only while another device's line says awaited; its own arbiter
# orders its own copies. Devices that copy in the background share the budget evenly, so each always has a part of it.
#
# No thread and no clock: ``now`` comes in, in seconds of the machine's monotonic clock.

LEASE_S = 0.1
"""Lease of a line's times, seconds: many slices long, and the longest that a hung mover holds others back."""
MOST_LEASE_S = 10.0
"""Times further ahead are of another clock and count for nothing."""
LOOK_S = 0.002
"""Longest delay after which a held device notices that no awaited copy runs any more, seconds."""
BACKGROUND_PARTS = 4
"""Background slices are this part of a slice where there is a budget: no awaited copy overtakes the two slices that the
copy engines of each other device have queued."""
LINKS_LIMIT = 0.8
"""Part of the sum of their rates alone that all devices reach at once where links are the limit."""
BACKGROUND_SHARE = 0.25
"""Share of the host's bandwidth that background copies may take together beside awaited ones. Eight H200s stored 120
GB/s at once (2026-11): a quarter of that leaves room for one load at its link's 50, and is more than engines write."""

_NS = 1_000_000_000
_LINE = 8
"""Words of a line: 64 bytes, a cache line, so that writers do not disturb one another."""
_AWAITED, _BACKGROUND = 0, 1


class HostBudget:
    """The page. ``fd``: what the movers get; this object takes it over."""

    def __init__(self, fd: int) -> None:
        """Map the page. Raises OSError."""
        self.fd = fd
        self._words = map_memfd(fd, os.fstat(fd).st_size).cast("q")

    @classmethod
    def make(cls, devices: int) -> HostBudget:
        """Make a page for ``devices`` devices, without a limit. Raises OSError."""
        return cls(sealed_memfd("kvcache-budget", (1 + devices) * _LINE * 8))

    @property
    def bytes_per_second(self) -> int:
        return self._words[0]

    def set(self, bytes_per_second: int) -> None:
        """Set another budget, from the next slice on; 0 is no limit."""
        self._words[0] = bytes_per_second

    def of(self, device: int) -> Neighbours:
        """View of one device, by its place among the others."""
        return Neighbours(self._words, device)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last reference. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Neighbours:
    """Other devices of the node as one device's arbiter knows them, and what they know of it."""

    def __init__(self, words: memoryview, device: int) -> None:
        """``words``: of the page, 64 bits each."""
        self._words = words
        self._own = (1 + device) * _LINE
        self._lines = range(_LINE, len(words), _LINE)
        assert self._own in self._lines

    @property
    def has_budget(self) -> bool:
        """True where background copies have a budget."""
        return self._words[0] > 0

    def begin_awaited(self, now: float) -> None:
        """Tell the others that awaited copies run here: renewed with each slice that is started."""
        self._words[self._own + _AWAITED] = round((now + LEASE_S) * _NS)

    def end_awaited(self) -> None:
        """Tell the others that no awaited copy is left here. Idempotent."""
        self._words[self._own + _AWAITED] = 0

    def seconds_of(self, size_bytes: int, now: float) -> float:
        """Time that a background slice, started now, takes out of this device's part of the budget."""
        budget, own = self._words[0], self._own + _BACKGROUND
        if not budget:
            return 0.0
        others = sum(self._counts(line + _BACKGROUND, now) for line in self._lines if line != self._own)
        seconds = size_bytes * (1 + others) / budget
        self._words[own] = round((now + seconds + LEASE_S) * _NS)
        return seconds

    def have_awaited(self, now: float) -> bool:
        """True while an awaited copy runs on another device."""
        return any(self._counts(line + _AWAITED, now) for line in self._lines if line != self._own)

    def _counts(self, word: int, now: float) -> bool:
        return 0 < self._words[word] / _NS - now <= MOST_LEASE_S


def no_neighbours() -> Neighbours:
    """View of a device that is alone, or whose links are the limit."""
    return Neighbours(memoryview(bytearray(2 * _LINE * 8)).cast("q"), 0)


def budget_of(alone: Sequence[float], at_once: Sequence[float]) -> int:
    """Budget in bytes a second by rates that were measured, of each device alone and of each while all copy: 0 where
    links are the limit."""
    together = sum(at_once)
    return 0 if together >= LINKS_LIMIT * sum(alone) else round(BACKGROUND_SHARE * together)
