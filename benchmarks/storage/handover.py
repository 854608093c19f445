"""Time that a decoder waits after a prefill has ended on another node, beside the transfer of the whole prompt.

    python -m benchmarks.storage.handover [--json OUT] [--tokens 1536 8192] [--chunks 128 512] [--rates 10000 20000]

Two daemons over loopback, in the shape of an 8B model. One engine prefills a prompt in chunks at a fixed rate: a chunk
of n tokens is sealed n / rate seconds after the one before; in place of computing it waits. Another engine has asked
before it begins (``Match.expected``). ``after``: from the end of the last chunk's computing until the second engine's
Match has the whole prompt on its host. ``transfer``: a prompt that was computed long before comes whole, in turns with
these. ``chunk_alone``: a prompt as long as a chunk does, which is the least that can be left when a prefill ends;
``floor`` is the chunk's part of the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from cachesvc_client import Expected

from benchmarks.storage.peers import BORROWS, LENDS, SPARE_BLOCKS, TOKEN_BYTES, Peer, fill, running_peer
from benchmarks.support.daemon_log import event_of
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save

BLOCK_TOKENS = 16
PATIENCE_SECONDS = 60.0


class Case(NamedTuple):
    """A way to prefill: ``chunk`` tokens at a time, ``rate`` tokens a second."""

    chunk: int
    rate: int


def measure(said: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """Figures for one length of prompts, a row for each case."""
    blocks = tokens // BLOCK_TOKENS
    rng = np.random.default_rng(tokens)
    cases = [Case(chunk, rate) for chunk in said.chunks for rate in said.rates if chunk < tokens]
    transfers: list[float] = []
    after: dict[Case, list[float]] = {case: [] for case in cases}
    alone: dict[int, list[float]] = {case.chunk: [] for case in cases}
    numbers = itertools.count(1)
    with ExitStack() as stack:
        room = 2 * blocks + SPARE_BLOCKS
        lender = stack.enter_context(running_peer(BLOCK_TOKENS, room, room, *LENDS))
        borrower = stack.enter_context(running_peer(BLOCK_TOKENS, SPARE_BLOCKS, room, *BORROWS))
        address = f"127.0.0.1:{event_of(lender.daemon, 'peers_ready')['port']}"
        for _ in range(said.repeats + 1):
            for length, seconds in ((tokens, transfers), *alone.items()):
                keys = rng.bytes(32 * (length // BLOCK_TOKENS))
                fill(lender, keys, length // BLOCK_TOKENS)
                began = time.perf_counter()
                seconds.append(arrival(borrower, keys, address, is_computed=True)() - began)
                empty(lender, borrower, numbers)
            for case in cases:
                after[case].append(follow(lender, borrower, rng.bytes(32 * blocks), address, case))
                empty(lender, borrower, numbers)
    return [row_of(tokens, case, transfers[1:], alone[case.chunk][1:], after[case][1:]) for case in cases]  # 0 warms up


def row_of(tokens: int, case: Case, transfers: list[float], alone: list[float], after: list[float]) -> dict[str, Any]:
    """Figures of a case. Shares are of the median transfer."""
    transfer = statistics.median(transfers)
    row = {
        "tokens": tokens,
        "bytes": tokens * TOKEN_BYTES,
        "chunk": case.chunk,
        "rate": case.rate,
        "prefill_ms": round(tokens / case.rate * 1e3, 1),
        "transfer_p50_ms": round(transfer * 1e3, 1),
        "chunk_alone_p50_ms": round(statistics.median(alone) * 1e3, 1),
        "after_p50_ms": round(statistics.median(after) * 1e3, 1),
        "after_max_ms": round(max(after) * 1e3, 1),
        "share_p50": round(statistics.median(after) / transfer, 3),
        "floor": round(case.chunk / tokens, 3),
    }
    print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def arrival(borrower: Peer, keys: bytes, address: str, *, is_computed: bool) -> Callable[[], float]:
    """A wait for a whole prompt; it returns the time at which that is there."""

    def wait() -> float:
        expected = Expected(address, patience=PATIENCE_SECONDS, is_computed=is_computed)
        while True:
            with borrower.lease.match(keys, expected=expected) as sequence:
                now = time.perf_counter()
                if sequence.host_blocks == len(keys) // 32:
                    return now
                assert sequence.coming_blocks, f"{sequence.host_blocks} blocks came, and no more will"

    return wait


def follow(lender: Peer, borrower: Peer, keys: bytes, address: str, case: Case) -> float:
    """Seconds from the end of a prefill until the decoder's node has all of it."""
    blocks, arrived = len(keys) // 32, list[float]()
    wait = arrival(borrower, keys, address, is_computed=False)
    waiting = threading.Thread(target=lambda: arrived.append(wait()))
    with lender.lease.match(keys) as sequence:
        sequence.allocate(blocks)
        waiting.start()
        began, ended = time.perf_counter(), 0.0
        last = blocks * BLOCK_TOKENS
        for tokens in (*range(case.chunk, last, case.chunk), last):
            time.sleep(max(0.0, began + tokens / case.rate - time.perf_counter()))  # a prefill's kernels run
            ended = time.perf_counter()
            sequence.publish(tokens // BLOCK_TOKENS)
        waiting.join()
    return arrived[0] - ended


def empty(lender: Peer, borrower: Peer, numbers: Iterator[int]) -> None:
    """Take everything off both nodes. ``numbers``: of the requests, each used once."""
    borrower.evict("host", next(numbers))
    for tier in ("device", "host"):
        lender.evict(tier, next(numbers))


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1536, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512], help="tokens")
    parser.add_argument("--rates", type=int, nargs="+", default=[10_000, 20_000], help="tokens a second")
    parser.add_argument("--repeats", type=int, default=5)
    said = parser.parse_args()
    if min(*said.chunks, *said.rates, said.repeats) < 1 or any(each % BLOCK_TOKENS for each in said.chunks):
        fail(f"--chunks are multiples of {BLOCK_TOKENS}; --rates and --repeats are at least 1")
    if min(said.tokens) <= min(said.chunks):
        fail("--tokens are more than the least of --chunks: a prefill in one chunk hides nothing")
    rows = [row for tokens in said.tokens for row in measure(said, tokens)]
    save(said, {"benchmark": "storage_handover", "repeats": said.repeats, "rows": rows})


if __name__ == "__main__":
    main()
