"""The CUDA backend on a GPU whose calls break: every job ends, nothing stays behind, and the log says it once."""

from __future__ import annotations

import gc
import logging
import mmap
from contextlib import suppress
from pathlib import Path

import pytest

from cachesvc.memory.cuda import CudaBackend
from cachesvc.model.errors import CacheError, InvalidRequest, PoolExhausted, Unavailable
from tests.contracts.host_gpu import HostGpu, HostMemory
from tests.contracts.test_backend import DEVICE_BYTES, Bench, flat, host, step

CALLS_OF_START = ("start", "shrink", "free_bytes", "queue", "open_peer")


def memory_files() -> set[int]:
    """Inodes of those open. Threads of other tests' libraries open descriptors of other kinds when they like."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:" in str(path.readlink()):
                found.add(path.stat().st_ino)
    return found


def started(*gpus: HostGpu) -> Bench:
    backend = CudaBackend(gpus, DEVICE_BYTES, timeline_words=64)
    backend.start()
    for gpu in gpus:
        backend.open_sheet(gpu.uuid, 0)
    return Bench(backend, lambda: None, gpus[0].uuid)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("name", "good"), [*((name, 0) for name in CALLS_OF_START), ("queue", 1)])
def test_a_start_that_breaks_anywhere_leaves_nothing_behind(name: str, good: int, which: int) -> None:
    gc.collect()
    files = memory_files()
    gpus = (HostGpu(0), HostGpu(1))
    gpus[which].breaks_after[name] = good
    backend = CudaBackend(gpus, DEVICE_BYTES, timeline_words=64)
    with pytest.raises(Unavailable, match="shm"):
        backend.start()
    assert all(gpu.is_whole() for gpu in gpus)
    gc.collect()  # threads that never ran
    assert memory_files() <= files  # what an earlier test left may have gone meanwhile
    with pytest.raises(Unavailable):
        backend.create_slab(gpus[0].uuid, 1)


def test_a_start_and_a_close_that_break_tell_of_the_start() -> None:
    gpus = (HostGpu(0), HostGpu(1))
    gpus[0].breaks = {"close", "unregister_host", "queue_close"}
    gpus[1].breaks = {"start"}
    with pytest.raises(Unavailable, match="start broke"):
        CudaBackend(gpus, DEVICE_BYTES).start()
    assert all(gpu.is_whole() for gpu in gpus)


def test_a_pool_beyond_the_gpu_is_refused_and_nothing_stays() -> None:
    gpus = (HostGpu(0), HostGpu(1, free=DEVICE_BYTES))
    with pytest.raises(InvalidRequest, match="ask for less"):
        CudaBackend(gpus, DEVICE_BYTES).start()
    assert all(gpu.is_whole() for gpu in gpus)


@pytest.mark.parametrize("call", ["submit", "wait"])
def test_one_call_that_breaks_fails_its_job_alone(call: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu = HostGpu()
    bench = started(gpu)
    region, memory = host(bench, 4096)
    slab = bench.backend.create_slab(bench.device, 4096)
    gpu.breaks = {call}
    bench.load(bench.job(1, [step(flat(region, 0, slab.region, 0, 64), value=1)]))
    bench.settle()
    gpu.breaks = set()
    bench.load(bench.job(2, [step(flat(region, 0, slab.region, 0, 4096), value=12)], word=2, end_value=12))
    bench.settle()
    assert str(bench.ended[1]) == f"{call} broke"
    assert bench.ended[2] is None
    assert bench.backend.read(slab.region, 0, 4096) == bytes(memory)
    assert [bench.backend.timeline(bench.device).read(word) for word in range(4)] == [9, 9, 12, 0]
    bench.backend.close()
    assert gpu.is_whole()
    assert not caplog.records


def test_a_gpu_that_dies_ends_every_job_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    gpu = HostGpu()
    bench = started(gpu)
    region, _ = host(bench, 4096)
    slab = bench.backend.create_slab(bench.device, 4096)
    gpu.is_dead = True
    with caplog.at_level(logging.INFO):
        for ticket in range(3):
            one = [step(flat(region, 0, slab.region, 0, 64), value=ticket)]
            bench.load(bench.job(2 * ticket, one, word=4 * ticket))
            bench.store(bench.job(2 * ticket + 1, one, word=4 * ticket + 2))
        bench.settle()
        submitted = gpu.told["submit"]
        bench.load(bench.job(9, [step(flat(region, 0, slab.region, 0, 64))], word=12))
        bench.settle()
        with pytest.raises(Unavailable, match="restart the daemon"):
            bench.backend.create_slab(bench.device, 4096)
        slab.close()
        bench.backend.close()
    assert gpu.told["submit"] == submitted  # nothing is tried again
    assert all("restart the daemon" in str(error) for error in bench.ended.values())
    assert [record.message for record in caplog.records] == [f"gpu_broken device={gpu.uuid} reason=submit broke"]
    assert gpu.is_whole()


def test_the_budget_comes_back_where_the_gpu_gives_no_memory() -> None:
    class Full(HostGpu):
        def allocate(self, size_bytes: int, *, vmm: bool) -> HostMemory:
            if size_bytes == DEVICE_BYTES:
                raise MemoryError("no memory")
            return super().allocate(size_bytes, vmm=vmm)

    for gpu, error in ((HostGpu(), Unavailable), (Full(), PoolExhausted)):
        bench = started(gpu)
        gpu.breaks = {"allocate"}
        for _ in range(2):
            with pytest.raises(CacheError) as told:
                bench.backend.create_slab(bench.device, DEVICE_BYTES)
            assert isinstance(told.value, error)
        gpu.breaks = set()
        if error is Unavailable:
            bench.backend.create_slab(bench.device, DEVICE_BYTES).close()
        bench.backend.close()
        assert gpu.is_whole()


def test_where_slabs_are_vmm_memory_nothing_asks_for_legacy_handles() -> None:
    """Some GPUs give no legacy handles; operators choose VMM for them."""

    class NoHandles(HostGpu):
        def allocate(self, size_bytes: int, *, vmm: bool) -> HostMemory:
            if not vmm:
                raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")
            return super().allocate(size_bytes, vmm=vmm)

    gpu = NoHandles()
    backend = CudaBackend((gpu,), DEVICE_BYTES, vmm=True)
    backend.start()
    backend.create_slab(gpu.uuid, DEVICE_BYTES).close()
    backend.close()
    assert gpu.is_whole()


def test_a_chunk_that_cannot_be_pinned_leaves_those_before_it() -> None:
    gpu = HostGpu()
    bench = started(gpu)
    first, memory = host(bench, 4096)
    gpu.breaks = {"register_host"}
    with pytest.raises(Unavailable, match="ulimit"):
        bench.backend.register_host(memoryview(mmap.mmap(-1, 4096)))
    assert bench.backend.read(first, 0, 4096) == bytes(memory)
    bench.backend.close()
    assert gpu.is_whole()


def test_what_is_told_to_a_backend_that_does_not_run_is_nothing() -> None:
    gpu = HostGpu()
    backend = CudaBackend((gpu,), DEVICE_BYTES, timeline_words=64)
    for _ in range(2):
        backend.expedite(gpu.uuid, 1)
        backend.pause_background(gpu.uuid, 1.0)
        backend.start()
        backend.close()
    assert gpu.is_whole()
