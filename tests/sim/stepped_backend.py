"""A backend on plain arrays whose copy streams do nothing until told: the simulator decides what lands when.

No thread, no descriptor, and a clock that others set: the same calls give the same bytes. The arbiter is the real one.
It must pass the contract suite of the real backends (tests/contracts/test_backend.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachesvc.memory.arbiter import Arbiter, CopyRules
from cachesvc.memory.copy_thread import end_job
from cachesvc.memory.interface import CopyJob, Handle, Slab
from cachesvc.memory.memcpy import run_copies
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, PoolExhausted, Unavailable
from cachesvc.model.words import Direction
from tests.sim.stepped_memory import SteppedSheet, SteppedTimeline, check_bounds

CRANKS = 1_000_000
"""Steps that ``run_all`` takes at most: jobs that submit jobs must come to an end."""


class SteppedStream:
    """Jobs as the arbiter gives them out; ``step`` is the only thing that moves a byte."""

    def __init__(self, backend: SteppedBackend, timeline: SteppedTimeline, arbiter: Arbiter, way: Direction) -> None:
        self._backend = backend
        self._timeline = timeline
        self._arbiter = arbiter
        self._way = way
        self._is_closed = False
        self._open: dict[int, CopyJob] = {}
        self._begun: set[int] = set()
        self._broken: Exception | None = None

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        return self._arbiter.queued(self._way)

    def next_job(self) -> CopyJob | None:
        """The job that ``step`` would move on."""
        queued = self._arbiter.next_up(self._way, self._backend.now)
        return None if queued is None else queued.job

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Raises Unavailable after ``close``."""
        if self._is_closed:
            raise Unavailable(f"the {self._way.value} stream is closed")
        if self._broken is not None:
            end_job(job, self._broken, self._timeline.write)
            return
        self._arbiter.push(self._way, job, self._backend.now)
        self._open[id(job)] = job

    def submit_here(self, job: CopyJob) -> None:
        """Submit as always: nothing moves before its step."""
        self.submit(job)

    def step(self) -> None:
        """Run the next slice; with its last one a job ends."""
        queued = self._arbiter.next_up(self._way, self._backend.now)
        assert queued is not None
        job, error = queued.job, None
        try:
            piece = self._arbiter.pop(self._way, self._backend.now)
        except InvalidRequest as failure:  # it cannot be planned
            self._arbiter.fail(job)
            self._end(job, failure)
            return
        assert piece is not None
        assert piece.job is job
        if id(job) not in self._begun:
            self._begun.add(id(job))
            if job.begun is not None:
                job.begun(self._backend.now)
        try:
            self._backend.copy(piece.copies)
            if piece.word_value is not None and job.word is not None:
                self._timeline.write(job.word, piece.word_value)
        except InvalidRequest as failure:
            error = failure
            self._arbiter.fail(job)
        self._arbiter.landed(self._way, piece)
        if piece.is_last or error is not None:
            self._end(job, error)

    def fail(self, error: Exception) -> None:
        """Fail the next job without copying."""
        job = self.next_job()
        assert job is not None
        self._arbiter.fail(job)
        self._end(job, error)

    def break_off(self, error: Exception) -> None:
        """End all jobs where they stand, and those that come from now on."""
        self._broken = error
        for job in list(self._open.values()):
            self._arbiter.fail(job)
            self._end(job, error)

    def mend(self) -> None:
        """Take jobs again."""
        self._broken = None

    def _end(self, job: CopyJob, error: Exception | None) -> None:
        self._open.pop(id(job), None)
        self._begun.discard(id(job))
        end_job(job, error, self._timeline.write)

    def stop(self) -> None:
        """End every job: nothing is on its way between two steps."""
        self._is_closed = True
        for job in self._arbiter.drain(self._way):
            self._end(job, Unavailable(f"the {self._way.value} stream was closed first"))

    def close(self) -> None:
        """End every job, as ``stop`` does."""
        self.stop()


@dataclass(frozen=True)
class Pending:
    """A stream that has a slice to run now: how many jobs it has, and the ticket of the next one."""

    device: str
    direction: Direction
    jobs: int
    ticket: int


