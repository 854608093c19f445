"""Scattered swaps through the real engine, beside one plain copy in the same run.

    python -m benchmarks.swap [--backend shm|cuda] [--movers inside process] [--json OUT] [--pool-mib N] [--quick]
                               [--planes 32 64]

A part of the pool (shm: a quarter of 1 GiB; cuda: 4 GiB of 16, a prefix of 32k tokens of an 8B model), and for whole
blocks also less, is moved each way in one ticket, in runs of blocks that are contiguous in both pools and otherwise
anywhere in them, differently on each side. Time is from the call to the wake-up of the waiter on the timeline word, as
an engine's worker does; ``movers`` says whether threads of this process copy or a process of their own. ``whole``: all
layers in one step. ``layered``: steps as the planner's costs choose them; ``short suffix``: a layer, then all others;
``by layer``: a step for each layer. ``both``: a load and a store at once, bytes of both added. ``of plain`` compares
with plain copies the same ways at once, ``of one`` with one plain copy at a time. Ratios are medians over medians. A
plain copy (``plain.py``) has as many bytes as the ticket, but 1 GiB at most.
"""

from __future__ import annotations

import itertools
import mmap
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
from cachesvc_client.memory.pool import POLL_S

from benchmarks.support.machine import fail
from benchmarks.support.mover import WAIT_SECONDS, Arrivals, Mover, two_plane_layout
from benchmarks.support.recording import parser_of, save
from benchmarks.swap.plain import PlainCopies
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.config import DEVICE_MEMORY, MOVERS
from cachesvc.memory.host_pool import HostSlab
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import CacheError
from cachesvc.model.futex import wait_reached, words_of
from cachesvc.model.layout import Layout, device_geometry
from cachesvc.model.words import Direction, PagePairs, Transfer
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.planner import ALL_BUT_FIRST

KIB, MIB = 1 << 10, 1 << 20
LOAD, STORE = Direction
ROW_SECONDS = 1.0
"""A row that has taken this long ends after ``FEWEST_REPEATS``."""
FEWEST_REPEATS = 3
CHECKED_PAGES = 4
LONGEST_RUN = 16


@dataclass(frozen=True)
class Ground:
    """Parameters of a measurement on one kind of memory. ``moved_part``: one of this number of blocks of a pool moves
    each way. ``small_mib``: whole blocks are also moved in tickets of each of these sizes."""

    layers: int
    widths: tuple[int, ...]
    runs: tuple[int, ...]
    pool_mib: int
    moved_part: int
    small_mib: tuple[int, ...]


GROUNDS = {
    "shm": Ground(16, (4 * KIB, 16 * KIB, 32 * KIB, 72 * KIB, 128 * KIB, 512 * KIB), (1, 16), 1024, 4, (64, 8)),
    "cuda": Ground(
        32,
        (4 * KIB, 8 * KIB, 8448, 16 * KIB, 32 * KIB, 41_984, 64 * KIB, 72 * KIB, 128 * KIB, 512 * KIB),
        (1, 16),
        16384,
        4,
        (1024, 512, 64),
    ),
}
QUICK_WIDTHS, QUICK_RUNS = (32 * KIB, 64 * KIB, 128 * KIB), (1,)


@dataclass(frozen=True)
class Way:
    """Directions that are moved at once, and the engine's ``layers_per_step``."""

    name: str
    directions: tuple[Direction, ...]
    steps: str
    layers_per_step: int | None


