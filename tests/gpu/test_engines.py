"""Engines and a daemon as processes on one GPU: prefixes in place, loads that streams wait for, tenants apart."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from cachesvc_client.memory.pool import LoadOutcome
from kvcache.v1 import admin_pb2

from gpu_ops.gpu import Gpu
from tests.e2e.engine import WAIT_SECONDS, prompt
from tests.e2e.rig import Node, running_node
from tests.gpu.engine import BACKED_UP, CUDA, LARGE, LAYOUTS, MIXED, SLOWLY, SMALL, GpuEngine, take_to_host
from tests.gpu.frameworks import cupy
from tests.gpu.remote import RemoteGpuEngine

pytestmark = pytest.mark.gpu

MEMORY = pytest.mark.parametrize("memory", ["ipc", "vmm"])


def copied(node: Node) -> tuple[int, int]:
    """Bytes that the daemon has moved, each way."""
    counters = node.counters()
    return counters.get("h2d_bytes", 0), counters.get("d2h_bytes", 0)


@MEMORY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_engine_computed_is_a_hit_in_place_for_another(layout: str, memory: str) -> None:
    blocks = 24
    with (
        running_node((*CUDA, "--device-memory", memory)) as node,
        RemoteGpuEngine(node.socket, layout=layout, device_pages=40) as a,
        GpuEngine(node.socket, layout=LAYOUTS[layout], device_pages=40) as b,
    ):
        a.ask("start")
        first = a.ask("serve", tokens=prompt(1, blocks))
        assert (first["computed"], first["bad"]) == (blocks, [])
        served = b.serve(prompt(1, blocks))
        assert (served.device, served.host, served.computed, served.bad) == (blocks, 0, 0, [])
        assert served.pages[0] == first["pages"][0]
        assert copied(node) == (0, 0)
        with b.lease.match(b.keys(prompt(1, blocks))) as sequence:  # and a check that finds nothing wrong can find it
            assert len(b.bad(sequence, b.keys(prompt(2, blocks)), [blocks - 1])) == len(b.layout.planes)


@MEMORY
def test_streams_that_wait_for_each_layer_of_a_load_find_it(memory: str) -> None:
    blocks = 100
    with (
        running_node((*BACKED_UP, "--device-memory", memory)) as node,
        GpuEngine(node.socket, layout=LARGE, device_pages=120, host_pages=120) as engine,
    ):
        tokens = prompt(1, blocks)
        keys = engine.keys(tokens)
        take_to_host(node, engine, tokens)
        with engine.lease.match(keys) as sequence:
            assert sequence.allocate(blocks).loading_blocks == blocks
            (ticket,) = sequence.tickets
            wrong = engine.check_behind_waits(sequence, keys, ticket, engine.stream)
            engine.stream.synchronize()
            engine.pool.confirm(*sequence.tickets)
            assert sum(int(each.sum()) for each in wrong) == 0
            assert not sequence.lost_tokens()
            assert engine.bad(sequence, keys, range(blocks)) == []
        assert copied(node)[0] == blocks * LARGE.page_bytes(0)


@pytest.mark.parametrize("layout", ["small", "mixed"])
def test_loads_of_small_and_mixed_planes_are_right_too(layout: str) -> None:
    blocks = 90
    with (
        running_node(BACKED_UP) as node,
        GpuEngine(node.socket, layout=LAYOUTS[layout], device_pages=100, host_pages=100) as engine,
    ):
        tokens = prompt(1, blocks)
        keys = engine.keys(tokens)
        take_to_host(node, engine, tokens)
        with engine.lease.match(keys) as sequence:
            sequence.allocate(blocks)
            for ticket in sequence.tickets:
                for layer in range(engine.layout.layers):
                    engine.pool.wait_layer(ticket, layer, WAIT_SECONDS)
                    assert engine.bad(sequence, keys, range(blocks), [layer]) == []
            sequence.wait_loaded(WAIT_SECONDS)
            assert engine.bad(sequence, keys, range(blocks)) == []


def test_a_graph_that_was_captured_during_a_load_waits_for_it() -> None:
    blocks = 120
    with (
        running_node(SLOWLY) as node,
        GpuEngine(node.socket, layout=LARGE, device_pages=130, host_pages=130) as engine,
    ):
        tokens = prompt(1, blocks)
        keys = engine.keys(tokens)
        take_to_host(node, engine, tokens)
        with engine.lease.match(keys) as sequence:
            sequence.allocate(blocks)
            (ticket,) = sequence.tickets
            prepared = engine.prepare(sequence, keys)
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                wrong = engine.queue_checks(prepared, ticket, stream)
                graph = stream.end_capture()
            graph.launch(stream)
            assert engine.pool.outcome(ticket) is LoadOutcome.RUNNING
            assert not stream.done
            stream.synchronize()
            engine.pool.confirm(ticket)
            assert [int(each.sum()) for each in wrong] == [0] * len(LARGE.planes)
            sequence.wait_loaded(WAIT_SECONDS)
            assert engine.bad(sequence, keys, range(blocks)) == []


def test_tenants_get_no_bytes_of_each_other_through_reused_memory() -> None:
    pages = 200  # 1.6 of the 2 GiB
    with running_node(CUDA) as node:
        with RemoteGpuEngine(node.socket, layout="large", salt="tenant a", device_pages=pages) as a:
            a.ask("start")
            assert a.ask("serve", tokens=prompt(6, pages))["computed"] == pages
        with GpuEngine(node.socket, layout=LARGE, salt=b"tenant b", device_pages=pages) as b:
            assert not b.registration.existed  # the idle model gave way
            assert not any(bool(plane.any()) for plane in b.pool.planes.values())
        assert node.counters()["models_dismissed"] == 1


def test_auto_takes_the_gpu_and_says_what_its_link_does(gpu: Gpu) -> None:
    with running_node(("--backend", "auto", "--calibration", "start")) as node:
        status = node.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.backend == "cuda"
        device = next(device for device in status.devices if device.uuid == gpu.uuid)
        assert (device.name, device.pool_bytes) == (gpu.facts.name, 64 << 20)
        assert min(device.load_gb_per_second, device.store_gb_per_second) > 1
        assert device.both_gb_per_second > max(device.load_gb_per_second, device.store_gb_per_second)
        assert device.context_bytes > 0, "what else runs on this GPU counts in it, so it has no upper bound here"


def test_a_budget_counts_what_was_asked_for(gpu: Gpu) -> None:
    """Slabs are rounded up to 2 MiB behind the budget's back: models that ask for all of it get all of it."""
    size = SMALL.page_bytes(0)
    with running_node(CUDA) as node, ExitStack() as stack:
        pages = (2 << 30) // size // 4
        for number in range(4):
            engine = GpuEngine(node.socket, model=f"model {number}", layout=SMALL, device_pages=pages)
            stack.enter_context(engine)
            assert engine.registration.device_pages == (pages,)
            assert engine.serve(prompt(number, 8)).bad == []


