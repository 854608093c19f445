"""Processor time of each step of the learning eviction that the daemon's loop runs in one go.

``python -m benchmarks.ledger.learning --json OUT``

One model of prompts of 2,048 blocks (128k tokens at 64 a block). The least of some repetitions each, of a refit that of
its longest step: other load of the machine is not the policy's. And by number of resident blocks what Match, Publish
and evictions of 16 blocks at a time cost, with least recently used beside it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.ledger.moves import LAYOUT, PROMPT_BLOCKS, block_key, fill, open_sequence, partly_known
from benchmarks.support.recording import parser_of, save
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.candidates import NO_RANK, Heads
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.retention import PromptPath, Request
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Ended
from cachesvc.model.words import KEY_BYTES, PageState
from cachesvc.policy.eviction import lru
from cachesvc.policy.hazard import REMEMBERED, Features, History

QUEUES, CLASSES, REPEATS = 300, 500, 5
EVICTED_AT_ONCE = 16
"""Blocks evicted in one turn of the daemon."""


def main() -> None:
    """Print the figures, in microseconds, and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    figures = {name: measure() for name, measure in FIGURES.items()}
    for name, value in figures.items():
        print(f"{name:70}{value:10.1f}", flush=True)
    by_size = {str(size): {name: moves(size, name) for name in ("lru", "hazard")} for size in arguments.sizes}
    for size, found in by_size.items():
        print(f"{int(size):,}", found, flush=True)
    save(arguments, {"us": figures, "by_size": by_size})


