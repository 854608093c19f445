"""Records of jobs and pools reach the mover unchanged, and ends come back unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cachesvc.memory.extents import Extent, ExtentTable
from cachesvc.memory.memcpy import CopyOutOfBounds
from cachesvc.model.errors import InvalidRequest, LedgerBroken, Unavailable
from cachesvc.model.layout import device_geometry, host_geometry
from cachesvc.model.words import Direction, TimelineSlot, Urgency
from cachesvc.mover import records
from cachesvc.mover.records import KEPT_TABLES, Listener, MoverFault, Part, Teller
from cachesvc.swap.movers import RankEnd, RankJob
from cachesvc.swap.planner import ALL_BUT_FIRST, GroupMove, LinkCosts, Pool, plan
from tests.unit.rigs.swap_rig import mixed_layout

LAYOUT = mixed_layout(1)
REGIONS = {7: 1, 9: 2}
TAKES = {records.GEOMETRY: Listener.geometry, records.TABLE: Listener.table, records.FORGET: Listener.forget}


def joined(record: list[Part]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in record)


def heard(listener: Listener, told: list[list[Part]]) -> list[RankJob]:
    """Let a listener hear records, and return the jobs."""
    jobs: list[RankJob] = []
    for record in map(joined, told):
        numbers = np.frombuffer(record[: len(record) // 8 * 8], np.int64)
        kind = int(numbers[0])
        if kind == records.JOB:
            jobs.append(listener.job(record))
        else:
            TAKES[kind](listener, numbers)
    return jobs


def pools(group: int) -> tuple[Pool, Pool]:
    device = Pool(device_geometry(LAYOUT, group, 20), ExtentTable.whole(7, 20))
    host = Pool(host_geometry(LAYOUT, group, 30), ExtentTable([Extent(0, 10, 9, 3), Extent(10, 20, 9, 70_000)]))
    return device, host


def job(ticket: int, moves: tuple[GroupMove, ...], step: int | None = None) -> RankJob:
    slot = TimelineSlot(word=4, failed_word=5, base=0xFFFFFFFE, layers=4)
    return RankJob(ticket, "shm-0", Direction.STORE, Urgency.BACKGROUND, step, slot, moves)


def moves() -> tuple[GroupMove, ...]:
    pages = np.array([3, 4, 5, 11], np.int64)
    return tuple(GroupMove(*pools(group), pages, pages[::-1] + group) for group in range(2))


def plan_of(one: RankJob, regions: dict[int, int]) -> list[list[int]]:
    """Plan of a job, with regions by other numbers."""
    steps = tuple(plan(one.moves, one.direction, layers=4, base=0, layers_per_step=1, costs=LinkCosts()))
    copies = np.concatenate([step.copies for step in steps])
    for column in (0, 2):
        copies[:, column] = [regions.get(int(region), int(region)) for region in copies[:, column]]
    rows: list[list[int]] = copies.tolist()
    return rows


@pytest.mark.parametrize("way", [(Direction.LOAD, False), (Direction.LOAD, True), (Direction.STORE, False)])
@pytest.mark.parametrize("step", [None, 0, 3, ALL_BUT_FIRST])
def test_a_job_is_heard_as_it_was_told_and_planned_alike(step: int | None, way: tuple[Direction, bool]) -> None:
    told = replace(job(1 << 40, moves(), step), direction=way[0], is_from_peer=way[1])
    (again,) = heard(Listener("shm-0", REGIONS), Teller().job(told))
    assert (again.ticket, again.device, again.direction, again.urgency) == (
        1 << 40,
        "shm-0",
        told.direction,
        told.urgency,
    )
    assert (again.layers_per_step, again.slot, again.is_from_peer) == (step, told.slot, way[1])
    assert plan_of(again, {}) == plan_of(told, REGIONS)


def test_a_pool_is_told_once_and_a_new_table_alone() -> None:
    teller, listener = Teller(), Listener("shm-0", REGIONS)
    first, second = moves()
    assert len(heard(listener, teller.job(job(1, (first, second))))) == 1
    assert len(teller.job(job(2, (first, second)))) == 1
    fresh = GroupMove(first.device, Pool(first.host.geometry, ExtentTable([Extent(0, 30, 9, 0)])), *pages_of(first))
    told = teller.job(job(3, (fresh,)))
    assert len(told) == 2
    (again,) = heard(listener, told)
    assert plan_of(again, {}) == plan_of(job(3, (fresh,)), REGIONS)


def pages_of(move: GroupMove) -> tuple[np.ndarray, np.ndarray]:
    return move.device_pages, move.host_pages


def test_tables_do_not_gather_for_ever() -> None:
    teller, listener = Teller(), Listener("shm-0", REGIONS)
    (first, _), told = moves(), 0
    for ticket in range(3 * KEPT_TABLES):
        table = ExtentTable([Extent(0, 30, 9, ticket)])
        fresh = job(ticket, (GroupMove(first.device, Pool(first.host.geometry, table), *pages_of(first)),))
        said = teller.job(fresh)
        (again,) = heard(listener, said)
        assert plan_of(again, {}) == plan_of(fresh, REGIONS)
        told += sum(int.from_bytes(joined(record)[:8], "little") == records.FORGET for record in said)
    assert told == 2


def test_what_is_forgotten_is_told_again() -> None:
    teller, listener = Teller(), Listener("shm-0", REGIONS)
    (first, _) = moves()
    heard(listener, teller.job(job(1, (first,))))
    heard(listener, teller.forget([first.device, first.host, pools(1)[0]]))
    with pytest.raises(KeyError):
        listener.job(joined(teller_of_one_job(first)[-1]))
    assert len(heard(listener, teller.job(job(2, (first,))))) == 1


def teller_of_one_job(move: GroupMove) -> list[list[Part]]:
    return Teller().job(job(9, (move,)))


def test_a_region_that_the_mover_does_not_have_is_named_by_no_copy() -> None:
    (again,) = heard(Listener("shm-0", {}), Teller().job(job(1, moves()[:1])))
    assert {row[0] for row in plan_of(again, {})} == {0}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("page 7"), InvalidRequest),
        (CopyOutOfBounds("source", [1, 2], 3), InvalidRequest),
        (Unavailable("closed — first"), Unavailable),
        (RuntimeError("bus"), MoverFault),
        (LedgerBroken("twice"), MoverFault),
        (ZeroDivisionError(), MoverFault),
    ],
)
def test_an_end_comes_back_with_its_words(error: Exception, kind: type[Exception]) -> None:
    told = RankEnd(5, "shm-0", error, 12.25)
    again = records.end_of(joined(records.end_record(told)), "shm-0")
    assert (again.ticket, again.device, again.began) == (5, "shm-0", 12.25)
    assert isinstance(again.error, kind)
    assert str(again.error) == (str(error) or "ZeroDivisionError")


def test_a_good_end_has_no_error() -> None:
    assert records.end_of(joined(records.end_record(RankEnd(5, "d", None, None))), "d") == RankEnd(5, "d", None, None)
