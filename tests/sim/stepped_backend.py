"""A backend on plain arrays whose copy streams do nothing until told: the simulator decides what lands when.

No thread, no clock, no descriptor: the same calls give the same bytes. It must pass the contract suite of
the real backends (tests/contracts/test_backend.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachesvc.memory.copies import check_bounds, run_copies
from cachesvc.memory.copy_thread import end_job
from cachesvc.memory.seam import CopyJob, Handle
from cachesvc.model.errors import InvalidRequest, NotFound, PoolExhausted, StateConflict, Unavailable
from cachesvc.model.transfer import Direction

CRANKS = 1_000_000
"""Steps that ``run_all`` takes at most: jobs that submit jobs must come to an end."""


class SteppedSlab:
    """An array in place of device memory."""

    fd: int | None = None

    def __init__(self, region: int, size_bytes: int, on_close: Callable[[], None]) -> None:
        self.region = region
        self.handle = Handle("memory", region.to_bytes(16, "little"), size_bytes)
        self._on_close = on_close
        self._is_open = True

    def close(self) -> None:
        """Give the memory back. Raises StateConflict when it was given back before."""
        if not self._is_open:
            raise StateConflict(f"slab of region {self.region} was closed before")
        self._is_open = False
        self._on_close()


class SteppedTimeline:
    """Words in an array. ``history`` keeps every write: (word, value)."""

    fd: int | None = None

    def __init__(self, device: str, words: int) -> None:
        self.words = words
        self.handle = Handle("memory", device.encode().ljust(16, b"\0"), 4 * words)
        self.history: list[tuple[int, int]] = []
        self._values = np.zeros(words, np.uint32)

    def read(self, word: int) -> int:
        """Present value of a word."""
        return int(self._values[word])

    def write(self, word: int, value: int) -> None:
        """Set a word."""
        self._values[word] = value
        self.history.append((word, value))

    def close(self) -> None:
        """Nothing to unmap."""


class SteppedStream:
    """Jobs in order; ``step`` is the only thing that moves a byte."""

    def __init__(self, backend: SteppedBackend, timeline: SteppedTimeline, name: str) -> None:
        self.name = name
        self.jobs: deque[CopyJob] = deque()
        self._backend = backend
        self._timeline = timeline
        self._next_step = 0
        self._is_closed = False

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Raises Unavailable after ``close``."""
        if self._is_closed:
            raise Unavailable(f"copy stream {self.name} is closed")
        self.jobs.append(job)

    def step(self) -> None:
        """Run the next step of the oldest job; with its last one the job ends."""
        job = self.jobs[0]
        try:
            if self._next_step < len(job.steps):
                step = job.steps[self._next_step]
                self._backend.copy(step.copies)
                if step.word_value is not None and job.word is not None:
                    self._timeline.write(job.word, step.word_value)
                self._next_step += 1
        except InvalidRequest as error:
            self.end(error)
            return
        if self._next_step >= len(job.steps):
            self.end(None)

    def end(self, error: Exception | None) -> None:
        """End the oldest job as it is."""
        self._next_step = 0
        end_job(self.jobs.popleft(), error, self._timeline.write)

    def close(self) -> None:
        """Fail what is queued; what has begun is finished first."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._next_step:
            begun = self.jobs[0]
            while self.jobs and self.jobs[0] is begun:
                self.step()
        while self.jobs:
            self.end(Unavailable(f"copy stream {self.name} was closed first"))


@dataclass(frozen=True)
class Pending:
    """A stream that has jobs: how many, and the ticket of the oldest."""

    device: str
    direction: Direction
    jobs: int
    ticket: int


class SteppedBackend:
    """``devices`` pretended devices ``step-0``, ``step-1``, ... of ``device_bytes`` each."""

    name = "stepped"

    def __init__(self, devices: int, device_bytes: int, timeline_words: int = 8192) -> None:
        self._free = {f"step-{i}": device_bytes for i in range(devices)}
        self._device_bytes = device_bytes
        self._regions: dict[int, memoryview] = {}
        self._last_region = 0
        self._timelines = {device: SteppedTimeline(device, timeline_words) for device in self._free}
        self._streams = {
            (device, way): SteppedStream(self, self._timelines[device], f"{way.value}-{device}")
            for device in self._free
            for way in Direction
        }
        self._is_running = False

    def pending(self) -> tuple[Pending, ...]:
        """Streams that have something to do, in a fixed order."""
        return tuple(
            Pending(device, way, len(stream.jobs), stream.jobs[0].ticket)
            for (device, way), stream in self._streams.items()
            if stream.jobs
        )

    def run_step(self, device: str, direction: Direction) -> None:
        """Run one step of the oldest job of a stream."""
        self._streams[device, direction].step()

    def run_one(self, device: str, direction: Direction) -> None:
        """Run the oldest job of a stream to its end."""
        stream = self._streams[device, direction]
        job = stream.jobs[0]
        while stream.jobs and stream.jobs[0] is job:
            stream.step()

    def fail_one(self, device: str, direction: Direction, error: Exception) -> None:
        """Break the oldest job of a stream where it stands."""
        self._streams[device, direction].end(error)

    def run_all(self) -> None:
        """Run until nothing is pending, one step of each stream in turn."""
        for _ in range(CRANKS):
            waiting = self.pending()
            if not waiting:
                return
            for one in waiting:
                if self._streams[one.device, one.direction].jobs:
                    self.run_step(one.device, one.direction)
        raise AssertionError(f"still pending after {CRANKS} cranks: {self.pending()}")

    def copy(self, copies: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        """Check and run a batch at once."""
        check_bounds(copies, {region: view.nbytes for region, view in self._regions.items()})
        run_copies(copies, self._regions)

    def devices(self) -> tuple[str, ...]:
        """Names of the pretended devices."""
        return tuple(self._free)

    def capacity_bytes(self, device: str) -> int:
        """Bytes that slabs on ``device`` may take in all."""
        self._check(device)
        return self._device_bytes

    def start(self) -> None:
        """Begin to take work."""
        self._is_running = True

    def create_slab(self, device: str, size_bytes: int) -> SteppedSlab:
        """Zeroed memory. Raises PoolExhausted (in bytes) when the device's budget cannot hold it."""
        self._check(device)
        self._check_running()
        if not 0 < size_bytes <= self._free[device]:
            raise PoolExhausted(
                pool=f"device {device} (bytes)",
                wanted=size_bytes,
                free=self._free[device],
                evictable=0,
                pinned=self._device_bytes - self._free[device],
                quarantined=0,
                capacity=self._device_bytes,
            )
        region = self.register_host(memoryview(bytearray(size_bytes)))
        self._free[device] -= size_bytes

        def drop() -> None:
            del self._regions[region]
            self._free[device] += size_bytes

        return SteppedSlab(region, size_bytes, drop)

    def timeline(self, device: str) -> SteppedTimeline:
        """The device's timeline."""
        self._check(device)
        self._check_running()
        return self._timelines[device]

    def load_stream(self, device: str) -> SteppedStream:
        """The host -> device stream."""
        self._check(device)
        self._check_running()
        return self._streams[device, Direction.LOAD]

    def store_stream(self, device: str) -> SteppedStream:
        """The device -> host stream."""
        self._check(device)
        self._check_running()
        return self._streams[device, Direction.STORE]

    def register_host(self, buffer: memoryview) -> int:
        """Make host memory copyable."""
        self._check_running()
        self._last_region += 1
        self._regions[self._last_region] = buffer
        return self._last_region

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region. Raises NotFound for an unknown region and InvalidRequest outside of it."""
        if region not in self._regions:
            raise NotFound("region", region)
        view = self._regions[region]
        if offset < 0 or size_bytes < 0 or offset + size_bytes > view.nbytes:
            raise InvalidRequest(f"bytes [{offset}, {offset + size_bytes}) are outside of {view.nbytes} bytes")
        return bytes(view[offset : offset + size_bytes])

    def write(self, region: int, offset: int, content: bytes) -> None:
        """Put bytes into a region, as an engine's kernel would."""
        self._regions[region][offset : offset + len(content)] = content

    def close(self) -> None:
        """Fail what is queued and forget the memory. Idempotent."""
        self._is_running = False
        for stream in self._streams.values():
            stream.close()
        self._regions.clear()

    def _check(self, device: str) -> None:
        if device not in self._free:
            raise NotFound("device", device)

    def _check_running(self) -> None:
        if not self._is_running:
            raise Unavailable("the stepped backend is not running")
