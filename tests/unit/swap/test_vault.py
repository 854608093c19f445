"""The memory of models: what cannot be made leaves nothing behind, and what was rounded up makes room again."""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.flows.core import Core
from cachesvc.flows.registration import PoolRequest, Registered, RegisterRequest, register
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.host_pool import ALIGN_BYTES, FreeRanges, HostPool, columns_of
from cachesvc.memory.interface import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import NotFound, PoolExhausted, Unavailable
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_bytes, host_bytes
from cachesvc.model.words import Direction, PagePairs, Run, Transfer, WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.swap import vault
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import SHARE_PRECISION, Headroom, InProcessMovers, PoolSizes
from cachesvc.swap.vault import Arrivals, Vault
from tests.contracts.host_gpu import UNIT_BYTES, HostGpu
from tests.sim.node import HOST_CHUNK_BYTES, SteppedHostPool
from tests.sim.stepped_backend import SteppedBackend
from tests.unit.rigs.ledger_rig import windowed

LAYOUT = windowed()
PAGES = (32, 32)
POOL_BYTES = device_bytes(LAYOUT, PAGES)


class Desk:
    """A core with real memory."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        backend.start()
        self.ended = threading.Semaphore(0)
        self.engine = engine = SwapEngine(InProcessMovers(backend), lambda *_: self.ended.release())
        engine.start()
        self.core = Core(Ledger(), engine, eviction_policy("lru"), WriteRule(WritePolicy.WRITE_BACK))
        pool = HostPool(0, 1 << 20, 1, None, backend)
        self.vault = Vault(backend, pool, engine, lambda *_: None)

    def register(self, name: str, device: str = "", pages: tuple[int, ...] = ()) -> Registered:
        devices = (device,) if device else ()
        request = RegisterRequest(name, LAYOUT, b"", devices, PoolRequest(pages), PoolRequest((0, 0)))
        return register(self.core, self.vault, request, 0.0)


def test_a_pool_whose_slabs_were_rounded_up_beyond_it_makes_room_again() -> None:
    gpu = HostGpu()
    desk = Desk(CudaBackend((gpu,), POOL_BYTES, vmm=True, timeline_words=64))
    desk.register("first")
    assert sum(slab.handle.size_bytes for slab in desk.vault.slabs(1, 0, 0)) == 2 * UNIT_BYTES > POOL_BYTES
    assert desk.vault.device_free_bytes(gpu.uuid) == 0
    second = desk.register("second")
    assert second.replica.device_pages == PAGES
    assert [model.name for model in desk.core.ledger.models.values()] == ["second"]
    desk.backend.close()
    assert gpu.is_whole()


def test_a_model_on_a_gpu_that_died_is_forgotten_whole() -> None:
    gpu = HostGpu()
    desk = Desk(CudaBackend((gpu,), POOL_BYTES, timeline_words=64))
    desk.register("first")
    gpu.is_dead = True
    with pytest.raises(Unavailable, match="restart the daemon"):
        desk.register("second")
    assert not desk.core.ledger.models
    assert desk.vault.device_free_bytes(gpu.uuid) == POOL_BYTES
    desk.backend.close()
    assert gpu.is_whole()


def test_a_slab_that_no_descriptor_is_left_for_leaves_no_model_behind() -> None:
    desk = Desk(ShmBackend(1, POOL_BYTES, timeline_words=64))
    with no_descriptors(), pytest.raises(Unavailable, match="ulimit -n"):
        desk.register("first")
    assert not desk.core.ledger.models
    assert desk.register("first").replica.device_pages == PAGES
    with pytest.raises(PoolExhausted):
        desk.backend.create_slab(desk.vault.devices()[0], 1)
    desk.backend.close()


class Store:
    """A vault over a host pool whose chunks come when told; ``told``: of which pages the node heard."""

    def __init__(self, chunks: int = 8) -> None:
        self.backend = SteppedBackend(2, 1 << 20)
        self.backend.start()
        self.told: list[tuple[int, int, Run]] = []
        self.pool = SteppedHostPool(chunks * HOST_CHUNK_BYTES, HOST_CHUNK_BYTES, 1, None, self.backend)
        self.engine = SwapEngine(InProcessMovers(self.backend), lambda *_: None)
        self.engine.start()
        self.vault = Vault(self.backend, self.pool, self.engine, lambda *arrived: self.told.append(arrived))

    def fill(self, chunks: int) -> None:
        for _ in range(chunks):
            assert self.pool.fill_one()

    def chunks_of(self, model: int) -> list[int]:
        """Chunks of the host pool in which the pages of the model's only slab lie."""
        ((slab,),) = self.vault._models[model].host  # noqa: SLF001 - where they lie is to be seen in no other way
        return [extent.place.chunk for extent in slab.extents]

    def free(self) -> tuple[int, ...]:
        left = self.vault.headroom()
        return *(left.device_bytes[device] for device in self.backend.devices()), left.host.free_bytes


