"""Cost of the ledger's moves a block, with 10^4 to 10^6 resident blocks: ``python -m benchmarks.ledger --json OUT``.

One model, one replica, one group. The index holds chains of 2,048 blocks (128k tokens at 64 tokens a block)
that share their first 64; look-ups hit to a random depth with a cold second-level cache. For figures with windows there
is a second group that looks back 1,024 tokens and to 64 sinks, and for room on the host a host full of blocks, the
youngest of which alone have windowed pages. Everything runs through the ledger's own calls, on one thread; figures are
its processor time.
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import time
import tracemalloc
from array import array
from typing import NamedTuple

import numpy as np

from benchmarks.support.recording import parser_of, save
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.retention import PromptPath, Request
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Ended
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState
from cachesvc.policy.eviction import eviction_policy, lru

PROMPT_BLOCKS = 2048
SHARED_BLOCKS = 64
FULL = Plane("bytes", 0, "full", (64,), "uint8")
LAYOUT = Layout(64, 1, (PlaneGroup("full"),), (FULL,))
WINDOWED = Layout(
    64, 1, (PlaneGroup("full"), PlaneGroup("window", 1024, 64)), (FULL, Plane("bytes", 1, "window", (64,), "uint8"))
)
HOST_PROMPT = 16
"""Blocks of the prompts that the host is full of."""
HOST_WANTED = 64
"""Pages of each group that are wanted at a time."""


class Filled(NamedTuple):
    """A ledger with resident chains, and what it took to build."""

    ledger: BlockLedger
    place: Place
    prompts: list[bytes]
    publish_us: float
    bytes_per_block: float


def main() -> None:
    """Print the table and write JSON."""
    parser = parser_of(__doc__, "python -m benchmarks.ledger")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    rows = {str(size): measure(size) for size in arguments.sizes}
    names = list(next(iter(rows.values())))
    print(f"{'':28}" + "".join(f"{int(size):>14,}" for size in rows))
    for name in names:
        print(f"{name:28}" + "".join(f"{row[name]:14.2f}" for row in rows.values()))
    result = {name: {size: row[name] for size, row in rows.items()} for name in names}
    flat: dict[str, object] = {**result, "bytes_per_block_by_size": result["bytes_per_block"]}
    flat["bytes_per_block"] = max(row["bytes_per_block"] for row in rows.values())
    save(arguments, flat)


def measure(size: int) -> dict[str, float]:
    """Figures for one number of resident blocks, in microseconds (medians) unless the name says otherwise."""
    bytes_per_block = fill(size, traced=True).bytes_per_block
    filled = fill(size, traced=False)
    ledger, place = filled.ledger, filled.place
    gc.collect()
    rng = random.Random(1)
    asked = (filled.prompts * (1 + 200 // len(filled.prompts)))[:300]
    match_pin = [_match_and_pin(ledger, place, partly_known(prompt, rng)) for prompt in asked]
    learned = _learned(size)
    table = [_timed(lambda p=prompt: _table(ledger, place, p)) for prompt in filled.prompts]
    opened = [open_sequence(ledger, place, partly_known(prompt, rng)) for prompt in asked]
    windowed, opened_windowed = _windowed(size)
    count = min(size // 2, 4096)
    evictor = Evictor(ledger)
    began = time.thread_time()
    plan, met = evictor.plan_device(place, count, to_host=False)
    evictor.carry_out(plan)
    evict = (time.thread_time() - began) / count * 1e6
    assert met
    began = time.thread_time()
    pages = place.pools[0].take(count, PageState.PRIVATE)
    allocate = (time.thread_time() - began) / count * 1e6
    place.pools[0].move_all(pages, PageState.FREE)
    return {
        "match_pin_us": statistics.median(match_pin),
        "match_pin_p99_us": sorted(match_pin)[int(len(match_pin) * 0.99)],
        "match_pin_windowed_us": windowed,
        "host_room_us_per_block": _host_room(size),
        "block_table_us": statistics.median(table),
        "open_us": statistics.median(opened),
        "open_windowed_us": opened_windowed,
        "publish_us_per_block": filled.publish_us,
        "evict_us_per_block": evict,
        "allocate_us_per_page": allocate,
        "bytes_per_block": bytes_per_block,
        **learned,
    }


def _learned(size: int) -> dict[str, float]:
    """Figures where eviction learns: each prompt is a request of its own, a second after the one before."""
    bytes_per_block = fill(size, traced=True, eviction="hazard").bytes_per_block
    filled = fill(size, traced=False, eviction="hazard")
    ledger, place = filled.ledger, filled.place
    rng = random.Random(1)
    asked = (filled.prompts * (1 + 200 // len(filled.prompts)))[:300]
    opened = [open_sequence(ledger, place, partly_known(prompt, rng)) for prompt in asked]
    count = min(size // 2, 4096)
    evictor = Evictor(ledger)
    began = time.thread_time()
    plan, met = evictor.plan_device(place, count, to_host=False)
    evictor.carry_out(plan)
    evict = (time.thread_time() - began) / count * 1e6
    assert met
    return {
        "open_hazard_us": statistics.median(opened),
        "publish_hazard_us_per_block": filled.publish_us,
        "evict_hazard_us_per_block": evict,
        "bytes_per_block_hazard": bytes_per_block,
    }


def fill(size: int, *, traced: bool, layout: Layout = LAYOUT, eviction: str = "lru") -> Filled:
    """A ledger with ``size`` resident blocks; with ``traced`` its memory is measured (and its times mean nothing)."""
    if traced:
        tracemalloc.start()
    pools = tuple(_pool(size) for _ in layout.groups)
    before = tracemalloc.get_traced_memory()[0] if traced else 0
    policy = eviction_policy(eviction)
    history = policy.new_history(layout.block_tokens)
    ledger = BlockLedger(layout, tuple(PagePool("host", 0) for _ in layout.groups), policy.rank, chooser=history)
    place = ledger.add_replica("replica 0", pools)
    prompts: list[bytes] = []
    seconds = 0.0
    published = 0
    while published < size:
        keys = chain_keys(len(prompts))
        began = time.thread_time()
        ledger.clock.tell(ledger.clock.seconds + 1.0)
        published += _publish(ledger, place, keys, size - published)
        seconds += time.thread_time() - began
        prompts.append(keys)
        _table(ledger, place, keys)  # as the first Match does: from then on it is kept in pieces
    after = tracemalloc.get_traced_memory()[0] if traced else 0
    if traced:
        tracemalloc.stop()
        after -= sum(len(keys) + 33 for keys in prompts)  # the prompts are the caller's
    whole = prompts[:-1] or prompts
    return Filled(ledger, place, whole[:200], seconds / size * 1e6, (after - before) / size)


def _pool(pages: int) -> PagePool:
    pool = PagePool("pool", pages)
    pool.add(0, pages)
    return pool


def _windowed(size: int) -> tuple[float, float]:
    """Seconds of match and pin, and of opening a sequence."""
    ledger, place, prompts, _, _ = fill(size, traced=False, layout=WINDOWED)
    rng = random.Random(1)
    asked = (prompts * (1 + 200 // len(prompts)))[:300]
    match_pin = [_match_and_pin(ledger, place, partly_known(each, rng)) for each in asked]
    opened = [open_sequence(ledger, place, partly_known(each, rng)) for each in asked]
    return statistics.median(match_pin), statistics.median(opened)


def _host_room(size: int) -> float:
    """Microseconds a block that goes, where a host full of ``size`` blocks makes room in both of its groups."""
    ledger = BlockLedger(WINDOWED, (_pool(size), _pool(4 * HOST_WANTED)), lru)
    host = ledger.host
    tip = NO_ROW
    for number in range(size):
        tip = ledger.index.insert(block_key("host", number), NO_ROW if number % HOST_PROMPT == 0 else tip, number + 1)
        groups = (0, 1) if number >= size - 4 * HOST_WANTED else (0,)
        pages = [host.pools[group].take(1, PageState.PRIVATE)[0] if group in groups else NO_PAGE for group in (0, 1)]
        ledger.seal(host, tip, pages)
        ledger.offer(host, tip)
    evictor = Evictor(ledger)
    began = time.thread_time()
    plan, short = evictor.plan_host_room([HOST_WANTED, HOST_WANTED])
    evictor.carry_out(plan)
    seconds = time.thread_time() - began
    assert short is None
    return seconds / HOST_WANTED * 1e6


def chain_keys(prompt: int) -> bytes:
    """Packed keys of one prompt; the first SHARED_BLOCKS are the same for all."""
    shared = [block_key("shared", i) for i in range(SHARED_BLOCKS)]
    return b"".join(shared + [block_key(f"prompt {prompt}", i) for i in range(SHARED_BLOCKS, PROMPT_BLOCKS)])


def block_key(name: str, position: int) -> bytes:
    """Key of one block of a named prompt."""
    return hashlib.blake2b(f"{name} {position}".encode(), digest_size=KEY_BYTES).digest()


def _publish(ledger: BlockLedger, place: Place, keys: bytes, limit: int) -> int:
    hit = ledger.find(keys, place)
    tip = hit.device_row
    request = _request(ledger, keys, hit.device_blocks)
    path: list[int] = []
    missing = min(PROMPT_BLOCKS - hit.device_blocks, limit)
    taken = [pool.take(missing, PageState.PRIVATE) for pool in place.pools]
    for i, pages in enumerate(zip(*taken, strict=True)):
        at = (hit.device_blocks + i) * KEY_BYTES
        row = ledger.index.insert(keys[at : at + KEY_BYTES], tip, 1)
        ledger.seal(place, row, pages)
        for group in place.window_groups:
            place.window_leaves[group].update(row)
        tip = row
        path.append(row)
    ledger.index.touch(tip, len(ledger.index))
    if request is not None:
        request.sealed(hit.device_blocks, path)
        request.ended = Ended(100)
        request.end(hit.device_blocks + missing, keys[-KEY_BYTES:], ledger.clock.seconds)
    ledger.offer(place, tip)
    return missing


def _request(ledger: BlockLedger, keys: bytes, known: int) -> Request | None:
    """Request that the policy sees for a prompt of which ``known`` blocks are there; None where it does not ask."""
    if ledger.chooser is None:
        return None
    path = PromptPath(ledger.index, keys, known, known)
    return Request(ledger.chooser, ledger.index, path, ledger.clock.seconds, 0.0)


def open_sequence(ledger: BlockLedger, place: Place, keys: bytes) -> float:
    """Microseconds of all that Match does in the ledger: find, pin, touch, block tables, windows."""
    began = time.thread_time()
    sequence = OpenSequence(1, "lease", 1, 0, ledger, place, keys)
    hit = ledger.find(keys, place)
    sequence.hold(hit, 1 << 40)
    request = _request(ledger, keys, hit.blocks)
    if request is not None:
        sequence.follow(request)
    elapsed = time.thread_time() - began
    sequence.end()
    return elapsed * 1e6


def partly_known(keys: bytes, rng: random.Random) -> bytes:
    """A prompt of as many blocks whose hit ends at a random depth.

    The processor's second-level cache is flushed: between two look-ups a daemon does other work.
    """
    known = rng.randrange(SHARED_BLOCKS, PROMPT_BLOCKS + 1)
    _CACHE[:] += 1
    return keys[: known * KEY_BYTES] + bytes((PROMPT_BLOCKS - known) * KEY_BYTES)


_CACHE = np.zeros(1 << 20, np.uint8)


def _match_and_pin(ledger: BlockLedger, place: Place, keys: bytes) -> float:
    began = time.thread_time()
    hit = ledger.find(keys, place)
    ledger.pin(place, hit.device_row)
    ledger.index.touch(hit.device_row, 1 << 40)
    elapsed = time.thread_time() - began
    assert hit.device_blocks >= SHARED_BLOCKS
    ledger.unpin(place, hit.device_row)
    return elapsed * 1e6


def _table(ledger: BlockLedger, place: Place, keys: bytes) -> array[int]:
    hit = ledger.find(keys, place)
    return place.pieces.tables(hit.device_row, hit.device_blocks)[0]


def _timed(call: object) -> float:
    assert callable(call)
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


if __name__ == "__main__":
    main()