def moves(size: int, eviction: str) -> dict[str, float]:
    """Microseconds (medians) of the ledger's moves, and bytes a block."""
    bytes_per_block = fill(size, traced=True, eviction=eviction).bytes_per_block
    filled = fill(size, traced=False, eviction=eviction)
    ledger, place, rng = filled.ledger, filled.place, random.Random(1)
    asked = (filled.prompts * (1 + 200 // len(filled.prompts)))[:300]
    opened = [open_sequence(ledger, place, partly_known(prompt, rng)) for prompt in asked]
    evictor = Evictor(ledger)
    evicted = []
    for _ in range(min(size // 2, 4096) // EVICTED_AT_ONCE):
        evicted.append(_us(lambda: evictor.carry_out(evictor.plan_device(place, EVICTED_AT_ONCE, to_host=False)[0])))
        ledger.dropped.clear()
    return {
        "match_us": statistics.median(opened),
        "publish_us_per_block": filled.publish_us,
        "evict_us_per_block": statistics.median(evicted) / EVICTED_AT_ONCE,
        "bytes_per_block": bytes_per_block,
    }


def _us(call: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1000


def choice() -> float:
    """One choice among ``QUEUES`` queues with candidates, of a policy that has learned."""
    history, rng = taught(QUEUES), random.Random(1)
    heads = Heads(history.rates.rows)
    for queue in range(history.rates.rows):
        heads.ranks[queue] = rng.randrange(1 << 40) if queue else NO_RANK
        heads.since[queue] = rng.random() * 1000
        heads.segments[queue] = rng.randrange(1, 100)
    return min(_us(lambda: [history.pick(heads, 1000.0) for _ in range(100)]) / 100 for _ in range(20))


def refit() -> float:
    """The longest step of a refit, of as many classes and landmarks as there can be."""
    history = taught(CLASSES)
    return min(max(_steps(history)) for _ in range(REPEATS))


def _steps(history: History) -> Iterator[float]:
    while (go_on := history.lesson()) is None:
        history.requests += 1
        yield _us(lambda: history.advance(1e5))
    is_over = False
    while not is_over:
        began = time.thread_time_ns()
        is_over = go_on()
        yield (time.thread_time_ns() - began) / 1000


def taught(classes: int) -> History:
    """A history of ``classes`` classes in both tables that follows as many requests as it can."""
    history, rng = History(LAYOUT.block_tokens), random.Random(2)
    names = [
        (Features(f, g, k), o) for f in range(5) for g in range(9) for k in range(3) for o in (None, 0, 1, 2, 3, 4)
    ]
    for seen, output in names[: classes // 2]:
        for is_shared in (False, True):
            history.classes.row(0 if output is None else 1, seen, output, is_shared=is_shared)
    rows = history.rates.rows
    for number in range(REMEMBERED + 100):
        now = number * 0.1
        parts = history.arrived(Unknown(number), now, 0.0)
        history.grew(parts, 0, 8)
        history.ended(parts, 8, block_key(str(number), 7), Ended(rng.randrange(1000), now + 1), now + 1)
        history.segments.queue[parts.own] = rng.randrange(rows)
        history.rates.touched(rng.randrange(rows), rng.random() * 1000, 1.0)
    list(_steps(history))
    return history


class Unknown:
    """A prompt of eight unknown blocks."""

    blocks, known, resident = 8, 0, 0

    def __init__(self, number: int) -> None:
        self._number = number

    def key(self, position: int) -> bytes:
        """Key of a block."""
        return block_key(str(self._number), position)

    def segment(self, position: int) -> int:
        """Nothing is resident."""
        raise IndexError(position)


class Served:
    """A ledger of one long path, and requests for it. ``scattered``: its rows lie one here, one there."""

    def __init__(self, *, scattered: bool = False) -> None:
        self.history = History(LAYOUT.block_tokens)
        pool = PagePool("pool", PROMPT_BLOCKS)
        pool.add(0, PROMPT_BLOCKS)
        self.ledger = BlockLedger(LAYOUT, (PagePool("host", 0),), lru, chooser=self.history)
        self.place: Place = self.ledger.add_replica("replica", (pool,))
        self.keys = b"".join(block_key("long", at) for at in range(PROMPT_BLOCKS))
        self.now = 0.0
        if scattered:
            rows = [self.ledger.index.insert(block_key("gone", at), NO_ROW, 1) for at in range(PROMPT_BLOCKS)]
            for row in random.Random(3).sample(rows, len(rows)):
                self.ledger.index.remove(row)
        self.request(0)

    def request(self, known: int, blocks: int = PROMPT_BLOCKS) -> float:
        """One for the first ``blocks``, of which ``known`` are there; what it costs to follow it."""
        self.now += 1.0
        self.ledger.clock.tell(self.now)
        resident = known if blocks > len(self.ledger.index) else min(known, blocks)
        path = PromptPath(self.ledger.index, self.keys[: blocks * KEY_BYTES], known, resident)
        made: list[Request] = []
        us = _us(lambda: made.append(self._follow(path)))
        [request] = made
        self._compute(request, known, blocks)
        request.ended = Ended(100)
        request.end(blocks, self.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES], self.now)
        return us

    def _follow(self, path: PromptPath) -> Request:
        return Request(self.history, self.ledger.index, path, self.now, 0.0)

    def _compute(self, request: Request, first: int, blocks: int) -> None:
        index, rows = self.ledger.index, []
        tip = index.rows[self.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]] if first else NO_ROW
        for at in range(first, blocks):
            tip = index.insert(self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], tip, 1)
            self.ledger.seal(self.place, tip, self.place.pools[0].take(1, PageState.PRIVATE))
            rows.append(tip)
        if rows:
            self.ledger.offer(self.place, tip)
            request.sealed(first, rows)


def again() -> float:
    """A whole hit, the path being one request's."""
    served = Served()
    return min(served.request(PROMPT_BLOCKS) for _ in range(REPEATS))


def again_scattered() -> float:
    """The same, its rows having been taken one here, one there."""
    served = Served(scattered=True)
    return min(served.request(PROMPT_BLOCKS) for _ in range(REPEATS))


def many_segments() -> float:
    """A whole hit, each block having been used last by a request of its own."""
    found = []
    for _ in range(3):
        served = Served()
        for blocks in range(PROMPT_BLOCKS - 1, 0, -1):
            served.request(blocks, blocks)
        found.append(served.request(PROMPT_BLOCKS))
    return min(found)


def gone() -> float:
    """No hit, the whole path having left the cache and being remembered."""
    served = Served()
    for row in reversed(served.ledger.index.path(served.ledger.index.rows[served.keys[-KEY_BYTES:]])):
        served.ledger.drop_copy(served.place, row)
    path = PromptPath(served.ledger.index, served.keys, PROMPT_BLOCKS, 0)
    return min(_us(lambda: served.history.arrived(path, 5.0, 0.0)) for _ in range(REPEATS))


FIGURES: dict[str, Callable[[], float]] = {
    f"one choice among {QUEUES} queues": choice,
    f"longest step of a refit of {CLASSES} classes": refit,
    "Match of 2,048 blocks, all there, of one request": again,
    "Match of 2,048 blocks, all there, in rows here and there": again_scattered,
    "Match of 2,048 blocks, each used last by another request": many_segments,
    "Match of 2,048 blocks that have left the cache": gone,
}


if __name__ == "__main__":
    main()