def two_ranks(page_bytes: int) -> Layout:
    """A group whose bytes differ by rank: two host slabs."""
    return Layout(4, 2, (PlaneGroup("full"),), (Plane("k", 0, "full", (page_bytes,), "uint8"),))


def test_host_pages_are_told_once_they_are_usable_on_every_rank_and_none_is_lost_on_the_way() -> None:
    """Four chunks a rank of four pages each; the model is entered while they still come."""
    store = Store()
    store.vault.open_host(1, two_ranks(1024), (16,), store.backend.devices())
    store.fill(5)
    assert store.vault.take_news(1) == [(0, Run(0, 4))]
    store.fill(1)
    assert store.told == [], "the model is not there yet"
    assert store.vault.announce(1) == [(0, Run(4, 4))]
    store.fill(2)
    assert store.told == [(1, 0, Run(8, 4)), (1, 0, Run(12, 4))]


def on_one(page_bytes: int) -> Layout:
    """A group of one rank."""
    return Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (page_bytes,), "uint8"),))


def test_a_chunk_that_one_device_lacks_is_there_for_models_of_others_and_comes_to_it_later() -> None:
    """Model 1 is on the first device, model 2 on the second; each has two chunks of four pages."""
    store = Store(4)
    first, second = store.backend.devices()
    for model, device in ((1, first), (2, second)):
        store.vault.open_host(model, on_one(1024), (8,), (device,))
        store.vault.announce(model)
    store.backend.tell_hosts(store.pool.reach)
    store.backend.lacking = {(first, region) for region in (2, 4)}
    store.fill(4)
    assert store.told == [(1, 0, Run(0, 4)), (2, 0, Run(0, 4)), (2, 0, Run(4, 4))]
    store.backend.take_hosts(second)
    assert len(store.told) == 3
    store.backend.take_hosts(first)
    assert store.told[3:] == [(1, 0, Run(4, 4))]


def test_ranks_wait_for_their_own_devices_alone_and_for_a_lost_one_no_more() -> None:
    """Two ranks have chunks of their own; the second device lacks what only the first one needs."""
    store = Store(4)
    first, second = store.backend.devices()
    store.vault.open_host(1, two_ranks(1024), (8,), (first, second))
    store.vault.announce(1)
    store.backend.tell_hosts(store.pool.reach)
    store.backend.lacking = {(second, 1), (second, 2), (second, 4)}
    store.fill(4)
    assert store.told == [(1, 0, Run(0, 4))]
    store.backend.take_hosts(second)
    assert store.told == [(1, 0, Run(0, 4)), (1, 0, Run(4, 4))]


def test_a_replica_on_a_device_that_lacks_pages_in_use_is_refused_and_keeps_no_other_waiting() -> None:
    store = Store(2)
    first, second = store.backend.devices()
    layout = on_one(1024)
    store.vault.open_host(1, layout, (8,), (first,))
    store.vault.announce(1)
    store.vault.open_replica(1, 0, layout, (first,), (4,))
    store.backend.tell_hosts(store.pool.reach)
    store.backend.lacking = {(second, region) for region in range(100)}
    store.fill(1)
    with pytest.raises(Unavailable, match="has not pinned"):
        store.vault.open_replica(1, 1, layout, (second,), (4,))
    store.fill(1)
    assert store.told == [(1, 0, Run(0, 4)), (1, 0, Run(4, 4))]
    store.backend.take_hosts(second)
    store.vault.open_replica(1, 1, layout, (second,), (4,))