def test_planes_are_torch_tensors_over_the_same_bytes() -> None:
    import torch

    with running_node(CUDA) as node, GpuEngine(node.socket, layout=MIXED, device_pages=40) as engine:
        wide, narrow = engine.pool.to_torch(1, "k"), engine.pool.to_torch(0, "k")
        bits, bytes_ = engine.pool.planes[1, "k"], engine.pool.planes[0, "k"]
        assert (wide.dtype, narrow.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        assert (tuple(wide.shape), tuple(narrow.shape)) == ((40, 1, 16, 33), (40, 2, 16, 64))
        assert (wide.data_ptr(), narrow.data_ptr()) == (bits.data.ptr, bytes_.data.ptr)
        assert wide.device.type == "cuda"
        wide[7].fill_(1.5)
        narrow[9].view(torch.uint8).fill_(0x3C)
        torch.cuda.synchronize()
        assert (bits[7].get() == 0x3FC0).all()
        assert (bytes_[9].get() == 0x3C).all()
        assert not bits[6].get().any()
        assert not bits[8].get().any()
        bits[8] = np.uint16(0xC000)
        cupy.cuda.Device().synchronize()
        assert bool((wide[8].float() == -2.0).all())
        slab = engine.pool.slab_to_torch(MIXED.groups[0].name)
        assert slab.data_ptr() == engine.pool.slab(MIXED.groups[0].name).data.ptr
        assert (slab.dtype, slab.is_cuda) == (torch.uint8, True)
        del wide, narrow, bits, bytes_, slab


def test_planes_are_paddle_tensors_over_the_same_bytes() -> None:
    paddle = pytest.importorskip("paddle", reason="paddle is not installed beside this GPU")
    if not paddle.is_compiled_with_cuda():
        pytest.skip("this paddle is built for CPUs")
    with running_node(CUDA) as node, GpuEngine(node.socket, layout=MIXED, device_pages=40) as engine:
        tensor, bits = engine.pool.to_paddle(1, "k"), engine.pool.planes[1, "k"]
        assert (tensor.dtype, tensor.data_ptr()) == (paddle.bfloat16, bits.data.ptr)
        bits[8] = np.uint16(0xC000)
        cupy.cuda.Device().synchronize()
        assert bool((tensor[8].astype("float32") == -2.0).all())
        del tensor, bits
