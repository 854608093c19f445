"""Engines on a looped trace for a long time, with chaos on.

    python -m benchmarks.chaos.soak --trace TRACE [--minutes 30] [--engines 8] [--calm] [--seed 1] [--json OUT]

Each engine is a process that knows every block's bytes and checks all that the cache gives it. A seed decides which
process is killed or stopped, which connections are cut, and when; a share of the daemon's copies is made to fail. The
trace is looped, under a new salt after every second loop. In the first third of the time the daemon is killed too; the
rest is one life of it, in which growth of memory and drift of latencies are judged. Memory is the daemon's anonymous
memory without the host pool; growth is the lowest of the second half of that life after its warm-up against the lowest
of the first half: between two collections of Python's cyclic garbage, minutes apart, it rises by some percent and falls
again. Exit code 1 where a page was corrupt or leaked, the accounting is inconsistent, memory grew by more than 2 %, or
an engine was not served. It goes on beyond its time until each kind of fault was made once.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachesvc_ctl.core.daemon_process import DaemonFailed
from cachesvc_lab.traces import TraceRequest, read_trace

from benchmarks.chaos.crew import Crew, Plan, RunFailed
from benchmarks.chaos.faults import FaultRates, Faults
from benchmarks.chaos.figures import shown, spread
from benchmarks.chaos.proc import MIB, bytes_beside_pools
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save

SAMPLE_SECONDS = 10.0
LOOK_SECONDS = 0.2
KILLS_SHARE = 1 / 3
WARM_UP_SHARE = 0.25
"""Warm-up share of the last life: until index, pools and free lists have been used throughout."""
WINDOW_SHARE = 0.2
MOST_GROWTH_PERCENT = 2.0
FAULT_COPIES = 0.01
STALLED_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Duration and fault rates. ``rates`` None: no faults."""

    plan: Plan
    seconds: float
    rates: FaultRates | None
    seed: int


class Soak:
    """One run. ``run`` gives what was found, as plain data."""

    def __init__(self, soak: SoakPlan, requests: list[TraceRequest], folder: Path) -> None:
        self._soak = soak
        self._crew = Crew(soak.plan, requests, folder)
        self._memory: list[tuple[float, int, int]] = []
        self._served: tuple[float, list[int]] = (0.0, [])

    def run(self) -> dict[str, Any]:
        """Raises RunFailed, DaemonFailed."""
        soak, crew = self._soak, self._crew
        kills_until = soak.seconds * KILLS_SHARE if soak.rates is not None else 0.0
        try:
            crew.start()
            crew.wait_until(lambda: all(slot.served for slot in crew.slots), STALLED_SECONDS, "all engines are served")
            faults = Faults(crew, soak.rates or FaultRates(*[0.0] * 6), soak.seed, kills_until)
            faults.start()
            self._watch(faults)
            crew.stop()
            faults.join()
            if faults.error is not None:
                raise RunFailed(f"a fault could not be made: {faults.error!r}") from faults.error
            ended = crew.finish()
        except BaseException:
            crew.abandon()
            raise
        return self._found(ended)

    def _watch(self, faults: Faults) -> None:
        """Sample memory, and see that every engine gets on."""
        crew = self._crew
        began = time.monotonic()
        sample_at = 0.0
        self._served = (began, [slot.served for slot in crew.slots])
        while not crew.stopping.wait(LOOK_SECONDS):
            now = time.monotonic() - began
            if now >= self._soak.seconds and faults.has_done():
                break
            crew.check() if not crew.daemon_lock.locked() else None
            if now >= sample_at:
                sample_at = now + min(SAMPLE_SECONDS, self._soak.seconds / 60)
                self._sample()
        crew.check()
        if faults.error is not None:
            raise RunFailed(f"a fault could not be made: {faults.error!r}") from faults.error

    def _sample(self) -> None:
        crew = self._crew
        with crew.daemon_lock:
            pid = crew.daemon.process.pid
            self._memory.append((crew.second(), pid, bytes_beside_pools(pid, self._soak.plan.host_pool_bytes)))
        since, before = self._served
        now = [slot.served for slot in crew.slots]
        if time.monotonic() - since > STALLED_SECONDS:
            stalled = [slot.number for slot, old, new in zip(crew.slots, before, now, strict=True) if old == new]
            if stalled:
                raise RunFailed(f"engines {stalled} were not served for {STALLED_SECONDS:g} s: {crew.engine_words()}")
            self._served = (time.monotonic(), now)
        sums = crew.figures.sums
        print(
            f"{crew.second():5d} s: {sums['requests']:,} requests, {sums['verified']:,} pages verified, "
            f"corrupt {sums['corrupt']}, faults {sum(crew.figures.faults.values())}, "
            f"daemon {self._memory[-1][2] / MIB:.1f} MiB",
            file=sys.stderr,
            flush=True,
        )

    def _found(self, ended: dict[str, Any]) -> dict[str, Any]:
        crew, figures = self._crew, self._crew.figures
        life = [(second, size) for second, pid, size in self._memory if pid == self._memory[-1][1]]
        first, last = life[0][0], life[-1][0]
        warm = first + WARM_UP_SHARE * (last - first)
        window = WINDOW_SHARE * (last - first)
        middle = (warm + last) / 2
        before = [size for second, size in life if warm <= second < middle] or [life[0][1]]
        after = [size for second, size in life if second >= middle]
        growth = 100 * (min(after) / min(before) - 1)
        figures_sums = dict(figures.sums)
        return {
            "plan": asdict(self._soak.plan),
            "seed": self._soak.seed,
            "rates": asdict(self._soak.rates) if self._soak.rates is not None else None,
            "seconds": crew.second(),
            **figures_sums,
            "faults": dict(figures.faults),
            "survived": dict(figures.losses),
            "served_by_engine": [figures.served[slot.number] for slot in crew.slots],
            "back_after_loss": spread(figures.returns),
            "step_start": figures.window(warm, warm + window),
            "step_end": figures.window(last - window, last + 1),
            "memory": {
                "life_seconds": last - first,
                "first_half_mib": [of(before) / MIB for of in (min, statistics.median, max)],
                "second_half_mib": [of(after) / MIB for of in (min, statistics.median, max)],
                "growth_percent": growth,
                "samples": len(life),
            },
            **ended,
        }


