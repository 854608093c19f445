"""Contract of every memory backend: bytes, order, release of waiters, and nothing left behind."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.interface import COPY_FIELDS, Backend, CopyJob, CopyStep
from cachesvc.memory.memcpy import CopyOutOfBounds
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, PoolExhausted, Unavailable
from gpu_ops.driver import CudaMissing
from gpu_ops.gpu import Gpu, find_gpus
from tests.contracts.host_gpu import HostGpu
from tests.sim.stepped_backend import SteppedBackend
from tests.sim.stepped_memory import SteppedTimeline

DEVICE_BYTES = 1 << 20
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
KINDS = ("shm", "stepped", "host gpu", CUDA)


@dataclass
class Bench:
    """A started backend and how to let what was submitted come to its end."""

    backend: Backend
    crank: Callable[[], None]
    device: str
    ended: dict[int, Exception | None] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    waits: list[threading.Event] = field(default_factory=list)

    def job(
        self,
        ticket: int,
        steps: list[CopyStep],
        *,
        word: int | None = 0,
        end_value: int = 9,
        then: Callable[[], object] = bool,
    ) -> CopyJob:
        """A job that is recorded when it ends; ``then`` runs inside of its ``done``."""
        gone = threading.Event()
        self.waits.append(gone)

        def done(error: Exception | None) -> None:
            assert ticket not in self.ended
            self.ended[ticket] = error
            self.order.append(ticket)
            try:
                then()
            finally:
                gone.set()

        return CopyJob(ticket, tuple(steps), word, None if word is None else word + 1, end_value, done)

    def load(self, job: CopyJob) -> None:
        self.backend.load_stream(self.device).submit(job)

    def store(self, job: CopyJob) -> None:
        self.backend.store_stream(self.device).submit(job)

    def settle(self) -> None:
        """Until every job has ended."""
        self.crank()
        for gone in self.waits:
            gone.wait()


def make(kind: str, devices: int = 2) -> Bench:
    if kind == "shm":
        shm = ShmBackend(devices, DEVICE_BYTES, timeline_words=64)
        return begun(Bench(shm, lambda: None, shm.devices()[0]))
    if kind in ("cuda", "host gpu"):
        gpus = tuple(map(HostGpu, range(devices))) if kind == "host gpu" else keep_contexts() and find_gpus()
        cuda = CudaBackend(gpus, DEVICE_BYTES, timeline_words=64)
        return begun(Bench(cuda, lambda: None, cuda.devices()[0]))
    stepped = SteppedBackend(devices, DEVICE_BYTES, timeline_words=64)
    return begun(Bench(stepped, stepped.run_all, stepped.devices()[0]))


def begun(bench: Bench) -> Bench:
    """Started, with the words of one model."""
    bench.backend.start()
    for device in bench.backend.devices():
        bench.backend.open_sheet(device, 0)
    return bench


@cache
def keep_contexts() -> tuple[Gpu, ...]:
    """Contexts that outlive every backend: making one anew takes a second, and not all of it is given back."""
    try:
        gpus = find_gpus()
    except CudaMissing as missing:
        pytest.skip(str(missing))
    for gpu in gpus:
        gpu.start()
    return gpus


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = make(request.param)
    yield made
    made.backend.close()


def step(*copies: tuple[int, ...], value: int | None = None) -> CopyStep:
    return CopyStep(np.array(copies, np.int64).reshape(-1, len(COPY_FIELDS)), value)


def flat(src: int, src_at: int, dst: int, dst_at: int, width: int) -> tuple[int, ...]:
    return (src, src_at, dst, dst_at, width, 1, width, width)


def host(bench: Bench, size_bytes: int, seed: int = 0) -> tuple[int, memoryview]:
    """Memory with pages of its own: a page can be pinned once only."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    memory[:] = np.random.default_rng(seed).bytes(size_bytes)
    return bench.backend.register_host(memory), memory


