"""Every call of an engine comes to an end, and memory that it may still write to is not free until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest

from cachesvc.storage.objects import Heads
from cachesvc.storage.seam import Each, Found, Item, ObjectName, Outcome
from cachesvc.storage.spec import TierOptions
from cachesvc.storage.workers import Job, Workers, nothing, run_job
from tests.sim.sim_storage import SimStorage
from tests.sim.storage_world import InboxWorkers
from tests.unit.rigs.ledger_rig import chain
from tests.unit.storage.storage_tier_rig import TierRig

BUSY, FAILED, LATE = Outcome.BUSY, Outcome.FAILED, Outcome.LATE


class CatchingWorkers(InboxWorkers):
    """Goes on after what raises, as a thread does."""

    def add(self, jobs: Sequence[Job[None]]) -> None:
        super().add([Job(partial(run_job, job, now=0.0)) for job in jobs])


class BrokenStorage(SimStorage):
    """Raises where it is asked, by the ways in ``broken``; what it was given before, it has begun."""

    broken: frozenset[str] = frozenset()

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        self._break("exists")
        super().exists(names, deadline, found)

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        super().get(items, deadline, each)
        self._break("get")

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        super().put(items, deadline, each)
        self._break("put")

    def register(self, chunk: memoryview) -> None:
        self._break("register")
        super().register(chunk)

    def _break(self, way: str) -> None:
        if way in self.broken:
            raise RuntimeError(way)


class NoHeads(Heads):
    """There is no memory for headers."""

    def take(self, count: int) -> list[memoryview]:
        raise OSError(f"no memory for {count}")


def broken_rig(*broken: str, knows: bool = True) -> TierRig:
    engine = BrokenStorage(knows=knows)
    rig = TierRig(TierOptions(deadline=2.0), engine, workers=CatchingWorkers)
    rig.keep("ab")
    engine.broken = frozenset(broken)
    return rig


def test_a_question_that_is_never_answered_ends() -> None:
    rig = broken_rig(knows=False)
    rig.engine.frozen = True
    rig.fetch(7, chain(*"ab"), [[10, 11]])
    rig.settle()
    assert rig.outcomes() == []
    rig.now += 2.0
    rig.tier.tick()
    rig.settle()
    assert rig.outcomes() == [FAILED, FAILED], "no byte was on its way: the pages are free at once"
    rig.engine.frozen = False
    rig.engine.land_late()
    rig.settle()
    assert rig.outcomes() == [], "an answer without a waiter"
    assert rig.tier.store.out() == 0


@pytest.mark.parametrize("way", ["exists", "heads"])
def test_what_breaks_before_it_is_begun_has_failed(way: str) -> None:
    rig = broken_rig("exists", knows=way == "heads")
    if way == "heads":
        rig.tier.store.heads = NoHeads(128)
    rig.fetch(7, chain(*"ab"), [[10, 11]])
    rig.settle()
    assert rig.outcomes() == [FAILED, FAILED]
    rig.now += 2.0
    rig.tier.tick()
    rig.settle()
    assert rig.outcomes() == [], "it is reported once"


def test_what_breaks_once_it_may_have_begun_is_late_until_it_is_back() -> None:
    rig = broken_rig("get", "put")
    rig.fetch(7, chain(*"ab"), [[10, 11]])
    rig.tier.keep(rig.model, chain("c"), [12])
    while rig.inbox:
        rig.inbox.popleft()()
    assert rig.outcomes() == []
    rig.now += 2.0
    rig.tier.tick()
    while rig.inbox:
        rig.inbox.popleft()()
    assert rig.outcomes() == [LATE] * 3
    rig.settle()
    assert rig.outcomes() == [None] * 3


def test_what_nobody_carries_in_time_is_not_begun_any_more() -> None:
    rig = broken_rig()
    rig.tier.keep(rig.model, chain("c"), [12])
    waiting = rig.inbox.popleft()
    rig.now += 2.0
    rig.tier.tick()
    rig.settle()
    assert rig.outcomes() == [BUSY]
    waiting()
    rig.settle()
    assert rig.outcomes() == []
    assert rig.tier.store.out() == 0


def test_a_canary_that_breaks_is_followed_by_another() -> None:
    rig = broken_rig("register", "put")
    rig.tier.breaker.open("test", rig.now)
    for _ in range(20):
        rig.now += 1.0
        rig.tier.tick()
        rig.settle()
    assert not rig.is_used()
    assert isinstance(rig.engine, BrokenStorage)
    rig.engine.broken = frozenset()
    for _ in range(40):
        rig.now += 1.0
        rig.tier.tick()
        rig.settle()
    assert rig.is_used()


def one_worker(most_waiting: int = 4) -> Workers[None]:
    return Workers("test", 1, nothing, most_waiting=most_waiting)


def test_a_job_that_breaks_is_refused_and_the_next_is_run() -> None:
    workers, done = one_worker(), threading.Event()
    told: list[str] = []

    def run(_: None) -> None:
        raise RuntimeError("broken")

    def refuse() -> None:
        told.append("refused")
        raise RuntimeError("broken too")

    workers.start()
    workers.add([Job(run, refuse), Job(lambda _: done.set(), refuse)])
    done.wait()
    assert workers.close()
    workers.add([Job(lambda _: done.set(), partial(told.append, "closed"))])
    assert told == ["refused", "closed"]


def test_jobs_behind_one_that_hangs_are_refused_at_the_end() -> None:
    workers, asked, goes_on = one_worker(), threading.Event(), threading.Event()
    told: list[str] = []

    def hang(_: None) -> None:
        asked.set()
        goes_on.wait()

    workers.start()
    workers.add([Job(hang, partial(told.append, "the first"))])
    asked.wait()
    workers.add([Job(lambda _: asked.set(), partial(told.append, "the second"))])
    assert not workers.finish()
    assert told == ["the second"]
    goes_on.set()


def test_what_waits_is_run_before_workers_finish() -> None:
    workers, told = one_worker(), list[int]()
    workers.add([Job(nothing, partial(told.append, -1))])
    workers.start()
    workers.add([Job(lambda _, number=number: told.append(number)) for number in range(4)])  # type: ignore[misc]
    assert workers.finish()
    assert told == [-1, 0, 1, 2, 3]


def test_jobs_are_refused_beyond_the_queue_and_after_their_deadline() -> None:
    workers, told = one_worker(most_waiting=1), list[str]()
    workers.start()
    workers.add([Job(lambda _: told.append("run"), partial(told.append, "late"), 0.0)])
    while not told:
        threading.Event().wait(0.001)
    workers.add([Job(nothing), Job(nothing, partial(told.append, "no room"))])
    assert workers.finish()
    assert told == ["late", "no room"]


def test_a_job_that_is_put_off_is_run_later_or_refused_at_the_end() -> None:
    workers, done, told = one_worker(), threading.Event(), list[str]()
    workers.start()
    workers.put_off(Job(lambda _: told.append("never"), partial(told.append, "refused")), time.monotonic() + 60.0)
    workers.put_off(Job(lambda _: done.set()), time.monotonic() + 0.01)
    done.wait()
    assert workers.close()
    assert told == ["refused"]
