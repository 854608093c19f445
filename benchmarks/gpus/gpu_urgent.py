"""Loads to one GPU while all the others store, a part of ``benchmarks.gpus``, whose head explains the figures."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any

from benchmarks.gpus.fleet import Fleet
from benchmarks.swap.swaps import WAYS
from cachesvc.model.words import Urgency

MIB = 1 << 20
LOAD_WAY, STORE_WAY = WAYS[:2]


@dataclass(frozen=True)
class UrgentRow:
    """One line: GB/s of the loads, alone and beside the others' background stores; ``stores``: of the others together.
    ``budget``: of background copies, 0 where there was none."""

    plane_bytes: int
    mib: int
    budget_gb_per_s: float
    gb_per_s: float
    beside_gb_per_s: float
    stores_gb_per_s: float


def measure_urgent(fleet: Fleet, mibs: tuple[int, ...], repeats: int, budget: int | None) -> list[dict[str, Any]]:
    """Every size without a budget, and with ``budget`` bytes a second, or with what calibration found. Raises
    AssertionError for wrong bytes."""
    rows, measured = [], fleet.budget.bytes_per_second
    print(f"{'plane':>9} {'MiB':>5} {'budget':>7} {'GB/s':>7} {'beside':>7} {'others store':>12}", flush=True)
    for mib in mibs:
        for each in sorted({0, measured if budget is None else budget}):
            fleet.budget.set(each)
            row = measure(fleet, mib * MIB // fleet.page_bytes, repeats)
            rows.append(asdict(row))
            print(
                f"{row.plane_bytes:>7} B {row.mib:>5} {row.budget_gb_per_s:>7.1f} {row.gb_per_s:>7.1f} "
                f"{row.beside_gb_per_s:>7.1f} {row.stores_gb_per_s:>12.1f}",
                flush=True,
            )
    fleet.budget.set(measured)
    return rows


def measure(fleet: Fleet, blocks: int, repeats: int) -> UrgentRow:
    """Medians of tickets to the first device, in turns with nothing beside them and with stores from all the others."""
    alone, beside = list[float](), list[float]()
    stored_bytes = stored_s = 0.0
    size_bytes = blocks * fleet.page_bytes
    with ThreadPoolExecutor(1) as thread:
        for repeat in range(repeats + 1):
            alone_s = timed_load(fleet, blocks)
            over = Event()
            busy = thread.submit(store_until, fleet, blocks, over)
            beside_s = timed_load(fleet, blocks)
            over.set()
            tickets, spent_s = busy.result()
            if repeat:  # the first one warms up
                alone.append(alone_s)
                beside.append(beside_s)
                stored_bytes += tickets * size_bytes
                stored_s += spent_s
    return UrgentRow(
        fleet.layout.planes[0].page_bytes,
        size_bytes // MIB,
        fleet.budget.bytes_per_second / 1e9,
        size_bytes / statistics.median(alone) / 1e9,
        size_bytes / statistics.median(beside) / 1e9,
        stored_bytes / stored_s / 1e9,
    )


def timed_load(fleet: Fleet, blocks: int) -> float:
    """Load fresh pages to the first device and check them; the seconds of the load."""
    loaded = fleet.transfers(fleet.replicas[:1], LOAD_WAY, blocks)
    fleet.mark(loaded)
    seconds = fleet.move(loaded).seconds
    fleet.check(loaded)
    return seconds


def store_until(fleet: Fleet, blocks: int, over: Event) -> tuple[int, float]:
    """Store in the background from all but the first device without a pause; the tickets that ended, and seconds."""
    ready = fleet.transfers(fleet.replicas[1:], STORE_WAY, blocks, Urgency.BACKGROUND)
    tickets, seconds = 0, 0.0
    while not over.is_set():
        seconds += fleet.move(fleet.again(ready)).seconds
        tickets += len(ready)
    return tickets, seconds
