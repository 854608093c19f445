"""Latency of calls to a real daemon while engines on several GPUs swap through it, and while nothing is copied."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from cachesvc_client import KEY_BYTES, CacheClient, opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.attach.interference import Neighbour
from benchmarks.rpc.round_trips import match_times, step_times, swapped_out
from benchmarks.support.calls import compute, spread
from cachesvc.model.layout import Layout

SWAPPERS = 2
"""Engines a GPU: while one is on its way out the other one comes in."""
MATCHED_BLOCKS, SEQUENCES, BLOCK_TOKENS = 2048, 32, 64
CALLED_PAGES, CALLED_BYTES = 1 << 18, 256
"""Enough blocks that the pages taken by all steps of a run never need an eviction."""
DEVICE_SPARE, HOST_SPARE = 256 << 20, 64 << 20
TURNS = 4


class Swap(NamedTuple):
    """Blocks that an engine moves in one ticket."""

    layout: Layout
    blocks: int

    @property
    def pages(self) -> int:
        """On each side for all engines of a GPU: what goes and what comes have pages at once."""
        return 2 * SWAPPERS * self.blocks


def measure_calls(backend: str, devices: Sequence[str], swap: Swap, count: int, found: dict[str, Any]) -> None:
    """Phases in turns, idle and beside engines that swap, ``count`` calls of each kind in each. Raises DaemonFailed,
    NeighbourLost."""
    pool_bytes = swap.pages * swap.layout.page_bytes(0)
    flags = ["--backend", backend, "--device-pool", str(pool_bytes + DEVICE_SPARE)]
    flags += ["--host-pool", str(len(devices) * (pool_bytes + HOST_SPARE)), "--shm-devices", str(len(devices))]
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(flags, whole=True))

        def begun(name: str, target: Callable[..., None], *arguments: Any) -> Neighbour:
            process = Neighbour(name, target, daemon.socket, *arguments)
            stack.callback(process.close)
            return process

        caller = begun("the caller", run_caller)
        swappers = [
            begun(f"swapper {number} on {device}", run_swapper, device, swap)
            for device, number in itertools.product(devices, range(SWAPPERS))
        ]
        times: dict[str, dict[str, list[float]]] = {name: {"idle": [], "beside": []} for name in ("step", "match")}
        rates = []
        for turn, phase in itertools.product(range(TURNS), ("idle", "beside")):
            busy = swappers if phase == "beside" else []
            for swapper in busy:
                swapper.send("swap")
            for swapper in busy:
                swapper.expect("running")
            caller.send(count)
            for name, more in caller.answer().items():
                times[name][phase] += more
            for swapper in busy:
                swapper.send("enough")
            rates += [sum(swapper.answer() for swapper in busy)] if busy else []
            print(f"calls, {phase}, turn {turn + 1} of {TURNS}", flush=True)
    found["gb_per_s"] = statistics.median(rates)
    print(f"{'ms':>8} {'idle p50':>9} {'p99':>7} {'beside p50':>10} {'p99':>7} {'of idle p50':>11} {'p99':>6}")
    for name, phases in times.items():
        row: dict[str, Any] = {phase: spread(each) for phase, each in phases.items()}
        ratios = {which: row["beside"][which] / row["idle"][which] for which in ("p50", "p99")}
        found[name] = {"calls": len(phases["idle"]), **row, "ratio": ratios}
        told = " ".join(f"{row[phase]['p50']:>9.3f} {row[phase]['p99']:>7.3f}" for phase in phases)
        print(f"{name:>8} {told} {ratios['p50']:>12.2f} {ratios['p99']:>6.2f}", flush=True)
    print(f"swapped meanwhile: {found['gb_per_s']:.1f} GB/s, in and out on {len(devices)} GPUs", flush=True)


def run_caller(socket: str, pipe: Connection) -> None:
    """An engine that answers a number of calls with the milliseconds of as many of each kind. None ends it."""
    layout = opaque(block_bytes=CALLED_BYTES, block_tokens=BLOCK_TOKENS)
    keys = np.random.default_rng(1).bytes(MATCHED_BLOCKS * KEY_BYTES)
    with CacheClient(socket, engine="caller") as client:
        assert client.transport == "lane"
        registration = client.register("called", layout, device_pages=[CALLED_PAGES], host_pages=[0])
        with client.open_lease(registration) as lease:
            compute(lease, keys)
            step_times(lease, SEQUENCES, SEQUENCES, publish=True)
            match_times(lease, SEQUENCES, lambda: keys)
            gc.freeze()  # as serving engines do
            pipe.send("ready")
            while (count := pipe.recv()) is not None:
                steps: list[float] = []
                while len(steps) < count:
                    steps += step_times(lease, SEQUENCES, count, publish=True)
                pipe.send({"step": steps, "match": match_times(lease, count, lambda: keys)})


def run_swapper(socket: str, device: str, swap: Swap, pipe: Connection) -> None:
    """An engine that swaps a sequence in and out from one message to the next, and answers with its GB/s. None ends
    it."""
    with CacheClient(socket, engine=f"swapper on {device}") as client:
        registration = client.register(
            f"swapped on {device}", swap.layout, devices=[device], device_pages=[swap.pages], host_pages=[swap.pages]
        )
        with client.open_lease(registration) as lease, lease.match(b"") as sequence:
            sequence.allocate(swap.blocks)
            while not swapped_out(sequence):
                time.sleep(0.05)  # the host pages are still arriving, of which no event tells a client
            sequence.wait_swapped(60)
            pipe.send("ready")
            while pipe.recv() is not None:
                pipe.send("running")
                swaps, began = 0, time.perf_counter()
                while not pipe.poll():
                    sequence.swap_in()
                    sequence.wait_swapped(60)
                    sequence.swap_out()
                    sequence.wait_swapped(60)
                    swaps += 2
                if pipe.recv() is None:
                    return
                pipe.send(swaps * swap.blocks * swap.layout.page_bytes(0) / (time.perf_counter() - began) / 1e9)
