"""A vLLM process on a GPU outlives the owner of its KV memory: it goes on there, and moves to the next daemon's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cachesvc_client.memory.device import DevicePlane, PlaneView
from cachesvc_client.plugins.node import Node, Share
from cachesvc_vllm.cache_groups import GROUP, slab_layout
from cachesvc_vllm.settings import FLAGS, Settings

from tests.e2e.movers import kill_mover_of
from tests.e2e.rig import Node as Daemon
from tests.e2e.rig import running_node, wait_until
from tests.gpu.engine import CUDA
from tests.gpu.frameworks import cupy
from tests.unit.rigs.vllm_rig import layers_outermost

pytestmark = pytest.mark.gpu

PAGES = 64
SHARE = Share("m", slab_layout(layers_outermost(PAGES)), PAGES)
MOVERS = ("inside", "process")


@contextmanager
def engine(daemon: Daemon) -> Iterator[tuple[Node, Node, cupy.ndarray]]:
    """Scheduler, worker, and all bytes of its KV memory."""
    scheduler = Node(Settings(socket=daemon.socket), "engine", SHARE, flags=FLAGS, attaches=False)
    worker = Node(Settings(socket=daemon.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    scheduler.start()
    worker.comes_back = scheduler.comes_back = worker.pool.memory(GROUP).can_map_over
    worker.keep_address()
    try:
        yield scheduler, worker, worker.pool.slab(GROUP)
    finally:
        scheduler.close()
        worker.close()


def kill(daemon: Daemon) -> None:
    daemon.daemon.process.kill()
    daemon.daemon.process.wait()


def use(memory: cupy.ndarray, value: int) -> None:
    """Kernels write and read all of it."""
    memory[:] = value
    assert int((memory != value).sum()) == 0
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
@pytest.mark.parametrize("movers", MOVERS)
def test_kernels_go_on_in_the_memory_of_a_daemon_that_was_killed(folder: Path, memory: str, movers: str) -> None:
    flags = (*CUDA, "--device-memory", memory, "--movers", movers)
    with running_node(flags, folder=folder) as daemon, engine(daemon) as (scheduler, worker, tensor):
        use(tensor, 7)
        kill(daemon)
        wait_until(lambda: worker.lease.is_lost and scheduler.lease.is_lost, "both know")
        assert int((tensor != 7).sum()) == 0
        use(tensor, 8)


@pytest.mark.parametrize("movers", MOVERS)
def test_after_a_restart_the_tensors_lie_on_the_next_daemons_slab(folder: Path, movers: str) -> None:
    with running_node((*CUDA, "--device-memory", "vmm", "--movers", movers), folder=folder) as daemon:
        with engine(daemon) as (scheduler, worker, tensor):
            address = tensor.data.ptr
            graph = captured(tensor)
            before = worker.lease.id
            for life in (1, 2):
                use(tensor, 7)
                kill(daemon)
                wait_until(lambda: worker.lease.is_lost and scheduler.lease.is_lost, "both know")
                daemon.daemon.start()
                for each in (scheduler, worker):
                    assert each.wait_back(60)
                    cupy.cuda.Device().synchronize()
                    each.move(each.back_id)
                assert worker.lease.id == scheduler.lease.id != before
                before = worker.lease.id
                assert tensor.data.ptr == address
                assert int(tensor.sum()) == 0, f"life {life}: memory of the next daemon"
                graph.launch()
                cupy.cuda.Device().synchronize()
                assert int((worker.pool.slab(GROUP) != 5).sum()) == 0, "what a graph writes that was captured before"
                assert int((tensor != 5).sum()) == 0
        assert daemon.problems() == []


def captured(tensor: cupy.ndarray) -> cupy.cuda.Graph:
    """A graph that fills it."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupy.cuda.runtime.memsetAsync(tensor.data.ptr, 5, tensor.nbytes, stream.ptr)
        return stream.end_capture()


def test_after_a_movers_death_the_tensors_lie_on_the_next_ones_slab() -> None:
    with running_node((*CUDA, "--device-memory", "vmm", "--movers", "process")) as daemon, engine(daemon) as kept:
        scheduler, worker, tensor = kept
        use(tensor, 7)
        before = worker.lease.registration.replica
        kill_mover_of(daemon, worker.pool.device)
        for each in (scheduler, worker):
            assert each.wait_back(60)
            cupy.cuda.Device().synchronize()
            each.move(each.back_id)
            assert each.lease.registration.replica != before
        assert int(tensor.sum()) == 0
        use(tensor, 9)
        assert int((worker.pool.slab(GROUP) != 9).sum()) == 0


def test_memory_that_is_unmapped_and_mapped_again_keeps_its_address_for_views() -> None:
    """A view that was made before points to the same bytes as one that is made after."""
    with running_node((*CUDA, "--device-memory", "vmm")) as daemon, engine(daemon) as (_, worker, tensor):
        memory = worker.pool.memory(GROUP)
        part = tensor[100:200]
        memory.map_over(memory.address)
        part[:] = 3
        plane = memory.plane(PlaneView((memory.size_bytes,), np.uint8, 0, (1,)))
        assert isinstance(plane, DevicePlane)
        assert set(cupy.asarray(plane)[100:200].get().tolist()) == {3}