WAYS = (
    Way("in", (LOAD,), "whole", 0),
    Way("out", (STORE,), "whole", 0),
    Way("both", (LOAD, STORE), "whole", 0),
    Way("in", (LOAD,), "layered", None),
    Way("in", (LOAD,), "short suffix", ALL_BUT_FIRST),
    Way("in", (LOAD,), "by layer", 1),
    Way("both", (LOAD, STORE), "by layer", 1),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    movers: str
    plane_bytes: int
    way: str
    steps: str
    run_blocks: int
    copy_bytes: int
    gb_per_s: float
    plain_gb_per_s: float
    one_way_gb_per_s: float
    ratio: float
    of_one_way: float


class Field:
    """One layout on a device slab and on host pages whose every plane differs from every other."""

    def __init__(self, mover: Mover, slab: Slab, layout: Layout, pages: int, blocks: int) -> None:
        self.mover = mover
        self.slab = slab
        self.layout = layout
        self.pages = pages
        self.blocks = blocks
        self.copy_bytes = blocks * layout.page_bytes(0)
        self.host: HostSlab = mover.reserve(layout, pages)
        self.plain = PlainCopies(mover.gpu, self.copy_bytes)
        self.arrivals = Arrivals()
        self.engine = mover.engine(layout, self.host, slab, pages, self.arrivals.done)
        words = mover.backend.timeline(mover.device).sheet(0)
        assert words.fd is not None
        self._words = words_of(memoryview(mmap.mmap(words.fd, words.handle.size_bytes, prot=mmap.PROT_READ)))
        self._poll_s = POLL_S if mover.gpu else None
        self._tickets = itertools.count(1)

    def start(self) -> None:
        """Write the host pages and load each into some device page."""
        self.plain.start()
        planes = len(self.layout.planes)
        stamps = np.arange(1, planes + 1, dtype=np.uint64)
        for page in range(self.pages):
            words = np.frombuffer(self.mover.host.view(self.host, page), np.uint64).reshape(planes, -1)
            words[:, 0] = words[:, -1] = stamps + np.uint64(page * planes)
        everywhere = np.random.default_rng(0).permutation(self.pages).tolist()
        self.engine.submit(self._transfer(LOAD, tuple(everywhere), tuple(range(self.pages)), layered=False))
        self.arrivals.wait(1)

    def close(self) -> None:
        """Give the host pages back."""
        self.plain.close()
        self.engine.detach_model(0)
        self.mover.host.release(self.host)

    def move(self, ready: list[Transfer], layers_per_step: int | None) -> float:
        """Seconds from the first call until the waiter for the last word resumes; then all have ended."""
        self.engine.layers_per_step = layers_per_step
        began = time.perf_counter()
        slots = [self.engine.submit(transfer) for transfer in ready]
        for slot in slots:
            assert wait_reached(self._words, slot.word, slot.end, time.monotonic() + WAIT_SECONDS, poll_s=self._poll_s)
        spent = time.perf_counter() - began
        self.arrivals.wait(len(ready))
        return spent

    def transfers(self, way: Way, run: int, blocks: int) -> list[Transfer]:
        """One transfer for each direction, on pages that do not meet."""
        rng = np.random.default_rng(run)
        device, host = (scattered(rng, self.pages, blocks, run, len(way.directions)) for _ in range(2))
        return [
            self._transfer(direction, mine, theirs, layered=direction is LOAD and way.steps != "whole")
            for direction, mine, theirs in zip(way.directions, device, host, strict=True)
        ]

    def _transfer(
        self, direction: Direction, device: tuple[int, ...], host: tuple[int, ...], *, layered: bool
    ) -> Transfer:
        return Transfer(next(self._tickets), 0, 0, direction, (PagePairs(0, device, host),), layered=layered)


def scattered(rng: np.random.Generator, pages: int, blocks: int, run: int, parts: int) -> list[tuple[int, ...]]:
    """For each part ``blocks`` pages out of the whole pool, in shuffled runs of ``run`` with gaps between."""
    starts = 2 * run * rng.permutation(pages // (2 * run))
    count = blocks // run
    return [
        tuple(int(page) for start in starts[part * count : (part + 1) * count] for page in range(start, start + run))
        for part in range(parts)
    ]


def measure(field: Field, way: Way, run: int, repeats: int, blocks: int) -> Row:
    """Medians of ``repeats`` tickets of ``blocks`` blocks, each beside its own plain copies."""
    swap_s, plain_s, one_s = [], [], []
    plain_bytes = min(blocks * field.layout.page_bytes(0), field.plain.size_bytes)
    until = time.perf_counter() + ROW_SECONDS
    for repeat in range(repeats + 1):
        plain = field.plain.seconds(way.directions, plain_bytes)
        one = field.plain.one_way_seconds(way.directions, plain_bytes) if len(way.directions) > 1 else plain
        ready = field.transfers(way, run, blocks)
        spent = field.move(ready, way.layers_per_step)
        if repeat:  # the first one warms up
            swap_s.append(spent)
            plain_s.append(plain)
            one_s.append(one)
        check(field.engine, ready)
        if repeat >= FEWEST_REPEATS and time.perf_counter() > until:
            break
    ways = len(way.directions)
    total = blocks * field.layout.page_bytes(0) * ways
    swap = total / statistics.median(swap_s) / 1e9
    plain_rate = plain_bytes * ways / statistics.median(plain_s) / 1e9
    one_rate = plain_bytes / statistics.median(one_s) / 1e9
    width = field.layout.planes[0].page_bytes
    rates = (swap, plain_rate, one_rate)
    return Row(
        field.mover.config.movers, width, way.name, way.steps, run, total, *rates, swap / plain_rate, swap / one_rate
    )


def check(engine: SwapEngine, moved: list[Transfer]) -> None:
    """Some blocks of each transfer are the same on both sides, and different from each other."""
    for transfer in moved:
        pairs = transfer.pages[0]
        found = set()
        for at in np.linspace(0, len(pairs.device_pages) - 1, CHECKED_PAGES).astype(int).tolist():
            device = engine.page_bytes(0, 0, 0, 0, pairs.device_pages[at])
            host = engine.page_bytes(0, None, 0, 0, pairs.host_pages[at])
            if device != host:
                raise AssertionError(f"ticket {transfer.ticket}: block {at} differs between device and host")
            found.add(device)
        assert len(found) == CHECKED_PAGES


HEAD = ("movers", "plane", "way", "steps", "run", "MiB", "GB/s", "plain", "one way", "of plain", "of one")


def show(row: Row) -> None:
    """One line."""
    print(
        f"{row.movers:>7} {row.plane_bytes:>7} B {row.way:>5} {row.steps:>12} {row.run_blocks:>4} "
        f"{row.copy_bytes // MIB:>6} "
        f"{row.gb_per_s:>7.2f} {row.plain_gb_per_s:>7.2f} {row.one_way_gb_per_s:>8.2f} {row.ratio:>9.3f} "
        f"{row.of_one_way:>7.3f}",
        flush=True,
    )


def run_all(mover: Mover, ground: Ground, pool_bytes: int, repeats: int) -> list[Row]:
    """Every width, way and run."""
    slab = mover.backend.create_slab(mover.device, pool_bytes)
    rows = []
    print(
        f"{HEAD[0]:>7} {HEAD[1]:>9} {HEAD[2]:>5} {HEAD[3]:>12} {HEAD[4]:>4} {HEAD[5]:>6} {HEAD[6]:>7} {HEAD[7]:>7} "
        f"{HEAD[8]:>8} {HEAD[9]:>9} {HEAD[10]:>7}"
    )
    for width in ground.widths:
        layout = two_plane_layout(ground.layers, width)
        blocks = pool_bytes // layout.page_bytes(0) // ground.moved_part // LONGEST_RUN * LONGEST_RUN
        if not blocks:
            print(f"{width:>7} B needs a larger --pool-mib")
            continue
        pages = blocks * ground.moved_part
        assert device_geometry(layout, 0, pages).total_bytes <= pool_bytes
        field = Field(mover, slab, layout, pages, blocks)
        field.start()
        for way, run in itertools.product(WAYS, ground.runs):
            rows.append(measure(field, way, run, repeats, blocks))
            show(rows[-1])
        for way, mib in itertools.product(WAYS, ground.small_mib):
            small = mib * MIB // layout.page_bytes(0)
            if way.steps == "whole" and CHECKED_PAGES <= small < blocks:
                rows.append(measure(field, way, 1, repeats, small))
                show(rows[-1])
        field.close()
    return rows


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = parser_of(__doc__, "python -m benchmarks.swap")
    parser.add_argument("--backend", choices=sorted(GROUNDS), default="shm")
    parser.add_argument("--pool-mib", type=int, help="bytes on each side (default: shm 1024, cuda 16384)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device-memory", default="", choices=DEVICE_MEMORY, help="how GPU pools are mapped")
    parser.add_argument("--quick", action="store_true", help="planes of 32, 64 and 128 KiB in runs of 1 alone")
    parser.add_argument("--planes", type=float, nargs="+", metavar="KIB", help="widths of planes, in KiB")
    parser.add_argument(
        "--movers", nargs="+", choices=MOVERS, default=["inside"], help="what copies, one after another"
    )
    arguments = parser.parse_args()
    ground = GROUNDS[arguments.backend]
    if arguments.quick:
        ground = replace(ground, widths=QUICK_WIDTHS, runs=QUICK_RUNS)
    if arguments.planes:
        ground = replace(ground, widths=tuple(int(each * KIB) for each in arguments.planes))
    pool_bytes = (arguments.pool_mib or ground.pool_mib) * MIB
    sys.setswitchinterval(SWITCH_SECONDS)  # as the daemon does
    host_bytes = 2 * pool_bytes if pool_bytes < 1 << 31 else pool_bytes + (1 << 30)
    began, rows, link = time.monotonic(), list[Row](), dict[str, object]()
    for movers in arguments.movers:
        try:
            mover = Mover(arguments.backend, pool_bytes, host_bytes, movers=movers, memory=arguments.device_memory)
            mover.start()
        except CacheError as error:
            fail(str(error))
        rows += run_all(mover, ground, pool_bytes, arguments.repeats)
        link = mover.link
        mover.close()
    found = {
        "benchmark": "swap",
        "backend": arguments.backend,
        "numpy": np.__version__,
        "link": link,
        "pool_mib": pool_bytes // MIB,
        "device_memory": arguments.device_memory,
        "planes": 2 * ground.layers,
        "seconds": time.monotonic() - began,
    }
    save(arguments, found | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