class SteppedBackend:
    """``devices`` pretended devices ``step-0``, ``step-1``, ... of ``device_bytes`` each. ``now``: seconds, for the
    arbiter; ``run_all`` moves it on where only time is waited for."""

    name = "stepped"

    def __init__(
        self,
        devices: int,
        device_bytes: int,
        timeline_words: int = 8192,
        rules: CopyRules | None = None,
        *,
        are_near: bool = True,
    ) -> None:
        """``are_near``: copies may go from one device to another."""
        self.now = 0.0
        self._are_near = are_near
        self._free = {f"step-{i}": device_bytes for i in range(devices)}
        self._device_bytes = device_bytes
        self._regions: dict[int, memoryview] = {}
        self.lacking: set[tuple[str, int]] = set()
        self._last_region = 0
        self._timelines = {device: SteppedTimeline(timeline_words) for device in self._free}
        self._arbiters = {device: Arbiter(device, rules or CopyRules()) for device in self._free}
        self._streams = {
            (device, way): SteppedStream(self, self._timelines[device], self._arbiters[device], way)
            for device in self._free
            for way in Direction
        }
        self._is_running = False
        self.broken: set[str] = set()

    def pending(self) -> tuple[Pending, ...]:
        """Streams that have something to do, in a fixed order."""
        return tuple(
            Pending(device, way, stream.jobs, job.ticket)
            for (device, way), stream in self._streams.items()
            if (job := stream.next_job()) is not None
        )

    def run_step(self, device: str, direction: Direction) -> None:
        """Run one slice of the next job of a stream."""
        self._streams[device, direction].step()

    def run_one(self, device: str, direction: Direction) -> None:
        """Run a stream for as long as it stays with its next job."""
        stream = self._streams[device, direction]
        job = stream.next_job()
        while job is not None and stream.next_job() is job:
            stream.step()

    def fail_one(self, device: str, direction: Direction, error: Exception) -> None:
        """Break the next job of a stream where it stands."""
        self._streams[device, direction].fail(error)

    def break_device(self, device: str) -> None:
        """The mover of a device dies with its jobs; no memory can be had there until ``mend_device``."""
        self.broken.add(device)
        for way in Direction:
            self._streams[device, way].break_off(Unavailable(f"the simulator has killed the mover of {device}"))

    def mend_device(self, device: str) -> None:
        """A new mover works."""
        self.broken.discard(device)
        for way in Direction:
            self._streams[device, way].mend()

    def run_all(self) -> None:
        """Run until nothing is pending, one step of each stream in turn."""
        for _ in range(CRANKS):
            waiting = self.pending()
            if not waiting and not self._wait():
                return
            for one in waiting:
                if self._streams[one.device, one.direction].next_job() is not None:
                    self.run_step(one.device, one.direction)
        raise AssertionError(f"still pending after {CRANKS} cranks: {self.pending()}")

    def _wait(self) -> bool:
        """Move the clock to where a stream can go on; False where none has anything to do."""
        times = [self._arbiters[device].next_time(way, self.now) for device, way in self._streams]
        coming = [time for time in times if time is not None]
        self.now = max(self.now, min(coming, default=self.now))
        return bool(coming)

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

    def create_slab(self, device: str, size_bytes: int) -> Slab:
        """Zeroed memory. Raises PoolExhausted (in bytes) when the device's budget cannot hold it."""
        self._check(device)
        self._check_running()
        if device in self.broken:
            raise Unavailable(f"the mover of {device} does not work")
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

        def drop(_: Slab) -> None:
            del self._regions[region]
            self._free[device] += size_bytes

        return Slab(region, Handle("memory", region.to_bytes(16, "little"), size_bytes), None, drop)

    def timeline(self, device: str) -> SteppedTimeline:
        """The device's timeline."""
        self._check(device)
        self._check_running()
        return self._timelines[device]

    def open_sheet(self, device: str, sheet: int) -> None:
        """Words of a model. Raises LedgerBroken."""
        timeline = self.timeline(device)
        if sheet in timeline.open:
            raise LedgerBroken(f"sheet {sheet} is open already")
        timeline.open[sheet] = SteppedSheet(timeline.words)

    def close_sheet(self, device: str, sheet: int) -> None:
        """Let them go."""
        self._check(device)
        self._timelines[device].open.pop(sheet, None)

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

    def peer_stream(self, device: str) -> SteppedStream:
        """These devices have one way in."""
        return self.load_stream(device)

    def can_reach(self, source: str, target: str) -> bool:
        """Reachability that the backend was made with."""
        self._check(source)
        self._check(target)
        return self._are_near or source == target

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """None: what is near is sound."""
        return {}

    def expedite(self, device: str, ticket: int) -> None:
        """A ticket's jobs on the device are awaited now."""
        self._check(device)
        self._arbiters[device].expedite(ticket)

    def pause_background(self, device: str, seconds: float) -> None:
        """Run no slice of background stores until ``now`` has come so far."""
        self._check(device)
        self._arbiters[device].pause_background(Direction.STORE, self.now + seconds)

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        for arbiter in self._arbiters.values():
            arbiter.limit(direction, bytes_per_second, self.now)

    def fault(self, device: str) -> str:
        self._check(device)
        return ""

    def probe(self) -> None:
        """Nothing breaks for good here."""

    def require_answer(self, device: str) -> None:
        """All devices answer."""

    def has_host(self, device: str, region: int) -> bool:
        """True unless the device has refused the chunk."""
        return (device, region) not in self.lacking

    def tell_hosts(self, on_host: Callable[[str], None]) -> None:
        """Tell when a device takes what it had refused."""
        self._on_host = on_host

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        """Chunks that devices have refused."""
        return {device: (1, "it refuses") for device, _ in self.lacking}

    def take_hosts(self, device: str) -> None:
        """A device takes what it has refused until now."""
        self.lacking = {each for each in self.lacking if each[0] != device}
        self._on_host(device)

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Make host memory copyable."""
        del fd
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
