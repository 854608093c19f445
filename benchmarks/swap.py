"""Scattered swaps through the real engine, beside one plain copy of the same bytes in the same run.

    python -m benchmarks.swap [--json OUT] [--backend shm] [--pool-mib 1024] [--repeats 5]

A quarter of the pool is moved each way, in runs of blocks that are contiguous in both pools. ``whole``:
all layers in one step. ``layered``: steps as the planner's costs choose them. ``by layer``: a step for
each layer. ``both``: a load and a store at once, bytes of both added. Ratios are medians over medians of
the same way of plain copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from cachesvc.memory.host_pool import MAX_CHUNK_BYTES, HostPool
from cachesvc.memory.host_slab import HostSlab
from cachesvc.memory.seam import Backend, CopyJob, CopyStep, Slab
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.geometry import device_geometry
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.transfer import Direction, PagePairs, Transfer
from cachesvc.swap.engine import SwapEngine

MIB = 1 << 20
LAYERS = 16
WIDTHS = (4 << 10, 16 << 10, 32 << 10, 72 << 10, 128 << 10, 512 << 10)
RUNS = (1, 16)
LOAD, STORE = Direction
BACKENDS: dict[str, Callable[[int], Backend]] = {"shm": lambda size: ShmBackend(1, size)}


@dataclass(frozen=True)
class Way:
    """What is moved at once: directions, and the engine's ``layers_per_step`` (0: whole)."""

    name: str
    directions: tuple[Direction, ...]
    steps: str
    layers_per_step: int | None


