"""Each model has words of its own on each device: no descriptor that its engines get reaches those of another one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.shm import ShmBackend
from cachesvc.memory.timeline import HostTimeline, MappedSheet
from cachesvc.model.errors import LedgerBroken, LimitExceeded, NotFound, Unavailable
from cachesvc.model.futex import Words, words_of
from cachesvc.model.layout import device_geometry
from cachesvc.model.words import PagePairs, TimelineSlot, Transfer
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers, SlotPool
from tests.contracts.host_gpu import HostGpu
from tests.contracts.test_backend import open_descriptors
from tests.unit.rigs.swap_rig import LOAD, MODEL, REPLICA, Rig, attach_replica, mixed_layout, rig_of
from tests.unit.swap.test_vault import no_descriptors

WORDS = 64
OTHER = MODEL + 1
FAR_AHEAD = 0x3FFFFFFF
"""Past whatever a young word is waited for."""


def shared_timeline() -> HostTimeline:
    """A timeline like a GPU's: engines may write the words that they get."""
    return HostTimeline(WORDS, lambda fd: MappedSheet(WORDS, is_shared=True, fd=fd))


def as_engine(sheet: MappedSheet) -> Words:
    """Writable words of a sheet, by its descriptor alone."""
    assert sheet.fd is not None
    return words_of(memoryview(mmap.mmap(sheet.fd, os.fstat(sheet.fd).st_size)))


def file_of(sheet: MappedSheet) -> int:
    """Identity of its file."""
    assert sheet.fd is not None
    return os.fstat(sheet.fd).st_ino


# -- the words ---------------------------------------------------------------------------------------------------------


def test_what_one_models_engine_writes_is_in_no_other_sheet() -> None:
    timeline = shared_timeline()
    for number in (1, 2, 3):
        timeline.open(number)
    assert len({file_of(sheet) for sheet in timeline.sheets().values()}) == 3
    assert len({sheet.handle.token for sheet in timeline.sheets().values()}) == 3
    mine = as_engine(timeline.sheet(2))
    assert len(mine) == WORDS, "there is nothing beyond its own words"
    mine[:] = FAR_AHEAD
    assert {timeline.read(word) for word in range(2 * WORDS, 3 * WORDS)} == {FAR_AHEAD}
    assert not any(timeline.read(word) for number in (1, 3) for word in range(number * WORDS, (number + 1) * WORDS))
    for size in (0, 2 * WORDS * 4):
        with pytest.raises(PermissionError):
            os.ftruncate(timeline.sheet(2).fd or 0, size)
    timeline.close()


def test_a_word_has_one_number_for_copies_and_one_in_its_sheet() -> None:
    timeline = shared_timeline()
    timeline.open(5)
    theirs = as_engine(timeline.sheet(5))
    timeline.write(5 * WORDS + 7, 12)
    assert (timeline.read(5 * WORDS + 7), timeline.sheet(5).read(7), theirs[7]) == (12, 12, 12)
    assert timeline.place(5 * WORDS + 7) == timeline.sheet(5).place(0) + 28
    timeline.close()
    assert timeline.read(5 * WORDS + 7) == 12, "who asks late still finds it"


def test_nobody_else_writes_a_sheet_that_engines_only_read() -> None:
    timeline = HostTimeline(WORDS)
    timeline.open(1)
    with pytest.raises(PermissionError):
        as_engine(timeline.sheet(1))
    timeline.close()


def test_a_number_that_is_opened_again_is_another_file_under_another_token() -> None:
    timeline = shared_timeline()
    timeline.open(1)
    kept, token = as_engine(timeline.sheet(1)), timeline.sheet(1).handle.token
    timeline.close_sheet(1)
    timeline.close_sheet(1)
    with pytest.raises(NotFound):
        timeline.sheet(1)
    timeline.open(1)
    kept[:] = FAR_AHEAD
    assert not any(timeline.read(WORDS + word) for word in range(WORDS))
    assert timeline.sheet(1).handle.token != token
    with pytest.raises(LedgerBroken):
        timeline.open(1)
    timeline.close()


