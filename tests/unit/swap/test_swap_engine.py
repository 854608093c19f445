"""The swap engine over both backends: bytes, order, words of every rank, and each ticket's one end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cachesvc_client.layouts.families import gqa, gqa_windowed
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest, LedgerBroken, LimitExceeded, NotFound, Unavailable
from cachesvc.model.layout import device_geometry
from cachesvc.model.words import Direction, PagePairs, TimelineSlot, Transfer, Urgency, has_reached
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers, RankJob, SlotPool
from cachesvc.swap.planner import LinkCosts
from tests.sim.stepped_backend import SteppedBackend, SteppedStream
from tests.unit.rigs.swap_rig import (
    DEVICE_PAGES,
    HOST_PAGES,
    LOAD,
    MODEL,
    REPLICA,
    STORE,
    HostArray,
    Rig,
    attach_replica,
    landed_bytes,
    mixed_layout,
    rig_of,
)


@pytest.fixture(params=["shm", "stepped", "process"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = rig_of(request.param, mixed_layout(2))
    yield made
    made.close()


@pytest.fixture
def stepped() -> Iterator[Rig]:
    made = rig_of("stepped", mixed_layout(2))
    yield made
    made.close()


@pytest.mark.parametrize("layered", [False, True])
def test_what_is_loaded_and_stored_again_is_the_same(rig: Rig, layered: bool) -> None:
    device, there, back = [3, 4, 5, 20, 9], [7, 8, 9, 30, 21], [1, 2, 0, 39, 19]
    before = {(r, g): [rig.host_page(r, g, p) for p in there] for r in range(2) for g in range(2)}
    untouched = rig.host_page(1, 1, 11)
    slot = rig.move(LOAD, (0, device, there), (1, device[::-1], there), layered=layered)
    rig.settle()
    for rank in range(2):
        assert [rig.device_page(rank, 0, p) for p in device] == before[rank, 0]
        assert [rig.device_page(rank, 1, p) for p in device[::-1]] == before[rank, 1]
        assert not any(rig.device_page(rank, 1, 0))
    assert rig.words(slot) == [(4, 0), (4, 0)]
    rig.move(STORE, (0, device, back), (1, device[::-1], back), layered=layered)
    rig.settle()
    for rank in range(2):
        assert [rig.host_page(rank, 0, p) for p in back] == before[rank, 0]
        assert [rig.host_page(rank, 1, p) for p in back] == before[rank, 1]
    assert rig.host_page(1, 1, 11) == untouched
    assert rig.ended == [(0, None), (1, None)]
    moved = 5 * sum(rig.layout.page_bytes(g) for g in range(2))
    once = 5 * rig.layout.page_bytes(0)
    assert (sum(rig.engine.transfers.failures.values()), rig.engine.in_flight) == (0, 0)
    assert [landed_bytes(rig.engine, way) for way in ("h2d", "d2h")] == [2 * moved, 2 * moved - once]


def test_page_bytes_are_in_copy_order(rig: Rig) -> None:
    mine = rig.hosts[1][1]
    assert rig.host_page(1, 1, 30) == bytes(mine.memory[mine.page(30)])
    assert rig.host_page(0, 0, 2) == rig.host_page(1, 0, 2)  # one host page for every rank


def test_a_replicated_group_is_stored_from_the_first_rank_alone(stepped: Rig) -> None:
    stepped.move(STORE, (0, [1, 2], [5, 6]))
    backend = stepped.backend
    assert isinstance(backend, SteppedBackend)
    assert [(p.device, p.direction, p.jobs) for p in backend.pending()] == [("step-0", STORE, 1), ("step-1", STORE, 1)]
    before = stepped.host_page(0, 0, 5)
    backend.run_one("step-1", STORE)
    assert stepped.host_page(0, 0, 5) == before
    assert stepped.ended == []
    backend.run_one("step-0", STORE)
    assert not any(stepped.host_page(0, 0, 5))
    assert stepped.ended == [(0, None)]


def test_layers_arrive_one_after_another_on_each_rank(stepped: Rig) -> None:
    backend = stepped.backend
    assert isinstance(backend, SteppedBackend)
    slot = stepped.move(LOAD, (0, [2], [3]), (1, [2], [4]), layered=True)
    spans = device_geometry(stepped.layout, 1, 1).spans
    for layer in range(slot.layers):
        backend.run_step("step-0", LOAD)
        for rank, (word, _) in enumerate(stepped.words(slot)):
            for other in range(slot.layers):
                assert has_reached(word, slot.base + other + 1) == (rank == 0 and other <= layer)
        at = 0
        for span in spans:
            is_there = any(stepped.device_page(0, 1, 2)[at : at + span.width])
            assert is_there == (span.plane.layer <= layer)
            at += span.width
    assert stepped.ended == []
    backend.run_all()
    assert stepped.ended == [(0, None)]


@pytest.mark.parametrize(("short_suffix", "arrived"), [(False, [1, 2, 3, 4]), (True, [1, 4])])
def test_before_a_short_suffix_all_layers_but_the_first_arrive_together(short_suffix: bool, arrived: list[int]) -> None:
    rig = rig_of("stepped", mixed_layout(1), layers_per_step=None)
    backend, movers = rig.backend, rig.engine._movers  # noqa: SLF001 - what a step costs is measured on a GPU alone
    assert isinstance(backend, SteppedBackend)
    assert isinstance(movers, InProcessMovers)
    movers.plan_by(LinkCosts(per_copy_us=0.0, per_row_ns=0.0, per_step_us=0.0, per_slice_us=0.0))
    slot = rig.move(LOAD, (0, [2], [3]), (1, [2], [4]), layered=True, short_suffix=short_suffix)
    seen = set[int]()
    while not rig.ended:
        backend.run_step("step-0", LOAD)
        ((word, _),) = rig.words(slot)
        seen.add(word - slot.base)
    assert sorted(seen - {0}) == arrived
    rig.close()


def test_a_rank_that_breaks_fails_the_ticket_for_all_and_releases_everybody(stepped: Rig) -> None:
    backend = stepped.backend
    assert isinstance(backend, SteppedBackend)
    slot = stepped.move(LOAD, (0, [2], [3]), layered=True)
    backend.run_step("step-0", LOAD)
    backend.fail_one("step-0", LOAD, RuntimeError("bus"))
    assert stepped.words(slot) == [(4, 4), (0, 0)]
    assert stepped.ended == []
    backend.run_all()
    assert stepped.words(slot) == [(4, 4), (4, 4)]
    ((ticket, error),) = stepped.ended
    assert (ticket, str(error)) == (0, "bus")
    assert (stepped.engine.transfers.failures["h2d"], landed_bytes(stepped.engine, "h2d")) == (1, 0)
    again = stepped.move(LOAD, (0, [2], [3]))
    backend.run_all()
    assert stepped.ended[1:] == [(1, None)]
    assert again.word != slot.word


def test_what_is_wrong_is_refused_with_nothing_queued(rig: Rig) -> None:
    for hosts in rig.hosts:
        for mine in hosts:
            mine.shown = 20
    groups: list[tuple[tuple[int, list[int], list[int]], ...]] = [((2, [0], [1]),), ((0, [0], [1]), (0, [1], [2]))]
    for pairs in groups:
        with pytest.raises(InvalidRequest):
            rig.move(LOAD, *pairs)
    for model, replica in ((9, REPLICA), (MODEL, 9)):
        with pytest.raises(NotFound):
            rig.engine.submit(Transfer(77, model, replica, LOAD, (), layered=False))
    for rank, group, page in ((2, 0, 0), (0, 2, 0), (0, 0, DEVICE_PAGES), (-1, 0, 0)):
        with pytest.raises(InvalidRequest):
            rig.device_page(rank, group, page)
    assert (rig.engine.in_flight, rig.ended) == (0, [])
    pages: list[tuple[list[int], list[int]]] = [
        ([0], [1, 2]),
        ([DEVICE_PAGES], [1]),
        ([-1], [1]),
        ([0], [HOST_PAGES]),
        ([0], [20]),  # not usable yet
        ([4, 4], [1, 2]),
    ]
    for device, host in pages:  # seen when it is planned
        rig.move(LOAD, (0, device, host))
        rig.settle()
        assert isinstance(rig.ended[-1][1], InvalidRequest)
    assert (rig.engine.in_flight, len(rig.ended)) == (0, len(pages))
    for hosts in rig.hosts:
        for mine in hosts:
            mine.shown = HOST_PAGES
    rig.move(LOAD, (0, [0], [20]))
    rig.settle()
    assert rig.ended[-1][1] is None


def test_jobs_of_a_direction_end_in_order_and_the_last_one_stands(rig: Rig) -> None:
    for host_page in range(12):
        rig.move(LOAD, (1, [5], [host_page]), layered=host_page % 2 == 0)
    rig.settle(12)
    assert [ticket for ticket, _ in rig.ended] == list(range(12))
    for rank in range(2):
        assert rig.device_page(rank, 1, 5) == rig.host_page(rank, 1, 11)


def test_words_go_on_where_they_stood_and_rest_before_they_are_used_again(rig: Rig) -> None:
    slots = []
    for _ in range(100):
        slots.append(rig.move(LOAD, (0, [0], [0]), layered=True))
        rig.settle()
    pairs = 64 // 2
    assert [slot.word for slot in slots[:pairs]] == list(range(0, 64, 2))
    for index, slot in enumerate(slots):
        assert (slot.word, slot.base) == (2 * (index % pairs), 4 * (index // pairs))
        for word, failed in rig.words(slot):
            assert has_reached(word, slot.end)
            assert failed == 0


def test_no_more_transfers_than_there_are_words(stepped: Rig) -> None:
    for _ in range(16):
        stepped.move(LOAD, (0, [0], [0]))
    with pytest.raises(LimitExceeded):
        stepped.move(LOAD, (0, [0], [0]))
    assert stepped.engine.in_flight == 16
    stepped.settle(16)
    stepped.move(STORE, (0, [0], [0]))


def test_words_go_around() -> None:
    slots = SlotPool(4)
    half = (1 << 31) - 1
    for turn in range(6):
        slot = slots.acquire(half)
        assert slot.base == turn // 2 * half % (1 << 32)
        assert has_reached(slot.end, slot.base + 1)
        assert not has_reached(slot.base, slot.end)
        slots.release(slot)


def test_as_many_transfers_are_taken_as_slots_are_free(stepped: Rig) -> None:
    """Found by reading: twice as many tickets may run as there are slots, and what was one too many failed late."""
    engine = stepped.engine
    free = engine.free_slots(MODEL, REPLICA)
    for taken in range(free):
        assert engine.free_slots(MODEL, REPLICA) == free - taken
        stepped.move(LOAD, (0, [0], [0]))
    assert engine.free_slots(MODEL, REPLICA) == 0
    with pytest.raises(LimitExceeded):
        stepped.move(LOAD, (0, [0], [0]))
    stepped.settle()
    assert engine.free_slots(MODEL, REPLICA) == free
    for model, replica in ((9, REPLICA), (MODEL, 9)):
        with pytest.raises(NotFound):
            engine.free_slots(model, replica)
    engine.close()
    assert engine.free_slots(MODEL, REPLICA) == 0


def test_a_ticket_is_used_once_at_a_time(stepped: Rig) -> None:
    transfer = Transfer(5, MODEL, REPLICA, LOAD, (), layered=False)
    stepped.engine.submit(transfer)
    with pytest.raises(LedgerBroken):
        stepped.engine.submit(transfer)
    stepped.settle()
    stepped.engine.submit(transfer)


def test_nothing_is_detached_under_a_transfer(stepped: Rig) -> None:
    engine = stepped.engine
    stepped.move(LOAD, (0, [0], [0]))
    with pytest.raises(LedgerBroken, match="ticket 0"):
        engine.detach_model(MODEL)
    stepped.settle()
    engine.detach_model(MODEL)
    with pytest.raises(NotFound):
        stepped.move(LOAD, (0, [0], [0]))
    with pytest.raises(NotFound):
        engine.detach_model(MODEL)
    engine.attach_model(MODEL, stepped.layout, stepped.hosts)
    attach_replica(stepped, REPLICA)


def test_what_does_not_fit_the_layout_is_not_attached(stepped: Rig) -> None:
    engine, hosts, devices = stepped.engine, stepped.hosts, stepped.backend.devices()
    other = gqa(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
    for layout, slabs in ((stepped.layout, hosts[:1]), (stepped.layout, hosts[::-1]), (other, hosts[:1])):
        with pytest.raises(InvalidRequest):
            engine.attach_model(8, layout, slabs)
    with pytest.raises(LedgerBroken):
        engine.attach_model(MODEL, stepped.layout, hosts)
    small = [[stepped.backend.create_slab(device, 64) for _ in range(2)] for device in devices]
    for ranks, slabs_, pages in (
        (devices[:1], small, [4, 4]),
        (devices, small[:1], [4, 4]),
        (devices, small, [4]),
        (devices, [one[:1] for one in small], [4, 4]),
        (devices, small, [4, 4]),
    ):
        with pytest.raises(InvalidRequest):
            engine.attach_replica(MODEL, 8, ranks, slabs_, pages)
    with pytest.raises(LedgerBroken):
        engine.attach_replica(MODEL, REPLICA, devices, small, [0, 0])


def test_after_close_nothing_is_taken_and_all_that_was_taken_has_ended(rig: Rig) -> None:
    slots = [rig.move(LOAD, (0, [i], [i]), (1, [i], [i]), layered=True) for i in range(14)]
    rig.engine.close()
    with pytest.raises(Unavailable):
        rig.move(LOAD, (0, [0], [0]))
    sheets = rig.sheets()
    rig.backend.close()
    assert sorted(ticket for ticket, _ in rig.ended) == list(range(14))
    for (_, error), slot in zip(sorted(rig.ended, key=lambda end: end[0]), slots, strict=True):
        assert error is None or isinstance(error, Unavailable)
        for sheet in sheets:
            assert sheet.read(slot.word) == slot.end
            assert sheet.read(slot.failed_word) == (0 if error is None else slot.end)
    rig.engine.close()


def test_a_backend_that_went_first_ends_the_ticket_all_the_same(stepped: Rig) -> None:
    sheets = stepped.sheets()
    stepped.backend.close()
    slot = stepped.move(LOAD, (0, [0], [0]))
    ((_, error),) = stepped.ended
    assert isinstance(error, Unavailable)
    assert [(t.read(slot.word), t.read(slot.failed_word)) for t in sheets] == [(4, 4), (4, 4)]


def test_an_owner_that_raises_is_logged_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    backend = SteppedBackend(1, 1 << 20)
    backend.start()
    layout = gqa(layers=1, kv_heads=1, head_dim=8, block_tokens=4)

    def broken(ticket: int, error: Exception | None) -> None:
        raise ZeroDivisionError

    engine = SwapEngine(InProcessMovers(backend), broken)
    engine.start()
    memory = memoryview(bytearray(layout.page_bytes(0) * HOST_PAGES + 16))
    host = HostArray(layout.page_bytes(0), HOST_PAGES, memory, backend.register_host(memory), HOST_PAGES)
    engine.attach_model(1, layout, [[host]])
    slab = backend.create_slab("step-0", 4096)
    engine.attach_replica(1, 1, ["step-0"], [[slab]], [1])
    with caplog.at_level(logging.ERROR):
        for ticket in range(2):
            engine.submit(Transfer(ticket, 1, 1, LOAD, (PagePairs(0, (0,), (0,)),), layered=False))
            backend.run_all()
    assert [r.message for r in caplog.records] == [f"swap_done_callback_failed ticket={t}" for t in range(2)]
    assert engine.in_flight == 0


def test_a_transfer_may_be_started_from_the_end_of_another() -> None:
    layout = gqa_windowed(window_layers=[False, True], kv_heads=1, head_dim=8, block_tokens=4, window_tokens=8)
    rig = rig_of("shm", layout)
    finished = threading.Event()

    def chain(ticket: int) -> None:
        if ticket == 50:
            finished.set()
        else:
            rig.move(STORE if ticket % 2 else LOAD, (0, [1], [ticket % 7]), (1, [2], [3]), layered=True)

    rig.then = chain
    rig.move(LOAD, (0, [1], [1]))
    finished.wait()
    rig.close()
    assert rig.ended == [(ticket, None) for ticket in range(51)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_order_of_steps_and_faults_ends_every_ticket_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig = rig_of("stepped", mixed_layout(3), layers_per_step=int(rng.integers(0, 3)))
    backend, slots = rig.backend, []
    assert isinstance(backend, SteppedBackend)
    doomed: set[int] = set()
    for _ in range(60):
        pending = backend.pending()
        act = rng.random()
        if act < 0.3 and rig.engine.in_flight < 16:
            pages = rng.permutation(DEVICE_PAGES)[: int(rng.integers(0, 6))].tolist()
            way = LOAD if rng.random() < 0.5 else STORE
            slots.append(rig.move(way, (int(rng.integers(0, 2)), pages, pages), layered=bool(rng.random() < 0.5)))
        elif pending:
            one = pending[int(rng.integers(0, len(pending)))]
            if act < 0.4:
                doomed.add(one.ticket)
                backend.fail_one(one.device, one.direction, RuntimeError("bus"))
            else:
                backend.run_step(one.device, one.direction)
    backend.run_all()
    assert sorted(ticket for ticket, _ in rig.ended) == list(range(len(slots)))
    assert {ticket for ticket, error in rig.ended if error is not None} == doomed
    for ticket, slot in enumerate(slots):
        for word, failed in rig.words(slot):
            assert has_reached(word, slot.end)
            assert ticket not in doomed or has_reached(failed, slot.end)
    assert rig.engine.in_flight == 0
    rig.close()


# Transfers from one replica's devices to another's: bytes of every rank, counters, and what must not go meanwhile.

TARGET, TARGET_PAGES = 2, 31


@pytest.fixture(params=["shm", "stepped"])
def two(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two replicas of two ranks on two devices, crosswise and of different sizes; the first holds random bytes."""
    made = rig_of(request.param, mixed_layout(2))
    attach_replica(made, TARGET, device_pages=TARGET_PAGES, turned=True)
    pages = list(range(DEVICE_PAGES))
    made.move(LOAD, (0, pages, pages), (1, pages, pages))
    made.settle()
    yield made
    made.close()


