"""Longest rounds of the daemon's event loop beside an engine: ``python -m benchmarks.loop.rounds --json OUT``.

Each case is the worst of its kind that one caller can do: many long publishes, loads and swaps into single pages, the
longest Steps, refused Allocates, a Match of what another engine computes, a mover's death, the end of many leases, a
full list of blocks to be written, status and dumps, connections that come and go, and a Match under a learned eviction.
Beside it an engine of another model makes a Step of 32 sequences every 10 ms.

``round_ms``: the longest round in processor time of the loop's thread, ``flow`` and ``flow_ms``: the flow of those that
held it longest. ``step_p99_ms``: the engine's, by the clock; ``alone_p99_ms``: before the case, in the same daemon.
``allocate_ms`` (of ``publishes``): the longest Allocate of 1,024 blocks of a second engine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from cachesvc_client import CacheClient
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.chaos.hostile import EVERY_SECONDS, SEQUENCES, step
from benchmarks.loop.cases import CASES, LAYOUT, Case, Site
from benchmarks.support.calls import Beside, spread
from benchmarks.support.recording import parser_of, save

MOST_ROUND_MS, MOST_STEP_RATIO, MOST_ALLOCATE_MS = 2.0, 1.5, 50.0
"""Goals."""
BLOCKS = 64
ALONE_SECONDS = 4.0


def main() -> None:
    """Print a table and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    arguments = parser.parse_args()
    print(f"{'case':26}{'round ms':>10}{'flow ms':>10}  {'flow':30}{'p99 ms':>8}{'alone':>8}{'ratio':>7}")
    found = {case.name: measure(case) for case in CASES if case.name in arguments.cases}
    save(arguments, {"benchmark": "loop.rounds", "cases": found})


def measure(case: Case) -> dict[str, Any]:
    """Figures of one case, on a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
        log = Path(folder) / "rounds"
        flags = [each.format(folder=folder) for each in case.flags]
        under = [sys.executable, "-m", "benchmarks.loop.round_log", str(log)]
        with DaemonProcess(["--backend", "shm", *flags], folder=folder, under=under) as daemon:
            device = "shm-1" if "--shm-devices" in case.flags else "shm-0"
            with Beside(serve, daemon.socket, device) as engine:
                site = Site(daemon, time.monotonic)
                case.run(site)
            taken = engine.result
        lines = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    during = [(what, float(ms)) for at, what, ms in lines if site.began <= float(at) <= site.ended]
    rounds = max((ms for what, ms in during if what == "round"), default=0.0)
    flow, flow_ms = max(
        ((what, ms) for what, ms in during if what != "round"), key=lambda each: each[1], default=("", 0.0)
    )
    alone = spread([ms for at, ms in taken if site.began - ALONE_SECONDS <= at < site.began])
    loaded = spread([ms for at, ms in taken if site.began <= at <= site.ended])
    ratio = loaded["p99"] / alone["p99"]
    row = f"{case.name:26}{rounds:10.2f}{flow_ms:10.2f}  {flow[-30:]:30}"
    row += f"{loaded['p99']:8.2f}{alone['p99']:8.2f}{ratio:7.2f}"
    print(row, *(f"{name} {value:.1f}" for name, value in site.figures.items()), flush=True)
    return {
        "round_ms": rounds,
        "flow": flow,
        "flow_ms": flow_ms,
        "step_p99_ms": loaded["p99"],
        "alone_p99_ms": alone["p99"],
        "steps": loaded["count"],
        "seconds": round(site.ended - site.began, 2),
        **site.figures,
    }


def serve(ends: Event, pipe: Connection, socket: str, device: str) -> None:
    """Make steps until told to end."""
    taken: list[tuple[float, float]] = []
    with CacheClient(socket, engine="beside") as client:
        registration = client.register("beside", LAYOUT, device_pages=[8192], host_pages=[0], devices=[device])
        lease = client.open_lease(registration)
        stream = lease.step(stock_pages=4 * SEQUENCES)
        pipe.send("ready")
        while not ends.is_set():
            held = [lease.match(b"") for _ in range(SEQUENCES)]
            for blocks in range(1, BLOCKS + 1):
                began, at = time.perf_counter(), time.monotonic()
                step(stream, held, blocks)
                taken.append((at, (time.perf_counter() - began) * 1e3))
                time.sleep(max(0.0, EVERY_SECONDS - (time.perf_counter() - began)))  # kernels run meanwhile
                if ends.is_set():
                    break
            for each in held:
                each.release()
        pipe.send(taken)


if __name__ == "__main__":
    main()