def test_words_that_cannot_be_made_are_refused_with_what_to_do() -> None:
    timeline = shared_timeline()
    with no_descriptors(), pytest.raises(Unavailable, match="ulimit -n"):
        timeline.open(1)
    timeline.open(1)
    timeline.close()


# -- places ------------------------------------------------------------------------------------------------------------


def test_places_of_a_sheet_come_in_order_and_are_told_from_its_first_word() -> None:
    slots, others = SlotPool(16, 7 * 16), SlotPool(16, 8 * 16)
    for turn in range(20):
        slot = slots.acquire(3)
        assert (slot.word, slot.failed_word) == (7 * 16 + 2 * turn % 16, 7 * 16 + 2 * turn % 16 + 1)
        assert slots.told(slot) == TimelineSlot(slot.word - 7 * 16, slot.failed_word - 7 * 16, 3 * (turn // 8), 3)
        slots.release(slot)
    assert {others.acquire(1).word // 16 for _ in range(others.free)} == {8}


@pytest.fixture(params=["shm", "stepped", "process"])
def two(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two models of one layout and the same host memory."""
    rig = rig_of(request.param, mixed_layout(2))
    rig.engine.attach_model(OTHER, rig.layout, rig.hosts)
    attach_replica(rig, REPLICA, model=OTHER)
    yield rig
    rig.close()


def load(rig: Rig, model: int, ticket: int) -> TimelineSlot:
    pairs = (PagePairs(1, (0, 1), (ticket % 30, 30)),)
    return rig.engine.submit(Transfer(ticket, model, REPLICA, LOAD, pairs, layered=True))


def test_both_models_count_their_words_from_the_first(two: Rig) -> None:
    for ticket in range(1000, 1008):
        slots = [load(two, model, ticket + 100 * (model - MODEL)) for model in (MODEL, OTHER)]
        two.settle(2)
        assert slots[0] == slots[1]
        for model in (MODEL, OTHER):
            assert [sheet.read(slots[0].word) for sheet in two.sheets(model)] == [slots[0].end] * 2
    assert {error for _, error in two.ended} == {None}


def test_who_has_taken_all_places_of_its_model_takes_none_of_another_ones() -> None:
    rig = rig_of("stepped", mixed_layout(1))
    rig.engine.attach_model(OTHER, rig.layout, rig.hosts)
    attach_replica(rig, REPLICA, model=OTHER)
    free = rig.engine.free_slots(OTHER, REPLICA)
    taken = rig.engine.free_slots(MODEL, REPLICA)
    for ticket in range(taken):
        load(rig, MODEL, ticket)
    with pytest.raises(LimitExceeded):
        load(rig, MODEL, taken)
    assert rig.engine.free_slots(OTHER, REPLICA) == free > 0
    load(rig, OTHER, 900)
    rig.settle(taken + 1)
    rig.close()


def test_the_words_of_a_model_go_with_it_and_those_of_others_stay(two: Rig) -> None:
    load(two, MODEL, 1)
    slot = load(two, OTHER, 2)
    two.settle(2)
    tokens = [sheet.handle.token for sheet in two.sheets()]
    two.engine.detach_model(MODEL)
    with pytest.raises(NotFound):
        two.sheets()
    assert [sheet.read(slot.word) for sheet in two.sheets(OTHER)] == [slot.end] * 2
    load(two, OTHER, 3)
    two.settle()
    two.engine.attach_model(MODEL, two.layout, two.hosts)
    attach_replica(two, REPLICA)
    assert not {sheet.handle.token for sheet in two.sheets()} & {*tokens}
    again = load(two, MODEL, 4)
    assert (again.word, again.base) == (0, 0)
    two.settle()
    assert [sheet.read(again.word) for sheet in two.sheets()] == [again.end] * 2
    assert {error for _, error in two.ended} == {None}


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_a_flood_of_ones_own_words_neither_ends_nor_fails_what_others_wait_for() -> None:
    """Nor does the daemon itself believe any word: the flooded model's own transfer ends as its copies did."""
    gpu = HostGpu()
    backend = CudaBackend((gpu,), 1 << 20, timeline_words=WORDS)
    backend.start()
    own = gpu.pins()
    rig = Rig(mixed_layout(1), backend)
    rig.engine = SwapEngine(InProcessMovers(backend), rig.done, layers_per_step=1)
    rig.engine.start()
    rig.add_hosts()
    rig.engine.attach_model(OTHER, rig.layout, rig.hosts)
    for model in (MODEL, OTHER):
        attach_replica(rig, REPLICA, model=model)
    hostile, victim = backend.timeline(gpu.uuid).sheet(MODEL), backend.timeline(gpu.uuid).sheet(OTHER)
    flooded = as_engine(hostile)
    for ticket in range(WORDS):  # every word of both is used
        flooded[:] = FAR_AHEAD
        slot = load(rig, OTHER, ticket)
        rig.settle()
        assert (victim.read(slot.word), victim.read(slot.failed_word)) == (slot.end, 0)
        load(rig, MODEL, 1000 + ticket)
        rig.settle()
    assert {error for _, error in rig.ended} == {None}
    for page, host in ((0, (WORDS - 1) % 30), (1, 30)):
        assert rig.engine.page_bytes(OTHER, REPLICA, 0, 1, page) == rig.host_page(0, 1, host)
    for model in (MODEL, OTHER):
        rig.engine.detach_model(model)
    assert gpu.pins() - own == len([pool for group in rig.hosts for pool in group]), "of the host pool alone"
    rig.close()
    assert gpu.is_whole()


@pytest.mark.parametrize("call", ["register_host", "device_address"])
def test_words_that_a_gpu_does_not_pin_leave_nothing_behind(call: str) -> None:
    gpu = HostGpu()
    backend = CudaBackend((gpu,), 1 << 20, timeline_words=WORDS)
    backend.start()
    gpu.breaks = {call}
    descriptors = open_descriptors()
    with pytest.raises(Unavailable, match="ulimit -l"):
        backend.open_sheet(gpu.uuid, 1)
    assert open_descriptors() == descriptors
    gpu.breaks = set()
    backend.open_sheet(gpu.uuid, 1)
    backend.close()
    assert gpu.is_whole()


def test_words_of_a_gpu_that_died_are_closed_and_no_new_ones_are_made() -> None:
    gpu = HostGpu()
    backend = CudaBackend((gpu,), 1 << 20, timeline_words=WORDS)
    backend.start()
    backend.open_sheet(gpu.uuid, 1)
    backend.open_sheet(gpu.uuid, 2)
    gpu.is_dead = True
    backend.close_sheet(gpu.uuid, 1)
    with pytest.raises(Unavailable, match="restart the daemon"):
        backend.open_sheet(gpu.uuid, 3)
    backend.close()
    assert gpu.is_whole()


def test_a_backend_that_does_not_run_has_no_words() -> None:
    for backend in (ShmBackend(1, 4096), CudaBackend((HostGpu(),), 4096)):
        device = backend.devices()[0]
        with pytest.raises(Unavailable):
            backend.open_sheet(device, 1)
        backend.close_sheet(device, 1)
        with pytest.raises(NotFound):
            backend.close_sheet("nowhere", 1)


def test_a_replica_whose_words_cannot_be_made_is_not_attached() -> None:
    gpu = HostGpu()
    backend = CudaBackend((gpu,), 1 << 20, timeline_words=WORDS)
    backend.start()
    rig = Rig(mixed_layout(1), backend)
    rig.engine = SwapEngine(InProcessMovers(backend), rig.done)
    rig.engine.start()
    rig.add_hosts()
    slab = backend.create_slab(gpu.uuid, device_geometry(rig.layout, 0, 1).total_bytes)
    gpu.breaks = {"register_host"}
    with pytest.raises(Unavailable):
        rig.engine.attach_replica(MODEL, REPLICA, [gpu.uuid], [[slab, slab]], [1, 1])
    with pytest.raises(NotFound):
        rig.engine.free_slots(MODEL, REPLICA)
    gpu.breaks = set()
    attach_replica(rig, REPLICA)
    rig.close()