def test_slabs_begin_zeroed_even_where_another_one_lay(bench: Bench) -> None:
    region, _ = host(bench, 4096)
    for _ in range(3):
        slab = bench.backend.create_slab(bench.device, DEVICE_BYTES)
        assert not any(bench.backend.read(slab.region, 0, DEVICE_BYTES))
        bench.load(bench.job(len(bench.order), [step(flat(region, 0, slab.region, 777, 4096))]))
        bench.settle()
        assert any(bench.backend.read(slab.region, 777, 4096))
        slab.close()


def test_a_slab_beyond_the_budget_is_refused_with_the_numbers(bench: Bench) -> None:
    first = bench.backend.create_slab(bench.device, 3 * DEVICE_BYTES // 4)
    with pytest.raises(PoolExhausted) as refused:
        bench.backend.create_slab(bench.device, DEVICE_BYTES // 2)
    assert (refused.value.wanted, refused.value.free) == (DEVICE_BYTES // 2, DEVICE_BYTES // 4)
    assert (refused.value.pinned, refused.value.capacity) == (3 * DEVICE_BYTES // 4, DEVICE_BYTES)
    others = [bench.backend.create_slab(device, DEVICE_BYTES) for device in bench.backend.devices()[1:]]
    first.close()
    again = bench.backend.create_slab(bench.device, DEVICE_BYTES)
    assert len({slab.region for slab in (again, first, *others)}) == 2 + len(others)


def test_a_slab_is_closed_once(bench: Bench) -> None:
    slab = bench.backend.create_slab(bench.device, 4096)
    slab.close()
    with pytest.raises(LedgerBroken):
        slab.close()
    with pytest.raises(NotFound):
        bench.backend.read(slab.region, 0, 1)


def test_names_that_are_not_there(bench: Bench) -> None:
    for call in (
        bench.backend.capacity_bytes,
        bench.backend.timeline,
        bench.backend.load_stream,
        bench.backend.store_stream,
        bench.backend.peer_stream,
        lambda device: bench.backend.create_slab(device, 1),
    ):
        with pytest.raises(NotFound, match="device"):
            call("nowhere")
    assert bench.backend.capacity_bytes(bench.device) == DEVICE_BYTES


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 2), (4000, 97), (0, -1)])
def test_nothing_is_read_outside_of_a_region(bench: Bench, offset: int, size_bytes: int) -> None:
    region, memory = host(bench, 4096)
    assert bench.backend.read(region, 3999, 97) == bytes(memory[3999:])
    with pytest.raises(InvalidRequest):
        bench.backend.read(region, offset, size_bytes)


def test_pitched_copies_move_exactly_their_rows_both_ways(bench: Bench) -> None:
    source, given = host(bench, 60_000)
    target, got = host(bench, 60_000, seed=1)
    poison = bytes(got)
    slab = bench.backend.create_slab(bench.device, 100_000)
    width, height, packed, spread = 333, 17, 1001, 5003
    bench.load(bench.job(1, [step((source, 11, slab.region, 7, width, height, packed, spread))]))
    bench.settle()
    bench.store(bench.job(2, [step((slab.region, 7, target, 5, width, height, spread, packed))]))
    bench.settle()
    assert bench.ended == {1: None, 2: None}
    want = bytearray(poison)
    for row in range(height):
        want[5 + row * packed : 5 + row * packed + width] = given[11 + row * packed : 11 + row * packed + width]
    assert got == want
    device = np.frombuffer(bench.backend.read(slab.region, 0, 100_000), np.uint8)
    rows = {i for row in range(height) for i in range(7 + row * spread, 7 + row * spread + width)}
    assert set(np.flatnonzero(device)) <= rows


def test_jobs_run_in_order_and_see_what_came_before(bench: Bench) -> None:
    region, memory = host(bench, 8192)
    slab = bench.backend.create_slab(bench.device, 8192)
    for ticket in range(20):  # each copies the last one's result one kilobyte further, through the device
        first, then = ticket % 7 * 1024, (ticket % 7 + 1) * 1024
        there, back = flat(region, first, slab.region, 0, 1024), flat(slab.region, 0, region, then, 1024)
        bench.load(bench.job(ticket, [step(there), step(back, value=ticket)], end_value=ticket))
    head = bytes(memory[:1024])
    bench.settle()
    assert bench.order == list(range(20))
    assert all(bytes(memory[i * 1024 : (i + 1) * 1024]) == head for i in range(8))
    assert bench.backend.timeline(bench.device).read(0) == 19


def test_the_word_moves_after_each_step_and_the_failure_word_does_not(bench: Bench) -> None:
    region, _ = host(bench, 64)
    slab = bench.backend.create_slab(bench.device, 64)
    copy = flat(region, 0, slab.region, 0, 64)
    start = 0xFFFFFFFE
    steps = [step(copy, value=(start + i) & 0xFFFFFFFF) for i in range(1, 5)]
    bench.load(bench.job(1, [step(value=start), *steps], word=4, end_value=2))
    bench.settle()
    timeline = bench.backend.timeline(bench.device)
    assert (timeline.read(4), timeline.read(5)) == (2, 0)
    if isinstance(timeline, SteppedTimeline):
        assert timeline.history == [(4, start), (4, 0xFFFFFFFF), (4, 0), (4, 1), (4, 2)]


def test_the_descriptor_of_a_shm_slab_is_its_memory_and_keeps_its_size() -> None:
    bench = make("shm")
    region, memory = host(bench, 4096)
    slab = bench.backend.create_slab(bench.device, 4096)
    assert (slab.handle.kind, len(slab.handle.token), slab.handle.size_bytes) == ("memfd", 16, 4096)
    assert slab.handle.token != bench.backend.create_slab(bench.device, 4096).handle.token
    assert slab.fd is not None
    mapped = mmap.mmap(slab.fd, 4096)
    bench.load(bench.job(1, [step(flat(region, 0, slab.region, 0, 4096))]))
    bench.settle()
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)
    bench.backend.close()
    assert mapped[:] == bytes(memory)  # the mapping outlives the daemon's own


