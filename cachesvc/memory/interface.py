"""The seam between the daemon and a kind of device memory. ``shm.py``, ``cuda.py`` and the movers' processes fill it.

A region is one piece of memory that a copy may address: a device slab or one chunk of the host pool. No copy crosses
the border of a region. Copies are data (``CopyBatch``): the planner makes them, any backend executes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import InvalidRequest, LedgerBroken, PoolExhausted
from cachesvc.model.words import Direction, Urgency

COPY_FIELDS = ("src_region", "src_offset", "dst_region", "dst_offset", "width", "height", "src_pitch", "dst_pitch")
"""Columns of a CopyBatch: a pitched copy of ``height`` rows of ``width`` bytes."""

CopyBatch = npt.NDArray[np.int64]
"""``[copies, len(COPY_FIELDS)]``. Column after column in memory (Fortran's order), where they are many: readers take
columns, never a whole copy."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Handle by which another process maps a slab: ``kind`` is ``memfd`` (the fd goes over the life socket under
    ``token``), ``cuda_ipc`` (``token`` is the 64-byte handle) or ``cuda_fd``."""

    kind: str
    token: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Copies that belong together; when they have all landed the timeline word becomes ``word_value``. ``size_bytes``:
    their sum, where the planner guarantees that they are valid."""

    copies: CopyBatch
    word_value: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One rank's share of a ticket, executed in order on one stream, between slices of other jobs.

    ``steps`` are asked for one after another, each when what was there before it has been started: so the planner may
    plan as little ahead. Raising ends the job with what was raised. ``done(error)`` is called once, from a thread of
    the backend: None when every byte has landed, else what broke. On failure the backend first writes ``end_value`` to
    ``failed_word``, then to ``word``, so that no waiter hangs. ``begun(seconds)`` is called once the first slice was
    started, with its time by the backend's clock; before ``done``. ``size_bytes``: of all copies, for the arbiter's
    shares; None: they are added up, and so all planned at once.
    """

    ticket: int
    steps: Iterable[CopyStep]
    word: int | None
    failed_word: int | None
    end_value: int
    done: Callable[[Exception | None], None]
    urgency: Urgency = Urgency.AWAITED
    begun: Callable[[float], None] | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a job that is started at once. ``word_value``: what the job's word is set to when the slice has landed.

    Slices of one job are given out in order, and ``is_last`` is the job's end.
    """

    job: CopyJob
    copies: CopyBatch
    size_bytes: int
    word_value: int | None
    is_last: bool


class SliceRunner(Protocol):
    """Executes the slices of one direction on one device, in the order of their start. Used by one thread at a time."""

    depth: int
    """Most slices in flight at a time."""
    only_queues: bool
    """True where ``submit`` copies nothing by itself, so that any thread may call it that has the stream to itself."""

    def begin(self) -> None:
        """Called first, on the thread that waits. What it raises fails every job."""

    def submit(self, piece: Slice) -> object:
        """Start a slice and its word. Raises what broke: then nothing of this slice is on its way."""

    def wait(self, started: object) -> None:
        """Wait for what ``submit`` returned, until it has landed and its word stands. Raises what broke.

        A slice after a broken one of the same job must not set its word: waiters would take it for the whole.
        """


class Slab:
    """Device memory of one group on one rank. ``fd``: what to pass for handles that travel as descriptors. ``address``:
    of the first byte, where this process can name it. ``on_close`` frees the memory, and closes ``fd``."""

    def __init__(
        self, region: int, handle: Handle, fd: int | None, on_close: Callable[[Slab], None], address: int = 0
    ) -> None:
        self.region = region
        self.handle = handle
        self.fd = fd
        self.on_close = on_close
        self.address = address
        self.is_open = True

    def close(self) -> None:
        """Free the memory, once its readers have finished; mappings of other processes stay valid until they close
        them. Raises LedgerBroken when it was freed before."""
        if not self.is_open:
            raise LedgerBroken(f"slab of region {self.region} was closed before")
        self.is_open = False
        self.on_close(self)
        self.fd = None


