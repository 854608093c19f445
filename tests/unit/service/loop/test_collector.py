"""When the cyclic collector runs: between calls, sometime all the same, and over nothing that was there for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cachesvc.flows.core import Chore, tidy
from cachesvc.model.numbers import BACKGROUND, Party, Rounds
from cachesvc.service.loop.node import (
    FREEZE_ROWS,
    FULL_EVERY_SECONDS,
    FULL_SHARE,
    LATE_SECONDS,
    MOST_FLOWS,
    QUIET_FLOWS,
    YOUNG_OBJECTS,
    Collector,
)


class Ring:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.me = self


class Rig:
    def __init__(self) -> None:
        self.idle = True
        self.rows = 0
        self.took = 0.0
        self._time = 0.0
        self.collector = Collector(lambda: self.idle, lambda: self.rows, self._clock)

    def _clock(self) -> float:
        """Every pass takes ``took`` seconds."""
        self._time += self.took
        return self._time

    def ring(self) -> weakref.ref[Ring]:
        return weakref.ref(Ring())


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.collector.start()
    made.collector.rest(1.0)
    yield made
    made.collector.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_is_new_is_passed_over_before_other_chores(rig: Rig) -> None:
    gone = rig.ring()
    chores = Rounds[Party, Chore]()
    for _ in range(3):
        chores.add(BACKGROUND, Chore(1, bool))
    for _ in range(MOST_FLOWS):
        rig.collector.glance(chores)
    assert len(chores) == 4
    tidy(chores)
    assert gone() is None


def test_it_runs_by_itself_never_and_when_nothing_is_served(rig: Rig) -> None:
    assert not gc.isenabled()
    gone = rig.ring()
    rig.idle = False
    rig.collector.rest(2.0)
    assert gone() is not None
    rig.idle = True
    rig.collector.rest(3.0)
    assert gone() is None


def test_a_daemon_that_is_never_idle_collects_sometime(rig: Rig) -> None:
    rig.idle = False
    gone = rig.ring()
    rig.collector.rest(1.0 + LATE_SECONDS - 0.1)
    assert gone() is not None
    rig.collector.rest(1.0 + LATE_SECONDS)
    assert gone() is None


def test_a_daemon_at_work_makes_full_passes_as_rare_as_they_are_long(rig: Rig) -> None:
    """Between two calls of an engine there is no room for one of 30 ms; and uncollected garbage grows."""

    def is_found(now: float) -> bool:
        ring = Ring()
        gone = weakref.ref(ring)
        for earlier in (now - 0.2, now - 0.1):
            rig.collector.rest(earlier)  # old by now
        del ring
        for _ in range(QUIET_FLOWS + 1):
            rig.collector.glance(Rounds[Party, Chore]())
        rig.collector.rest(now + LATE_SECONDS)
        return gone() is None

    rig.took = 0.03
    assert is_found(2.0), "its length is not known yet"
    assert not is_found(100.0)
    assert is_found(2.0 + LATE_SECONDS + rig.took / FULL_SHARE)


def test_what_survived_before_it_died_is_found_by_a_rare_full_pass(rig: Rig) -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    rig.collector.rest(2.0)
    rig.collector.rest(3.0)  # old by now
    del ring
    rig.collector.rest(4.0)
    assert gone() is not None
    rig.collector.rest(1.0 + FULL_EVERY_SECONDS)
    assert gone() is None


def test_what_new_blocks_brought_is_frozen_and_no_garbage_with_it(rig: Rig) -> None:
    frozen = gc.get_freeze_count()
    gone = rig.ring()
    kept = [Ring() for _ in range(100)]
    rig.rows = FREEZE_ROWS - 1
    rig.collector.rest(2.0)
    assert gc.get_freeze_count() <= frozen
    rig.rows = FREEZE_ROWS
    rig.collector.rest(3.0)
    assert gc.get_freeze_count() >= frozen + len(kept)
    assert gone() is None
    frozen = gc.get_freeze_count()
    rig.rows += FREEZE_ROWS - 1
    rig.collector.rest(4.0)
    assert gc.get_freeze_count() <= frozen


def test_rows_that_went_are_no_reason_to_freeze_late(rig: Rig) -> None:
    """A model of a million rows is evicted, and another one comes."""
    rig.rows = 20 * FREEZE_ROWS
    rig.collector.rest(2.0)
    rig.rows = 0
    rig.collector.rest(3.0)
    kept = [Ring() for _ in range(100)]
    rig.rows = FREEZE_ROWS
    rig.collector.rest(4.0)
    assert not {id(each) for each in kept} & {id(each) for each in gc.get_objects()}, "what is frozen is not listed"


def test_what_replaces_old_objects_is_passed_over_though_the_count_stands_still(rig: Rig) -> None:
    """A full cache drops as much as it makes: nothing was passed over until a sweep, and then all at once."""
    chores = Rounds[Party, Chore]()
    gone = rig.ring()
    old = [[number] for number in range(YOUNG_OBJECTS)]
    gc.collect()
    passes = 0
    for number in range(2 * MOST_FLOWS):
        old[number] = [number]
        rig.collector.glance(chores)
        while chores:
            passes += chores.take().go_on()
    assert passes >= 2
    assert gone() is None


def test_what_is_new_is_passed_over_in_a_turn_once_there_is_enough_of_it(rig: Rig) -> None:
    chores = Rounds[Party, Chore]()
    rig.collector.glance(chores)
    assert not chores
    gone = rig.ring()
    kept = [[number] for number in range(YOUNG_OBJECTS + 1)]
    rig.collector.glance(chores)
    rig.collector.glance(chores)
    [chore] = chores
    assert gone() is not None
    assert chore.go_on()
    assert gone() is None
    chores.take()
    rig.collector.glance(chores)
    assert not chores
    assert len(kept) > YOUNG_OBJECTS
