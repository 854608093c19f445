"""Ranks and replicas on two GPUs: every byte of both, tickets that end with the last rank, and copies between them."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kvcache.v1 import admin_pb2

from cachesvc.memory.backend import STAMP_BYTES, PeerCheck, bytes_of
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import Unavailable
from cachesvc.model.layout import Geometry, Layout, Plane, PlaneGroup, device_geometry, host_geometry
from cachesvc.model.words import Direction, PagePairs, TimelineSlot, Transfer, has_reached
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers
from gpu_ops.gpu import Gpu, find_gpus, started
from tests.e2e.engine import prompt
from tests.e2e.rig import running_node
from tests.forked_command import command_forker
from tests.forked_process import PipedProcess
from tests.gpu.engine import CUDA
from tests.gpu.remote import RemoteGpuEngine
from tests.gpu.rig import Bytes, write_device
from tests.gpu.swap_rig import END_SECONDS, HOST_GAP, HOST_PAGES, MODEL, PinnedPages
from tests.unit.rigs.swap_rig import landed_bytes

pytestmark = pytest.mark.gpu

LOAD, STORE = Direction
STRAIGHT, CROSSWISE = 0, 1
PAGES = (48, 37)
"""Device pages of the two replicas: they differ, so that strides do."""
Pair = tuple[int, Sequence[int], Sequence[int]]


@pytest.fixture(scope="module")
def gpus(gpu: Gpu) -> Iterator[tuple[Gpu, Gpu]]:
    """The first two GPUs, started."""
    every = find_gpus()
    if len(every) < 2:
        pytest.skip(f"this takes two GPUs, and there is only {every[0].facts.name}")
    with started(every[1]) as second:
        yield gpu, second


def two_ranks() -> Layout:
    """Latents that are the same on every rank, and windowed keys and values that are not; some planes of odd widths."""
    planes = [Plane("latent", layer, "full", (64, 576), "bfloat16") for layer in range(6)]
    planes += [Plane(name, layer, "window", (2, 64, 128), "bfloat16") for layer in (1, 3, 5) for name in ("k", "v")]
    planes += [Plane("odd", layer, "window", (1003,), "uint8") for layer in (1, 5)]
    return Layout(64, 2, (PlaneGroup("full", replicated=True), PlaneGroup("window", 256)), tuple(planes))


@dataclass
class Side:
    """Memory of one group on one device (``slab``) or on the host, and what every byte of it must be."""

    geometry: Geometry
    model: Bytes
    slab: Slab | None = None
    host: PinnedPages | None = None

    def rows(self, page: int) -> Iterator[Bytes]:
        """A page's planes in the model."""
        for span in self.geometry.spans:
            start = page * span.page_stride if self.host is None else self.host.start_of(page)
            yield self.model[start + span.offset : start + span.offset + span.width]


@dataclass
class TwoGpuRig:
    """Replica 0 has its ranks on the GPUs in order, replica 1 crosswise. ``devices[replica][rank][group]``."""

    layout: Layout
    backend: CudaBackend
    engine: SwapEngine = field(init=False)
    devices: list[list[list[Side]]] = field(default_factory=list)
    hosts: list[list[Side]] = field(default_factory=list)
    slots: dict[int, TimelineSlot] = field(default_factory=dict)
    ended: list[tuple[int, Exception | None]] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    submitted: threading.Lock = field(default_factory=threading.Lock)
    tickets: int = 0
    settled: int = 0

    def done(self, ticket: int, error: Exception | None) -> None:
        """A ticket's end: the words of every rank stand at their ends by then."""
        with self.submitted:
            slot = self.slots[ticket]
        words = [self.backend.timeline(device).sheet(MODEL).read(slot.word) for device in self.backend.devices()]
        if not all(has_reached(word, slot.end) for word in words):
            self.early.append(ticket)
        self.ended.append((ticket, error))
        self.came.release()

    def move(
        self,
        direction: Direction,
        *pairs: Pair,
        replica: int = STRAIGHT,
        source: int | None = None,
        layered: bool = False,
    ) -> None:
        """Start a transfer, and make it in the model."""
        for group, mine, theirs in pairs:
            self._apply(direction, group, mine, theirs, replica, source)
        pages = tuple(PagePairs(group, tuple(mine), tuple(theirs)) for group, mine, theirs in pairs)
        self.tickets += 1
        transfer = Transfer(self.tickets, MODEL, replica, direction, pages, layered, source_replica=source)
        with self.submitted:
            self.slots[self.tickets] = self.engine.submit(transfer)

    def _apply(
        self, way: Direction, group: int, mine: Sequence[int], theirs: Sequence[int], replica: int, source: int | None
    ) -> None:
        replicated = self.layout.groups[group].replicated
        for rank in range(1 if replicated and way is STORE else self.layout.ranks):
            here = self.devices[replica][rank][group]
            hosts = self.hosts[group]
            there = hosts[rank % len(hosts)] if source is None else self.devices[source][rank][group]
            for page, other in zip(mine, theirs, strict=True):
                for ours, others in zip(here.rows(page), there.rows(other), strict=True):
                    if way is LOAD:
                        ours[:] = others
                    else:
                        others[:] = ours

    def settle(self) -> None:
        """Until every transfer has ended, well and not too early."""
        while self.settled < self.tickets:
            assert self.came.acquire(timeout=END_SECONDS)
            self.settled += 1
        assert sorted(self.ended) == [(ticket, None) for ticket in range(1, self.tickets + 1)]
        assert self.early == []

    def check(self) -> None:
        """Every byte everywhere is what the model says."""
        for replica, ranks in enumerate(self.devices):
            for rank, groups in enumerate(ranks):
                for group, side in enumerate(groups):
                    assert side.slab is not None
                    found = np.frombuffer(self.backend.read(side.slab.region, 0, len(side.model)), np.uint8)
                    where = f"replica {replica}, rank {rank}, group {group}"
                    np.testing.assert_array_equal(found, side.model, err_msg=where)
        for group, hosts in enumerate(self.hosts):
            for side in hosts:
                assert side.host is not None
                found = np.frombuffer(side.host.memory, np.uint8)
                np.testing.assert_array_equal(found, side.model, err_msg=f"host, group {group}")


