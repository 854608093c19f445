"""Several GPUs at once, through the real swap engine and a mover process for each.

    python -m benchmarks.gpus [--backend shm|cuda] [--gpus N] [--parts copies peers urgent calls kill hang]
                              [--json OUT] [--mib 512 2048] [--repeats 5] [--quick]

``copies``: single pages, scattered on both sides, in one ticket whose ranks are the GPUs (``ranks``), or in a ticket
for each GPU's own model, all at once (``replicas``). ``MiB`` is what each GPU moves each way. ``steps``: ``whole``: all
layers in one; ``layered``: as the planner chooses. ``both``: loads and stores at once, bytes of both added. Time is
from the call to the wake-up of the waiter for the last GPU's timeline word. ``GB/s`` is of all GPUs together; ``plain``
of plain copies of as many bytes (1 GiB at most, see ``plain.py``) the same ways on all GPUs at once; ``one GPU`` of
plain copies on the first GPU alone. ``time``: ours over that of plain copies on all of as many bytes, budget 1.10; ``of
one``: our rate over one GPU's. How far the machine itself scales is ``plain`` over ``one GPU``. The three are measured
in turns, and rates are of medians. ``ms/GiB``: processor time of this process (the daemon's side, without the waiter) a
GiB that all moved, and of the busiest mover a GiB that it moved; over these tickets and as many more as half a second
has, because some kernels count it in steps of 10 ms. Pages on every rank are checked after each ticket.

``peers``: a replica's pages from the first GPU to the second, whole blocks; ``plain``: one copy from GPU to GPU of as
many bytes (1 GiB at most); ``host``: a load of as many bytes from the host to the second GPU; ``beside`` and ``host
beside``: both at once.

``urgent``: loads to the first GPU, alone and beside background stores from all the others without a pause: how far
backups slow a load that an engine waits for. First without a budget of background copies, then with the one that
calibration found (none where links are the limit) or ``--budget`` GB/s.

``calls``: p50 and p99, over the lane to a real daemon, of a Step in which 32 sequences grow and publish and of Match of
2,048 blocks, in turns while nothing is copied (``idle``) and while two engines on each GPU swap as much as the smallest
of the sizes above out and in without a pause (``beside``). Budget: 1.2 times the idle p99.

``kill``: all GPUs swap both ways without a pause, and the last one's mover is killed. Reported are after how long its
ticket failed and a new replica there had loaded its first pages, which are checked (budget 3 s); and the other GPUs'
GB/s in the half second before the kill, from it on, and from when the GPU is served again, and their longest ticket.

``hang``: an engine on each GPU swaps without a pause, and the last GPU's mover is stopped (SIGSTOP). Reported are each
other engine's GB/s before, meanwhile and after, when a new engine on that GPU had swapped, and how long a daemon takes
to start, and to serve another GPU, beside a mover that hangs.

On two H100s each part is made to take a minute and a half at most; ``--quick`` (planes of 128 KiB, the first size,
fewer calls) is a small part of that. Where a part fails the others are measured, and the exit code is 1.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.gpus.fleet import Fleet, Moved
from benchmarks.gpus.gpu_calls import Swap, measure_calls
from benchmarks.gpus.gpu_hang import measure_hang
from benchmarks.gpus.gpu_kill import measure_kill
from benchmarks.gpus.gpu_peers import measure_peers
from benchmarks.gpus.gpu_urgent import measure_urgent
from benchmarks.support.machine import fail, require_gpu
from benchmarks.support.mover import Mover, two_plane_layout
from benchmarks.support.recording import parser_of, save
from benchmarks.swap.plain import MOST_BYTES, PlainCopies, seconds_at_once
from benchmarks.swap.swaps import FEWEST_REPEATS, ROW_SECONDS, WAYS, Way
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.config import DEVICE_MEMORY
from cachesvc.memory.interface import Slab
from cachesvc.model.layout import Layout
from cachesvc.model.words import Transfer
from gpu_ops.gpu import find_gpus

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BUDGETS = {"time": 1.1, "p99": 1.2, "again_s": 3.0}
MEASURED_WAYS = WAYS[:4]
MOVED_PART = 4
"""One of this number of pages moves each way: two ways, and a gap behind each page."""
BUSY_SECONDS = 0.5


class Sizes(NamedTuple):
    """Sizes: layers, widths of planes, MiB that each GPU moves each way. ``calls``: of each kind in a phase."""

    layers: int
    widths: tuple[int, ...]
    mib: tuple[int, ...]
    calls: int = 512

    def layouts(self, width: int, gpus: int) -> tuple[Layout, Layout]:
        """Layout for one GPU, and layout for all as ranks."""
        return two_plane_layout(self.layers, width), two_plane_layout(self.layers, width, gpus)


SIZES = {
    "shm": Sizes(4, (64 * KIB, 128 * KIB), (16, 64)),
    "cuda": Sizes(32, (64 * KIB, 128 * KIB), (512, 2048)),
}


@dataclass(frozen=True)
class Row:
    """One line of the copies' table."""

    kind: str
    plane_bytes: int
    way: str
    steps: str
    gpu_mib: int
    copy_bytes: int
    gb_per_s: float
    plain_gb_per_s: float
    one_gb_per_s: float
    time_ratio: float
    of_one: float
    daemon_ms_per_gib: float
    mover_ms_per_gib: float