class SlabBudget:
    """Bytes that slabs on a device may take in all. Any thread."""

    def __init__(self, device: str, capacity_bytes: int) -> None:
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises PoolExhausted with the numbers."""
        with self._lock:
            if not 0 < size_bytes <= self._capacity_bytes - self.used_bytes:
                raise self.exhausted(size_bytes)
            self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes

    def exhausted(self, size_bytes: int, most_free: int | None = None) -> PoolExhausted:
        """Refusal of a slab. ``most_free``: bytes that the device itself has left."""
        free = self._capacity_bytes - self.used_bytes
        return PoolExhausted(
            pool=f"device {self._device} (bytes)",
            wanted=size_bytes,
            free=free if most_free is None else min(free, most_free),
            evictable=0,
            pinned=self.used_bytes,
            quarantined=0,
            capacity=self._capacity_bytes,
        )


def require_inside(offset: int, size_bytes: int, region_bytes: int) -> None:
    """Raises InvalidRequest for bytes outside of a region."""
    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes:
        raise InvalidRequest(f"bytes [{offset}, {offset + size_bytes}) are outside of {region_bytes} bytes")


class Sheet(Protocol):
    """The 32-bit words of one model on one device, in host memory that its engines map too. ``fd``: what to pass to
    them. ``writers``: the descriptor of a pipe, and its handle; it hangs up once nothing copies into the model's slabs
    on the device any more. None where another process keeps it."""

    handle: Handle
    fd: int | None

    @property
    def writers(self) -> tuple[Handle, int] | None:
        """See above."""


class Timeline(Protocol):
    """All words of a device, in sheets of ``words``: those of sheet ``n`` are numbered from ``n * words`` on."""

    words: int

    def sheet(self, number: int) -> Sheet:
        """Find an open sheet. Raises NotFound."""

    def read(self, word: int) -> int:
        """Present value of a word."""

    def write(self, word: int, value: int) -> None:
        """Set a word and wake its waiters (failure and reset paths; streams write in order by themselves)."""


class CopyStream(Protocol):
    """Copy jobs in one direction on one device; jobs of one size and urgency end in the order they came in."""

    def submit(self, job: CopyJob) -> None:
        """Queue a job; returns at once. Raises Unavailable after ``close``, LimitExceeded."""

    def submit_here(self, job: CopyJob) -> None:
        """Submit like ``submit``; but where the stream has nothing to do the first slice is planned and started by this
        very thread, for as long as the driver takes: it need not wake another one first."""

    def stop(self) -> None:
        """Take no more jobs, and start no more copies: what is on its way lands, and every job of which something is
        left ends as failed. Does not wait. Idempotent."""

    def close(self) -> None:
        """Stop, and wait for the end of all jobs."""


class DeviceMemory(Protocol):
    """A kind of device memory, as its allocator and its watchdog see it. Nothing runs before ``start``."""

    name: str

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the devices whose memory can be owned."""

    def capacity_bytes(self, device: str) -> int:
        """Bytes that device slabs on ``device`` may take in all."""

    def start(self) -> None:
        """Acquire what is needed; raises a CacheError that says what is missing."""

    def create_slab(self, device: str, size_bytes: int) -> Slab:
        """Zeroed device memory. Raises PoolExhausted with the numbers when the device's budget cannot hold it, and
        Unavailable."""

    def timeline(self, device: str) -> Timeline:
        """The device's timeline, without sheets at first."""

    def open_sheet(self, device: str, sheet: int) -> None:
        """Add a sheet of words, all 0, in a memory file of its own. One thread at a time; waits for drivers. Raises
        NotFound (device), Unavailable, and LedgerBroken where it is open."""

    def close_sheet(self, device: str, sheet: int) -> None:
        """Let a sheet go, of which no copy is under way; mappings of other processes stay valid. As ``open_sheet``, but
        nothing where it is not open."""

    def can_reach(self, source: str, target: str) -> bool:
        """True where ``target``'s load stream may copy from slabs on ``source``, the same device too. Raises
        NotFound."""

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """Pairs (source, target) that the hardware offers, and whose copies were found wrong; each with the reason."""

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Make a chunk of host memory copyable; returns its region. ``fd``: the memory file that it is, which movers
        in processes of their own need."""

    def has_host(self, device: str, region: int) -> bool:
        """True where a device can copy from and to a chunk of host memory."""

    def tell_hosts(self, on_host: Callable[[str], None]) -> None:
        """Tell ``on_host(device)``, from a thread, when a device can reach chunks that it could not at first."""

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        """Devices that refuse chunks of host memory: how many, and why the last of them."""

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget in one direction for every device; 0 is none."""

    def fault(self, device: str) -> str:
        """Reason why a device no longer works for this process, and never will; empty while it does. Raises
        NotFound."""

    def require_answer(self, device: str) -> None:
        """Raises Unavailable where a device does not work, or its mover does not answer now; waits for that one."""

    def probe(self) -> None:
        """Find out which devices still work, for ``fault``. Any thread; waits for drivers, raises nothing."""

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region, for verification: not on any stream, and as slow as it likes. Any thread.

        The region stays as long as that takes. Raises NotFound for a region that is unknown, closed or being closed,
        and InvalidRequest for bytes outside of it.
        """

    def close(self) -> None:
        """Stop the streams and free everything. Idempotent."""


class Backend(DeviceMemory, Protocol):
    """Device memory with its copy streams: what a mover works with."""

    def load_stream(self, device: str) -> CopyStream:
        """The host -> device stream."""

    def store_stream(self, device: str) -> CopyStream:
        """The device -> host stream."""

    def peer_stream(self, device: str) -> CopyStream:
        """The stream for loads from other devices, or from others' pages on this one."""

    def expedite(self, device: str, ticket: int) -> None:
        """An engine waits for a ticket now: its jobs on the device are AWAITED. Nothing where none is queued.

        Raises NotFound (device), never Unavailable: with ``close`` every job ends anyway. So does ``pause_background``.
        """

    def pause_background(self, device: str, seconds: float) -> None:
        """Start no slice of BACKGROUND stores on the device for ``seconds`` from now; a longer pause stays."""
