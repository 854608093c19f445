"""Observations of a run: requests, bytes, losses, and latencies by when they were measured."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cachesvc_lab.replay_report import LatencyHistogram

SUMS = ("device", "host", "computed", "uncached", "verified", "corrupt")


@dataclass
class Figures:
    """Guarded by ``lock``. ``steps``: one histogram for each second since the run began. ``returns``: how long engines
    took from noticing that the daemon was gone to a new lease, in seconds. ``lost_at``: when they noticed, on the
    monotonic clock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sums: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    served: Counter[int] = field(default_factory=Counter)
    steps: dict[int, LatencyHistogram] = field(default_factory=dict)
    returns: list[float] = field(default_factory=list)
    lost_at: list[float] = field(default_factory=list)

    def add(self, engine: int, outcome: dict[str, Any], second: int) -> None:
        """Count one request."""
        with self.lock:
            self.served[engine] += 1
            self.sums["requests"] += 1
            for name in SUMS:
                self.sums[name] += outcome[name]
            self.losses.update(outcome["losses"])
            histogram = self.steps.setdefault(second, LatencyHistogram())
            for milliseconds in outcome["step_ms"]:
                histogram.record(milliseconds)
            if outcome["lost_at"]:
                self.lost_at.append(outcome["lost_at"])
            if outcome["lost_at"] and outcome["back_at"] > outcome["lost_at"]:
                self.returns.append(outcome["back_at"] - outcome["lost_at"])

    def note_fault(self, kind: str) -> None:
        """Count an injected fault."""
        with self.lock:
            self.faults[kind] += 1

    def window(self, first: float, last: float) -> dict[str, float]:
        """Steps answered in seconds ``[first, last)`` of the run: how many, p50 and p99 in ms."""
        merged = LatencyHistogram()
        with self.lock:
            for second, histogram in self.steps.items():
                if first <= second < last:
                    merged.merge(histogram)
        if not merged.count:
            return {"from_s": round(first), "to_s": round(last), "steps": 0}
        return {
            "from_s": round(first),
            "to_s": round(last),
            "steps": merged.count,
            "p50_ms": merged.percentile_ms(50),
            "p99_ms": merged.percentile_ms(99),
        }


def spread(values: list[float]) -> dict[str, float]:
    """Count, median, p95 and worst of some seconds."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50_s": statistics.median(ordered),
        "p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max_s": ordered[-1],
    }


def shown(figures: dict[str, float]) -> str:
    """Some figures for people, rounded."""
    return ", ".join(f"{name} {value:,.3f}" if value % 1 else f"{name} {value:,.0f}" for name, value in figures.items())