def test_models_get_the_chunks_that_their_devices_have_and_those_that_all_have_before_others() -> None:
    """The second device refuses the first and the third of four chunks of four pages."""
    store = Store(4)
    first, second = store.backend.devices()
    store.backend.lacking = {(second, 1), (second, 3)}
    store.fill(4)
    layout = on_one(1024)
    for model, device in ((1, second), (2, first), (3, first)):
        store.vault.open_host(model, layout, (4,), (device,))
        store.vault.announce(model)
    assert store.chunks_of(1) == [1]
    assert store.chunks_of(2) == [3], "a replica on the other device may come"
    assert store.chunks_of(3) == [0], "what is left"
    store.vault.open_replica(2, 0, layout, (first,), (4,))
    store.vault.open_replica(2, 1, layout, (second,), (4,))
    with pytest.raises(Unavailable, match="has not pinned"):
        store.vault.open_replica(3, 0, layout, (second,), (4,))


def test_a_device_that_pins_late_is_waited_for_by_its_own_models() -> None:
    store = Store(1)
    first, second = store.backend.devices()
    layout = on_one(1024)
    store.vault.open_host(1, layout, (4,), (first,))
    store.backend.tell_hosts(store.pool.reach)
    store.backend.lacking = {(second, 1)}
    store.fill(1)
    late = threading.Thread(target=store.backend.take_hosts, args=(second,))
    has_host = store.backend.has_host

    def looked(device: str, region: int) -> bool:
        """The first look finds it missing, and then it comes."""
        there = has_host(device, region)
        if device == second and late.ident is None:
            late.start()
        return there

    store.backend.has_host = looked  # type: ignore[method-assign]
    store.vault.open_replica(1, 0, layout, (second,), (4,))
    late.join()


def test_a_device_that_lost_its_memory_is_not_waited_for() -> None:
    store = Store(2)
    first, second = store.backend.devices()
    layout = on_one(1024)
    store.vault.open_host(1, layout, (8,), (first,))
    store.vault.announce(1)
    for replica, device in enumerate((first, second)):
        store.vault.open_replica(1, replica, layout, (device,), (4,))
    store.backend.lacking = {(second, region) for region in range(100)}
    store.fill(1)
    assert store.told == []
    store.vault.lose(second)
    assert store.told == [(1, 0, Run(0, 4))]


def test_pages_that_arrive_for_a_model_that_has_left_are_told_to_nobody() -> None:
    store = Store()
    store.vault.open_host(1, two_ranks(1024), (16,), store.backend.devices())
    store.vault.announce(1)
    store.vault.retire(1)
    store.fill(8)
    store.vault.close_retired()
    assert store.told == []
    assert store.free()[-1] == 8 * HOST_CHUNK_BYTES


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.randoms())
def test_arrivals_on_all_ranks_are_counted_as_page_by_page(cuts: list[list[int]], random: Random) -> None:
    """However the pages of each rank are cut into runs, and in whatever order they come."""
    pages = min(map(sum, cuts))
    runs = []
    for rank, lengths in enumerate(cuts):
        starts = [0, *accumulate(lengths)]
        runs += [(rank, Run(at, min(n, pages - at))) for at, n in zip(starts, lengths, strict=False) if at < pages]
    random.shuffle(runs)
    arrivals = Arrivals([pages], [len(cuts)])
    seen: Counter[int] = Counter()
    for _, run in runs:
        seen.update(range(run.first, run.first + run.count))
        whole = [page for r in arrivals.count(0, run) for page in range(r.first, r.first + r.count)]
        assert whole == [p for p in range(run.first, run.first + run.count) if seen[p] == len(cuts)]


