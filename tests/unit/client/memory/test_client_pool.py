"""A mapped pool shows the daemon's own bytes, and no wait outlives its load, its deadline or the daemon."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cachesvc_client import (
    AlreadyClosed,
    AttachedPool,
    CacheClient,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    Lease,
    LoadFailed,
    LoadOutcome,
    NotFound,
    NotSupported,
)
from cachesvc_client.memory.device import DevicePlane, PlaneView, to_paddle, to_torch
from cachesvc_client.memory.mapping import MappedMemory
from cachesvc_client.wire.life import LifeConnection
from kvcache.v1 import common_pb2

from cachesvc.model.answers import TicketView
from cachesvc.model.errors import ErrorCode
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import TimelineSlot
from tests.unit.rigs.client_rig import LEASE_ID, PAGES, TOKEN, FakeDaemon, refuse

LAYOUT = Layout(
    4,
    1,
    (PlaneGroup("full"), PlaneGroup("window", 9, 4)),
    (
        Plane("k", 0, "full", (2, 4, 8), "bfloat16"),
        Plane("k_scale", 0, "full", (2, 4), "float32"),
        Plane("k", 1, "full", (1, 4, 8), "float8_e4m3fn"),
        Plane("k", 1, "window", (1, 4, 8), "float8_e4m3fn"),
    ),
)
LAYERS = 4
PROMPT_S = 2.0


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    with CacheClient(daemon.path) as client:
        yield client.open_lease(client.register("m", LAYOUT))


@pytest.fixture
def pool(lease: Lease) -> AttachedPool:
    return lease.attach()


def load(base: int = 10, state: str = "running") -> TicketView:
    return TicketView(1, state, "broken wire", TimelineSlot(4, 5, base, LAYERS), "load", 1, 64)


def test_planes_have_the_layouts_shapes_and_the_daemon_sees_what_is_written(
    daemon: FakeDaemon, pool: AttachedPool
) -> None:
    plane = pool.planes[0, "k"]
    assert plane.shape == (PAGES, 2, 4, 8)
    assert plane.dtype == np.uint16
    assert pool.planes[0, "k_scale"].dtype == np.float32
    before = bytes(daemon.slab(0))
    assert not any(before)
    plane[3] = 0xABCD
    pool.page("full", 3)[0, "k_scale"][:] = 1.5
    seen = bytes(daemon.slab(0))
    assert seen.count(0xABCD.to_bytes(2, "little")) == plane[3].size
    assert seen.count(np.float32(1.5).tobytes()) == 8


def test_planes_of_one_name_in_two_groups_are_found_by_group_alone(pool: AttachedPool) -> None:
    assert set(pool.planes) == {(0, "k"), (0, "k_scale")}
    assert set(pool.group_planes("full")) == {(0, "k"), (0, "k_scale"), (1, "k")}
    pool.group_planes("window")[1, "k"][0] = 7
    assert not pool.group_planes("full")[1, "k"].any()
    with pytest.raises(InvalidRequest, match="full, window"):
        pool.group_planes("other")
    with pytest.raises(InvalidRequest, match="page 8"):
        pool.page("full", PAGES)


def test_a_slab_is_all_bytes_of_its_group_in_place_and_keeps_them_mapped(
    daemon: FakeDaemon, lease: Lease, pool: AttachedPool
) -> None:
    slab = pool.slab("full")
    assert (slab.dtype, slab.shape) == (np.uint8, (len(daemon.slab(0)),))
    assert {plane.ctypes.data - slab.ctypes.data for plane in pool.group_planes("full").values()} == {0, 1024, 1280}
    slab[-1] = 7
    assert bytes(daemon.slab(0))[-1] == 7
    pool.slab("window")[0] = 9
    assert (pool.group_planes("window")[1, "k"][0, 0, 0, 0], slab[0]) == (9, 0)
    with pytest.raises(InvalidRequest, match="full, window"):
        pool.slab("other")
    assert (pool.close(), pool.held, slab[-1]) == (False, 1, 7)
    del slab
    assert pool.close()
    with pytest.raises(AlreadyClosed):
        pool.slab("full")


def test_a_slab_as_a_torch_tensor_is_the_same_bytes(pool: AttachedPool) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    tensor = pool.slab_to_torch("window")
    assert (tensor.dtype, tensor.numel()) == (torch.uint8, pool.slab("window").nbytes)
    assert tensor.data_ptr() == pool.slab("window").ctypes.data


def test_a_wait_ends_with_its_layer(daemon: FakeDaemon, pool: AttachedPool) -> None:
    writer = threading.Thread(target=lambda: daemon.timeline.write(4, 12))
    with pytest.raises(DeadlineExceeded):
        pool.wait_layer(load(), 0, timeout_s=0)
    writer.start()
    pool.wait_layer(load(), 1, timeout_s=PROMPT_S)
    writer.join()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        pool.wait_ticket(load(), timeout_s=0.01)
    daemon.timeline.write(4, 14)
    pool.wait_ticket(load(), timeout_s=0)


def test_a_wait_is_cyclic_over_32_bits(daemon: FakeDaemon, pool: AttachedPool) -> None:
    last = (1 << 32) - 2
    daemon.timeline.write(4, last)
    with pytest.raises(DeadlineExceeded):
        pool.wait_layer(load(last), 3, timeout_s=0)
    daemon.timeline.write(4, 2)
    pool.wait_layer(load(last), 3, timeout_s=0)


def test_a_failed_load_wakes_and_says_so(daemon: FakeDaemon, pool: AttachedPool) -> None:
    daemon.timeline.write(5, 14)
    daemon.timeline.write(4, 14)
    with pytest.raises(LoadFailed, match="recompute"):
        pool.wait_layer(load(), 0, timeout_s=0)
    with pytest.raises(LoadFailed, match="broken wire"):
        pool.wait_layer(load(state="failed"), 0, timeout_s=0)


def test_a_failure_that_is_asked_for_late_is_not_lost_in_later_ones(daemon: FakeDaemon, pool: AttachedPool) -> None:
    for later in (14, 18, 30):  # the slot's later loads failed too
        daemon.timeline.write(5, later)
        daemon.timeline.write(4, later)
        with pytest.raises(LoadFailed, match="recompute"):
            pool.wait_layer(load(), 0, timeout_s=0)


def test_later_loads_of_its_slot_that_come_say_nothing_of_a_load(daemon: FakeDaemon, pool: AttachedPool) -> None:
    daemon.timeline.write(5, 10)  # one before it failed
    daemon.timeline.write(4, 22)
    pool.wait_layer(load(), 0, timeout_s=0)


def test_what_need_not_or_cannot_be_waited_for(pool: AttachedPool) -> None:
    pool.wait_ticket(load(state="done"), timeout_s=0)
    with pytest.raises(InvalidRequest, match="layer 4 of a load of 4"):
        pool.wait_layer(load(), LAYERS, timeout_s=0)
    with pytest.raises(InvalidRequest, match=r"lease\.wait_tickets"):
        pool.wait_ticket(load()._replace(slot=None), timeout_s=0)


def test_the_end_of_the_daemon_ends_every_wait_soon(daemon: FakeDaemon, pool: AttachedPool) -> None:
    ended: list[str] = []

    def wait() -> None:
        try:
            pool.wait_ticket(load(), timeout_s=60)
        except DaemonUnavailable as error:
            ended.append(str(error))

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    began = time.monotonic()
    daemon.hang_up()
    for waiter in waiters:
        waiter.join()
    assert time.monotonic() - began < PROMPT_S
    assert len(ended) == 3


def test_no_stream_waits_for_host_memory_and_what_was_waited_for_is_confirmed(
    daemon: FakeDaemon, pool: AttachedPool
) -> None:
    with pytest.raises(NotSupported, match="use wait_layer"):
        pool.wait_layer_on(0, load(), 0)
    with pytest.raises(NotSupported, match="use wait_layer"):
        pool.wait_ticket_on(0, load())
    with pytest.raises(Conflict, match="has not ended"):
        pool.confirm(load())
    assert pool.outcome(load(state="failed")) is LoadOutcome.FAILED
    daemon.timeline.write(4, 14)
    pool.confirm(load(), load(state="done"))
    daemon.timeline.write(5, 14)
    with pytest.raises(LoadFailed):
        pool.confirm(load())


def test_closing_unmaps_tells_the_daemon_and_ends_all_use(daemon: FakeDaemon, pool: AttachedPool) -> None:
    ended: list[str] = []

    def wait() -> None:
        try:
            pool.wait_ticket(load(), timeout_s=60)
        except AlreadyClosed as error:
            ended.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    pool.close()
    pool.close()
    waiter.join()
    assert len(ended) == 1
    for use in (lambda: pool.planes, lambda: pool.timeline, lambda: pool.page("full", 0)):
        with pytest.raises(AlreadyClosed, match="attach again"):
            use()
    with pytest.raises(AlreadyClosed):
        pool.wait_ticket(load(), timeout_s=0)


def test_the_daemon_is_told_of_an_unmapping_only_when_nothing_is_held(daemon: FakeDaemon, lease: Lease) -> None:
    lease.attach().close()
    (told,) = daemon.seen["Detach"]
    assert (told.lease_id, told.rank, told.process_token) == (LEASE_ID, 0, TOKEN)
    other = lease.attach()
    kept = other.planes[0, "k"]
    kept[0] = 5
    assert not other.close()
    assert len(daemon.seen["Detach"]) == 1
    assert kept[0].min() == 5
    del kept
    assert other.close()
    assert other.close()
    assert len(daemon.seen["Detach"]) == 2


def test_a_rank_is_detached_with_the_last_pool_of_it(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.attach(), lease.attach()
    daemon.memory_kind = "rdma"
    with pytest.raises(NotSupported):
        lease.attach()
    daemon.faults["Attach"].append(refuse(ErrorCode.NOT_FOUND))
    with pytest.raises(NotFound):
        lease.attach()
    assert first.close()
    assert not daemon.seen["Detach"]
    assert second.close()
    assert len(daemon.seen["Detach"]) == 1


def test_a_close_that_fails_says_how_much_is_still_held(lease: Lease, caplog: pytest.LogCaptureFixture) -> None:
    pool = lease.attach()
    kept = [pool.planes[0, "k"][2:], pool.planes[0, "k_scale"], pool.group_planes("window")[1, "k"]]
    assert not pool.close()
    assert pool.held == len(kept)
    assert f"pool_still_mapped rank=0 arrays={len(kept)}" in caplog.text
    kept.pop()
    assert (pool.close(), pool.held) == (False, 2)
    kept.clear()
    assert (pool.close(), pool.held) == (True, 0)


def test_a_sequence_without_loads_has_lost_none(daemon: FakeDaemon, lease: Lease, pool: AttachedPool) -> None:
    sequence = lease.match(b"")
    assert lease.pools == (pool,)
    daemon.hang_up()
    assert not sequence.lost_tokens()


def test_memory_of_a_kind_or_under_a_name_that_cannot_be_had(daemon: FakeDaemon, lease: Lease) -> None:
    daemon.memory_kind = "rdma"
    with pytest.raises(NotSupported, match=r"'rdma'.*memfd, cuda_ipc, cuda_fd"):
        lease.attach()
    daemon.memory_kind = "cuda_ipc"  # no machine has a GPU of that name
    with pytest.raises(NotSupported, match=r"lies on shm-0.*CUDA_VISIBLE_DEVICES"):
        lease.attach()
    assert len(daemon.seen["Detach"]) == 2  # a worker that was refused is no writer, and may end without harm
    daemon.memory_kind = "memfd"
    life = LifeConnection(daemon.path, PROMPT_S, lambda: None)
    life.start()
    with pytest.raises(NotFound, match="unknown token"):
        life.fetch_fd(b"x" * 16)
    life.close()
    with pytest.raises(DaemonUnavailable):
        life.fetch_fd(b"x" * 16)
    assert lease.attach().pages == (PAGES, PAGES)


def test_memory_for_which_a_process_has_no_room_is_refused_by_name() -> None:
    size_bytes = 1 << 47
    descriptor = os.memfd_create("slab")
    os.ftruncate(descriptor, size_bytes)
    handle = common_pb2.MemoryHandle(kind="memfd", token=b"t", size_bytes=size_bytes)
    memory = MappedMemory(handle, lambda _: descriptor, protection=mmap.PROT_READ)
    with pytest.raises(NotSupported, match="ulimit -v"):
        memory.start()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert memory.close()


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_plane_as_a_tensor_has_the_layouts_dtype_and_the_same_bytes(pool: AttachedPool, framework: str) -> None:
    pytest.importorskip(framework, exc_type=ImportError)
    take = getattr(pool, f"to_{framework}")
    tensor = take(0, "k")
    assert str(tensor.dtype).endswith("bfloat16")
    assert int(tensor.data_ptr()) == pool.planes[0, "k"].ctypes.data
    assert str(take(1, "k", "window").dtype).endswith("float8_e4m3fn")
    with pytest.raises(InvalidRequest, match="2 groups"):
        take(1, "k")


def test_a_plane_on_a_gpu_is_nothing_for_a_torch_without_cuda() -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    with pytest.raises(NotSupported, match="install a CUDA build"):
        to_torch(DevicePlane(4096, 1024, PlaneView((3, 2), np.uint16, 64, (128, 2)), 0, object()), "bfloat16")


def test_what_a_framework_would_take_for_something_else_is_refused() -> None:
    with pytest.raises(NotSupported, match="uint16"):
        to_paddle(np.zeros(4, np.uint16), "uint16")
