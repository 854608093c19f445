"""Movers of GPUs, in threads of this process for what no real process shows: a GPU that breaks or hangs is replaced."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from cachesvc import __version__
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.extents import map_memfd, sealed_memfd
from cachesvc.memory.host_pool import Neighbours
from cachesvc.model.words import CopiesHang, PagePairs, Transfer
from cachesvc.mover.life import MoverProcess
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.mover.server import Equipment
from cachesvc.swap.planner import costs_of
from gpu_ops.calibration import LinkFigures
from tests.contracts.host_gpu import HostGpu
from tests.unit.mover.mover_rig import Heard, engine_on, in_thread
from tests.unit.rigs.swap_rig import (
    LOAD,
    MODEL,
    REPLICA,
    STORE,
    Rig,
    attach_replica,
    wait_chunks,
)

FIGURES = LinkFigures(
    load_bytes_per_us=1e-3,
    store_bytes_per_us=1e-3,
    both_bytes_per_us=1e-3,
    per_copy_us=2.5,
    per_row_ns=30.0,
    per_step_us=6.0,
    max_pitch_bytes=1 << 30,
    is_batched=True,
    row_ns=((8192, 30.0),),
)
"""A link so slow that each layer is worth a step, however few its bytes."""


class InThreads:
    """Begins movers as threads, on GPUs that ``gpus`` gives one after another."""

    def __init__(self, gpus: list[HostGpu], process: MoverProcess | None = None) -> None:
        self._gpus = iter(gpus)
        self._process = process

    def __call__(self) -> tuple[socket.socket, MoverProcess | None]:
        gpu = next(self._gpus)

        def equip(settings: Settings, neighbours: Neighbours) -> Equipment:
            del neighbours
            backend = CudaBackend((gpu,), settings.device_bytes, timeline_words=settings.timeline_words)
            return Equipment(backend, dict, lambda: (asdict(FIGURES), costs_of(asdict(FIGURES))))

        return in_thread(equip, self._process)


class Unkillable:
    """A process that stands in a call of the driver."""

    def __init__(self, is_child: bool = True) -> None:
        self.is_child = is_child

    def kill(self) -> None:
        """It does not hear."""

    def has_ended(self, seconds: float | None) -> bool:
        assert seconds is not None, "the wait for it ends"
        return False

    def close(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def on_gpus(*gpus: HostGpu, process: MoverProcess | None = None, probe_seconds: float = 10.0) -> Iterator[Rig]:
    """An engine on one GPU, whose mover is each of ``gpus`` in turn."""
    settings = Settings("cuda", "GPU-host-0", 1 << 20, timeline_words=64)
    begins = [InThreads(list(gpus), process)]
    movers = MoverProcesses([settings], __version__, begins=begins, probe_seconds=probe_seconds)
    movers.start()
    rig = engine_on(movers, layers_per_step=1)
    attach_replica(rig, REPLICA)
    try:
        yield rig
    finally:
        rig.close()


def test_a_gpu_is_driven_by_its_mover_alone() -> None:
    gpu = HostGpu()
    with on_gpus(gpu) as rig:
        content = [rig.host_page(0, 1, page) for page in (3, 30)]
        rig.move(LOAD, (1, [0, 9], [3, 30]), layered=True)
        rig.settle()
        assert [rig.device_page(0, 1, page) for page in (0, 9)] == content
        rig.move(STORE, (1, [0, 9], [11, 12]))
        rig.settle()
        assert [rig.host_page(0, 1, page) for page in (11, 12)] == content
        assert [error for _, error in rig.ended] == [None, None]
    assert gpu.is_whole()


def test_a_gpu_that_broke_gives_way_to_a_new_mover(heard: Heard) -> None:
    broken, fresh = HostGpu(), HostGpu()
    with on_gpus(broken, fresh) as rig:
        broken.is_dead = True
        rig.move(LOAD, (0, [1], [1]))
        rig.settle()
        assert rig.ended[-1][1] is not None
        heard.wait("gpu_broken")
        heard.wait("mover_started")
        attach_replica(rig, REPLICA + 1)
        rig.engine.submit(Transfer(7, MODEL, REPLICA + 1, LOAD, (PagePairs(0, [1], [1]),), layered=False))
        rig.settle()
        assert rig.ended[-1] == (7, None)
        assert rig.device_page(0, 0, 1, REPLICA + 1) == rig.host_page(0, 0, 1)


def test_a_new_mover_plans_by_what_was_measured_on_the_first(heard: Heard) -> None:
    broken, fresh = HostGpu(), HostGpu()
    with on_gpus(broken, fresh) as rig:
        assert isinstance(rig.backend, MoverProcesses)
        rig.backend.measure()
        rig.engine.layers_per_step = None
        rig.move(LOAD, (0, [1], [1]), layered=True)
        rig.settle()
        assert broken.told["submit"] == rig.layout.layers
        broken.is_dead = True
        rig.backend.probe()
        heard.wait("mover_started")
        attach_replica(rig, REPLICA + 1)
        rig.engine.submit(Transfer(7, MODEL, REPLICA + 1, LOAD, (PagePairs(0, [1], [1]),), layered=True))
        rig.settle()
        assert rig.ended[-1] == (7, None)
        assert fresh.told["submit"] == rig.layout.layers


def test_a_gpu_that_fell_off_is_found_by_asking(heard: Heard) -> None:
    broken, fresh = HostGpu(), HostGpu()
    with on_gpus(broken, fresh) as rig:
        broken.is_dead = True
        rig.backend.probe()
        heard.wait("mover_started")
        rig.backend.probe()
        assert rig.backend.fault("GPU-host-0") == ""


@pytest.mark.parametrize("process", [None, Unkillable(), Unkillable(is_child=False)])
@pytest.mark.parametrize("call", ["wait", "submit"])
def test_a_gpu_whose_copies_do_not_end_gives_way_to_a_new_mover(
    call: str, process: MoverProcess | None, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads jobs may stand in the driver's call: it submits the first slice of an idle device."""
    hung, fresh = HostGpu(), HostGpu()
    with on_gpus(hung, fresh, process=process) as rig:
        hung.hangs = {call}
        free = rig.engine.free_slots(MODEL, REPLICA)
        rig.move(LOAD, (0, [1], [1]))
        assert hung.hung.acquire()
        monkeypatch.setattr("cachesvc.memory.copy_thread.PATIENCE_S", 0.0)
        rig.backend.probe()
        rig.settle()
        monkeypatch.undo()
        error = rig.ended[-1][1]
        assert "died: 196 bytes" in str(error), "no end is reported before the mover is gone"
        may_write = process is not None
        assert isinstance(error, CopiesHang) == may_write == rig.engine.hangs(MODEL)
        assert rig.engine.free_slots(MODEL, REPLICA) == free - may_write
        heard.wait("mover_started")
        attach_replica(rig, REPLICA + 1)
        rig.engine.submit(Transfer(7, MODEL, REPLICA + 1, LOAD, (PagePairs(0, [1], [1]),), layered=False))
        rig.settle()
        assert rig.ended[-1] == (7, None)
    hung.goes_on.set()