def test_what_would_be_left_without_models_is_what_is_left_once_they_are_gone() -> None:
    store = Store()
    devices = store.backend.devices()
    for model, pages in ((1, 5), (2, 3)):
        store.vault.open_host(model, two_ranks(1000), (pages,), devices)
        store.vault.open_replica(model, 0, two_ranks(1000), devices, (10 * pages,))
    planned = [store.vault.headroom(without) for without in ((), (1,), (1, 2))]
    assert [room.host.free_bytes for room in planned] == sorted(room.host.free_bytes for room in planned)
    for model, room in enumerate(planned):
        if model:
            store.vault.retire(model)
            store.vault.close_retired()
        assert store.free() == (*room.device_bytes.values(), room.host.free_bytes)
    assert store.free() == (1 << 20, 1 << 20, 8 * HOST_CHUNK_BYTES)


def test_the_memory_of_a_model_that_has_left_is_given_to_nobody() -> None:
    desk = Desk(ShmBackend(1, POOL_BYTES, timeline_words=64))
    desk.register("first")
    (token, *_) = [slab.handle.token for slab in desk.vault.slabs(1, 0, 0)]
    shared = desk.vault.shared(token)
    assert shared is not None
    assert shared[1:] == ("shm-0", 1, 0, 0)
    desk.vault.retire(1)
    assert desk.vault.shared(token) is None
    with pytest.raises(NotFound):
        desk.vault.slabs(1, 0, 0)
    assert desk.vault.device_free_bytes("shm-0") == 0, "not before it is free"
    desk.vault.close_retired()
    assert desk.vault.device_free_bytes("shm-0") == POOL_BYTES
    desk.backend.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The process may open nothing more for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_to_which_copies_may_still_write_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(SteppedBackend(1, POOL_BYTES))
    desk.register("m")
    [device], [model] = desk.vault.devices(), desk.core.ledger.models
    taken = desk.vault.device_free_bytes(device)
    assert taken < POOL_BYTES
    monkeypatch.setattr(SwapEngine, "hangs", lambda _, number: number == model)
    desk.vault.retire(model)
    desk.vault.close_retired()
    assert desk.vault.device_free_bytes(device) == taken


def test_who_registers_waits_for_no_copy_that_hangs_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it reads is kept until it has ended."""
    monkeypatch.setattr(vault, "LANDING_SECONDS", 0.0)
    lost, hung = HostGpu(0), HostGpu(1)
    desk = Desk(CudaBackend((lost, hung), 4 * POOL_BYTES, timeline_words=64))
    for gpu in (lost, hung):
        desk.register("m", gpu.uuid, PAGES)
    hung.hangs = {"wait"}
    copies = (PagePairs(0, [1], [1]),)
    desk.engine.submit(Transfer(7, 1, 1, Direction.LOAD, copies, layered=False, source_replica=0))
    assert hung.hung.acquire()
    desk.vault.lose(lost.uuid)
    free = desk.vault.device_free_bytes(lost.uuid)
    desk.register("other", lost.uuid, PAGES)
    assert desk.vault.device_free_bytes(lost.uuid) == free - POOL_BYTES
    hung.goes_on.set()
    assert desk.ended.acquire()
    desk.vault.close_retired()
    assert desk.vault.device_free_bytes(lost.uuid) == free
    desk.backend.close()
    assert lost.is_whole()


# Headroom: never more than there is, hardly less, and exactly what the pools then give.

WIDTHS = st.integers(1, 5000)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to three groups of planes of odd widths, on one to three ranks, some replicated, perhaps all with windows, or
    all in one slab."""
    count, pool = draw(st.integers(1, 3)), draw(st.sampled_from(("", "one")))
    groups = tuple(
        PlaneGroup(f"g{i}", draw(st.sampled_from((None, 8))), replicated=draw(st.booleans()), pool=pool)
        for i in range(count)
    )
    if pool:
        widths = sorted(draw(st.lists(WIDTHS, min_size=1, max_size=4)), reverse=True)
        layers = [range(draw(st.integers(1, len(widths)))) for _ in groups]
        over = [
            Plane("k", at, group.name, (widths[at],), "uint8")
            for group, few in zip(groups, layers, strict=True)
            for at in few
        ]
        return Layout(4, draw(st.integers(1, 3)), groups, tuple(over))
    planes = tuple(
        Plane("k", layer, f"g{group}", (draw(WIDTHS),), "uint8")
        for layer, group in enumerate([*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=4))])
    )
    return Layout(4, draw(st.integers(1, 3)), groups, planes)


