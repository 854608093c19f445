"""Time that a decoder waits after a prefill has ended on another node, beside the transfer of the whole prompt.

    python -m benchmarks.storage.handover [--json OUT] [--tokens 1536 8192] [--parts 16] [--repeats 5]

Two daemons over loopback, in the shape of an 8B model. One engine seals a prompt in ``--parts`` equal parts, at the
pace of a prefill that takes ``--pace`` times as long as the transfer alone; in place of computing it waits. Another
engine has asked before it begins (``Match.expected``). ``after``: from the last part's seal until the second engine's
Match has the whole prompt on its host. ``transfer``: the same for a prompt that was computed long before.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from cachesvc_client import Expected

from benchmarks.storage.peers import BORROWS, LENDS, SPARE_BLOCKS, TOKEN_BYTES, Peer, fill, running_peer
from benchmarks.support.daemon_log import told
from benchmarks.support.machine import describe_machine, fail
from benchmarks.support.recording import write_result

BLOCK_TOKENS = 16
PATIENCE_SECONDS = 60.0


def measure(said: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Figures for one length of prompts."""
    blocks = tokens // BLOCK_TOKENS
    rng = np.random.default_rng(tokens)
    transfers: list[float] = []
    after: list[float] = []
    with ExitStack() as stack:
        room = 2 * blocks + SPARE_BLOCKS
        lender = stack.enter_context(running_peer(BLOCK_TOKENS, room, room, *LENDS))
        borrower = stack.enter_context(running_peer(BLOCK_TOKENS, SPARE_BLOCKS, room, *BORROWS))
        address = f"127.0.0.1:{told(lender.daemon, 'peers_ready')['port']}"
        for repeat in range(said.repeats + 1):
            keys = rng.bytes(32 * blocks)
            fill(lender, keys, blocks)
            began = time.perf_counter()
            transfers.append(arrival(borrower, keys, address, is_computed=True)() - began)
            empty(lender, borrower, 2 * repeat)
            after.append(follow(lender, borrower, rng.bytes(32 * blocks), address, said, transfers[-1]))
            empty(lender, borrower, 2 * repeat + 1)
    shares = [one / whole for one, whole in zip(after[1:], transfers[1:], strict=True)]  # the first one warms up
    row = {
        "tokens": tokens,
        "bytes": blocks * BLOCK_TOKENS * TOKEN_BYTES,
        "transfer_p50_ms": round(statistics.median(transfers[1:]) * 1e3, 1),
        "after_p50_ms": round(statistics.median(after[1:]) * 1e3, 1),
        "after_max_ms": round(max(after[1:]) * 1e3, 1),
        "share_p50": round(statistics.median(shares), 3),
        "share_max": round(max(shares), 3),
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


def follow(
    lender: Peer, borrower: Peer, keys: bytes, address: str, said: argparse.Namespace, transfer_seconds: float
) -> float:
    """Seconds from the end of a prefill until the decoder's node has all of it."""
    blocks, arrived = len(keys) // 32, list[float]()
    wait = arrival(borrower, keys, address, is_computed=False)
    waiting = threading.Thread(target=lambda: arrived.append(wait()))
    with lender.lease.match(keys) as sequence:
        sequence.allocate(blocks)
        waiting.start()
        began = time.perf_counter()
        for part in range(1, said.parts + 1):
            due = began + part / said.parts * said.pace * transfer_seconds
            time.sleep(max(0.0, due - time.perf_counter()))  # a prefill's kernels run
            sequence.publish(blocks * part // said.parts)
        ended = time.perf_counter()
        waiting.join()
    return arrived[0] - ended


def empty(lender: Peer, borrower: Peer, number: int) -> None:
    """Take everything off both nodes."""
    borrower.evict("host", 2 * number + 1)
    for at, tier in enumerate(("device", "host")):
        lender.evict(tier, 2 * number + 1 + at)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1536, 8192])
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--pace", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    said = parser.parse_args()
    if min(said.tokens) < BLOCK_TOKENS * said.parts or min(said.repeats, said.parts) < 1:
        fail("--tokens has a block for each of --parts at least, and --repeats is at least 1")
    rows = [measure(said, tokens) for tokens in said.tokens]
    if said.json:
        facts = {"benchmark": "storage_handover", "machine": describe_machine(), "parts": said.parts}
        write_result(said.json, {**facts, "pace": said.pace, "repeats": said.repeats, "rows": rows})


if __name__ == "__main__":
    main()
