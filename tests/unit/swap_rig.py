"""A swap engine with one model on one replica, over either backend; for tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cachesvc.memory.extents import Extent, ExtentTable
from cachesvc.memory.seam import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.geometry import device_geometry
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.transfer import Direction, PagePairs, TimelineSlot, Transfer
from cachesvc.swap.engine import SwapEngine
from tests.sim.inline_planning import InlinePlanning
from tests.sim.stepped_backend import SteppedBackend

LOAD, STORE = Direction
MODEL, REPLICA = 3, 1
DEVICE_PAGES, HOST_PAGES = 24, 40


def landed_bytes(engine: SwapEngine, direction: str) -> int:
    """Bytes of transfers that ended well, on all devices; ``direction`` is one of DIRECTIONS."""
    return sum(count for (way, _), count in engine.transfers.device_bytes.items() if way == direction)


@dataclass
class HostArray:
    """Host pages in two extents with a gap; ``shown`` pages are usable."""

    page_bytes: int
    pages: int
    memory: bytearray
    region: int
    shown: int

    @property
    def table(self) -> ExtentTable:
        half = self.pages // 2
        all_extents = (
            Extent(0, half, self.region, 3),
            Extent(half, self.pages - half, self.region, half * self.page_bytes + 9),
        )
        return ExtentTable(e for e in all_extents if e.first_page < self.shown)

    def page(self, page: int) -> slice:
        start = page * self.page_bytes + (3 if page < self.pages // 2 else 9)
        return slice(start, start + self.page_bytes)


@dataclass
class Rig:
    """An engine on a backend with one model on one replica; ``ended`` in order of the ends."""

    layout: Layout
    backend: Backend
    engine: SwapEngine = field(init=False)
    hosts: list[list[HostArray]] = field(default_factory=list)
    ended: list[tuple[int, Exception | None]] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    tickets: Iterator[int] = field(default_factory=itertools.count)
    then: Callable[[int], None] | None = None

    def done(self, ticket: int, error: Exception | None) -> None:
        self.ended.append((ticket, error))
        self.came.release()
        if self.then is not None:
            self.then(ticket)

    def move(
        self, direction: Direction, *pairs: tuple[int, list[int], list[int]], layered: bool = False
    ) -> TimelineSlot:
        pages = tuple(PagePairs(group, tuple(device), tuple(host)) for group, device, host in pairs)
        return self.engine.submit(Transfer(next(self.tickets), MODEL, REPLICA, direction, pages, layered))

    def settle(self, ends: int = 1) -> None:
        if isinstance(self.backend, SteppedBackend):
            self.backend.run_all()
        for _ in range(ends):
            self.came.acquire()

    def device_page(self, rank: int, group: int, page: int, replica: int = REPLICA) -> bytes:
        return self.engine.page_bytes(MODEL, replica, rank, group, page)

    def host_page(self, rank: int, group: int, page: int) -> bytes:
        return self.engine.page_bytes(MODEL, None, rank, group, page)

    def words(self, slot: TimelineSlot) -> list[tuple[int, int]]:
        timelines = [self.backend.timeline(device) for device in self.backend.devices()]
        return [(timeline.read(slot.word), timeline.read(slot.failed_word)) for timeline in timelines]

    def close(self) -> None:
        self.engine.close()
        self.backend.close()


def mixed_layout(ranks: int) -> Layout:
    """A replicated group, a window of odd widths that begins at layer 1, and two kinds of planes in each."""
    planes = [Plane("latent", layer, "full", (37,), "uint8") for layer in range(4)]
    planes += [Plane("scale", layer, "full", (3,), "float32") for layer in range(4)]
    planes += [Plane(name, layer, "window", (5, 7), "uint8") for layer in (1, 3) for name in ("k", "v")]
    return Layout(16, ranks, (PlaneGroup("full", replicated=True), PlaneGroup("window", 64)), tuple(planes))


def rig_of(kind: str, layout: Layout, *, words: int = 64, layers_per_step: int | None = 1) -> Rig:
    backend: Backend
    if kind == "shm":
        backend = ShmBackend(layout.ranks, 1 << 20, timeline_words=words)
    else:
        backend = SteppedBackend(layout.ranks, 1 << 20, timeline_words=words)
    backend.start()
    planning = None if kind == "shm" else InlinePlanning()
    rig = Rig(layout, backend)
    rig.engine = engine = SwapEngine(backend, rig.done, planning=planning, layers_per_step=layers_per_step)
    engine.start()
    rng = np.random.default_rng(5)
    for group in range(len(layout.groups)):
        ranks = []
        for _ in range(layout.host_ranks(group)):
            memory = bytearray(rng.bytes(layout.page_bytes(group) * HOST_PAGES + 16))
            region = backend.register_host(memoryview(memory))
            ranks.append(HostArray(layout.page_bytes(group), HOST_PAGES, memory, region, HOST_PAGES))
        rig.hosts.append(ranks)
    engine.attach_model(MODEL, layout, rig.hosts)
    attach_replica(rig, REPLICA)
    return rig


def attach_replica(rig: Rig, replica: int, *, device_pages: int = DEVICE_PAGES, turned: bool = False) -> None:
    """One more replica; ``turned``: with its ranks on the devices in the other order."""
    pages = [device_pages] * len(rig.layout.groups)
    devices = rig.backend.devices()[:: -1 if turned else 1]
    slabs = [
        [
            rig.backend.create_slab(device, device_geometry(rig.layout, group, count).total_bytes)
            for group, count in enumerate(pages)
        ]
        for device in devices
    ]
    rig.engine.attach_replica(MODEL, replica, devices, slabs, pages)
