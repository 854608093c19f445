"""Transfers from one replica's devices to another's: bytes of every rank, counters, and what must not go meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound
from cachesvc.model.words import Direction, PagePairs, TimelineSlot, Transfer
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers, RankJob
from tests.sim.stepped_backend import SteppedBackend
from tests.unit.rigs.swap_rig import (
    DEVICE_PAGES,
    HOST_PAGES,
    LOAD,
    MODEL,
    REPLICA,
    STORE,
    Rig,
    attach_replica,
    landed_bytes,
    mixed_layout,
    rig_of,
)

TARGET, TARGET_PAGES = 2, 31


@pytest.fixture(params=["shm", "stepped"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two replicas of two ranks on two devices, crosswise and of different sizes; the first holds random bytes."""
    made = rig_of(request.param, mixed_layout(2))
    attach_replica(made, TARGET, device_pages=TARGET_PAGES, turned=True)
    pages = list(range(DEVICE_PAGES))
    made.move(LOAD, (0, pages, pages), (1, pages, pages))
    made.settle()
    yield made
    made.close()


def share(rig: Rig, *pairs: tuple[int, list[int], list[int]], direction: Direction = LOAD) -> TimelineSlot:
    pages = tuple(PagePairs(group, tuple(mine), tuple(theirs)) for group, mine, theirs in pairs)
    transfer = Transfer(next(rig.tickets), MODEL, TARGET, direction, pages, layered=False, source_replica=REPLICA)
    return rig.engine.submit(transfer)


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_gets_what_its_like_has_and_nothing_else_changes(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = {
        (rank, group): [rig.device_page(rank, group, page, TARGET) for page in range(TARGET_PAGES)]
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
                expected[rank, group][here] = rig.device_page(rank, group, there)
    before = landed_bytes(rig.engine, "h2d")
    slot = share(rig, *pairs)
    rig.settle()
    for (rank, group), pages in expected.items():
        assert [rig.device_page(rank, group, page, TARGET) for page in range(TARGET_PAGES)] == pages
        for page in range(DEVICE_PAGES):
            assert rig.device_page(rank, group, page) == rig.host_page(rank, group, page)
    assert rig.words(slot) == [(slot.end, 0)] * 2
    moved = 2 * sum(len(mine) * rig.layout.page_bytes(group) for group, mine, _ in pairs)
    assert [landed_bytes(rig.engine, way) for way in ("p2p", "h2d", "d2h")] == [moved, before, 0]


def test_ranks_run_on_the_load_streams_of_the_target(rig: Rig) -> None:
    if not isinstance(rig.backend, SteppedBackend):
        pytest.skip("the streams of shm do not wait to be looked at")
    share(rig, (1, [0], [1]))
    assert [(p.device, p.direction) for p in rig.backend.pending()] == [("step-0", LOAD), ("step-1", LOAD)]
    rig.backend.run_one("step-1", LOAD)  # rank 0 of the target
    assert rig.device_page(0, 1, 0, TARGET) == rig.device_page(0, 1, 1)
    assert not any(rig.device_page(1, 1, 0, TARGET))
    rig.backend.fail_one("step-0", LOAD, RuntimeError("link"))
    assert str(rig.ended[-1][1]) == "link"
    assert (landed_bytes(rig.engine, "p2p"), rig.engine.transfers.failures["p2p"]) == (0, 1)


def test_jobs_say_whether_they_come_from_another_replica() -> None:
    told: list[tuple[int, bool]] = []

    class Told(InProcessMovers):
        def submit(self, job: RankJob) -> None:
            told.append((job.ticket, job.is_from_peer))
            super().submit(job)

    backend = SteppedBackend(2, 1 << 20, timeline_words=64)
    backend.start()
    rig = Rig(mixed_layout(2), backend)
    rig.engine = SwapEngine(Told(backend), rig.done)
    rig.engine.start()
    rig.add_hosts()
    for replica in (REPLICA, TARGET):
        attach_replica(rig, replica)
    rig.move(LOAD, (0, [1], [2]))
    share(rig, (0, [0], [1]))
    rig.move(STORE, (0, [1], [3]))
    rig.settle(3)
    assert told == [(0, False)] * 2 + [(1, True)] * 2 + [(2, False)] * 2
    rig.close()


def test_no_replica_is_detached_under_a_transfer(rig: Rig) -> None:
    if not isinstance(rig.backend, SteppedBackend):
        pytest.skip("shm does not wait")
    share(rig, (0, [0], [1]))
    with pytest.raises(LedgerBroken, match="ticket 1"):
        rig.engine.detach_model(MODEL)
    rig.settle()
    rig.engine.detach_model(MODEL)
    with pytest.raises(NotFound):
        share(rig, (0, [0], [1]))


def test_what_is_wrong_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match="not to another replica"):
        share(rig, (0, [0], [1]), direction=STORE)
    for mine, theirs in (([TARGET_PAGES], [0]), ([0], [HOST_PAGES - 1]), ([0, 0], [1, 2]), ([0], [1, 2])):
        share(rig, (0, mine, theirs))
        rig.settle()
        assert isinstance(rig.ended[-1][1], InvalidRequest)
    assert rig.engine.in_flight == 0


def test_replicas_reach_each_other_where_all_their_ranks_do(rig: Rig) -> None:
    assert rig.engine.can_reach(MODEL, REPLICA, TARGET)
    with pytest.raises(NotFound):
        rig.engine.can_reach(MODEL, REPLICA, 9)
    far = SteppedBackend(2, 1 << 20, are_near=False)
    assert (far.can_reach("step-0", "step-0"), far.can_reach("step-0", "step-1")) == (True, False)