def share(two: Rig, *pairs: tuple[int, list[int], list[int]], direction: Direction = LOAD) -> TimelineSlot:
    pages = tuple(PagePairs(group, tuple(mine), tuple(theirs)) for group, mine, theirs in pairs)
    transfer = Transfer(next(two.tickets), MODEL, TARGET, direction, pages, layered=False, source_replica=REPLICA)
    return two.engine.submit(transfer)


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_gets_what_its_like_has_and_nothing_else_changes(two: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = {
        (rank, group): [two.device_page(rank, group, page, TARGET) for page in range(TARGET_PAGES)]
        for rank in range(2)
        for group in range(2)
    }
    pairs: list[tuple[int, list[int], list[int]]] = []
    for group in range(2):
        count = int(rng.integers(1, DEVICE_PAGES))
        mine, theirs = rng.permutation(TARGET_PAGES)[:count].tolist(), rng.permutation(DEVICE_PAGES)[:count].tolist()
        if rng.random() < 0.5:
            mine, theirs = sorted(mine), sorted(theirs)
        pairs.append((group, mine, theirs))
        for rank in range(2):
            for here, there in zip(mine, theirs, strict=True):
                expected[rank, group][here] = two.device_page(rank, group, there)
    before = landed_bytes(two.engine, "h2d")
    slot = share(two, *pairs)
    two.settle()
    for (rank, group), pages in expected.items():
        assert [two.device_page(rank, group, page, TARGET) for page in range(TARGET_PAGES)] == pages
        for page in range(DEVICE_PAGES):
            assert two.device_page(rank, group, page) == two.host_page(rank, group, page)
    assert two.words(slot) == [(slot.end, 0)] * 2
    moved = 2 * sum(len(mine) * two.layout.page_bytes(group) for group, mine, _ in pairs)
    assert [landed_bytes(two.engine, way) for way in ("p2p", "h2d", "d2h")] == [moved, before, 0]


def test_ranks_run_on_the_load_streams_of_the_target(two: Rig) -> None:
    if not isinstance(two.backend, SteppedBackend):
        pytest.skip("the streams of shm do not wait to be looked at")
    share(two, (1, [0], [1]))
    assert [(p.device, p.direction) for p in two.backend.pending()] == [("step-0", LOAD), ("step-1", LOAD)]
    two.backend.run_one("step-1", LOAD)  # rank 0 of the target
    assert two.device_page(0, 1, 0, TARGET) == two.device_page(0, 1, 1)
    assert not any(two.device_page(1, 1, 0, TARGET))
    two.backend.fail_one("step-0", LOAD, RuntimeError("link"))
    assert str(two.ended[-1][1]) == "link"
    assert (landed_bytes(two.engine, "p2p"), two.engine.transfers.failures["p2p"]) == (0, 1)


def test_jobs_say_whether_they_come_from_another_replica() -> None:
    told: list[tuple[int, bool]] = []

    class Told(InProcessMovers):
        def submit(self, job: RankJob) -> None:
            told.append((job.ticket, job.is_from_peer))
            super().submit(job)

    backend = SteppedBackend(2, 1 << 20, timeline_words=64)
    backend.start()
    two = Rig(mixed_layout(2), backend)
    two.engine = SwapEngine(Told(backend), two.done)
    two.engine.start()
    two.add_hosts()
    for replica in (REPLICA, TARGET):
        attach_replica(two, replica)
    two.move(LOAD, (0, [1], [2]))
    share(two, (0, [0], [1]))
    two.move(STORE, (0, [1], [3]))
    two.settle(3)
    assert told == [(0, False)] * 2 + [(1, True)] * 2 + [(2, False)] * 2
    two.close()


def test_no_replica_is_detached_under_a_transfer(two: Rig) -> None:
    if not isinstance(two.backend, SteppedBackend):
        pytest.skip("shm does not wait")
    share(two, (0, [0], [1]))
    with pytest.raises(LedgerBroken, match="ticket 1"):
        two.engine.detach_model(MODEL)
    two.settle()
    two.engine.detach_model(MODEL)
    with pytest.raises(NotFound):
        share(two, (0, [0], [1]))


def test_what_is_wrong_is_refused(two: Rig) -> None:
    with pytest.raises(InvalidRequest, match="not to another replica"):
        share(two, (0, [0], [1]), direction=STORE)
    for mine, theirs in (([TARGET_PAGES], [0]), ([0], [HOST_PAGES - 1]), ([0, 0], [1, 2]), ([0], [1, 2])):
        share(two, (0, mine, theirs))
        two.settle()
        assert isinstance(two.ended[-1][1], InvalidRequest)
    assert two.engine.in_flight == 0


def test_replicas_reach_each_other_where_all_their_ranks_do(two: Rig) -> None:
    assert two.engine.can_reach(MODEL, REPLICA, TARGET)
    with pytest.raises(NotFound):
        two.engine.can_reach(MODEL, REPLICA, 9)
    far = SteppedBackend(2, 1 << 20, are_near=False)
    assert (far.can_reach("step-0", "step-0"), far.can_reach("step-0", "step-1")) == (True, False)


# Urgency of transfers in the swap engine: background ones stand back, are expedited, and can be paused; and movers are
# awake when a job comes.

DEVICES = ("step-0", "step-1")


@pytest.fixture
def idle() -> Iterator[Rig]:
    made = rig_of("stepped", mixed_layout(2))
    yield made
    made.close()


def backend_of(idle: Rig) -> SteppedBackend:
    assert isinstance(idle.backend, SteppedBackend)
    return idle.backend


def transfer(ticket: int, direction: Direction, urgency: Urgency) -> Transfer:
    return Transfer(ticket, MODEL, REPLICA, direction, (PagePairs(0, (0, 1), (0, 1)),), layered=False, urgency=urgency)


def streams(idle: Rig) -> list[tuple[str, Direction, int]]:
    return [(one.device, one.direction, one.ticket) for one in backend_of(idle).pending()]


def test_an_expedited_transfer_goes_on_on_every_device(idle: Rig) -> None:
    idle.engine.submit(transfer(1, LOAD, Urgency.AWAITED))
    idle.engine.submit(transfer(2, STORE, Urgency.BACKGROUND))
    loads = [(device, LOAD, 1) for device in DEVICES]
    assert streams(idle) == loads
    idle.engine.expedite(2)
    idle.engine.expedite(2)
    idle.engine.expedite(99)
    assert {(device, STORE, 2) for device in DEVICES} <= set(streams(idle))
    idle.settle(2)


def test_write_backs_are_paused_on_the_named_devices_alone(idle: Rig) -> None:
    idle.engine.pause_write_backs(DEVICES[:1], 0.5)
    idle.engine.submit(transfer(1, STORE, Urgency.BACKGROUND))
    assert streams(idle) == [(DEVICES[1], STORE, 1)]
    with pytest.raises(NotFound):
        idle.engine.pause_write_backs(["nowhere"], 0.5)
    idle.settle()
    assert backend_of(idle).now >= 0.5


def test_what_is_expedited_before_it_is_queued_is_awaited(idle: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(idle)
    stream_of = backend.store_stream

    def expedite_first(device: str) -> SteppedStream:
        idle.engine.expedite(2)  # as another thread may
        return stream_of(device)

    monkeypatch.setattr(backend, "store_stream", expedite_first)
    idle.engine.submit(transfer(1, LOAD, Urgency.AWAITED))
    idle.engine.submit(transfer(2, STORE, Urgency.BACKGROUND))
    assert {(device, STORE, 2) for device in DEVICES} <= set(streams(idle))
    idle.settle(2)
