"""An engine learns that its daemon has gone from the first call that meets none, or another life of the daemon."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client import (
    CacheClient,
    CacheClientError,
    DaemonDraining,
    DaemonUnavailable,
    DeadlineExceeded,
    Lease,
    NotFound,
    Reattacher,
    Retries,
    Timeouts,
)
from cachesvc_client.layouts.families import opaque
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import TicketView
from cachesvc.model.errors import ErrorCode
from cachesvc.model.words import TimelineSlot
from tests.unit.rigs.client_gpu_rig import GpuRig
from tests.unit.rigs.client_rig import EPOCH, FakeDaemon, break_way, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)
RETRIES = Retries(pause_s=0.001)
NEVER_S = 60.0
"""Time limit of a test that hangs."""


@pytest.fixture
def successor(tmp_path: Path) -> Iterator[FakeDaemon]:
    """The daemon's next life, to be started; it knows no lease of the last."""
    fake = FakeDaemon(tmp_path, epoch=EPOCH + 1)
    for rpc in ("Match", "Allocate", "KeepAlive"):
        fake.faults[rpc].extend([refuse(ErrorCode.NOT_FOUND, "unknown lease")] * 9)
    yield fake
    fake.close()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[CacheClient]:
    with CacheClient(daemon.path, retries=RETRIES, timeouts=Timeouts(close_s=1)) as made:
        yield made


def leased(client: CacheClient) -> Lease:
    return client.open_lease(client.register("m", LAYOUT))


def silent(lease: Lease) -> list[CacheClientError]:
    """Errors that callbacks got so far."""
    told: list[CacheClientError] = []
    lease.on_lost(told.append)
    return told


def test_a_call_that_meets_the_next_daemon_is_told_as_the_loss_of_its_own(
    daemon: FakeDaemon, successor: FakeDaemon, client: CacheClient
) -> None:
    lost: queue.Queue[CacheClientError | None] = queue.Queue()
    client.on_lost(lambda: lost.put(None))
    lease = leased(client)
    sequence = lease.match(b"")
    lease.on_lost(lost.put)
    daemon.let_go()
    successor.start()
    with pytest.raises(DaemonUnavailable, match="went away"):
        sequence.allocate(1)
    assert (lease.is_lost, client.connected) == (True, False)
    told = [lost.get(timeout=NEVER_S) for _ in range(2)]  # by the thread that was the first to notice, perhaps a beat's
    assert sorted(type(error).__name__ for error in told) == ["DaemonUnavailable", "NoneType"]
    with pytest.raises(DaemonUnavailable):
        lease.match(b"")
    daemon.hang_up()
    assert lost.empty(), "its end is reported once"
    successor.faults.clear()
    (fresh,) = client.reconnect()
    assert client.epoch == EPOCH + 1
    fresh.match(b"")


def test_a_registration_of_a_daemon_that_has_gone_opens_no_lease(
    daemon: FakeDaemon, successor: FakeDaemon, client: CacheClient
) -> None:
    """Its numbers may be another model's now."""
    stale = client.register("m", LAYOUT)
    daemon.let_go()
    daemon.hang_up()
    assert client.wait_lost(NEVER_S)
    successor.start()
    assert client.reconnect() == ()
    with pytest.raises(NotFound, match="registered with a daemon that has gone; register it again"):
        client.open_lease(stale)
    assert not client.open_lease(client.register("m", LAYOUT)).is_lost


def test_a_call_that_meets_nobody_is_the_loss_at_once(daemon: FakeDaemon, client: CacheClient) -> None:
    lease = leased(client)
    told, heard = silent(lease), threading.Event()
    lease.on_lost(lambda _: heard.set())
    daemon.let_go()
    with pytest.raises(DaemonUnavailable):
        lease.prefetch(b"")
    assert lease.is_lost
    assert heard.wait(NEVER_S), "by a beat's thread, which may have met it first"
    assert len(told) == 1


def test_an_engine_that_asks_nothing_hears_of_it_by_its_beats(daemon: FakeDaemon, client: CacheClient) -> None:
    lease = leased(client)
    heard: queue.SimpleQueue[CacheClientError] = queue.SimpleQueue()
    lease.on_lost(heard.put)
    assert daemon.beats.acquire(timeout=NEVER_S)
    daemon.let_go()
    assert isinstance(heard.get(timeout=NEVER_S), DaemonUnavailable)
    assert client.wait_lost(NEVER_S)


def test_a_beat_that_another_life_answers_is_the_loss(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, silence_limit_ms=60)
    daemon.start()
    with CacheClient(daemon.path, retries=RETRIES) as client:
        lease = leased(client)
        heard: queue.SimpleQueue[CacheClientError] = queue.SimpleQueue()
        lease.on_lost(heard.put)
        daemon.epoch += 1
        assert isinstance(heard.get(timeout=NEVER_S), DaemonUnavailable)
        assert lease.is_lost
    daemon.close()


