"""The host pool: memory that arrives chunk by chunk, pages that never cross one, and bytes that never pass
on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.memory.extents import map_memfd, populate, sealed_memfd
from cachesvc.memory.host_pool import HostPool, HostSlab, divide
from cachesvc.memory.numa import MemoryLimit, Placement, memory_limits
from cachesvc.model.errors import InvalidRequest, LedgerBroken, PoolExhausted, Unavailable
from cachesvc.model.words import Run
from tests.sim.stepped_backend import SteppedBackend

MIB = 1 << 20


class GatedBackend(SteppedBackend):
    """Registration waits for a permit: the test says when the next chunk arrives."""

    def __init__(self) -> None:
        super().__init__(1, MIB)
        self.permits = threading.Semaphore(0)
        self.start()

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        self.permits.acquire()
        return super().register_host(buffer)


class RefusingBackend(SteppedBackend):
    """Takes one chunk and no more."""

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        if self._regions:
            raise OSError(12, "cannot lock memory")
        return super().register_host(buffer)


@contextmanager
def pool_of(
    total: int, chunk: int, *, threads: int = 2, backend: SteppedBackend | None = None
) -> Iterator[tuple[HostPool, threading.Semaphore]]:
    """A started pool, and a semaphore that counts the chunks that were announced."""
    told = threading.Semaphore(0)
    if backend is None:
        backend = SteppedBackend(1, MIB)
        backend.start()
    pool = HostPool(total, chunk, threads, None, backend, on_ready=lambda _: told.release())
    pool.start()
    try:
        yield pool, told
    finally:
        if isinstance(backend, GatedBackend):
            backend.permits.release(pool.chunks)
        pool.close()


def arrive(pool: HostPool, told: threading.Semaphore) -> None:
    for _ in range(pool.chunks):
        told.acquire()


def wait_ready(pool: HostPool, slab: HostSlab) -> None:
    """Until every page of a slab is usable."""
    more = threading.Semaphore(0)
    counts: list[int] = []

    def come(run: Run) -> None:
        counts.append(run.count)
        more.release()

    ready = sum(run.count for run in pool.ready_pages(slab, come))
    while ready + sum(counts) < slab.pages:
        more.acquire()


def test_every_chunk_is_announced_once_and_is_zeroed() -> None:
    chunks: list[int] = []
    done = threading.Event()
    backend = SteppedBackend(1, MIB)
    backend.start()

    def announced(chunk: int) -> None:
        chunks.append(chunk)
        if len(chunks) == 3:
            done.set()

    pool = HostPool(5 * MIB + 4095, 2 * MIB, 3, None, backend, on_ready=announced)
    assert pool.total_bytes == 5 * MIB
    pool.start()
    done.wait()
    assert sorted(chunks) == [0, 1, 2]
    assert pool.ready_chunks == pool.chunks == 3
    assert [backend.read(region, 0, size) for region, size in ((1, MIB), (2, MIB), (3, MIB))] == [bytes(MIB)] * 3
    pool.close()
    pool.close()


def test_pages_become_usable_as_their_chunks_arrive() -> None:
    backend = GatedBackend()
    with pool_of(3 * MIB, MIB, threads=1, backend=backend) as (pool, told):
        slab = pool.reserve(MIB // 4, 11)
        later: list[Run] = []
        assert pool.ready_pages(slab, later.append) == []
        with pytest.raises(InvalidRequest, match="not usable"):
            pool.view(slab, 0)
        assert slab.table.pages == 0
        backend.permits.release()
        told.acquire()
        assert later == [Run(0, 4)]
        assert pool.ready_pages(slab) == [Run(0, 4)]
        assert (slab.table.pages, pool.ready_chunks) == (4, 1)
        backend.permits.release(2)
        told.acquire()
        told.acquire()
        assert later == [Run(0, 4), Run(4, 4), Run(8, 3)]
        assert [(e.first_page, e.pages, e.offset) for e in slab.table.extents] == [(0, 4, 0), (4, 4, 0), (8, 3, 0)]
        assert len({e.region for e in slab.table.extents}) == 3


def test_a_page_that_does_not_fit_behind_the_last_one_goes_to_the_next_chunk() -> None:
    with pool_of(2 * MIB, MIB) as (pool, told):
        arrive(pool, told)
        slab = pool.reserve(700_000, 2)
        assert [(e.first_page, e.pages) for e in slab.table.extents] == [(0, 1), (1, 1)]
        for page in range(2):
            assert len(pool.view(slab, page)) == 700_000
        with pytest.raises(PoolExhausted) as full:
            pool.reserve(700_000, 1)
        assert (full.value.wanted, full.value.free, full.value.pinned, full.value.capacity) == (1, 0, 2, 2)
        assert pool.reserve(300_000, 2).pages == 2


def test_views_of_pages_do_not_overlap() -> None:
    with pool_of(2 * MIB, MIB) as (pool, told):
        arrive(pool, told)
        slabs = [pool.reserve(33_333, 20), pool.reserve(1001, 300)]
        for index, slab in enumerate(slabs):
            for page in range(slab.pages):
                pool.view(slab, page)[:] = bytes([(index * 131 + page * 7 + 1) % 251]) * slab.page_bytes
        for index, slab in enumerate(slabs):
            for page in range(slab.pages):
                assert set(pool.view(slab, page)) == {(index * 131 + page * 7 + 1) % 251}


def test_what_a_tenant_left_is_gone_before_the_next_one_may_look() -> None:
    with pool_of(8 * MIB, 4 * MIB) as (pool, told):
        arrive(pool, told)
        slab = pool.reserve(MIB, 8)
        for _ in range(20):
            wait_ready(pool, slab)
            for page in range(slab.pages):
                view = pool.view(slab, page)
                assert not any(view[::101])
                assert bytes(view[-64:]) == bytes(64)
                view[:] = b"\xaa" * len(view)
            pool.release(slab)
            slab = pool.reserve(MIB // 2, 16) if slab.pages == 8 else pool.reserve(MIB, 8)
        assert pool.free_bytes == 0


def test_slabs_that_are_released_while_they_are_zeroed_leave_the_pool_whole() -> None:
    with pool_of(64 * MIB, 64 * MIB) as (pool, told):
        arrive(pool, told)
        pool.release(pool.reserve(64 * MIB, 1))
        for _ in range(50):
            pool.release(pool.reserve(32 * MIB, 2))
        assert pool.free_bytes == 64 * MIB
        last = pool.reserve(16 * MIB, 4)
        wait_ready(pool, last)
        for page in range(4):  # no thread zeroes behind the new owner's back
            pool.view(last, page)[:] = bytes([page + 1]) * (16 * MIB)
        assert pool.ready_pages(last) == [Run(0, 4)]
        for page in range(4):
            assert set(pool.view(last, page)[::4096]) == {page + 1}


def test_a_slab_that_was_never_usable_leaves_nothing_to_zero() -> None:
    backend = GatedBackend()
    with pool_of(MIB, MIB, threads=1, backend=backend) as (pool, told):
        pool.release(pool.reserve(MIB // 2, 2))
        slab = pool.reserve(MIB, 1)
        backend.permits.release()
        told.acquire()
        assert pool.ready_pages(slab) == [Run(0, 1)]


def test_a_slab_is_released_once_and_to_its_own_pool() -> None:
    with pool_of(MIB, MIB) as (pool, _), pool_of(MIB, MIB) as (other, _):
        slab = pool.reserve(4096, 3)
        with pytest.raises(LedgerBroken):
            other.release(slab)
        pool.release(slab)
        with pytest.raises(LedgerBroken):
            pool.release(slab)
        assert pool.free_bytes == MIB


def test_an_empty_slab_and_an_empty_pool() -> None:
    with pool_of(MIB, MIB) as (pool, _):
        slab = pool.reserve(4096, 0)
        assert (slab.pages, pool.ready_pages(slab), slab.table.pages) == (0, [], 0)
        pool.release(slab)
    with pool_of(0, MIB) as (pool, _):
        assert pool.chunks == 0
        with pytest.raises(PoolExhausted):
            pool.reserve(4096, 1)


def test_a_pool_larger_than_what_is_left_is_refused_with_the_numbers() -> None:
    backend = SteppedBackend(1, MIB)
    limits = (MemoryLimit("cgroup", 3 * MIB), MemoryLimit("MemAvailable", 9 * MIB))
    pool = HostPool(4 * MIB, MIB, 1, None, backend, limits=lambda: limits)
    with pytest.raises(InvalidRequest, match=rf"{4 * MIB} bytes, but cgroup leaves {3 * MIB}"):
        pool.start()
    pool.close()


@pytest.mark.parametrize(("total", "chunk", "threads"), [(MIB, 0, 1), (MIB, 1 << 31, 1), (MIB, 5000, 1), (MIB, MIB, 0)])
def test_sizes_that_cannot_be(total: int, chunk: int, threads: int) -> None:
    with pytest.raises(InvalidRequest):
        HostPool(total, chunk, threads, None, SteppedBackend(1, MIB))


def test_a_chunk_that_cannot_be_registered_leaves_the_others_in_use(caplog: pytest.LogCaptureFixture) -> None:
    backend = RefusingBackend(1, MIB)
    backend.start()
    told = threading.Semaphore(0)
    pool = HostPool(3 * MIB, MIB, 1, None, backend, on_ready=lambda _: told.release())
    with caplog.at_level(logging.ERROR):
        pool.start()
        told.acquire()
        pool.join_filling()
    assert isinstance(pool.failure, OSError)
    (record,) = caplog.records
    assert record.message == "host_pool_filling_failed ready_chunks=1 chunks=3 reason=[Errno 12] cannot lock memory"
    assert not record.exc_info, "memory that ran out is no defect: what there is to say is said in a line"
    slab = pool.reserve(MIB, 3)
    assert pool.ready_pages(slab) == [Run(0, 1)]
    pool.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_defect_while_filling_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    class Defective(SteppedBackend):
        def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
            raise ZeroDivisionError("a defect")

    pool = HostPool(3 * MIB, MIB, threads, None, Defective(1, MIB))
    with caplog.at_level(logging.ERROR):
        pool.start()
        pool.join_filling()
    (record,) = caplog.records
    assert record.message == "host_pool_filling_failed ready_chunks=0 chunks=3 reason=a defect"
    assert record.exc_info
    pool.close()


def test_chunks_are_divided_among_the_nodes_of_the_devices_from_the_first_one_on() -> None:
    assert divide([4] * 8, {0: 4, 1: 4}) == [0, 1] * 4
    assert divide([4] * 6, {0: 1, 1: 2}) == [1, 0, 1, 1, 0, 1]
    assert divide([4, 4, 1], {3: 1}) == [3, 3, 3]
    assert divide([4, 4], {}) == [None, None]
    assert divide([], {0: 1}) == []


def test_pages_of_a_device_lie_on_its_node_while_there_is_room() -> None:
    """With a made-up machine: two GPUs on node 1, one on node 0, and one whose node is unknown."""
    bound: list[int | None] = []

    def bind(address: int, size_bytes: int, node: int | None) -> Placement:
        bound.append(node)
        return Placement.PLACED

    backend = SteppedBackend(1, MIB)
    backend.start()
    told = threading.Semaphore(0)
    nodes = {"gpu-0": 0, "gpu-1": 1, "gpu-2": 1}
    pool = HostPool(6 * MIB, MIB, 1, nodes, backend, on_ready=lambda _: told.release(), bind=bind)
    pool.start()
    arrive(pool, told)
    assert bound == divide([MIB] * 6, {0: 1, 1: 2})

    def nodes_of(slab: HostSlab) -> list[int | None]:
        return [bound[extent.place.chunk] for extent in slab.extents]

    assert nodes_of(pool.reserve(MIB // 2, 2, "gpu-0")) == [0]
    assert nodes_of(pool.reserve(MIB, 3, "gpu-2")) == [1, 1, 1]
    last = pool.reserve(MIB // 2, 4, "gpu-1")
    assert nodes_of(last) == [1, 0], "what its node no longer holds lies elsewhere"
    assert len(pool.view(last, 3)) == MIB // 2
    pool.release(last)
    assert nodes_of(pool.reserve(MIB, 1, "gpu-3")) == [0], "lowest addresses first"
    pool.close()


def test_closing_stops_the_filling_and_nothing_is_given_any_more() -> None:
    before = set(threading.enumerate())  # threads of tests before this one may end meanwhile
    with pool_of(256 * MIB, 128 * MIB) as (pool, _):
        slab = pool.reserve(MIB, 2)
        pool.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(Unavailable):
            pool.reserve(4096, 1)
        with pytest.raises(InvalidRequest):
            pool.view(slab, 0)


def test_a_watcher_that_raises_is_logged_and_the_pool_fills_on(caplog: pytest.LogCaptureFixture) -> None:
    backend = GatedBackend()

    def broken(run: Run) -> None:
        raise ZeroDivisionError(run)

    with caplog.at_level(logging.ERROR), pool_of(2 * MIB, MIB, threads=1, backend=backend) as (pool, told):
        pool.ready_pages(pool.reserve(MIB, 1), broken)
        backend.permits.release(2)
        arrive(pool, told)
        assert pool.failure is None
    assert [record.message for record in caplog.records] == ["host_pages_callback_failed first_page=0 pages=1"]


def test_where_populating_is_unknown_pages_are_touched() -> None:
    fd = sealed_memfd("t", 8192)
    view = map_memfd(fd, 8192)
    view[:] = b"\xff" * 8192
    populate(view, 1, 100)  # an odd address is what the kernel calls EINVAL, as it does an unknown advice
    assert bytes(view[:102]) == b"\xff" + bytes(100) + b"\xff"
    with pytest.raises(AssertionError):
        populate(view, 4096, 8192)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limits_of_a_plain_machine(tmp_path: Path) -> None:
    root = machine(
        tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "proc/self/cgroup": "0::/\n"}
    )
    assert memory_limits(root) == (MemoryLimit("MemAvailable", 2 * MIB),)


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1048576 kB\n",
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "4096\n",
        "sys/fs/cgroup/pod/memory.max": "1000000\n",
        "sys/fs/cgroup/pod/memory.current": "400000\n",
    }
    root = machine(tmp_path, files)
    assert memory_limits(root)[0] == MemoryLimit(str(root / "sys/fs/cgroup/pod/memory.max"), 600_000)


def test_the_older_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/on/the/host\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "500\n",  # inside a container only the mount exists
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "700\n",
        "sys/fs/cgroup/memory/on/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/on/memory.usage_in_bytes": "1\n",
    }
    root = machine(tmp_path, files)
    assert [limit.available_bytes for limit in memory_limits(root)] == [0]


def test_a_machine_that_tells_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == ()


def test_this_machine_has_memory_left() -> None:
    assert memory_limits()[0].available_bytes > 0