WAYS = (
    Way("in", (LOAD,), "whole", 0),
    Way("out", (STORE,), "whole", 0),
    Way("both", (LOAD, STORE), "whole", 0),
    Way("in", (LOAD,), "layered", None),
    Way("in", (LOAD,), "by layer", 1),
    Way("both", (LOAD, STORE), "by layer", 1),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    plane_bytes: int
    way: str
    steps: str
    run_blocks: int
    copy_bytes: int
    gb_per_s: float
    plain_gb_per_s: float
    ratio: float


class Bench:
    """One device slab and one host pool, on which layouts of every width are laid in turn."""

    def __init__(self, backend: Backend, pool_bytes: int) -> None:
        self.backend = backend
        self.pool_bytes = pool_bytes
        self.host = HostPool(2 * pool_bytes, min(MAX_CHUNK_BYTES, 2 * pool_bytes), 2, None, backend)
        self.ended = threading.Semaphore(0)
        self.errors: list[Exception] = []
        self.tickets = iter(range(1 << 30))

    def start(self) -> Slab:
        """Start all, and touch all memory once, so that no measurement pays for its pages."""
        self.backend.start()
        slab = self.backend.create_slab(self.backend.devices()[0], self.pool_bytes)
        self.host.start()
        self.host.join_filling()
        return slab

    def close(self) -> None:
        """Stop all."""
        self.backend.close()
        self.host.close()

    def done(self, error: Exception | None) -> None:
        """The end of a job."""
        if error is not None:
            self.errors.append(error)
        self.ended.release()

    def wait(self, jobs: int) -> None:
        """Until ``jobs`` have ended; raises what broke."""
        for _ in range(jobs):
            self.ended.acquire()
        if self.errors:
            raise self.errors[0]

    def plain(self, way: Way, slab: Slab, host: HostSlab, copy_bytes: int) -> float:
        """Seconds of one plain copy of ``copy_bytes`` for each direction of ``way``."""
        extent = host.table.extents[0]
        begin = time.perf_counter()
        for part, direction in enumerate(way.directions):
            here, there = (extent.region, extent.offset + part * copy_bytes), (slab.region, part * copy_bytes)
            ends = (*here, *there) if direction is LOAD else (*there, *here)
            copies = np.array([(*ends, copy_bytes, 1, copy_bytes, copy_bytes)], np.int64)
            device = self.backend.devices()[0]
            stream = self.backend.load_stream(device) if direction is LOAD else self.backend.store_stream(device)
            stream.submit(CopyJob(next(self.tickets), (CopyStep(copies),), None, None, 0, self.done))
        self.wait(len(way.directions))
        return time.perf_counter() - begin


def layout_of(width: int) -> Layout:
    """Two planes a layer of ``width`` bytes a block."""
    planes = tuple(Plane(name, layer, "full", (width,), "uint8") for layer in range(LAYERS) for name in ("k", "v"))
    return Layout(64, 1, (PlaneGroup("full"),), planes)


def scattered(rng: np.random.Generator, first: int, blocks: int, run: int) -> tuple[int, ...]:
    """``blocks`` pages out of twice as many from ``first`` on, in runs of ``run`` with gaps between,
    shuffled."""
    starts = first + 2 * run * rng.permutation(blocks // run)
    return tuple(int(page) for start in starts for page in range(start, start + run))


def transfers(bench: Bench, way: Way, blocks: int, run: int) -> list[Transfer]:
    """One transfer for each direction, on halves of both pools that do not meet."""
    rng = np.random.default_rng(run)
    made = []
    for part, direction in enumerate(way.directions):
        device, host = (scattered(rng, part * 2 * blocks, blocks, run) for _ in range(2))
        layered = direction is LOAD and way.steps != "whole"
        pairs = PagePairs(0, device, host)
        made.append(Transfer(next(bench.tickets), 0, 0, direction, (pairs,), layered))
    return made


def measure(bench: Bench, slab: Slab, width: int, way: Way, run: int, repeats: int) -> Row:
    """Median of ``repeats``, each beside its own plain copy."""
    layout = layout_of(width)
    pages = bench.pool_bytes // layout.page_bytes(0) // 4 // max(RUNS) * max(RUNS) * 4
    blocks = pages // 4
    host = bench.host.reserve(layout.page_bytes(0), pages)
    while sum(come.count for come in bench.host.ready_pages(host)) < pages:
        time.sleep(0.001)  # reused pages are being zeroed; nothing is measured yet
    engine = SwapEngine(bench.backend, lambda _, error: bench.done(error), layers_per_step=way.layers_per_step)
    engine.start()
    engine.attach_model(0, layout, [[host]])
    assert device_geometry(layout, 0, pages).total_bytes <= slab.handle.size_bytes
    engine.attach_replica(0, 0, bench.backend.devices(), [[slab]], [pages])
    copy_bytes = blocks * layout.page_bytes(0)
    swap_s, plain_s = [], []
    for repeat in range(repeats + 1):
        plain = bench.plain(way, slab, host, copy_bytes)
        ready = transfers(bench, way, blocks, run)
        begin = time.perf_counter()
        for transfer in ready:
            engine.submit(transfer)
        bench.wait(len(way.directions))
        if repeat:  # the first one warms up
            swap_s.append(time.perf_counter() - begin)
            plain_s.append(plain)
    check(engine, transfers(bench, way, blocks, run))
    engine.close()
    bench.host.release(host)
    total = copy_bytes * len(way.directions)
    swap, plain = total / statistics.median(swap_s) / 1e9, total / statistics.median(plain_s) / 1e9
    return Row(width, way.name, way.steps, run, total, round(swap, 2), round(plain, 2), round(swap / plain, 3))


def check(engine: SwapEngine, moved: list[Transfer]) -> None:
    """The last block of each transfer is the same on both sides."""
    for transfer in moved:
        pairs = transfer.pages[0]
        device, host = (
            engine.page_bytes(0, 0, 0, 0, pairs.device_pages[-1]),
            engine.page_bytes(0, None, 0, 0, pairs.host_pages[-1]),
        )
        assert device == host


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="shm")
    parser.add_argument("--pool-mib", type=int, default=1024, help="bytes on each side; a quarter moves each way")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    pool_bytes = arguments.pool_mib * MIB
    bench = Bench(BACKENDS[arguments.backend](pool_bytes), pool_bytes)
    slab = bench.start()
    rows = []
    print(f"{'plane':>9} {'way':>5} {'steps':>9} {'run':>4} {'MiB':>6} {'GB/s':>7} {'plain':>7} {'ratio':>6}")
    for width in WIDTHS:
        for way in WAYS:
            for run in RUNS:
                row = measure(bench, slab, width, way, run, arguments.repeats)
                rows.append(row)
                print(
                    f"{row.plane_bytes >> 10:>5} KiB {row.way:>5} {row.steps:>9} {row.run_blocks:>4} "
                    f"{row.copy_bytes // MIB:>6} {row.gb_per_s:>7.2f} {row.plain_gb_per_s:>7.2f} {row.ratio:>6.3f}",
                    flush=True,
                )
    bench.close()
    if arguments.json:
        machine = describe_machine()
        found = {"benchmark": "swap", "backend": arguments.backend, "machine": machine, "numpy": np.__version__}
        arguments.json.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
