"""A swap engine on a real GPU, with a model of every byte on both sides in NumPy."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.extents import Extent, ExtentTable
from cachesvc.memory.interface import Slab
from cachesvc.model.layout import Geometry, Layout, Plane, PlaneGroup, device_geometry, host_geometry
from cachesvc.model.words import Direction, PagePairs, TimelineSlot, Transfer
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers
from gpu_ops.gpu import Gpu, find_gpus
from tests.gpu.rig import Bytes, write_device

MODEL, REPLICA = 1, 1
DEVICE_PAGES, HOST_PAGES = 48, 80
HOST_GAP = 3 * mmap.PAGESIZE
"""Between the two extents of the host pages: nothing may be copied there."""
END_SECONDS = 60.0


@dataclass
class PinnedPages:
    """Host pages of one group in two extents with a gap between them."""

    page_bytes: int
    pages: int
    memory: memoryview
    region: int

    @property
    def table(self) -> ExtentTable:
        """Pages of the blocks."""
        half = self.pages // 2
        behind = half * self.page_bytes + HOST_GAP
        return ExtentTable((Extent(0, half, self.region, 0), Extent(half, self.pages - half, self.region, behind)))

    def start_of(self, page: int) -> int:
        """Offset of a page."""
        return page * self.page_bytes + (HOST_GAP if page >= self.pages // 2 else 0)


@dataclass
class GroupBytes:
    """One group: where its planes are, its real memory, and what every byte of it must be."""

    device_geometry: Geometry
    host_geometry: Geometry
    slab: Slab
    host: PinnedPages
    device_model: Bytes
    host_model: Bytes

    def apply(self, direction: Direction, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Move pages in the model."""
        for here, there in zip(device_pages, host_pages, strict=True):
            for ours, theirs in zip(self.device_geometry.spans, self.host_geometry.spans, strict=True):
                at = ours.offset + here * ours.page_stride
                on_device = self.device_model[at : at + ours.width]
                at = self.host.start_of(there) + theirs.offset
                on_host = self.host_model[at : at + ours.width]
                if direction is Direction.LOAD:
                    on_device[:] = on_host
                else:
                    on_host[:] = on_device


@dataclass
class CudaRig:
    """``ended`` in the order of the ends."""

    layout: Layout
    backend: CudaBackend
    engine: SwapEngine = field(init=False)
    groups: list[GroupBytes] = field(default_factory=list)
    ended: list[tuple[int, Exception | None]] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    tickets: int = 0
    settled: int = 0

    def done(self, ticket: int, error: Exception | None) -> None:
        """A ticket's end."""
        self.ended.append((ticket, error))
        self.came.release()

    def move(self, direction: Direction, pairs: Sequence[PagePairs], *, layered: bool = False) -> TimelineSlot:
        """Start a transfer, and make it in the model. Its pages must not be those of another one on its way."""
        for pair in pairs:
            self.groups[pair.group].apply(direction, pair.device_pages, pair.host_pages)
        self.tickets += 1
        return self.engine.submit(Transfer(self.tickets, MODEL, REPLICA, direction, tuple(pairs), layered))

    def settle(self) -> None:
        """Until every transfer has ended, well."""
        while self.settled < self.tickets:
            assert self.came.acquire(timeout=END_SECONDS)
            self.settled += 1
        assert sorted(self.ended) == [(ticket, None) for ticket in range(1, self.tickets + 1)]

    def check(self) -> None:
        """Every byte of both sides is what the model says: what was moved, and what was not touched."""
        for number, group in enumerate(self.groups):
            size = len(group.device_model)
            found = np.frombuffer(self.backend.read(group.slab.region, 0, size), np.uint8)
            np.testing.assert_array_equal(found, group.device_model, err_msg=f"device, group {number}")
            host = np.frombuffer(group.host.memory, np.uint8)
            np.testing.assert_array_equal(host, group.host_model, err_msg=f"host, group {number}")