@contextmanager
def two_gpu_rig(
    gpus: tuple[Gpu, Gpu], rng: np.random.Generator, *, layers_per_step: int | None = None, vmm: bool = False
) -> Iterator[TwoGpuRig]:
    """One model with both replicas, poisoned everywhere with random bytes."""
    layout = two_ranks()
    sizes = [device_geometry(layout, group, pages).total_bytes for pages in PAGES for group in range(2)]
    mine = [one for one in find_gpus() if one.uuid in {gpu.uuid for gpu in gpus}]
    backend = CudaBackend(mine, sum(sizes), vmm=vmm, timeline_words=64)
    backend.start()
    rig = TwoGpuRig(layout, backend)
    try:
        rig.engine = SwapEngine(InProcessMovers(backend), rig.done, layers_per_step=layers_per_step)
        rig.engine.start()
        rig.hosts = [[_host(backend, layout, g, rng) for _ in range(layout.host_ranks(g))] for g in range(2)]
        rig.engine.attach_model(MODEL, layout, [[_pages_of(side) for side in hosts] for hosts in rig.hosts])
        for replica, order in enumerate((gpus, gpus[::-1])):
            ranks = [[_device(gpu, backend, layout, g, PAGES[replica], rng) for g in range(2)] for gpu in order]
            rig.devices.append(ranks)
            slabs = [[side.slab for side in groups if side.slab is not None] for groups in ranks]
            rig.engine.attach_replica(MODEL, replica, [gpu.uuid for gpu in order], slabs, [PAGES[replica]] * 2)
        yield rig
        rig.engine.close()
    finally:
        backend.close()


def _pages_of(side: Side) -> PinnedPages:
    assert side.host is not None
    return side.host


def _host(backend: CudaBackend, layout: Layout, group: int, rng: np.random.Generator) -> Side:
    page_bytes = layout.page_bytes(group)
    memory = memoryview(mmap.mmap(-1, HOST_PAGES * page_bytes + HOST_GAP))
    model = rng.integers(0, 256, memory.nbytes, np.uint8)
    np.frombuffer(memory, np.uint8)[:] = model
    pages = PinnedPages(page_bytes, HOST_PAGES, memory, backend.register_host(memory))
    return Side(host_geometry(layout, group, HOST_PAGES), model, host=pages)


def _device(gpu: Gpu, backend: CudaBackend, layout: Layout, group: int, pages: int, rng: np.random.Generator) -> Side:
    geometry = device_geometry(layout, group, pages)
    model = rng.integers(0, 256, geometry.total_bytes, np.uint8)
    slab = backend.create_slab(gpu.uuid, geometry.total_bytes)
    write_device(gpu, slab.address, model.tobytes())
    return Side(geometry, model, slab=slab)


