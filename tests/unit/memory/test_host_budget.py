"""The node's budget: background copies of all devices keep to it while an awaited copy runs on another one."""

from __future__ import annotations

import os

import pytest

from cachesvc.memory.host_pool import BACKGROUND_PARTS, LEASE_S, HostBudget, budget_of
from cachesvc.memory.interface import CopyJob
from cachesvc.model.words import Direction
from tests.unit.memory.arbiter_rig import (
    AWAITED,
    BACKGROUND,
    BYTES_PER_SECOND,
    LOAD,
    MIB,
    STORE,
    Link,
    copy_rules,
    job_of,
)

BUDGET = 4_000_000_000
TICK_S = 0.00025
DEPTH = 2
RULES = copy_rules(32 * MIB)
URGENT, LARGE = 1, 1 << 36
URGENT_BYTES = 2 << 30
URGENT_S = URGENT_BYTES / BYTES_PER_SECOND


class Node:
    """Links of several devices over one page, each with its own arbiter and as fast as if it were alone."""

    def __init__(self, devices: int, budget: int = BUDGET) -> None:
        self.page = HostBudget.make(devices)
        self.page.set(budget)
        self.links = [Link(RULES, DEPTH, neighbours=self.page.of(device)) for device in range(devices)]
        self.now = 0.0

    def run(self, seconds: float, *, hung: tuple[int, ...] = ()) -> None:
        """All links but those of hung devices."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + TICK_S)
            for device, link in enumerate(self.links):
                if device not in hung:
                    link.run(self.now)

    def push(self, device: int, job: CopyJob, way: Direction = STORE) -> None:
        self.links[device].push(job, way)

    def store(self, *devices: int, way: Direction = STORE) -> None:
        """Begin background copies without end."""
        for device in devices:
            self.push(device, job_of(100 + device, LARGE, BACKGROUND), way)

    def moved(self, *devices: int) -> list[int]:
        return [self.links[device].moved[100 + device] for device in devices]


@pytest.fixture(params=[STORE, LOAD], ids=["stores", "prefetches"])
def way(request: pytest.FixtureRequest) -> Direction:
    way: Direction = request.param
    return way


def queued_before() -> int:
    """Bytes that the copy engines of a device have when the awaited load comes, and two slices of a tick."""
    return (DEPTH + 2) * RULES.slice_bytes // BACKGROUND_PARTS


def test_background_copies_of_all_devices_together_keep_to_the_budget_beside_an_awaited_load(way: Direction) -> None:
    node = Node(8)
    node.store(*range(1, 8), way=way)
    node.run(0.05)
    before = node.moved(*range(1, 8))
    assert sum(before) > 0.95 * 7 * 0.05 * BYTES_PER_SECOND, "at full speed as long as no awaited copy runs"
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    node.run(URGENT_S)
    beside = [after - at for after, at in zip(node.moved(*range(1, 8)), before, strict=True)]
    assert max(beside) - min(beside) <= queued_before(), "each device has the same part"
    assert sum(beside) <= URGENT_S * BUDGET + 7 * queued_before()
    assert sum(beside) >= 0.9 * URGENT_S * BUDGET, "and the budget is used: none starves"
    node.run(2 * TICK_S)
    assert URGENT in node.links[0].ended
    at = sum(node.moved(*range(1, 8)))
    node.run(0.05)
    assert sum(node.moved(*range(1, 8))) - at > 0.9 * 7 * 0.05 * BYTES_PER_SECOND, "nothing idles afterwards"


def test_without_a_budget_nothing_is_held_back_and_slices_are_whole() -> None:
    node = Node(2, budget=0)
    node.store(1)
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    node.run(URGENT_S)
    assert node.moved(1)[0] > 0.95 * URGENT_S * BYTES_PER_SECOND
    assert len(node.links[1].order) <= node.moved(1)[0] // RULES.slice_bytes + DEPTH


def test_a_device_that_stores_alone_has_the_whole_budget() -> None:
    node = Node(8)
    node.store(5)
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    node.run(URGENT_S)
    assert node.moved(5)[0] >= 0.9 * URGENT_S * BUDGET


def test_awaited_stores_and_expedited_ones_are_not_held_back_and_hold_others_back() -> None:
    node = Node(3)
    node.store(1, 2)
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    node.run(0.01)
    room = job_of(7, 1 << 30, AWAITED)
    node.push(1, room)
    node.run((1 << 30) / BYTES_PER_SECOND + 0.001)
    assert 7 in node.links[1].ended, "room for a call that waits is made at the link's speed"
    at = node.moved(2)[0]
    node.links[2].arbiter.expedite(102)
    node.run(0.01)
    assert node.moved(2)[0] - at > 0.8 * 0.01 * BYTES_PER_SECOND
    node.run(URGENT_S)  # the load has ended long ago; what was expedited is awaited still
    at = node.moved(1)[0]
    node.run(0.1)
    assert node.moved(1)[0] - at <= 0.1 * BUDGET + queued_before()


def test_a_device_that_hangs_or_dies_with_awaited_copies_holds_the_others_for_no_longer_than_its_lease() -> None:
    node = Node(2)
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    node.run(0.01)
    node.store(1)
    for turn in range(3):  # engines go on to ask it
        node.links[0].now = node.now
        node.push(0, job_of(10 + turn, URGENT_BYTES), LOAD)
        node.run(LEASE_S, hung=(0,))
    assert node.moved(1)[0] > 0.9 * 2 * LEASE_S * BYTES_PER_SECOND


def test_a_failed_load_and_a_drained_one_hold_no_one_back() -> None:
    for end in ("fail", "drain"):
        node = Node(2)
        job = job_of(URGENT, URGENT_BYTES)
        node.push(0, job, LOAD)
        assert node.page.of(1).have_awaited(node.now)
        if end == "fail":
            node.links[0].arbiter.fail(job)
        else:
            node.links[0].arbiter.drain(LOAD)
        assert not node.page.of(1).have_awaited(node.now)


def test_a_devices_own_awaited_copies_are_its_own_arbiters_affair() -> None:
    node = Node(2)
    node.push(0, job_of(URGENT, URGENT_BYTES), LOAD)
    assert not node.page.of(0).have_awaited(node.now)
    node.store(0)
    node.run(2 * URGENT_S)
    assert node.moved(0)[0] > 0.9 * URGENT_S * BYTES_PER_SECOND, "at full speed once its load has ended"


def test_times_of_another_clock_count_for_nothing() -> None:
    page = HostBudget.make(2)
    page.of(0).begin_awaited(1e6)
    assert not page.of(1).have_awaited(5.0)


def test_the_budget_is_measured_and_there_is_none_where_links_are_the_limit() -> None:
    assert budget_of([55e9, 55e9], [54e9, 53e9]) == 0
    assert budget_of([55e9] * 8, [15e9] * 8) == 30e9
    assert budget_of([55e9], [55e9]) == 0


def test_a_page_that_another_process_maps_is_the_same() -> None:
    page = HostBudget.make(3)
    theirs = HostBudget(os.dup(page.fd))
    page.set(BUDGET)
    assert theirs.bytes_per_second == BUDGET
    theirs.of(2).begin_awaited(1.0)
    theirs.close()
    theirs.close()
    assert page.of(0).have_awaited(1.0)
    assert not page.of(0).have_awaited(1.0 + 2 * LEASE_S)
    page.close()
