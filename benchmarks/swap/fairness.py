"""A short load behind endless long ones, through the real engine: what it takes beside its time alone.

    python -m benchmarks.swap.fairness [--backend shm|cuda] [--json OUT] [--rounds 20]

A load of 4k tokens (cuda: 131,072 bytes a token, so 512 MiB; shm: 8,192) is submitted at random moments while four
loads of 32k tokens are outstanding, each of which is followed by another one. Budget: twice its time alone (median).
``first come`` is what it would take behind the four, one after another, at the speed that it has alone.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.support.machine import fail
from benchmarks.support.mover import Arrivals, Mover, two_plane_layout
from benchmarks.support.recording import parser_of, save
from cachesvc.model.errors import CacheError
from cachesvc.model.words import Direction, PagePairs, Transfer
from cachesvc.swap.engine import SwapEngine

KIB, MIB = 1 << 10, 1 << 20
LAYERS = 32
BLOCK_TOKENS = 64
SHORT_BLOCKS = 4096 // BLOCK_TOKENS
LONG_BLOCKS = 32768 // BLOCK_TOKENS
LONGS = 4
DEVICE_BLOCKS = LONGS * LONG_BLOCKS + SHORT_BLOCKS
HOST_BLOCKS = LONG_BLOCKS + SHORT_BLOCKS
BUDGET = 2.0
PLANE_BYTES = {"shm": 8 * KIB, "cuda": 128 * KIB}
SLICE_BYTES = {"shm": 2 * MIB, "cuda": 32 * MIB}
"""A sixteenth of the short load."""

Ended = Callable[[Exception | None], None]


@dataclass(frozen=True)
class Result:
    """Times of the short load in milliseconds; ``gb_per_s``: all bytes that came while the long ones ran."""

    short_bytes: int
    long_bytes: int
    rounds: int
    alone_ms: float
    alone_worst_ms: float
    behind_ms: float
    behind_worst_ms: float
    ratio: float
    worst_ratio: float
    first_come_ratio: float
    gb_per_s: float


class Loads:
    """Loads of one engine: long ones from the same host pages to a place of the device pool each, and the short one."""

    def __init__(self, mover: Mover, plane_bytes: int) -> None:
        layout = two_plane_layout(LAYERS, plane_bytes)
        self.block_bytes = layout.page_bytes(0)
        rng = np.random.default_rng(1)
        self._device: list[int] = rng.permutation(DEVICE_BLOCKS).tolist()
        self._host: list[int] = rng.permutation(HOST_BLOCKS).tolist()
        slab = mover.slab(layout, DEVICE_BLOCKS)
        host = mover.reserve(layout, HOST_BLOCKS)
        self.engine = mover.engine(layout, host, slab, DEVICE_BLOCKS, self._on_done)
        self._tickets = itertools.count(1)
        self._ended: dict[int, Ended] = {}
        self._feeding = False
        self._longs = Arrivals()

    def short_seconds(self) -> float:
        """Submit the short load and wait for it."""
        arrival = Arrivals()
        first = LONGS * LONG_BLOCKS
        began = time.perf_counter()
        self._load(self._device[first:], self._host[LONG_BLOCKS:], lambda error: arrival.done(0, error))
        arrival.wait(1)
        return time.perf_counter() - began

    def start_longs(self) -> None:
        """Four long loads, each followed by another one until ``stop_longs``."""
        self._feeding = True
        for place in range(LONGS):
            self._long(place)

    def stop_longs(self) -> None:
        """Let the last ones end. Raises what broke."""
        self._feeding = False
        self._longs.wait(LONGS)

    def _long(self, place: int) -> None:
        device = self._device[place * LONG_BLOCKS : (place + 1) * LONG_BLOCKS]

        def ended(error: Exception | None) -> None:
            if self._feeding and error is None:
                self._long(place)
            else:
                self._longs.done(0, error)

        self._load(device, self._host[:LONG_BLOCKS], ended)

    def _load(self, device: list[int], host: list[int], ended: Ended) -> None:
        ticket = next(self._tickets)
        self._ended[ticket] = ended
        pairs = PagePairs(0, tuple(device), tuple(host))
        self.engine.submit(Transfer(ticket, 0, 0, Direction.LOAD, (pairs,), layered=True))

    def _on_done(self, ticket: int, error: Exception | None) -> None:
        self._ended.pop(ticket)(error)


def landed_bytes(engine: SwapEngine) -> int:
    """Bytes of loads that have ended."""
    return sum(count for (way, _), count in engine.transfers.device_bytes.items() if way == "h2d")


def measure(loads: Loads, rounds: int) -> Result:
    """Alone, behind the long ones, and alone again."""
    loads.start_longs()  # every page of the device pool is touched once before anything is measured
    loads.stop_longs()
    loads.short_seconds()
    alone = [loads.short_seconds() for _ in range(rounds)]
    long_bytes = LONG_BLOCKS * loads.block_bytes
    rng = random.Random(1)
    typical_s = statistics.median(alone) * LONG_BLOCKS / SHORT_BLOCKS
    loads.start_longs()
    time.sleep(typical_s)  # until the long loads are in their stride
    before, began = landed_bytes(loads.engine), time.perf_counter()
    behind = []
    for _ in range(rounds):
        time.sleep(rng.uniform(0.2, 1.0) * typical_s)  # at any moment in the life of a long load
        behind.append(loads.short_seconds())
    rate = (landed_bytes(loads.engine) - before) / (time.perf_counter() - began) / 1e9
    loads.stop_longs()
    alone += [loads.short_seconds() for _ in range(rounds)]
    usual = statistics.median(alone)
    return Result(
        short_bytes=SHORT_BLOCKS * loads.block_bytes,
        long_bytes=long_bytes,
        rounds=rounds,
        alone_ms=usual * 1e3,
        alone_worst_ms=max(alone) * 1e3,
        behind_ms=statistics.median(behind) * 1e3,
        behind_worst_ms=max(behind) * 1e3,
        ratio=statistics.median(behind) / usual,
        worst_ratio=max(behind) / usual,
        first_come_ratio=1 + LONGS * LONG_BLOCKS / SHORT_BLOCKS,
        gb_per_s=rate,
    )


def main() -> None:
    """Measure, print the figures, and write them as JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", choices=sorted(PLANE_BYTES), default="shm")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    plane_bytes = PLANE_BYTES[arguments.backend]
    block_bytes = two_plane_layout(LAYERS, plane_bytes).page_bytes(0)
    try:
        mover = Mover(
            arguments.backend,
            DEVICE_BLOCKS * block_bytes,
            (HOST_BLOCKS + LONG_BLOCKS // 4) * block_bytes,
            slice_bytes=SLICE_BYTES[arguments.backend],
        )
        mover.start()
    except CacheError as error:
        fail(str(error))
    loads = Loads(mover, plane_bytes)
    result = measure(loads, arguments.rounds)
    loads.engine.close()
    mover.close()
    print(
        f"short load {result.short_bytes // MIB} MiB, {LONGS} long ones of {result.long_bytes // MIB} MiB outstanding"
    )
    print(f"{'':12}{'median ms':>12}{'worst ms':>12}{'ratio':>8}{'worst':>8}")
    print(f"{'alone':12}{result.alone_ms:12.2f}{result.alone_worst_ms:12.2f}{1.0:8.2f}")
    print(
        f"{'behind':12}{result.behind_ms:12.2f}{result.behind_worst_ms:12.2f}{result.ratio:8.2f}"
        f"{result.worst_ratio:8.2f}   (budget {BUDGET:g}, first come {result.first_come_ratio:g}), "
        f"{result.gb_per_s:.1f} GB/s in all"
    )
    found = {
        "benchmark": "fairness",
        "backend": arguments.backend,
        "link": mover.link,
        "budget": BUDGET,
    }
    save(arguments, found | asdict(result))


if __name__ == "__main__":
    main()