class Ground(NamedTuple):
    """Backend and devices of a measurement."""

    backend: str
    devices: tuple[str, ...]
    sizes: Sizes
    repeats: int
    memory: str
    budget: int | None = None


# -- copies ------------------------------------------------------------------------------------------------------------


def started(ground: Ground, pool_bytes: int, stack: ExitStack) -> tuple[Mover, list[Slab]]:
    """Start movers with ``pool_bytes`` a side and device, and make a slab of all of it on each. Raises CacheError."""
    gpus = len(ground.devices)
    host_bytes = gpus * pool_bytes + GIB // (1 if pool_bytes > GIB else 16)
    mover = Mover(ground.backend, pool_bytes, host_bytes, movers="process", devices=gpus, memory=ground.memory)
    stack.callback(mover.close)
    mover.start()
    return mover, [mover.backend.create_slab(device, pool_bytes) for device in ground.devices]


def copies(ground: Ground, found: dict[str, Any]) -> None:
    """Every width, kind, way and size. Raises CacheError, AssertionError for wrong bytes."""
    pool_bytes = MOVED_PART * max(ground.sizes.mib) * MIB
    rows = found["rows"] = []
    numbers = itertools.count()
    with ExitStack() as stack:
        mover, slabs = started(ground, pool_bytes, stack)
        found["link"] = mover.link
        plain = []
        for device in ground.devices:
            node = mover.hardware.nodes.get(device)
            plain.append(PlainCopies(device if mover.gpu else "", max(ground.sizes.mib) * MIB, node))
            stack.callback(plain[-1].close)
            plain[-1].start()
        print(
            f"{'':>8} {'plane':>9} {'way':>5} {'steps':>8} {'MiB':>5} {'GB/s':>7} {'plain':>7} {'one GPU':>7} "
            f"{'time':>6} {'of one':>6} {'ms/GiB: daemon':>14} {'mover':>6}",
            flush=True,
        )
        for width in ground.sizes.widths:
            layouts = ground.sizes.layouts(width, len(ground.devices))
            fleet = Fleet(mover, ground.devices, slabs, layouts, pool_bytes // layouts[0].page_bytes(0))
            fleet.start(numbers)
            for kind, mib, way in itertools.product(("ranks", "replicas"), ground.sizes.mib, MEASURED_WAYS):
                row = measure(fleet, plain, kind, way, mib, ground.repeats)
                rows.append(asdict(row))
                show(row)
            fleet.close()


def measure(fleet: Fleet, plain: list[PlainCopies], kind: str, way: Way, mib: int, repeats: int) -> Row:
    """Medians of tickets, each beside its plain copies."""
    models = (fleet.ranks,) if kind == "ranks" else fleet.replicas
    blocks, size_bytes = mib * MIB // fleet.page_bytes, min(mib * MIB, MOST_BYTES)
    moves, plain_s, one_s, ready = list[Moved](), list[float](), list[float](), list[Transfer]()
    until = time.perf_counter() + ROW_SECONDS
    for repeat in range(repeats + 1):
        together = seconds_at_once(plain, way.directions, size_bytes)
        alone = seconds_at_once(plain[:1], way.directions, size_bytes)
        ready = fleet.transfers(models, way, blocks)
        fleet.mark(ready)
        moved = fleet.move(ready, way.layers_per_step)
        fleet.check(ready)
        if repeat:  # the first one warms up
            moves.append(moved)
            plain_s.append(together)
            one_s.append(alone)
        if repeat >= FEWEST_REPEATS and time.perf_counter() > until:
            break
    busy, until = list(moves), time.perf_counter() + BUSY_SECONDS
    while time.perf_counter() < until:
        busy.append(fleet.move(fleet.again(ready), way.layers_per_step))
    ways, gpus = len(way.directions), len(fleet.devices)
    each_bytes = blocks * fleet.page_bytes * ways
    rate = gpus * each_bytes / statistics.median(one.seconds for one in moves) / 1e9
    plain_rate = gpus * size_bytes * ways / statistics.median(plain_s) / 1e9
    one_rate = size_bytes * ways / statistics.median(one_s) / 1e9
    gib_each = len(busy) * each_bytes / GIB
    return Row(
        kind=kind,
        plane_bytes=fleet.layout.planes[0].page_bytes,
        way=way.name,
        steps=way.steps,
        gpu_mib=mib,
        copy_bytes=gpus * each_bytes,
        gb_per_s=rate,
        plain_gb_per_s=plain_rate,
        one_gb_per_s=one_rate,
        time_ratio=plain_rate / rate,
        of_one=rate / one_rate,
        daemon_ms_per_gib=max(0.0, sum(one.daemon_s for one in busy)) * 1e3 / gib_each / gpus,
        mover_ms_per_gib=max(map(sum, zip(*(one.movers_s for one in busy), strict=True))) * 1e3 / gib_each,
    )


def show(row: Row) -> None:
    """One line."""
    print(
        f"{row.kind:>8} {row.plane_bytes:>7} B {row.way:>5} {row.steps:>8} {row.gpu_mib:>5} {row.gb_per_s:>7.2f} "
        f"{row.plain_gb_per_s:>7.2f} {row.one_gb_per_s:>7.2f} {row.time_ratio:>6.3f} {row.of_one:>6.2f} "
        f"{row.daemon_ms_per_gib:>14.2f} {row.mover_ms_per_gib:>6.2f}",
        flush=True,
    )


def peers(ground: Ground, found: dict[str, Any]) -> None:
    """From device to device. Raises CacheError, AssertionError for wrong bytes."""
    uuids = ground.devices if ground.backend == "cuda" else ()
    on_fleets(ground, found, lambda fleet: measure_peers(fleet, uuids, ground.sizes.mib, ground.repeats))


def urgent(ground: Ground, found: dict[str, Any]) -> None:
    """Loads beside others' stores. Raises CacheError, AssertionError for wrong bytes."""
    on_fleets(ground, found, lambda fleet: measure_urgent(fleet, ground.sizes.mib, ground.repeats, ground.budget))


def on_fleets(ground: Ground, found: dict[str, Any], measured: Callable[[Fleet], list[dict[str, Any]]]) -> None:
    """Measure on pages of every width; what is found joins ``rows``."""
    sizes, pool_bytes = ground.sizes, MOVED_PART * max(ground.sizes.mib) * MIB
    rows = found["rows"] = list[dict[str, Any]]()
    numbers = itertools.count()
    with ExitStack() as stack:
        mover, slabs = started(ground, pool_bytes, stack)
        for width in sizes.widths:
            layouts = sizes.layouts(width, len(ground.devices))
            fleet = Fleet(mover, ground.devices, slabs, layouts, pool_bytes // layouts[0].page_bytes(0))
            fleet.start(numbers)
            rows += measured(fleet)
            fleet.close()


# -- calls and kill ----------------------------------------------------------------------------------------------------


def calls(ground: Ground, found: dict[str, Any]) -> None:
    """Calls of a real daemon. Raises DaemonFailed, NeighbourLost."""
    layout, _ = ground.sizes.layouts(ground.sizes.widths[-1], len(ground.devices))
    swap = Swap(layout, ground.sizes.mib[0] * MIB // layout.page_bytes(0))
    measure_calls(ground.backend, ground.devices, swap, ground.sizes.calls, found)


def hang(ground: Ground, found: dict[str, Any]) -> None:
    """Stop the last device's mover. Raises DaemonFailed, NeighbourLost."""
    layout, _ = ground.sizes.layouts(ground.sizes.widths[-1], len(ground.devices))
    swap = Swap(layout, ground.sizes.mib[0] * MIB // layout.page_bytes(0))
    measure_hang(ground.backend, ground.devices, swap, found)


def kill(ground: Ground, found: dict[str, Any]) -> None:
    """Kill the last device's mover while all swap. Raises CacheError, AssertionError for wrong bytes, and what breaks
    swaps elsewhere."""
    pool_bytes = MOVED_PART * ground.sizes.mib[0] * MIB
    with ExitStack() as stack:
        mover, slabs = started(ground, pool_bytes, stack)
        layouts = ground.sizes.layouts(ground.sizes.widths[-1], len(ground.devices))
        fleet = Fleet(mover, ground.devices, slabs, layouts, pool_bytes // layouts[0].page_bytes(0))
        fleet.start(itertools.count())
        measure_kill(fleet, ground.sizes.mib[0] * MIB // fleet.page_bytes, BUDGETS["again_s"], found)


PARTS: dict[str, Callable[[Ground, dict[str, Any]], None]] = {
    "copies": copies,
    "peers": peers,
    "urgent": urgent,
    "calls": calls,
    "kill": kill,
    "hang": hang,
}


def main() -> None:
    """Measure part by part, print, and write what there is after each."""
    parser = parser_of(__doc__, "python -m benchmarks.gpus")
    parser.add_argument("--backend", choices=sorted(SIZES), default="shm")
    parser.add_argument("--gpus", type=int, help="use the first N devices (default: all; simulated devices of shm: 2)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mib", type=int, nargs="+", help="what each GPU moves each way (default: cuda 512 2048)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, help="of background copies in urgent, GB/s (default: as calibrated)")
    parser.add_argument("--device-memory", default="", choices=DEVICE_MEMORY, help="of copies and peers")
    parser.add_argument(
        "--quick", action="store_true", help="planes of 128 KiB, the first size, a quarter of the calls"
    )
    arguments = parser.parse_args()
    sizes = SIZES[arguments.backend]
    if arguments.mib:
        sizes = sizes._replace(mib=tuple(arguments.mib))
    if arguments.quick:
        sizes = sizes._replace(widths=sizes.widths[-1:], mib=sizes.mib[:1], calls=sizes.calls // 4)
    devices = devices_of(arguments.backend, arguments.gpus)
    sys.setswitchinterval(SWITCH_SECONDS)  # as the daemon does
    budget = None if arguments.budget is None else round(arguments.budget * 1e9)
    ground = Ground(arguments.backend, devices, sizes, arguments.repeats, arguments.device_memory, budget)
    found: dict[str, Any] = {
        "benchmark": "gpus",
        "backend": ground.backend,
        "gpus": len(devices),
        "device_memory": ground.memory,
        "budgets": BUDGETS,
        "planes": 2 * sizes.layers,
    }
    failed = []
    for part in arguments.parts:
        mine, began = found.setdefault(part, {}), time.monotonic()
        try:
            PARTS[part](ground, mine)
        except Exception as error:  # noqa: BLE001 - the root: other parts are measured all the same
            traceback.print_exc()
            mine["failed"] = str(error)
            failed.append(part)
        mine["seconds"] = time.monotonic() - began
        save(arguments, found)
    if failed:
        sys.exit(f"gpus: failed: {', '.join(failed)}")


def devices_of(backend: str, wanted: int | None) -> tuple[str, ...]:
    """The first devices, as many as are wanted. Ends the process where there are fewer, or fewer than two."""
    if backend == "shm":
        there = tuple(f"shm-{number}" for number in range(wanted or 2))
    else:
        require_gpu()
        there = tuple(gpu.uuid for gpu in find_gpus())
    count = len(there) if wanted is None else wanted
    if not 2 <= count <= len(there):
        fail(f"this benchmark needs 2 GPUs or more: {len(there)} are here, and {count} are to be measured")
    return there[:count]


if __name__ == "__main__":
    main()