def test_a_job_without_words_and_one_without_steps(bench: Bench) -> None:
    region, _ = host(bench, 64)
    slab = bench.backend.create_slab(bench.device, 64)
    bench.store(bench.job(1, [step(flat(region, 0, slab.region, 0, 64), value=5)], word=None))
    bench.store(bench.job(2, []))
    bench.settle()
    assert bench.ended == {1: None, 2: None}
    assert bench.backend.timeline(bench.device).read(0) == 0


OUTSIDE = [
    ("a region that is not there", (99, 0, 2, 0, 8, 1, 8, 8)),
    ("a negative offset", (1, -1, 2, 0, 8, 1, 8, 8)),
    ("one byte beyond the source", (1, 4089, 2, 0, 8, 1, 8, 8)),
    ("one byte beyond the target", (1, 0, 2, 4089, 8, 1, 8, 8)),
    ("a last row beyond the end", (1, 0, 2, 0, 8, 5, 8, 1023)),
    ("a pitch smaller than the width", (1, 0, 2, 0, 8, 2, 7, 8)),
    ("no rows", (1, 0, 2, 0, 8, 0, 8, 8)),
    ("no bytes", (1, 0, 2, 0, 0, 1, 8, 8)),
    ("a product beyond 64 bits", (1, 0, 2, 0, 8, 1 << 62, 8, 1 << 62)),
]


