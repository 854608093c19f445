"""The daemon killed with SIGKILL at random moments under load, and started again at once on the same socket.

    python -m benchmarks.chaos.daemon_kills --trace TRACE [--kills 50] [--engines 8] [--backend shm|cuda] [--json OUT]

Engines are processes that check every byte that the cache gives them. After each kill three times are taken from the
moment of the signal: ``ready``, the new daemon serves; ``noticed``, an engine knows that the old one is gone;
``served``, every engine has had a request served by the new one. At the end: pages held, books, sockets, memory files
of former lives, processes, and on GPUs the memory in use before and after, as the driver tells it. Exit code 1 where a
page was wrong or something was left behind.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachesvc_ctl.core.daemon_process import DaemonFailed
from cachesvc_lab.traces import TraceRequest, read_trace

from benchmarks.chaos.crew import Crew, Plan, RunFailed
from benchmarks.chaos.figures import shown, spread
from benchmarks.chaos.proc import memory_files
from benchmarks.support.machine import fail, require_gpu
from benchmarks.support.recording import parser_of, save

PAUSE_SECONDS = (0.0, 4.0)
"""Between all engines' being served again and the next kill."""
SERVED_SECONDS = 120.0
FILES_OF_ONE_LIFE = 2
"""Files that an engine has mapped: the slab of its one group, and the timeline. On a GPU the timeline alone."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Seconds since the signal."""

    ready_s: float
    noticed_s: float
    served_s: float


class Kills:
    """One run of ``count`` kills."""

    def __init__(self, plan: Plan, requests: list[TraceRequest], folder: Path, count: int, seed: int) -> None:
        self._crew = Crew(plan, requests, folder)
        self._count = count
        self._rng = random.Random(seed)
        self.kills: list[Kill] = []

    def run(self) -> dict[str, Any]:
        """Run and return the results as plain data. Raises RunFailed, DaemonFailed."""
        crew = self._crew
        try:
            crew.start()
            crew.wait_until(lambda: all(slot.served for slot in crew.slots), SERVED_SECONDS, "all engines are served")
            for number in range(self._count):
                self._pause(self._rng.uniform(*PAUSE_SECONDS))
                self.kills.append(self._kill())
                print(f"kill {number + 1}: {shown(asdict(self.kills[-1]))}", file=sys.stderr, flush=True)
            self._check_mappings()
            ended = crew.finish()
        except BaseException:
            crew.abandon()
            raise
        return {
            "plan": asdict(crew.plan),
            "seconds": crew.second(),
            "kills": len(self.kills),
            **{
                name: spread([getattr(kill, f"{name}_s") for kill in self.kills])
                for name in ("ready", "noticed", "served")
            },
            **dict(crew.figures.sums),
            "survived": dict(crew.figures.losses),
            **ended,
        }

    def _pause(self, seconds: float) -> None:
        """Let the load run on; an engine that ends by itself ends the run."""
        until = time.monotonic() + seconds
        self._crew.wait_until(lambda: time.monotonic() >= until, seconds + 1, "time passes")

    def _kill(self) -> Kill:
        crew = self._crew
        with crew.figures.lock:
            crew.figures.lost_at.clear()
        killed_at = crew.restart_daemon()
        ready_at = time.monotonic()
        epoch = crew.epoch()
        crew.wait_until(
            lambda: all(slot.epoch == epoch for slot in crew.slots), SERVED_SECONDS, "every engine is served again"
        )
        served_at = time.monotonic()
        with crew.figures.lock:
            noticed = [at for at in crew.figures.lost_at if at >= killed_at]
        if len(noticed) < len(crew.slots):
            raise RunFailed(f"{len(noticed)} of {len(crew.slots)} engines noticed that the daemon was gone")
        return Kill(ready_at - killed_at, max(noticed) - killed_at, served_at - killed_at)

    def _check_mappings(self) -> None:
        """Raises RunFailed where an engine still maps what a dead daemon gave it."""

        def most() -> int:
            return max(memory_files(slot.process.pid) for slot in self._crew.slots if slot.process is not None)

        self._crew.wait_until(lambda: most() <= FILES_OF_ONE_LIFE, SERVED_SECONDS, "old pools are unmapped")


def gpu_used_mib() -> int | None:
    """MiB in use on all GPUs, as the driver tells; None where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        told = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(line) for line in told.split())


def problems_of(found: dict[str, Any]) -> list[str]:
    """Violated expectations."""
    good = {
        "corrupt": 0,
        "leaked_pages": 0,
        "leases_left": 0,
        "conservation": "ok",
        "daemon_exit_code": 0,
        "sockets_left": [],
        "processes_left": [],
        "zombies": [],
        "old_pools_mapped": 0,
        "tracebacks_in_log": 0,
    }
    wrong = [f"{name} is {found[name]!r}" for name, value in good.items() if found[name] != value]
    before, after = found.get("gpu_mib_before"), found.get("gpu_mib_after")
    if before is not None and after is not None and after > before:
        wrong.append(f"GPU memory in use went from {before} to {after} MiB")
    return wrong


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        ("kills, seconds, engines", f"{found['kills']}, {found['seconds']}, {found['plan']['engines']}"),
        *((f"{name} after the kill", shown(found[name])) for name in ("ready", "noticed", "served")),
        ("requests", f"{found['requests']:,}"),
        ("pages verified, wrong", f"{found['verified']:,}, {found['corrupt']}"),
        ("leaked pages, conservation", f"{found['leaked_pages']}, {found['conservation']}"),
        ("sockets, processes left", f"{found['sockets_left']}, {found['processes_left']}"),
        ("old pools that engines still map", str(found["old_pools_mapped"])),
        ("GPU MiB before, after", f"{found.get('gpu_mib_before')}, {found.get('gpu_mib_after')}"),
    ]
    return "\n".join(f"{name:34s} {value}" for name, value in lines)


def main() -> None:
    """Entry point. Exit codes: 0 sound, 1 unsound, 2 could not run."""
    parser = parser_of(__doc__, "python -m benchmarks.chaos.daemon_kills")
    parser.add_argument("--trace", required=True, metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--backend", choices=("shm", "cuda"), default="shm")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.backend == "cuda":
        require_gpu("cupy")
    requests = list(read_trace(Path(given.trace)))
    plan = Plan(engines=given.engines, backend=given.backend)
    before = gpu_used_mib() if given.backend == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        try:
            found = Kills(plan, requests, Path(folder), given.kills, given.seed).run()
        except (RunFailed, DaemonFailed) as failed:
            fail(str(failed))
    found["trace"] = Path(given.trace).name
    if given.backend == "cuda":
        found |= {"gpu_mib_before": before, "gpu_mib_after": gpu_used_mib()}
    print(table(found))
    save(given, found)
    wrong = problems_of(found)
    for line in wrong:
        print(f"unsound: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