def test_a_step_that_the_next_daemon_refuses_is_the_loss(
    daemon: FakeDaemon, successor: FakeDaemon, client: CacheClient
) -> None:
    lease = leased(client)
    stream = lease.step()
    daemon.step_answers.append(cache_pb2.StepResponse())
    assert stream.submit() == []
    daemon.let_go()
    unknown = cache_pb2.OperationError(code=ErrorCode.NOT_FOUND.value, message="unknown lease")
    successor.step_answers.append(cache_pb2.StepResponse(error=unknown))
    successor.start()
    with pytest.raises(DaemonUnavailable):
        stream.submit()
    assert lease.is_lost


@pytest.mark.parametrize(("fault", "error"), [(refuse(ErrorCode.NOT_FOUND), NotFound), (break_way, DaemonUnavailable)])
def test_what_the_living_daemon_says_costs_no_lease(
    daemon: FakeDaemon, client: CacheClient, fault: Callable[[Any], None], error: type[CacheClientError]
) -> None:
    lease = leased(client)
    told = silent(lease)
    daemon.faults["Match"].extend([fault] * RETRIES.attempts)
    with pytest.raises(error):
        lease.match(b"")
    assert (lease.is_lost, told, client.connected) == (False, [], True)
    daemon.faults.clear()
    lease.match(b"")


def test_reconnect_to_a_daemon_that_drains_gives_the_leases_that_live(daemon: FakeDaemon, client: CacheClient) -> None:
    """The guide's reaction to DaemonUnavailable is harmless while the daemon drains."""
    kept, lost = leased(client), leased(client)
    daemon.faults["Match"].append(refuse(ErrorCode.LEASE_LOST, "it fell silent"))
    with pytest.raises(CacheClientError):
        lost.match(b"")
    daemon.faults["Match"].append(refuse(ErrorCode.DRAINING, "draining"))
    with pytest.raises(DaemonDraining) as draining:
        kept.match(b"")
    assert isinstance(draining.value, DaemonUnavailable)
    assert client.reconnect() == (kept,)
    assert not kept.is_lost
    kept.prefetch(b"")


def test_the_reattacher_comes_back_to_the_successor(
    daemon: FakeDaemon, successor: FakeDaemon, client: CacheClient
) -> None:
    back: queue.SimpleQueue[tuple[Lease, ...]] = queue.SimpleQueue()
    lease = leased(client)
    successor.faults.clear()
    with Reattacher(client, back.put, first_pause_s=0.001):
        daemon.let_go()
        with pytest.raises(DaemonUnavailable):
            lease.prefetch(b"")
        successor.start()
        (fresh,) = back.get(timeout=NEVER_S)
        fresh.match(b"")
    assert back.empty()


WORD, FAILED = 4, 5


def load() -> TicketView:
    return TicketView(1, "running", "", TimelineSlot(WORD, FAILED, 10, 4), "load", 1, 64)


@pytest.fixture
def rig(daemon: FakeDaemon) -> Iterator[GpuRig]:
    rig = GpuRig(daemon, LAYOUT, timeout_s=0.05)
    yield rig
    rig.life.close()


def patiently(ask: Callable[[], object]) -> None:
    """Ask again for as long as the answer is late."""
    while True:
        try:
            ask()
        except DeadlineExceeded:
            continue
        return


def test_a_late_descriptor_ends_nobodys_loads(daemon: FakeDaemon, rig: GpuRig) -> None:
    """The words are every engine's: what is written there while the daemon lives fails loads that others joined."""
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    daemon.may_give.clear()
    with pytest.raises(CacheClientError, match="no descriptor within"):
        rig.life.fetch_fd(daemon.timeline.handle.token)
    assert not rig.life.lost.is_set()
    assert pool.timeline[[WORD, FAILED]].tolist() == [0, 0]
    daemon.may_give.set()
    with pytest.raises(NotFound):  # and not the answer to the question before
        patiently(lambda: rig.life.fetch_fd(b"x" * 16))
    rig.write(WORD, 14)
    pool.confirm(load())
    assert pool.close()


def test_words_are_released_at_the_daemons_end_and_not_when_it_is_given_up(daemon: FakeDaemon, rig: GpuRig) -> None:
    pool = rig.pool()
    pool.wait_ticket_on(7, load())
    words = pool.timeline[:]
    rig.life.give_up()
    assert rig.life.lost.is_set()
    assert words[[WORD, FAILED]].tolist() == [0, 0], "it may still end the load"
    with pytest.raises(DaemonUnavailable):
        pool.wait_ticket_on(7, load())
    rig.lose()
    assert words[[WORD, FAILED]].tolist() == [14, 14]
    del words
    assert pool.close()
    assert rig.gpu.is_whole()