def headroom_of(host: FreeRanges, nodes: dict[str, int] | None = None) -> Headroom:
    return Headroom({"d0": 0, "d1": 0, "d2": 0}, host, 0, host.free_bytes, nodes or {})


DEVICES = ("d0", "d1", "d2")


@settings(max_examples=200, deadline=None)
@given(layout=layouts(), size_bytes=st.integers(0, 1 << 21), data=st.data())
def test_device_pages_are_the_most_that_fit(layout: Layout, size_bytes: int, data: st.DataObject) -> None:
    sizes = PoolSizes(layout)
    pages = sizes.device_pages(size_bytes)
    blocks = {count // unit for count, unit in zip(pages, layout.unit_pages, strict=True)}
    assert len(blocks) == 1
    assert not any(pages) or device_bytes(layout, pages) <= size_bytes
    more = tuple(count + unit for count, unit in zip(pages, layout.unit_pages, strict=True))
    assert device_bytes(layout, more) > size_bytes
    assert sizes.device_pages(device_bytes(layout, more)) >= more
    any_pages = tuple(data.draw(st.integers(0, 1 << 32)) for _ in layout.groups)
    assert sizes.device_bytes(any_pages) == device_bytes(layout, any_pages), "what is planned is what is made"
    assert sizes.host_bytes(any_pages) == host_bytes(layout, any_pages)


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts(),
    chunks=st.lists(st.integers(1, 60), min_size=0, max_size=6),
    share=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    holes=st.lists(st.tuples(st.integers(1, 3 * ALIGN_BYTES), st.integers(1, 6)), max_size=5),
)
def test_host_blocks_fit_and_hardly_more_would(
    layout: Layout, chunks: list[int], share: float, holes: list[tuple[int, int]]
) -> None:
    """In a pool with holes, as other models leave them; on two nodes."""
    host = FreeRanges([count * ALIGN_BYTES for count in chunks], [index % 2 for index in range(len(chunks))])
    held = [host.take(*hole) for hole in holes]
    for pieces in held[::2]:
        host.give_back(columns_of(place for _, place in pieces or ()))
    left, sizes = headroom_of(host, {"d0": 1, "d1": 0}), PoolSizes(layout)
    free = host.free_bytes
    blocks = left.host_blocks(sizes, DEVICES, share)
    assert left.holds(sizes, DEVICES, sizes.host_pages(blocks))
    assert blocks * sizes.host_block_bytes <= free * share
    more = blocks + 1 + blocks // SHARE_PRECISION
    fits_more = left.holds(sizes, DEVICES, sizes.host_pages(more))
    assert not fits_more or more * sizes.host_block_bytes > int(free * share)
    assert host.free_bytes == free, "planning takes nothing"
    assert left.host_blocks(sizes, DEVICES, share, most=3) <= min(3, blocks)
    for group, rank, page_bytes in sizes.host_slabs:  # and the pool gives what was planned
        pages = sizes.host_pages(blocks)[group]
        assert host.take(page_bytes, pages, left.nodes.get(DEVICES[rank])) is not None, group


def test_a_block_has_a_page_in_every_group_and_on_the_host_of_every_rank_that_differs() -> None:
    groups = (PlaneGroup("full"), PlaneGroup("window", 8), PlaneGroup("same", 8, replicated=True))
    layout = Layout(4, 2, groups, tuple(Plane("k", i, g.name, (10 << i,), "uint8") for i, g in enumerate(groups)))
    sizes = PoolSizes(layout)
    assert (sizes.device_block_bytes, sizes.host_block_bytes) == (10 + 20 + 40, 2 * 10 + 2 * 20 + 40)
    assert [(group, rank) for group, rank, _ in sizes.host_slabs] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