def problems_of(found: dict[str, Any], most_growth_percent: float = MOST_GROWTH_PERCENT) -> list[str]:
    """Violated expectations."""
    wrong = [
        f"{name} is {found[name]!r}"
        for name, good in (
            ("corrupt", 0),
            ("leaked_pages", 0),
            ("leases_left", 0),
            ("conservation", "ok"),
            ("daemon_exit_code", 0),
            ("sockets_left", []),
            ("processes_left", []),
            ("zombies", []),
            ("old_pools_mapped", 0),
            ("tracebacks_in_log", 0),
        )
        if found[name] != good
    ]
    wrong += [f"engine {at} was never served" for at, count in enumerate(found["served_by_engine"]) if not count]
    if found["memory"]["growth_percent"] > most_growth_percent:
        wrong.append(f"memory grew by {found['memory']['growth_percent']:.2f} %")
    return wrong


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    memory, start, end = found["memory"], found["step_start"], found["step_end"]
    before, after = (
        ", ".join(f"{size:.1f}" for size in memory[half]) for half in ("first_half_mib", "second_half_mib")
    )
    lines = [
        ("seconds, engines", f"{found['seconds']:,}, {found['plan']['engines']}"),
        ("requests", f"{found['requests']:,}"),
        ("blocks: device, host, computed", f"{found['device']:,}, {found['host']:,}, {found['computed']:,}"),
        ("faults by kind", ", ".join(f"{kind} {count}" for kind, count in sorted(found["faults"].items())) or "none"),
        ("survived by engines", ", ".join(f"{kind} {count}" for kind, count in sorted(found["survived"].items()))),
        ("pages verified, corrupt", f"{found['verified']:,}, {found['corrupt']}"),
        ("leaked pages, conservation", f"{found['leaked_pages']}, {found['conservation']}"),
        ("daemon lost to lease again", shown(found["back_after_loss"])),
        ("Step at start", shown(start)),
        ("Step at end", shown(end)),
        ("MiB beside pools: min, p50, max", f"{before}, then {after}: {memory['growth_percent']:+.2f} %"),
    ]
    return "\n".join(f"{name:32s} {value}" for name, value in lines)


def main() -> None:
    """Entry point. Exit codes: 0 sound, 1 unsound, 2 could not run."""
    parser = parser_of(__doc__, "python -m benchmarks.chaos.soak")
    parser.add_argument("--trace", required=True, metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--calm", action="store_true", help="nothing is done to anybody: the same load without chaos")
    parser.add_argument("--chaos", action="store_true", help="the default; kept so that a command can say so")
    parser.add_argument("--pace", type=float, default=1.0, help="faults this many times as far apart")
    parser.add_argument("--fault-copies", type=float, default=FAULT_COPIES, help="share of copies that fail")
    parser.add_argument("--write-policy", default="write_back")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    requests = list(read_trace(Path(given.trace)))
    share = 0.0 if given.calm else given.fault_copies
    plan = Plan(engines=given.engines, fault_copies=share, write_policy=given.write_policy)
    rates = None if given.calm else FaultRates().scaled(given.pace)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            found = Soak(SoakPlan(plan, 60 * given.minutes, rates, given.seed), requests, Path(folder)).run()
        except (RunFailed, DaemonFailed) as failed:
            fail(str(failed))
    found["trace"] = Path(given.trace).name
    print(table(found))
    save(given, found)
    wrong = problems_of(found)
    for line in wrong:
        print(f"unsound: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
