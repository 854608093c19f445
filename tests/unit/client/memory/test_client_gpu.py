"""A pool on a GPU: mapped by its kind, shown in place, waited for by streams; and no stream waits for a dead daemon."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cachesvc_client import (
    AlreadyClosed,
    Conflict,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    GpuFailed,
    InvalidRequest,
    LoadFailed,
    NotSupported,
)
from cachesvc_client.memory.cuda import CudaDevice, open_device
from cachesvc_client.memory.device import DevicePlane, PlaneView
from cachesvc_client.memory.pool import AttachedPool

from cachesvc.memory.extents import map_memfd
from cachesvc.model.answers import TicketView
from cachesvc.model.futex import Words, wait_reached, words_of
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import TimelineSlot
from gpu_ops.driver import CudaError
from tests.unit.rigs.client_gpu_rig import UUID, GpuRig
from tests.unit.rigs.client_rig import PAGES, FakeDaemon

LAYERS = 4
LAYOUT = Layout(
    4,
    1,
    (PlaneGroup("full"),),
    (Plane("k", 0, "full", (2, 4, 8), "bfloat16"), Plane("k_scale", 0, "full", (2, 4), "float32")),
)
WORD, FAILED = 4, 5


@pytest.fixture
def rig(daemon: FakeDaemon) -> Iterator[GpuRig]:
    rig = GpuRig(daemon, LAYOUT)
    yield rig
    rig.life.close()


def load(ticket: int = 1, base: int = 10, state: str = "running", word: int = WORD) -> TicketView:
    return TicketView(ticket, state, "broken wire", TimelineSlot(word, word + 1, base, LAYERS), "load", 1, 64)


def words_seen(pool: AttachedPool) -> Words:
    """The timeline as this process has it mapped."""
    return pool.timeline[:]


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_fd"])
def test_planes_lie_in_the_daemons_memory_and_closing_gives_all_back(daemon: FakeDaemon, kind: str) -> None:
    rig = GpuRig(daemon, LAYOUT, kind)
    pool = rig.pool()
    second = rig.pool()
    assert pool.planes[0, "k"].shape == (PAGES, 2, 4, 8)
    assert pool.planes[0, "k"].dtype == np.uint16
    pool.page("full", 3)[0, "k_scale"][:] = 1.5
    assert (pool.slab("full").dtype, pool.slab("full").nbytes) == (np.uint8, len(daemon.slab(0)))
    assert pool.slab("full").ctypes.data == pool.planes[0, "k"].ctypes.data
    seen = bytes(daemon.slab(0)) if kind == "cuda_fd" else rig.gpu.memory[bytes(64)].tobytes()
    assert seen.count(np.float32(1.5).tobytes()) == 8
    assert pool.close()
    assert pool.close()
    assert rig.told == 1
    assert second.close()
    assert rig.gpu.is_whole()
    with pytest.raises(AlreadyClosed):
        _ = pool.planes
    rig.life.close()


def test_memory_stays_mapped_while_an_array_of_it_is_held(rig: GpuRig) -> None:
    pool = rig.pool()
    kept = pool.planes[0, "k"][2:]
    assert not pool.close()
    assert pool.held == 1
    assert rig.told == 0
    assert rig.gpu.is_started
    kept[:] = 3
    del kept
    assert pool.close()
    assert rig.told == 1
    assert rig.gpu.is_whole()


def test_what_the_daemon_says_is_checked_and_nothing_stays_mapped(rig: GpuRig) -> None:
    tried: list[str] = []

    def refused(match: str, change: Callable[[Any], object]) -> None:
        tried.append(match)
        good = type(rig.attached).FromString(rig.attached.SerializeToString())
        change(rig.attached)
        with pytest.raises(DaemonFault, match=match):
            rig.pool()
        rig.attached.CopyFrom(good)
        assert rig.gpu.is_whole()
        assert rig.told == len(tried)

    def place(name: str, value: int) -> Callable[[Any], object]:
        return lambda answer: setattr(answer.slabs[0].planes[1], name, value)

    refused("does not fit its slab: it ends", place("offset", 1 << 40))
    refused("does not fit its slab: it ends", place("page_stride", 1 << 20))
    refused("no multiples of its 4-byte", place("offset", 2))
    refused("IPC handle of 3 bytes", lambda answer: setattr(answer.slabs[0].handle, "token", b"abc"))
    rig.pool().close()


def test_a_gpu_that_is_not_here_is_refused_with_what_to_do() -> None:
    with pytest.raises(NotSupported, match=rf"{UUID}.*CUDA_VISIBLE_DEVICES"):
        open_device(UUID)


class BrokenGpu:
    """Every call fails with one code."""

    uuid = UUID
    facts = SimpleNamespace(ordinal=0)

    def __init__(self, code: int) -> None:
        self.pinned: list[int] = []
        self._error = CudaError("cuAny", code, "CUDA_ERROR_ANY", "what the driver says")

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext(self)

    def number(self, *_: object) -> int:
        raise self._error

    def open_memory(self, *_: object) -> None:
        raise self._error

    def wait_word(self, *_: object) -> None:
        raise self._error

    def register_host(self, address: int, _: int) -> None:
        self.pinned.append(address)

    def unregister_host(self, address: int) -> None:
        self.pinned.remove(address)

    def device_address(self, _: int) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (201, NotSupported, "another process"),
        (801, NotSupported, "MIG"),
        (2, GpuFailed, "cuAny"),
        (999, GpuFailed, "999"),
    ],
)
def test_memory_that_cannot_be_mapped_says_why(code: int, kind: type[Exception], advice: str) -> None:
    device = CudaDevice(BrokenGpu(code))  # type: ignore[arg-type]
    with pytest.raises(kind, match=advice):
        device.open_memory(bytes(64), None, 4096)
    with pytest.raises(kind, match=advice):
        device.map_fd_over(0, 1 << 20, 4096)


def test_a_stream_that_is_none_is_told_from_a_broken_gpu() -> None:
    with pytest.raises(InvalidRequest, match="living stream"):
        CudaDevice(BrokenGpu(400)).wait_word(7, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(GpuFailed) as failed:
        CudaDevice(BrokenGpu(700)).wait_word(7, 0, 0)  # type: ignore[arg-type]
    assert failed.value.driver_code == 700


def test_words_that_streams_cannot_reach_do_not_stay_pinned() -> None:
    gpu = BrokenGpu(1)
    with pytest.raises(GpuFailed, match="could not be pinned"):
        CudaDevice(gpu).pin(4096, 256)  # type: ignore[arg-type]
    assert not gpu.pinned


def test_without_cupy_arrays_are_refused_by_the_extras_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    view = PlaneView((3, 2), np.uint16, 64, (128, 2))
    plane = DevicePlane(4096, 1024, view, 0, object())
    with pytest.raises(NotSupported, match="cuda12 or cuda13"):
        CudaDevice(BrokenGpu(0)).array(plane)  # type: ignore[arg-type]
    shown = plane.view(np.int16).__cuda_array_interface__
    assert (shown["shape"], shown["strides"], shown["typestr"]) == ((3, 2), (128, 2), "<i2")
    assert shown["data"] == (4096 + 64, False)


def test_streams_of_every_library_wait_for_the_word(rig: GpuRig) -> None:
    pool = rig.pool()
    for stream in (7, SimpleNamespace(ptr=7), SimpleNamespace(cuda_stream=7)):
        pool.wait_layer_on(stream, load(), 1)
        pool.wait_ticket_on(stream, load())
    assert rig.gpu.waits == [(7, WORD, 12), (7, WORD, 14)] * 3
    pool.wait_ticket_on(0, load(base=0xFFFFFFFE, word=8))
    assert rig.gpu.waits[-1] == (0, 8, 2)
    pool.wait_ticket_on(7, load(state="done"))
    assert len(rig.gpu.waits) == 7
    with pytest.raises(InvalidRequest, match="layer 4 of a load of 4"):
        pool.wait_layer_on(7, load(), LAYERS)
    with pytest.raises(InvalidRequest, match="str is no stream"):
        pool.wait_layer_on("7", load(), 0)
    with pytest.raises(LoadFailed, match="broken wire"):
        pool.wait_ticket_on(7, load(state="failed"))
    with pytest.raises(DaemonFault, match="word 8191"):
        pool.wait_ticket_on(7, load(word=8191))


def test_processors_see_a_word_that_nobody_wakes_them_for(daemon: FakeDaemon, rig: GpuRig) -> None:
    pool = rig.pool()
    assert daemon.timeline.fd is not None
    words = words_of(map_memfd(daemon.timeline.fd, 256))
    with pytest.raises(DeadlineExceeded):
        pool.wait_ticket(load(), timeout_s=0.01)
    waiter = threading.Thread(target=lambda: pool.wait_ticket(load(), timeout_s=60))
    waiter.start()
    words[WORD] = 14
    waiter.join(5)
    assert not waiter.is_alive()


def test_confirm_tells_what_has_become_of_loads(rig: GpuRig) -> None:
    pool = rig.pool()
    with pytest.raises(Conflict, match="load 1 has not ended"):
        pool.confirm(load())
    rig.write(WORD, 14)
    pool.confirm(load(), load(2, state="done"))
    rig.write(FAILED, 14)
    with pytest.raises(LoadFailed, match="load 1"):
        pool.confirm(load())
    with pytest.raises(LoadFailed, match="broken wire"):
        pool.confirm(load(2, state="failed"))


def test_the_loss_releases_each_pending_wait_once_failure_first(rig: GpuRig) -> None:
    pool = rig.pool()
    came, failed, pending = load(1, 0, word=0), load(2, 10), load(3, 20, word=8)
    for ticket in (came, failed, pending):
        pool.wait_layer_on(7, ticket, 0)
        pool.wait_ticket_on(7, ticket)
    rig.write(0, 4)
    words = words_seen(pool)
    rig.lose()
    assert words[[0, 1, WORD, FAILED, 8, 9]].tolist() == [4, 0, 14, 14, 24, 24]
    pool.confirm(came)
    with pytest.raises(DaemonUnavailable, match="load 3"):
        pool.confirm(came, pending)
    with pytest.raises(DaemonUnavailable, match="load 3"):
        pool.wait_ticket_on(7, pending)
    with pytest.raises(DaemonUnavailable, match="load 3"):
        pool.wait_ticket(pending, timeout_s=60)
    with pytest.raises(DaemonUnavailable, match="load 9"):
        pool.confirm(load(9, 30, word=16))
    del words
    assert pool.close()
    assert rig.gpu.is_whole()


def test_a_load_that_ended_before_the_loss_keeps_its_own_failure(rig: GpuRig) -> None:
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    rig.write(FAILED, 14)
    rig.write(WORD, 14)
    rig.lose()
    with pytest.raises(LoadFailed):
        pool.confirm(load())


def test_a_wait_on_its_way_at_the_loss_is_released_though_its_call_blocks(rig: GpuRig) -> None:
    pool = rig.pool()
    words = words_seen(pool)

    def block() -> None:  # as the driver does where the stream's queue is full of what stands behind another wait
        rig.daemon.hang_up()
        assert wait_reached(words, WORD, 14, time.monotonic() + 5, poll_s=(1e-4, 1e-3))

    rig.gpu.on_wait = block
    pool.wait_ticket_on(7, load())
    assert words[[FAILED, WORD]].tolist() == [14, 14]
    with pytest.raises(DaemonUnavailable):
        pool.confirm(load())


def test_words_stay_mapped_until_no_stream_can_wait_and_are_released_even_then(rig: GpuRig) -> None:
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    assert not pool.close()
    assert rig.told == 0
    with pytest.raises(AlreadyClosed):
        pool.wait_ticket_on(7, load())
    assert rig.daemon.timeline.read(WORD) == 0
    rig.lose()
    assert rig.daemon.timeline.read(WORD) == 14
    assert pool.close()
    assert rig.gpu.is_whole()


def test_closing_the_connection_leaves_the_words_to_the_daemon_and_still_hears_of_its_end(rig: GpuRig) -> None:
    """The daemon lives and ends its loads itself; only when it does not must the streams be released, and the GPU."""
    pool = rig.pool()
    words = words_seen(pool)
    pool.wait_ticket_on(7, load())
    assert not pool.close()
    rig.life.close()
    assert words[[FAILED, WORD]].tolist() == [0, 0]
    rig.lose()
    assert words[[FAILED, WORD]].tolist() == [14, 14]
    assert rig.told == 0
    del words
    assert pool.close()
    assert rig.gpu.is_whole()


def test_a_closed_connection_ends_with_the_last_wait_that_it_was_kept_for(rig: GpuRig) -> None:
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    assert not pool.close()
    rig.life.close()
    rig.write(WORD, 14)
    assert pool.close()
    assert rig.life.join(60)
    assert rig.daemon.timeline.read(FAILED) == 0


def test_after_its_load_a_closed_pool_goes(rig: GpuRig) -> None:
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    rig.write(WORD, 14)
    assert pool.close()
    rig.lose()
    assert rig.daemon.timeline.read(FAILED) == 0
