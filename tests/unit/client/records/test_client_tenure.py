"""A lease surely lives, or its process asks: what was read of its pages may be used only then."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator

import pytest
from cachesvc_client import DaemonUnavailable, DeadlineExceeded, Lease, LeaseLost, Timeouts
from cachesvc_client.aio import AsyncCacheClient
from cachesvc_client.core.errors import AlreadyClosed
from cachesvc_client.records.lease_record import Tenure

from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import FakeDaemon, break_way, hang_until, refuse
from tests.unit.rigs.tenure_rig import LAYOUT, LONG_S, expire, sure, sure_lease


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_answer_is_good_for_the_limit_from_when_its_beat_was_sent() -> None:
    clock = Clock()
    tenure = Tenure(9, clock(), clock)
    clock.now_s = 108.9
    assert sure(tenure)
    sent_s = tenure.begin_beat()
    clock.now_s = 109
    assert not sure(tenure)
    tenure.end_beat(sent_s)
    clock.now_s = 117.8
    assert sure(tenure)
    clock.now_s = 117.9
    assert not sure(tenure)
    tenure.end_beat(100)  # of an answer that was overtaken
    assert not sure(tenure)


def test_beats_that_follow_each_other_bridge_a_daemon_that_hangs() -> None:
    clock = Clock()
    tenure = Tenure(9, clock(), clock)
    for _ in range(10):
        clock.now_s += 3
        tenure.begin_beat()
    assert sure(tenure)
    clock.now_s += 4.5
    assert not sure(tenure)


def test_nothing_is_sure_after_a_stop_until_there_is_an_answer() -> None:
    """Nor does the last beat before it count: it may not have left."""
    clock = Clock()
    tenure = Tenure(9, clock(), clock)
    clock.now_s += 3
    tenure.begin_beat()
    clock.now_s += 9  # stopped; for the daemon it was silent for 12
    assert not sure(tenure)
    sent_s = tenure.begin_beat()
    assert not sure(tenure)
    tenure.end_beat(sent_s)
    assert sure(tenure)


def test_beats_that_do_not_come_through_count_for_nothing() -> None:
    clock = Clock()
    tenure = Tenure(9, clock(), clock)
    for _ in range(3):
        clock.now_s += 3
        tenure.begin_beat()
        tenure.break_off()
    assert not sure(tenure)


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    """One that is sure."""
    with sure_lease(daemon) as made:
        yield made


def test_where_it_is_sure_nothing_is_asked(daemon: FakeDaemon, lease: Lease) -> None:
    assert sure(lease)
    lease.make_sure(LONG_S)
    assert len(daemon.seen["KeepAlive"]) == 1
    lease.close()
    assert not sure(lease)
    with pytest.raises(AlreadyClosed):
        lease.make_sure(LONG_S)


def test_a_lease_that_lived_on_is_sure_again(daemon: FakeDaemon, lease: Lease) -> None:
    expire(lease)
    daemon.faults["KeepAlive"].append(break_way)
    lease.make_sure(LONG_S)
    assert sure(lease)
    assert len(daemon.seen["KeepAlive"]) == 3


def test_a_lease_that_was_lost_meanwhile_is_lost_here_too(daemon: FakeDaemon, lease: Lease) -> None:
    expire(lease)
    daemon.faults["KeepAlive"].append(refuse(ErrorCode.LEASE_LOST, "silent for more than 30 s"))
    with pytest.raises(LeaseLost, match="silent"):
        lease.make_sure(LONG_S)
    assert lease.is_lost
    assert not sure(lease)
    with pytest.raises(LeaseLost, match="silent"):
        lease.make_sure(LONG_S)
    assert len(daemon.seen["KeepAlive"]) == 2


def test_a_daemon_that_hangs_is_waited_for_so_long(daemon: FakeDaemon, lease: Lease) -> None:
    expire(lease)
    go_on = threading.Event()
    daemon.faults["KeepAlive"].append(hang_until(go_on))
    with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
        lease.make_sure(0.1)
    assert not lease.is_lost
    go_on.set()


@pytest.mark.parametrize("was_sure", [True, False])
def test_a_daemon_that_went_leaves_what_was_sure_until_then(daemon: FakeDaemon, lease: Lease, was_sure: bool) -> None:
    if not was_sure:
        expire(lease)
    told: queue.Queue[Exception] = queue.Queue()
    lease.on_lost(told.put)
    daemon.close()
    assert isinstance(told.get(timeout=LONG_S), DaemonUnavailable)
    assert lease.is_sure == was_sure
    if was_sure:
        lease.make_sure(LONG_S)
    else:
        with pytest.raises(DaemonUnavailable):
            lease.make_sure(LONG_S)


async def test_the_awaited_twin_asks_too(daemon: FakeDaemon) -> None:
    async with AsyncCacheClient(daemon.path, timeouts=Timeouts(close_s=1)) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        await lease.make_sure(LONG_S)
        lease.record.tenure = Tenure(LONG_S, -math.inf)
        daemon.faults["KeepAlive"] += [
            refuse(ErrorCode.LEASE_LOST, "silent")
        ] * 3  # the periodic heartbeat may take one
        with pytest.raises(LeaseLost):
            await lease.make_sure(LONG_S)