def some(rng: np.random.Generator, pages: int, of: int) -> list[int]:
    """Different pages: a few runs, and singles."""
    runs = np.array_split(np.arange(of), max(1, of // 5))
    rng.shuffle(runs)
    picked: list[int] = np.concatenate(runs)[:pages].tolist()
    return picked


def pairs_of(rng: np.random.Generator, count: int, mine: int, theirs: int) -> list[Pair]:
    """Pages in both groups."""
    return [(group, some(rng, count, mine), some(rng, count, theirs)) for group in range(2)]


@pytest.mark.parametrize("vmm", [False, True], ids=["ipc", "vmm"])
@pytest.mark.parametrize("layers_per_step", [None, 1])
def test_both_ranks_swap_out_and_in_and_a_ticket_ends_with_the_last(
    gpus: tuple[Gpu, Gpu], rng: np.random.Generator, layers_per_step: int | None, vmm: bool
) -> None:
    with two_gpu_rig(gpus, rng, layers_per_step=layers_per_step, vmm=vmm) as rig:
        for count in (1, 17, 30):
            pairs = pairs_of(rng, count, PAGES[0], HOST_PAGES)
            rig.move(STORE, *pairs)
            rig.settle()
            rig.check()
            rig.move(LOAD, *((group, some(rng, count, PAGES[0]), there) for group, _, there in pairs), layered=True)
            rig.settle()
            rig.check()


def test_a_group_that_ranks_have_alike_is_stored_once_and_loaded_to_both(
    gpus: tuple[Gpu, Gpu], rng: np.random.Generator
) -> None:
    with two_gpu_rig(gpus, rng) as rig:
        assert [len(hosts) for hosts in rig.hosts] == [1, 2]
        mine, there, back = some(rng, 20, PAGES[0]), some(rng, 20, HOST_PAGES), some(rng, 20, PAGES[0])
        rig.move(STORE, (0, mine, there))
        rig.settle()
        once = 20 * rig.layout.page_bytes(0)
        assert landed_bytes(rig.engine, "d2h") == once
        rig.move(LOAD, (0, back, there), layered=True)
        rig.settle()
        rig.check()
        assert landed_bytes(rig.engine, "h2d") == 2 * once
        for page in back:
            assert rig.engine.page_bytes(MODEL, 0, 0, 0, page) == rig.engine.page_bytes(MODEL, 0, 1, 0, page)


@pytest.mark.parametrize("crowded", [False, True])
def test_replicas_share_device_to_device(gpus: tuple[Gpu, Gpu], rng: np.random.Generator, crowded: bool) -> None:
    """``crowded``: with loads and stores of other pages at the same time."""
    with two_gpu_rig(gpus, rng) as rig:
        if not rig.engine.can_reach(MODEL, STRAIGHT, CROSSWISE):
            pytest.skip("these two GPUs do not reach each other")
        for source, target in ((STRAIGHT, CROSSWISE), (CROSSWISE, STRAIGHT)):
            mine, theirs = some(rng, 36, PAGES[target]), some(rng, 36, PAGES[source])
            hosts = some(rng, 36, HOST_PAGES)
            if crowded:
                rig.move(LOAD, *((g, mine[30:], hosts[30:]) for g in range(2)), replica=target)
                rig.move(STORE, *((g, theirs[:30], hosts[:30]) for g in range(2)), replica=source)
            rig.move(LOAD, *((g, mine[:30], theirs[:30]) for g in range(2)), replica=target, source=source)
            rig.settle()
            rig.check()
        moved = 2 * 2 * 30 * sum(rig.layout.page_bytes(group) for group in range(2))
        assert landed_bytes(rig.engine, "p2p") == moved


def test_ways_between_the_gpus_bring_each_one_s_stamp_and_no_other_bytes(
    gpus: tuple[Gpu, Gpu], rng: np.random.Generator
) -> None:
    with two_gpu_rig(gpus, rng) as rig:
        assert rig.backend.refused_peers() == {}
        for source, target in (gpus, gpus[::-1]):
            if not target.can_reach(source):
                pytest.skip("these two GPUs do not reach each other")
            stamp = PeerCheck(rig.backend, source.uuid).stamp()
            check = PeerCheck(rig.backend, target.uuid)
            check.verify(stamp.slab.region, stamp.seed)
            wrong = bytes([bytes_of(stamp.seed)[-1] ^ 1])
            write_device(source, stamp.slab.address + STAMP_BYTES - 1, wrong)
            with pytest.raises(Unavailable, match=f"1 of .* the first at {STAMP_BYTES - 1}"):
                check.verify(stamp.slab.region, stamp.seed)


class EngineOnOneGpu(RemoteGpuEngine):
    """A process that is shown one GPU alone."""

    def __init__(self, gpu: Gpu, socket: str, **settings: Any) -> None:
        line = json.dumps({"socket": socket, "devices": [gpu.uuid], **settings})
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
        self.process = PipedProcess(command_forker().socket, "tests.gpu.remote", (line,), environment)


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
@pytest.mark.parametrize("layout", ["small", "mixed"])
def test_an_engine_hits_what_one_on_another_gpu_has_computed(gpus: tuple[Gpu, Gpu], layout: str, memory: str) -> None:
    blocks, near = 24, gpus[1].can_reach(gpus[0])
    with ExitStack() as stack:
        node = stack.enter_context(running_node((*CUDA, "--device-memory", memory)))
        first, second = (
            stack.enter_context(EngineOnOneGpu(gpu, node.socket, layout=layout, device_pages=40, host_pages=40))
            for gpu in gpus
        )
        first.ask("start")
        second.ask("start")
        assert first.ask("serve", tokens=prompt(1, blocks))["computed"] == blocks
        served = second.ask("serve", tokens=prompt(1, blocks + 1))
        assert (served["computed"], served["bad"]) == (1, [])
        assert (served["device"], served["host"]) == ((blocks, 0) if near else (0, blocks))
        back = first.ask("serve", tokens=prompt(1, blocks + 1))
        assert (back["computed"], back["bad"]) == (0, [])
        assert (node.counters().get("p2p_bytes", 0) > 0) == near
        attention = node.admin.GetStatus(admin_pb2.GetStatusRequest()).attention
        assert not [line for line in attention if "are refused" in line]
