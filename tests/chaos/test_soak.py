"""Engines on a trace while they and the daemon are killed, stopped and cut off, under a seed: the soak, made short."""

from __future__ import annotations

import os
from pathlib import Path

from cachesvc_lab.traces import SyntheticTraceSpec, TraceRequest, read_trace, write_synthetic_trace

from benchmarks.chaos.crew import Plan
from benchmarks.chaos.daemon_kills import Kills
from benchmarks.chaos.daemon_kills import problems_of as problems_of_kills
from benchmarks.chaos.faults import FaultRates
from benchmarks.chaos.soak import Soak, SoakPlan, problems_of
from tests.e2e.rig import short_folder

SEED = int(os.environ.get("CHAOS_SEED", "7"))
SECONDS = 12.0
RATES = FaultRates(kill_engine=2.0, stop_engine=2.0, kill_daemon=3.0, stop_daemon=3.0, cut_calls=1.5, cut_life=2.5)
NO_LIMIT = float("inf")
"""Growth is judged in runs that are long enough to have a warm-up."""


def requests(folder: Path) -> list[TraceRequest]:
    trace = folder / "trace.jsonl"
    write_synthetic_trace(trace, SyntheticTraceSpec(requests=400, seed=SEED))
    return list(read_trace(trace))


def test_chaos_leaves_no_corrupt_page_no_leak_and_nobody_unserved() -> None:
    plan = Plan(engines=4, device_blocks=128, host_blocks=512, lease_seconds=1.0, fault_copies=0.02)
    with short_folder() as folder:
        found = Soak(SoakPlan(plan, SECONDS, RATES, SEED), requests(folder), folder).run()
    assert problems_of(found, NO_LIMIT) == [], f"seed {SEED}: {found}"
    assert set(found["faults"]) == set(RATES.__dataclass_fields__), "each kind of fault was injected"
    assert found["device"] > 0
    assert found["host"] > 0
    assert found["verified"] > 100
    assert found["survived"]["DaemonUnavailable"] > 0


def test_a_daemon_that_is_killed_again_and_again() -> None:
    with short_folder() as folder:
        kills = Kills(Plan(engines=3, device_blocks=512, host_blocks=512), requests(folder), folder, 2, SEED)
        found = kills.run()
    assert problems_of_kills(found) == []
    assert found["noticed"]["count"] == found["served"]["count"] == 2
    assert found["memory_files_of_an_engine"] == 2
