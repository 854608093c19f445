"""When a vLLM engine that finds no room gives back what it got ahead."""

from __future__ import annotations

from cachesvc_client.plugins.page_book import TRIES_S, GivingWay


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_an_idle_engine_got_goes_back_once_it_has_tried_for_some_time() -> None:
    clock = Clock()
    way = GivingWay(clock)
    assert not way.is_due(is_idle=True)
    clock.now_s += TRIES_S / 2
    assert not way.is_due(is_idle=True)
    clock.now_s += TRIES_S
    assert way.is_due(is_idle=True)
    assert way.is_away


def test_it_is_away_for_a_moment_and_then_tries_again_as_long() -> None:
    clock = Clock()
    way = GivingWay(clock)
    way.is_due(is_idle=True)
    clock.now_s += 2 * TRIES_S
    assert way.is_due(is_idle=True)
    away = []
    for later_s in (TRIES_S * 0.99, TRIES_S * 1.01):
        clock.now_s += later_s
        away.append(way.is_away)
    assert away == [True, False]
    assert not way.is_due(is_idle=True)
    clock.now_s += TRIES_S * 1.01
    assert way.is_due(is_idle=True)


def test_an_engine_that_runs_something_or_has_just_admitted_waits() -> None:
    clock = Clock()
    way = GivingWay(clock)
    for meanwhile in (lambda: way.is_due(is_idle=False), way.admit):
        way.is_due(is_idle=True)
        clock.now_s += 2 * TRIES_S
        meanwhile()
        assert not way.is_due(is_idle=True)
