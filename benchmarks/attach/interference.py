"""Slowdown of an engine by swaps of another process on the same GPU.

    python -m benchmarks.attach.interference [--json OUT] [--seconds 1.5] [--modes prefill,decode]

An engine process runs matmuls of 8192 x 8192 in bf16 (``prefill``) or a CUDA graph of 200 small kernels (``decode``);
beside it a process copies without a pause: plain memcpys of 512 MiB, for what a busy link costs by itself; then,
scattered planes of 128 KiB, the daemon's own engine and backend (copy engines, through SwapEngine in a process of its
own, because no client can ask fast enough), and a kernel that reads and writes pinned host memory. Every loaded phase
stands between two quiet ones; slowdowns are ratios of the median, the mean and the 99th percentile of an iteration.
(Kernels of two processes take turns: the median of a short iteration does not show that, its mean does.) Budgets:
prefill 1.05, decode 1.02.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attach.neighbours import WAYS, Job, run_copies, run_engine, run_kernels, run_mover
from benchmarks.support.machine import describe_gpu, describe_machine, fail, require_gpu
from benchmarks.support.recording import write_result

THREAD_BLOCKS = (4, 16)
BUDGETS = {"prefill": 1.05, "decode": 1.02}
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class Row:
    """One phase: milliseconds of an iteration without and with swaps, and what the swaps reached meanwhile."""

    mode: str
    swapper: str
    way: str
    quiet_ms: float
    loaded_ms: float
    slowdown: float
    slowdown_mean: float
    quiet_p99_ms: float
    loaded_p99_ms: float
    slowdown_p99: float
    gb_per_s: float


class NeighbourLost(Exception):
    """A process ended or did not answer; what it said stands above."""


class Neighbour:
    """A process with a pipe to it."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.expect("ready", START_SECONDS)

    def send(self, message: object) -> None:
        """Say something. Raises NeighbourLost."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise NeighbourLost(f"{self.name} is gone") from error

    def answer(self, timeout_s: float = ANSWER_SECONDS) -> Any:
        """Read the process's next answer. Raises NeighbourLost."""
        pipe: Connection = self._pipe
        try:
            if not pipe.poll(timeout_s):
                raise NeighbourLost(f"{self.name} said nothing for {timeout_s:g} s")
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise NeighbourLost(f"{self.name} ended") from error

    def expect(self, word: str, timeout_s: float = ANSWER_SECONDS) -> None:
        """Wait for its next word. Raises NeighbourLost."""
        said = self.answer(timeout_s)
        if said != word:
            raise NeighbourLost(f"{self.name} said {said!r} instead of {word!r}")

    def close(self) -> None:
        """Let it end."""
        self.send(None)
        self._process.join(ANSWER_SECONDS)
        self._process.kill()


def measure(mode: str, engine: Neighbour, swapper: Neighbour, job: Job, seconds: float) -> Row:
    """Quiet, loaded, quiet."""

    def times() -> list[float]:
        engine.send(seconds)
        found = engine.answer(ANSWER_SECONDS + seconds)
        assert isinstance(found, list)
        return found

    quiet = times()
    swapper.send(job)
    swapper.expect("running")
    time.sleep(SETTLE_SECONDS)  # the first swaps load code and fill queues
    loaded = times()
    swapper.send("enough")
    rate = float(swapper.answer())
    quiet += times()
    medians = float(np.median(quiet)), float(np.median(loaded))
    worst = float(np.percentile(quiet, 99)), float(np.percentile(loaded, 99))
    return Row(
        mode=mode,
        swapper=f"{swapper.name}, {job.thread_blocks} thread blocks" if job.thread_blocks else swapper.name,
        way=job.way,
        quiet_ms=medians[0],
        loaded_ms=medians[1],
        slowdown=medians[1] / medians[0],
        slowdown_mean=float(np.mean(loaded) / np.mean(quiet)),
        quiet_p99_ms=worst[0],
        loaded_p99_ms=worst[1],
        slowdown_p99=worst[1] / worst[0],
        gb_per_s=rate,
    )


def run_all(modes: Sequence[str], seconds: float) -> list[Row]:
    """Engines of these modes beside all that copies. Raises NeighbourLost."""
    rows = []
    jobs = {
        "memcpy": (run_copies, [Job(way) for way in WAYS]),
        "copy engines": (run_mover, [Job(way) for way in WAYS]),
        "kernel": (run_kernels, [Job(way, count) for count in THREAD_BLOCKS for way in WAYS]),
    }
    head = f"{'engine':8} {'swapper':26} {'way':>5} {'quiet ms':>9} {'loaded':>9} {'slower':>7} {'mean':>6} {'p99':>7}"
    print(f"{head} {'GB/s':>6}", flush=True)
    for mode in modes:
        engine = Neighbour(mode, run_engine, mode)
        for name, (target, todo) in jobs.items():
            swapper = Neighbour(name, target)
            for job in todo:
                row = measure(mode, engine, swapper, job, seconds)
                rows.append(row)
                print(
                    f"{row.mode:8} {row.swapper:26} {row.way:>5} {row.quiet_ms:9.3f} {row.loaded_ms:9.3f} "
                    f"{row.slowdown:7.3f} {row.slowdown_mean:6.2f} {row.slowdown_p99:7.3f} {row.gb_per_s:6.1f}",
                    flush=True,
                )
            swapper.close()
        engine.close()
    return rows


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each phase")
    parser.add_argument("--modes", type=lambda text: tuple(text.split(",")), default=tuple(BUDGETS))
    arguments = parser.parse_args()
    if unknown := set(arguments.modes) - set(BUDGETS):
        parser.error(f"--modes are of {', '.join(BUDGETS)}, and not {', '.join(sorted(unknown))}")
    require_gpu("torch", "cupy")
    try:
        rows = run_all(arguments.modes, arguments.seconds)
    except NeighbourLost as lost:
        fail(str(lost))
    if arguments.json:
        found = {
            "benchmark": "interference",
            "machine": describe_machine() | describe_gpu(),
            "budgets": BUDGETS,
            "seconds": arguments.seconds,
            "rows": [asdict(row) for row in rows],
        }
        write_result(arguments.json, found)


if __name__ == "__main__":
    main()