@pytest.mark.parametrize("is_child", [True, False])
def test_a_mover_that_does_not_answer_nor_die_is_waited_for_by_nobody(
    is_child: bool, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in a driver's call keeps a killed process, and so its end of the connection."""
    monkeypatch.setattr("cachesvc.memory.cuda.ANSWER_S", 3600.0)
    hung, fresh = HostGpu(), HostGpu()
    with on_gpus(hung, fresh, process=Unkillable(is_child), probe_seconds=0.05) as rig:
        hung.hangs = {"wait", "free_bytes"}
        rig.move(LOAD, (0, [1], [1]))
        assert hung.hung.acquire()
        rig.backend.probe()
        rig.settle()
        assert isinstance(rig.ended[-1][1], CopiesHang)
        assert rig.engine.hangs(MODEL)
        heard.wait("mover_started")
    hung.goes_on.set()


@pytest.mark.parametrize(("process", "pause"), [(None, "again_s=0.0"), (Unkillable(), "again_s=600.00")])
def test_processes_that_cannot_be_killed_do_not_pile_up(process: MoverProcess | None, pause: str, heard: Heard) -> None:
    """A GPU that hangs may hang for the next mover too."""
    broken, refused, fresh = HostGpu(), HostGpu(), HostGpu()
    refused.is_dead = True
    with on_gpus(broken, refused, fresh, process=process) as rig:
        broken.is_dead = True
        rig.backend.probe()
        heard.wait(f"mover_not_started device=GPU-host-0 {pause}")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HostGpu, HostGpu, MoverProcesses]]:
    """Two GPUs, each with a mover of its own."""
    monkeypatch.setattr("cachesvc.mover.peers.WAITED_SECONDS", 0.05)
    gpus = HostGpu(0), HostGpu(1)
    settings = [Settings("cuda", gpu.uuid, 1 << 20, timeline_words=64) for gpu in gpus]
    movers = MoverProcesses(settings, __version__, begins=[InThreads([gpu]) for gpu in gpus])
    movers.start()
    movers.listen(lambda _: None)
    yield *gpus, movers
    gpus[0].goes_on.set()
    movers.close()


def test_a_question_that_takes_long_keeps_nobody_from_looking_at_the_other_gpus(
    pair: tuple[HostGpu, HostGpu, MoverProcesses], heard: Heard
) -> None:
    hung, other, movers = pair
    hung.hangs = {"allocate"}
    with ThreadPoolExecutor(1) as threads:
        slab = threads.submit(movers.create_slab, hung.uuid, 4096)
        assert hung.hung.acquire()
        movers.probe()
        other.is_dead = True
        movers.probe()
        heard.wait("gpu_broken device=GPU-host-1")
        hung.goes_on.set()
        assert slab.result().is_open, "nor was its own mover ended meanwhile"


def test_a_gpu_that_cannot_pin_for_it_is_broken_takes_host_memory_from_no_other(
    pair: tuple[HostGpu, HostGpu, MoverProcesses], heard: Heard
) -> None:
    broken, other, movers = pair
    broken.is_dead = True
    fd = sealed_memfd("chunk", 4096)
    view = map_memfd(fd, 4096)
    before = other.pins()
    movers.register_host(view, fd)
    wait_chunks()
    assert other.pins() == before + 1
    other.breaks = {"register_host"}
    refused = movers.register_host(view, fd)
    wait_chunks()
    assert not movers.has_host(other.uuid, refused)
    assert "ulimit -l" in movers.lacking_hosts()[other.uuid][1]
    os.close(fd)


@pytest.mark.parametrize("call", ["free", "unregister_host"])
def test_memory_is_given_back_to_a_gpu_that_hangs_without_waiting_for_it(
    call: str, pair: tuple[HostGpu, HostGpu, MoverProcesses]
) -> None:
    """Making pools frees what others left, on any device."""
    hung, _, movers = pair
    slab = movers.create_slab(hung.uuid, 4096)
    movers.open_sheet(hung.uuid, 1)
    hung.hangs = {call}
    movers.close_sheet(hung.uuid, 1)
    slab.close()
    assert hung.hung.acquire()
    hung.goes_on.set()
    movers.create_slab(hung.uuid, 1 << 20)
    assert movers.fault(hung.uuid) == ""