@pytest.mark.parametrize(("why", "copy"), OUTSIDE, ids=[why for why, _ in OUTSIDE])
def test_a_copy_outside_of_its_regions_fails_its_job_and_releases_its_waiters(
    bench: Bench, why: str, copy: tuple[int, ...]
) -> None:
    region, _ = host(bench, 4096)
    slab = bench.backend.create_slab(bench.device, 4096)
    copy = tuple({1: region, 2: slab.region}.get(v, v) if i in (0, 2) else v for i, v in enumerate(copy))
    good = flat(region, 0, slab.region, 0, 16)
    bench.load(bench.job(1, [step(good, value=1), step(flat(region, 0, slab.region, 64, 8), copy, value=2)]))
    bench.load(bench.job(2, [step(good, value=12)], word=2, end_value=12))
    bench.settle()
    assert isinstance(bench.ended[1], CopyOutOfBounds)
    assert bench.ended[2] is None
    timeline = bench.backend.timeline(bench.device)
    assert [timeline.read(word) for word in range(4)] == [9, 9, 12, 0]
    assert not any(bench.backend.read(slab.region, 64, 8))  # the step that broke copied nothing


def test_a_done_that_raises_is_logged_once_and_the_stream_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        bench.load(bench.job(1, [], then=broken))
        bench.load(bench.job(2, []))
        bench.settle()
    assert bench.order == [1, 2]
    assert [record.message for record in caplog.records] == ["copy_done_callback_failed ticket=1"]


def test_close_sees_what_is_on_its_way_land_and_fails_the_rest(bench: Bench) -> None:
    region, _ = host(bench, 64)
    slab = bench.backend.create_slab(bench.device, 64)
    stream, gate = bench.backend.load_stream(bench.device), threading.Event()
    timeline = bench.backend.timeline(bench.device)

    def close_behind_the_gate() -> None:
        gate.wait()
        stream.close()

    copy = flat(region, 0, slab.region, 0, 64)
    stream.submit(bench.job(1, [step(copy, value=3)], then=close_behind_the_gate))
    stream.submit(bench.job(2, [step(copy, value=7)], end_value=7))
    stream.submit(bench.job(3, [step(copy, value=8)], word=2, end_value=8))
    gate.set()
    bench.settle()
    assert bench.ended[1] is None
    had_begun = bench.ended[2] is None  # where more than one slice is on its way at a time
    assert isinstance(bench.ended[2], Unavailable) or (had_begun and bench.backend.name == "cuda")
    assert isinstance(bench.ended[3], Unavailable)
    assert [timeline.read(word) for word in range(4)] == [7, 0 if had_begun else 7, 8, 8]
    with pytest.raises(Unavailable):
        stream.submit(bench.job(4, []))
    bench.waits.pop()


def test_after_close_nothing_is_given_and_closing_again_is_nothing(bench: Bench) -> None:
    bench.backend.create_slab(bench.device, 4096)
    stream = bench.backend.store_stream(bench.device)
    bench.backend.close()
    bench.backend.close()
    with pytest.raises(Unavailable):
        stream.submit(bench.job(1, []))
    for call in (
        lambda: bench.backend.create_slab(bench.device, 1),
        lambda: bench.backend.timeline(bench.device),
    ):
        with pytest.raises(Unavailable):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_close(kind: str) -> None:
    use_and_close(kind)  # whatever is loaded once, is loaded
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(3):
        use_and_close(kind)
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() == descriptors


def use_and_close(kind: str) -> None:
    bench = make(kind)
    slabs = [bench.backend.create_slab(bench.device, 4096) for _ in range(4)]
    slabs[0].close()
    region, _ = host(bench, 64)
    bench.load(bench.job(1, [step(flat(region, 0, slabs[1].region, 0, 64))]))
    bench.settle()
    bench.backend.close()


def test_a_backend_that_was_not_started_gives_nothing() -> None:
    for backend in (ShmBackend(1, 4096), SteppedBackend(1, 4096)):
        with pytest.raises(Unavailable):
            backend.create_slab(backend.devices()[0], 1)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_device_reaches_itself_and_says_whom_else(bench: Bench) -> None:
    reach, here = bench.backend.can_reach, bench.device
    assert here in [other for other in bench.backend.devices() if reach(here, other) and reach(other, here)]
    with pytest.raises(NotFound):
        reach(here, "nowhere")
