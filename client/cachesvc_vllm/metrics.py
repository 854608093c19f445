"""Metrics of the connector in vLLM's own: hits by tier, loads, and its time in vLLM's scheduler thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

FOUND = ("asked_tokens", "device_tokens", "host_tokens", "lost_tokens")
AGAIN = tuple(f"preempted_{name}" for name in FOUND)
WAITS, IDLE_WAITS = "waits", "idle_waits"
COUNTS = (*FOUND, *AGAIN, "loads", "failed_loads", WAITS, IDLE_WAITS)
"""Counts of matched requests: their prompts' tokens, where these may be hits, those found in place and in the host
pool, and those that were not found because a window or a state was missing; the same of requests that were preempted
before, or not loaded, with what they had generated; loads that have ended, and those whose blocks did not come;
answers of the daemon that the scheduler waited for, while requests ran and while none did."""

STEP_SECONDS = "step_seconds"
"""Time of each active iteration in vLLM's scheduler thread."""

LOAD_SECONDS = "load_seconds"
"""Time of each load: from the request's having its pages until the scheduler knows of its end."""

SHARES = "shares"
"""1 while the engine shares with others, 0 while its weights are known to no other or it has no daemon."""

TIMES = (STEP_SECONDS, LOAD_SECONDS)
BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
LOAD_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


def _nothing() -> dict[str, Any]:
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    return counts | {name: [] for name in TIMES} | {SHARES: 1}


@dataclass
class CacheStats(KVConnectorStats):  # type: ignore[misc]
    """Statistics since they were made or reset."""

    data: dict[str, Any] = field(default_factory=_nothing)

    def reset(self) -> None:
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another process of the engine saw, or a later moment."""
        for name in COUNTS:
            self.data[name] += other.data[name]
        for name in TIMES:
            self.data[name] = [*self.data[name], *other.data[name]]
        self.data[SHARES] = other.data[SHARES]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Reduce for vLLM's log: counts, and the times of iterations and of loads, in the middle and at most."""
        told: dict[str, int | float] = {name: self.data[name] for name in COUNTS}
        for name in TIMES:
            if seconds := self.data[name]:
                what = name.removesuffix("_seconds")
                told[f"{what}_ms_p50"] = round(float(np.percentile(seconds, 50)) * 1e3, 3)
                told[f"{what}_ms_max"] = round(max(seconds) * 1e3, 3)
        return told

    def is_empty(self) -> bool:
        """True where there is nothing to tell."""
        return not any(value for name, value in self.data.items() if name != SHARES) and bool(self.data[SHARES])


class Stopwatch:
    """Stopwatch of an iteration: a context manager around its work, ``apart`` around what others do within that, and
    ``lap`` at its end. Used from one thread; nested use counts once."""

    def __init__(self) -> None:
        self._outer: list[bool] = []
        self._runs = False
        self._since_s = 0.0
        self._total_s = 0.0
        self.apart = Apart(self)

    def __enter__(self) -> None:
        self.turn(runs=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turn_back()

    def turn(self, *, runs: bool) -> None:
        """Have the watch run or stand still until it is turned back."""
        self._outer.append(self._runs)
        self._set(runs)

    def turn_back(self) -> None:
        """Go on as before the last turn."""
        self._set(self._outer.pop())

    def _set(self, runs: bool) -> None:
        if runs is not self._runs:
            now_s = time.perf_counter()
            if runs:
                self._since_s = now_s
            else:
                self._total_s += now_s - self._since_s
            self._runs = runs

    def lap(self) -> float:
        seconds, self._total_s = self._total_s, 0.0
        return seconds


class Apart:
    """Context manager around what others do within the work of a ``watch``: it stands still, but for work of its own
    that they call."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.turn(runs=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.turn_back()


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count a method's time as that of its object's ``watch``."""

    @wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.watch:
            return method(self, *args, **kwargs)

    return counted


class CacheMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``CacheStats`` as Prometheus metrics beside vLLM's own."""

    def __init__(
        self,
        vllm_config: object,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        tiers = metric_types[Counter](
            "vllm:cachesvc_hit_tokens",
            "Prompt tokens that the daemon had, by where it had them.",
            labelnames=[*labelnames, "tier"],
        )
        loads = metric_types[Counter](
            "vllm:cachesvc_loads", "Loads from the host pool that ended.", labelnames=[*labelnames, "outcome"]
        )
        asked = metric_types[Counter](
            "vllm:cachesvc_asked_tokens", "Prompt tokens that the daemon was asked for.", labelnames=labelnames
        )
        self._lost = metric_types[Counter](
            "vllm:cachesvc_lost_tokens",
            "Prompt tokens that were computed although the daemon had them, for lack of a window or a state.",
            labelnames=labelnames,
        )
        again = metric_types[Counter](
            "vllm:cachesvc_preempted_tokens",
            "Tokens of requests that were admitted again after a preemption: asked for, and where the daemon had them.",
            labelnames=[*labelnames, "found"],
        )
        steps = metric_types[Histogram](
            "vllm:cachesvc_step_seconds",
            "Time of the connector in an iteration of vLLM's scheduler.",
            buckets=BUCKETS_S,
            labelnames=labelnames,
        )
        waits = metric_types[Histogram](
            "vllm:cachesvc_load_seconds",
            "Time of a load from the host pool, from the request's pages to its end as the scheduler hears of it.",
            buckets=LOAD_BUCKETS_S,
            labelnames=labelnames,
        )
        self._stalls = metric_types[Counter](
            "vllm:cachesvc_waits",
            "Answers of the daemon that vLLM's scheduler waited for, while requests were running and while none was.",
            labelnames=[*labelnames, "requests"],
        )
        self._shares = metric_types[Gauge](
            "vllm:cachesvc_shares", "1 while the engine shares its cache with others.", labelnames=labelnames
        )
        self._tiers, self._loads, self._asked, self._steps, self._waits = tiers, loads, asked, steps, waits
        self._again = again

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        told, labels = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        self._tiers.labels(*labels, "device").inc(told["device_tokens"])
        self._tiers.labels(*labels, "host").inc(told["host_tokens"])
        self._loads.labels(*labels, "came").inc(told["loads"] - told["failed_loads"])
        self._loads.labels(*labels, "failed").inc(told["failed_loads"])
        self._asked.labels(*labels).inc(told["asked_tokens"])
        self._lost.labels(*labels).inc(told["lost_tokens"])
        self._shares.labels(*labels).set(told[SHARES])
        self._stalls.labels(*labels, "running").inc(told[WAITS])
        self._stalls.labels(*labels, "none").inc(told[IDLE_WAITS])
        for name in AGAIN:
            self._again.labels(*labels, name.removeprefix("preempted_").removesuffix("_tokens")).inc(told[name])
        for name, histogram in ((STEP_SECONDS, self._steps), (LOAD_SECONDS, self._waits)):
            for seconds in told[name]:
                histogram.labels(*labels).observe(seconds)
