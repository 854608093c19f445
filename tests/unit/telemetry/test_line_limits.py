"""Lines that callers cause at will: few of each caller, few in all, and none is forgotten."""

from __future__ import annotations

from cachesvc.telemetry.events import LineLimits


def test_a_caller_that_connects_again_and_again_costs_few_lines_and_hides_no_other_one() -> None:
    now = [0.0]
    repeats = LineLimits(lambda: now[0])
    written = [repeats.admit("lane_refused", "a") for _ in range(1000)]
    assert written.count(None) == 1000 - repeats.ONE_A_MINUTE
    assert repeats.admit("lane_refused", "b") == 1000 - repeats.ONE_A_MINUTE, "its line says how many are missing"
    assert repeats.admit("lane_refused", "b") == 0
    assert repeats.admit("lane_opened", "a") == 0
    now[0] = 60.0
    assert repeats.admit("lane_refused", "a") == 0


def test_callers_that_are_new_each_time_have_a_limit_together() -> None:
    repeats = LineLimits(lambda: 0.0)
    written = [repeats.admit("process_ended", pid) for pid in range(5000)]
    assert len(written) - written.count(None) == repeats.ALL_A_MINUTE