@contextmanager
def cuda_rig(
    gpu: Gpu, layout: Layout, rng: np.random.Generator, *, layers_per_step: int | None = None, vmm: bool = False
) -> Iterator[CudaRig]:
    """One model on one GPU, poisoned on both sides with random bytes."""
    device_bytes = sum(device_geometry(layout, g, DEVICE_PAGES).total_bytes for g in range(len(layout.groups)))
    mine = [one for one in find_gpus() if one.uuid == gpu.uuid]
    backend = CudaBackend(mine, device_bytes, vmm=vmm, timeline_words=64)
    backend.start()
    rig = CudaRig(layout, backend)
    try:
        rig.engine = SwapEngine(InProcessMovers(backend), rig.done, layers_per_step=layers_per_step)
        rig.engine.start()
        rig.groups = [_group(gpu, backend, layout, group, rng) for group in range(len(layout.groups))]
        rig.engine.attach_model(MODEL, layout, [[group.host] for group in rig.groups])
        slabs = [group.slab for group in rig.groups]
        rig.engine.attach_replica(MODEL, REPLICA, [gpu.uuid], [slabs], [DEVICE_PAGES] * len(slabs))
        yield rig
        rig.engine.close()
    finally:
        backend.close()


def _group(gpu: Gpu, backend: CudaBackend, layout: Layout, group: int, rng: np.random.Generator) -> GroupBytes:
    device, page_bytes = device_geometry(layout, group, DEVICE_PAGES), layout.page_bytes(group)
    memory = memoryview(mmap.mmap(-1, HOST_PAGES * page_bytes + HOST_GAP))
    host_model = rng.integers(0, 256, memory.nbytes, np.uint8)
    device_model = rng.integers(0, 256, device.total_bytes, np.uint8)
    np.frombuffer(memory, np.uint8)[:] = host_model
    host = PinnedPages(page_bytes, HOST_PAGES, memory, backend.register_host(memory))
    slab = backend.create_slab(gpu.uuid, device.total_bytes)
    write_device(gpu, slab.address, device_model.tobytes())
    return GroupBytes(device, host_geometry(layout, group, HOST_PAGES), slab, host, device_model, host_model)


def gqa_bf16() -> Layout:
    """128 KiB a plane."""
    planes = [Plane(name, layer, "full", (8, 64, 128), "bfloat16") for layer in range(4) for name in ("k", "v")]
    return Layout(64, 1, (PlaneGroup("full"),), tuple(planes))


def fp8_with_scales() -> Layout:
    """32 KiB a plane, and 1 KiB of scales beside each."""
    planes = [Plane(name, layer, "full", (4, 64, 128), "float8_e4m3fn") for layer in range(6) for name in ("k", "v")]
    planes += [Plane(name, layer, "full", (4, 64), "float32") for layer in range(6) for name in ("k_scale", "v_scale")]
    return Layout(64, 1, (PlaneGroup("full"),), tuple(planes))


def mla() -> Layout:
    """73,728 bytes a plane, as DeepSeek-V3."""
    planes = [Plane("latent", layer, "full", (1, 64, 576), "bfloat16") for layer in range(8)]
    return Layout(64, 1, (PlaneGroup("full", replicated=True),), tuple(planes))


def dsa() -> Layout:
    """41,984 bytes of latents and 8,448 of an indexer's keys and scales in each layer."""
    planes = [Plane("latent", layer, "full", (64, 656), "uint8") for layer in range(8)]
    planes += [Plane("index", layer, "full", (8448,), "uint8") for layer in range(8)]
    return Layout(64, 1, (PlaneGroup("full", replicated=True),), tuple(planes))


def two_groups() -> Layout:
    """Full attention in every other layer and windows between, of another width; and pages of odd bytes."""
    planes = [Plane(name, layer, "full", (2, 64, 128), "bfloat16") for layer in (0, 2, 4) for name in ("k", "v")]
    planes += [Plane(name, layer, "window", (3, 64, 64), "bfloat16") for layer in (1, 3, 5) for name in ("k", "v")]
    planes += [Plane("odd", layer, "window", (1003,), "uint8") for layer in (1, 5)]
    return Layout(64, 1, (PlaneGroup("full"), PlaneGroup("window", 256)), tuple(planes))


LAYOUTS = {"gqa": gqa_bf16, "fp8": fp8_with_scales, "mla": mla, "dsa": dsa, "groups": two_groups}
