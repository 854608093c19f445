"""Cost of a mover that is killed to the other GPUs, and time until its GPU is served again."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpus.fleet import Fleet
from benchmarks.support.mover import WAIT_SECONDS
from benchmarks.swap.swaps import WAYS
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import Transfer

BOTH_WAYS = WAYS[2]
WINDOW_SECONDS, SETTLE_SECONDS = 0.5, 1.5
Log = list[tuple[float, float]]
"""Start and end of each ticket."""


def measure_kill(fleet: Fleet, blocks: int, budget_s: float, found: dict[str, Any]) -> None:
    """Swap on all devices, kill the last one's mover, and serve that device again. Raises CacheError, AssertionError
    for wrong bytes, and what breaks swaps elsewhere."""
    logs, killed, told, again = swap_and_kill(fleet, blocks)
    for at in range(len(fleet.devices)):
        load(fleet, at, blocks)
    moved = 2 * blocks * fleet.page_bytes
    windows = {"before": killed - WINDOW_SECONDS, "during": killed, "after": again}
    others = [
        {name: rate_in(log, first, moved) for name, first in windows.items()}
        | {"longest_ms": max((ended - began for began, ended in log if ended > killed), default=0.0) * 1e3}
        for log in logs[:-1]
    ]
    found |= {"told_s": told - killed, "again_s": again - killed, "others": others}
    print(
        f"the mover of GPU {len(others)} killed: its ticket failed after {found['told_s']:.3f} s, a new replica had "
        f"its first pages after {found['again_s']:.2f} s (budget {budget_s:g}); GB/s of the others:",
        flush=True,
    )
    for at, other in enumerate(others):
        print(f"  GPU {at}: " + ", ".join(f"{name} {value:.2f}" for name, value in other.items()), flush=True)


def swap_and_kill(fleet: Fleet, blocks: int) -> tuple[list[Log], float, float, float]:
    """The tickets of each device, and when the last one's mover was killed, its ticket failed, and pages came again."""
    victim, stop = len(fleet.devices) - 1, threading.Event()
    logs: list[Log] = [[] for _ in fleet.devices]
    todo = [fleet.transfers([model], BOTH_WAYS, blocks) for model in fleet.replicas]
    with ThreadPoolExecutor(len(todo)) as threads:
        try:
            runs = [threads.submit(swap_until, stop, fleet, mine, log) for mine, log in zip(todo, logs, strict=True)]
            time.sleep(SETTLE_SECONDS)  # the undisturbed rate of all devices is reported too
            killed = time.perf_counter()
            os.kill(fleet.pid(victim), signal.SIGKILL)
            broken = runs[victim].exception(WAIT_SECONDS)
            told = time.perf_counter()
            if not isinstance(broken, Unavailable):
                raise AssertionError(f"swaps on the GPU whose mover was killed ended with {broken!r}")
            fleet.renew(victim)
            again = load(fleet, victim, blocks)
            runs[victim] = threads.submit(swap_until, stop, fleet, todo[victim], logs[victim])
            time.sleep(SETTLE_SECONDS)  # and what they do once the killed one is back
        finally:
            stop.set()
        for run in runs:
            run.result(WAIT_SECONDS)
    return logs, killed, told, again


def swap_until(stop: threading.Event, fleet: Fleet, moves: list[Transfer], log: Log) -> None:
    """Swap without a pause, and note when each began and ended. Raises what breaks a ticket."""
    while not stop.is_set():
        began = time.perf_counter()
        fleet.move(fleet.again(moves))
        log.append((began, time.perf_counter()))


def load(fleet: Fleet, at: int, blocks: int) -> float:
    """Load pages of a device's model, and look at them; when they came. Raises AssertionError."""
    ready = fleet.transfers([fleet.replicas[at]], WAYS[0], blocks)
    fleet.mark(ready)
    fleet.move(ready)
    came = time.perf_counter()
    fleet.check(ready)
    return came


def rate_in(log: Log, first: float, moved: int) -> float:
    """GB/s of tickets of ``moved`` bytes in ``WINDOW_SECONDS`` from ``first`` on; overlapping tickets count in part."""
    last = first + WINDOW_SECONDS
    shares = (max(0.0, min(ended, last) - max(began, first)) / (ended - began) for began, ended in log)
    return moved * sum(shares) / WINDOW_SECONDS / 1e9
