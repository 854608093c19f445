"""The swap engine on copy engines: every byte against a model in NumPy, for layouts of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cachesvc.model.words import Direction, PagePairs, has_reached
from gpu_ops.gpu import Gpu
from gpu_ops.kernels.pages import check_pages, count_wrong, stamps
from gpu_ops.kernels.reference import page_bytes
from tests.gpu.frameworks import cupy
from tests.gpu.rig import scrambled, spin_until
from tests.gpu.swap_rig import DEVICE_PAGES, HOST_PAGES, LAYOUTS, MODEL, CudaRig, GroupBytes, cuda_rig, mla

pytestmark = pytest.mark.gpu

LOAD, STORE = Direction
RUNS = (1, 1, 1, 4, 7, 12)
ENGINE_PRIORITY = -1000
"""The driver takes a number beyond its range for the end of it: the highest."""


def in_runs(rng: np.random.Generator, pages: int, of: int) -> list[int]:
    """``pages`` different pages out of ``of`` in runs and singles, in no order."""
    taken: set[int] = set()
    order: list[int] = []
    while len(order) < pages:
        first = int(rng.integers(0, of))
        for page in range(first, min(of, first + int(rng.choice(RUNS)))):
            if page in taken or len(order) == pages:
                break
            taken.add(page)
            order.append(page)
    return order


def parted(rng: np.random.Generator, rig: CudaRig) -> tuple[list[list[PagePairs]], list[list[PagePairs]]]:
    """Transfers each way, in runs and singles: none touches what another one reads or writes."""
    loads: list[list[PagePairs]] = [[] for _ in range(4)]
    stores: list[list[PagePairs]] = [[] for _ in range(4)]
    for group in range(len(rig.groups)):
        device, host = in_runs(rng, 40, DEVICE_PAGES), in_runs(rng, 40, HOST_PAGES)
        cuts = sorted(int(cut) for cut in rng.choice(np.arange(1, 40), 7, replace=False))
        parts = list(zip([0, *cuts], [*cuts, 40], strict=True))
        for number, (first, end) in enumerate(parts):
            pairs = PagePairs(group, tuple(device[first:end]), tuple(host[first:end]))
            (loads if number % 2 else stores)[number // 2].append(pairs)
    return loads, stores


@pytest.mark.parametrize("layers_per_step", [None, 1])
@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_and_stores_at_once_move_what_they_should_and_nothing_else(
    gpu: Gpu, rng: np.random.Generator, name: str, layered: bool, layers_per_step: int | None
) -> None:
    with cuda_rig(gpu, LAYOUTS[name](), rng, layers_per_step=layers_per_step) as rig:
        loads, stores = parted(rng, rig)
        for load, store in zip(loads, stores, strict=True):
            rig.move(STORE, store)
            rig.move(LOAD, load, layered=layered)
        rig.settle()
        rig.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_stored_comes_back_to_other_pages(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    with cuda_rig(gpu, LAYOUTS[name](), rng, vmm=True) as rig:
        for direction in (STORE, LOAD, STORE, LOAD):
            pairs = [
                PagePairs(group, tuple(in_runs(rng, 17, DEVICE_PAGES)), tuple(in_runs(rng, 17, HOST_PAGES)))
                for group in range(len(rig.groups))
            ]
            rig.move(direction, pairs, layered=direction is LOAD)
            rig.settle()
            rig.check()


def plane_of(group: GroupBytes, layer: int) -> Any:
    """One plane of a slab as a CuPy array ``[pages, width]``."""
    span = group.device_geometry.spans[layer]
    memory = cupy.cuda.UnownedMemory(group.slab.address, group.slab.handle.size_bytes, group.slab, 0)
    start = cupy.cuda.MemoryPointer(memory, span.offset)
    return cupy.ndarray((DEVICE_PAGES, span.width), np.uint8, memptr=start, strides=(span.page_stride, 1))


def stamp_host(group: GroupBytes, pages: Sequence[int], seeds: Any) -> None:
    """Give host pages bytes that tell their seed, another for each layer, in memory and in the model."""
    shown = np.frombuffer(group.host.memory, np.uint8)
    for layer, span in enumerate(group.host_geometry.spans):
        for page, content in zip(pages, page_bytes(seeds + np.uint64(layer), span.width), strict=True):
            at = group.host.start_of(page) + span.offset
            shown[at : at + span.width] = group.host_model[at : at + span.width] = content


def test_streams_that_wait_for_a_layer_find_it_behind_a_large_transfer(gpu: Gpu, rng: np.random.Generator) -> None:
    """Another stream of this process waits on the words, as an engine's does; its priority differs from the
    copies' one, so that they never share a hardware queue."""
    with cuda_rig(gpu, mla(), rng, layers_per_step=1) as rig:
        (group,), layers = rig.groups, rig.layout.layers
        order, hosts = scrambled(rng, DEVICE_PAGES, DEVICE_PAGES), scrambled(rng, DEVICE_PAGES, HOST_PAGES)
        pages, seeds = order[:9], rng.integers(0, 1 << 60, 9, np.uint64)
        stamp_host(group, hosts[:9].tolist(), seeds)
        marks = [stamps(pages, seeds + np.uint64(layer)) for layer in range(layers)]
        planes = [plane_of(group, layer) for layer in range(layers)]
        stream = cupy.cuda.Stream(non_blocking=True, priority=ENGINE_PRIORITY)
        wrong = [cupy.zeros(9, np.uint32) for _ in range(layers)]
        cupy.cuda.Device().synchronize()
        for plane, mark in zip(planes, marks, strict=True):  # poison is no pattern
            assert count_wrong(plane, mark, stream.ptr).min() > 0

        for first in range(9, DEVICE_PAGES, 13):
            part = slice(first, first + 13)
            rig.move(LOAD, [PagePairs(0, tuple(order[part].tolist()), tuple(hosts[part].tolist()))])
        slot = rig.move(LOAD, [PagePairs(0, tuple(pages.tolist()), tuple(hosts[:9].tolist()))], layered=True)
        timeline = rig.backend.timeline(gpu.uuid).sheet(MODEL)
        for layer in range(layers):
            gpu.wait_word(stream.ptr, timeline.place(slot.word), slot.base + layer + 1)
            check_pages(planes[layer], marks[layer], wrong[layer], stream.ptr)
        seen = [timeline.read(slot.word)]
        for layer in range(layers):
            target = (slot.base + layer + 1) & 0xFFFFFFFF
            spin_until(lambda target=target: has_reached(timeline.read(slot.word), target), f"layer {layer}")  # type: ignore[misc]
            seen.append(timeline.read(slot.word))
            at = group.device_geometry.spans[layer]
            for page in pages[:2].tolist():
                found = rig.backend.read(group.slab.region, at.offset + page * at.page_stride, at.width)
                want = group.device_model[at.offset + page * at.page_stride :][: at.width]
                assert found == want.tobytes()
        stream.synchronize()
        assert seen == sorted(seen)
        assert [int(one.sum()) for one in wrong] == [0] * layers
        rig.settle()
        rig.check()
        assert (timeline.read(slot.word), timeline.read(slot.failed_word)) == (slot.end, 0)
