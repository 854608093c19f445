"""A swap engine with one model on one replica, over either backend; for tests."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachesvc import __version__
from cachesvc.memory.extents import Extent, ExtentTable, map_memfd, sealed_memfd
from cachesvc.memory.interface import DeviceMemory
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_geometry
from cachesvc.model.words import Direction, PagePairs, TimelineSlot, Transfer
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers, Movers
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
    memory: memoryview
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


def wait_chunks() -> None:
    """Until every mover has been asked for the chunks of host memory that there are."""
    for thread in threading.enumerate():
        if thread.name.startswith("chunks-"):
            thread.join()


@dataclass
class Rig:
    """An engine on a backend with one model on one replica; ``ended`` in order of the ends."""

    layout: Layout
    backend: DeviceMemory
    engine: SwapEngine = field(init=False)
    hosts: list[list[HostArray]] = field(default_factory=list)
    ended: list[tuple[int, Exception | None]] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    tickets: Iterator[int] = field(default_factory=itertools.count)
    then: Callable[[int], None] | None = None
    descriptors: list[int] = field(default_factory=list)

    def done(self, ticket: int, error: Exception | None) -> None:
        self.ended.append((ticket, error))
        self.came.release()
        if self.then is not None:
            self.then(ticket)

    def move(
        self,
        direction: Direction,
        *pairs: tuple[int, list[int], list[int]],
        layered: bool = False,
        short_suffix: bool = False,
    ) -> TimelineSlot:
        pages = tuple(PagePairs(group, tuple(device), tuple(host)) for group, device, host in pairs)
        ticket = next(self.tickets)
        return self.engine.submit(
            Transfer(ticket, MODEL, REPLICA, direction, pages, layered, short_suffix=short_suffix)
        )

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
        return [(sheet.read(slot.word), sheet.read(slot.failed_word)) for sheet in self.sheets()]

    def sheets(self, model: int = MODEL) -> list[Any]:
        """A model's words on each device."""
        return [self.backend.timeline(device).sheet(model) for device in self.backend.devices()]

    def add_hosts(self) -> None:
        """Attach the model with host pages of random bytes."""
        rng = np.random.default_rng(5)
        for group in range(len(self.layout.groups)):
            ranks = []
            for _ in range(self.layout.host_ranks(group)):
                content = rng.bytes(self.layout.page_bytes(group) * HOST_PAGES + 16)
                fd = sealed_memfd("host", len(content))
                memory = map_memfd(fd, len(content))
                memory[:] = content
                region = self.backend.register_host(memory, fd)
                self.descriptors.append(fd)
                ranks.append(HostArray(self.layout.page_bytes(group), HOST_PAGES, memory, region, HOST_PAGES))
            self.hosts.append(ranks)
        wait_chunks()
        self.engine.attach_model(MODEL, self.layout, self.hosts)

    def close(self) -> None:
        self.engine.close()
        self.backend.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def mixed_layout(ranks: int) -> Layout:
    """A replicated group, a window of odd widths that begins at layer 1, and two kinds of planes in each."""
    planes = [Plane("latent", layer, "full", (37,), "uint8") for layer in range(4)]
    planes += [Plane("scale", layer, "full", (3,), "float32") for layer in range(4)]
    planes += [Plane(name, layer, "window", (5, 7), "uint8") for layer in (1, 3) for name in ("k", "v")]
    return Layout(16, ranks, (PlaneGroup("full", replicated=True), PlaneGroup("window", 64)), tuple(planes))


def rig_of(kind: str, layout: Layout, *, words: int = 64, layers_per_step: int | None = 1) -> Rig:
    movers: Movers
    if kind == "process":
        names = [f"shm-{rank}" for rank in range(layout.ranks)]
        movers = MoverProcesses([Settings("shm", name, 1 << 20, timeline_words=words) for name in names], __version__)
    elif kind == "shm":
        movers = InProcessMovers(ShmBackend(layout.ranks, 1 << 20, timeline_words=words))
    else:
        movers = InProcessMovers(SteppedBackend(layout.ranks, 1 << 20, timeline_words=words))
    backend = movers.memory
    backend.start()
    rig = Rig(layout, backend)
    rig.engine = engine = SwapEngine(movers, rig.done, layers_per_step=layers_per_step)
    engine.start()
    rig.add_hosts()
    attach_replica(rig, REPLICA)
    return rig


def attach_replica(
    rig: Rig, replica: int, *, device_pages: int = DEVICE_PAGES, turned: bool = False, model: int = MODEL
) -> None:
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
    rig.engine.attach_replica(model, replica, devices, slabs, pages)
