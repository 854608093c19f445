"""Every call of an engine comes to an end, and memory that it may still write to is not free until then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from cachesvc.storage.mooncake.engine import Questions
from cachesvc.storage.objects import Heads
from cachesvc.storage.seam import Each, Found, Item, ObjectName, Outcome
from cachesvc.storage.spec import TierOptions
from cachesvc.storage.tier import Courier, StorageTask, run_task
from tests.sim.sim_storage import SimStorage
from tests.sim.storage_world import InboxCarrier
from tests.unit.rigs.ledger_rig import chain
from tests.unit.storage.storage_tier_rig import TierRig

BUSY, FAILED, LATE = Outcome.BUSY, Outcome.FAILED, Outcome.LATE


class CatchingCarrier(InboxCarrier):
    """Goes on after what raises, as a thread does."""

    def add(self, call: Callable[[], None], fail: Callable[[], None]) -> None:
        super().add(partial(run_task, StorageTask(call, fail)), fail)


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
    rig = TierRig(TierOptions(deadline=2.0), engine, carriers=CatchingCarrier)
    rig.keep("ab")
    engine.broken = frozenset(broken)
    return rig


def test_a_question_that_is_never_answered_ends() -> None:
    rig = broken_rig(knows=False)
    rig.engine.frozen = True
    rig.tier.fetch(rig.model, 7, chain(*"ab"), [[10, 11]])
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
    rig.tier.fetch(rig.model, 7, chain(*"ab"), [[10, 11]])
    rig.settle()
    assert rig.outcomes() == [FAILED, FAILED]
    rig.now += 2.0
    rig.tier.tick()
    rig.settle()
    assert rig.outcomes() == [], "it is reported once"


def test_what_breaks_once_it_may_have_begun_is_late_until_it_is_back() -> None:
    rig = broken_rig("get", "put")
    rig.tier.fetch(rig.model, 7, chain(*"ab"), [[10, 11]])
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


def test_a_courier_goes_on_after_what_raises() -> None:
    courier, done = Courier("test"), threading.Event()
    told: list[str] = []

    def call() -> None:
        raise RuntimeError("broken")

    def fail() -> None:
        told.append("failed")
        raise RuntimeError("broken too")

    courier.start()
    courier.add(call, fail)
    courier.add(done.set, fail)
    done.wait()
    courier.close()
    assert told == ["failed"]


def test_a_question_that_breaks_is_given_up_and_the_next_is_asked() -> None:
    questions, done = Questions(), threading.Event()
    told: list[str] = []

    def ask() -> None:
        raise RuntimeError("the library broke")

    questions.start()
    questions.add(ask, partial(told.append, "given up"))
    questions.add(done.set, partial(told.append, "not asked"))
    done.wait()
    assert questions.close()
    questions.add(done.set, partial(told.append, "closed"))
    assert told == ["given up", "closed"]


def test_questions_behind_one_that_hangs_are_given_up_at_the_end() -> None:
    questions, asked, goes_on = Questions(), threading.Event(), threading.Event()
    told: list[str] = []

    def hang() -> None:
        asked.set()
        goes_on.wait()

    questions.start()
    questions.add(hang, partial(told.append, "the first"))
    asked.wait()
    questions.add(asked.set, partial(told.append, "the second"))
    assert not questions.close()
    assert told == ["the second"]
    goes_on.set()
