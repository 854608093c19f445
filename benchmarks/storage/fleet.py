"""Many peers of one node: the cost of a Match that none of them can serve, and which of them is asked first.

    python -m benchmarks.storage.fleet [--json OUT] [--peers 64] [--matches 2000]

All are real daemons on this machine, with tiny pools. Matches of prompts that no node has go to a daemon with all the
others as its peers, in turns with a daemon without any. Each peer has prompts of its own, whose first half some others
have too. The right peer of a prompt is the one that has all of it: this process asks by the daemon's own borrowing
side, and notes the peer that each question goes to first.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
from cachesvc_client import Lease, opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import compute, leased, match_ms
from benchmarks.support.daemon_log import event_of
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save
from cachesvc.peer.borrower import PeerStorage
from cachesvc.peer.fleet import Answered
from cachesvc.service.rpc.peer_service import GrpcControl, PeerListening
from cachesvc.storage.seam import LAYOUT_ID_BYTES, ObjectName, Part, Scope

BLOCK_BYTES, BLOCK_TOKENS = 4096, 64
PROMPTS, BLOCKS, SHARED_BLOCKS, SHARERS = 8, 16, 8, 4
"""Prompts of a peer, blocks of each, and the first blocks that ``SHARERS`` peers have."""
ABSENT_BLOCKS = 64
LAYOUT = opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, layers=1)
PAGES = 1024
LEAST_SHARE, MOST_RATIO = 0.95, 1.2
FLAGS = ("--backend", "shm", "--device-pool", "16MiB", "--host-pool", "16MiB", "--host-chunk", "2MiB")
QUIET = ("--movers", "inside", "--calibration", "never", "--log-level", "info")
WAIT_SECONDS = 120.0


class NotedControl(GrpcControl):
    """A peer, with a note of each question that goes to it."""

    asked: list[str]

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        """See PeerControl."""
        self.asked.append(self.address)
        super().borrow_later(scope, keys, parts, patience, seconds, answered)


def start_peers(count: int, stack: ExitStack) -> list[DaemonProcess]:
    """Daemons that lend, one started at a time for each processor."""
    lends = (*FLAGS, *QUIET, "--peer-listen", "127.0.0.1:0", "--write-policy", "write_through")
    daemons = [DaemonProcess(lends, whole=True) for _ in range(count)]

    def start(daemon: DaemonProcess) -> None:
        daemon.start()
        stack.callback(daemon.stop)

    with ThreadPoolExecutor(os.cpu_count()) as starting:
        list(starting.map(start, daemons))
    return daemons


def measure(said: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    rng = np.random.default_rng(said.peers)
    with ExitStack() as stack:
        daemons = start_peers(said.peers, stack)
        addresses = [f"127.0.0.1:{event_of(daemon, 'peers_ready')['port']}" for daemon in daemons]
        prompts = [[rng.bytes(32 * BLOCKS) for _ in range(PROMPTS)] for _ in daemons]
        leases = [stack.enter_context(leased(daemon.socket, LAYOUT, PAGES, PAGES, "fleet")) for daemon in daemons]
        for at, lease in enumerate(leases):
            for number, keys in enumerate(prompts[at]):
                compute(lease, keys)
                for other in range(1, SHARERS):
                    compute(leases[(at + other + number) % len(leases)], keys[: 32 * SHARED_BLOCKS])
        found = matches(said, addresses, stack, rng)
        return found | asked_first(leases[0], addresses, prompts)


def matches(said: argparse.Namespace, addresses: Sequence[str], stack: ExitStack, rng: Any) -> dict[str, Any]:
    """Matches of absent prompts, with peers and without."""
    flags = {"without": (*FLAGS, *QUIET), "with": (*FLAGS, *QUIET, "--peers", ",".join(addresses))}
    leases = {}
    for name, each in flags.items():
        daemon = stack.enter_context(DaemonProcess(each, whole=True))
        leases[name] = stack.enter_context(leased(daemon.socket, LAYOUT, PAGES, PAGES, "fleet"))
    ms: dict[str, list[float]] = {name: [] for name in leases}
    time.sleep(said.settle)  # the digests of all peers come; nothing is timed here
    for _ in range(said.matches):
        for name, lease in leases.items():
            ms[name].append(match_ms(lease, rng.bytes(32 * ABSENT_BLOCKS)))
    rows = {name: np.percentile(times, (50, 99)) * 1e3 for name, times in ms.items()}
    ratio = float(rows["with"][1] / rows["without"][1])
    for name, (p50, p99) in rows.items():
        print(f"{name:>8} peers: a Match of an absent prompt p50 {p50:.0f} us, p99 {p99:.0f} us", flush=True)
    print(f"p99 with peers is {ratio:.2f} of p99 without (goal {MOST_RATIO})")
    spread = {name: {"p50_us": round(float(p50)), "p99_us": round(float(p99))} for name, (p50, p99) in rows.items()}
    return {"match_absent": spread, "p99_ratio": round(ratio, 3)}


def asked_first(lease: Lease, addresses: Sequence[str], prompts: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    """Share of prompts of which the right peer is asked first; and the memory of the digests."""
    asked: list[str] = []
    controls = [NotedControl(address, PeerListening(address), None) for address in addresses]
    for control in controls:
        control.asked = asked
    peers = PeerStorage(controls)
    peers.start()
    until = time.monotonic() + WAIT_SECONDS
    while not all(peer.digest.is_known for peer in peers.peers):
        if time.monotonic() > until:
            fail("not all peers have told what they have")
        time.sleep(0.05)  # between two looks; nothing is timed here
    scope = Scope(lease.registration.namespace, LAYOUT.fingerprint[:LAYOUT_ID_BYTES])
    right = questions = 0
    for address, some in zip(addresses, prompts, strict=True):
        for keys in some:
            asked.clear()
            there = exists(peers, scope, keys)
            right += bool(asked) and asked[0] == address and there == BLOCKS
            questions += len(asked)
    size_bytes = sum(len(peer.digest.bits) for peer in peers.peers)
    peers.close()
    count = sum(map(len, prompts))
    print(f"right peer first: {right} of {count} prompts (goal {LEAST_SHARE:.0%}), by {questions} questions")
    print(f"digests of {len(addresses)} peers: {size_bytes / 1024:.0f} KiB")
    first = {"prompts": count, "right_first": round(right / count, 4), "questions": questions}
    return first | {"digest_bytes": size_bytes}


def exists(peers: PeerStorage, scope: Scope, keys: bytes) -> int:
    """Count the leading blocks that the peers lend; they lapse unread."""
    names = [ObjectName(scope, keys[at : at + 32], Part(0, 0, 1)) for at in range(0, len(keys), 32)]
    answers: list[bool] = []
    is_told = threading.Event()

    def tell(there: Sequence[bool] | None) -> None:
        answers.extend(there or ())
        is_told.set()

    peers.exists(names, time.monotonic() + WAIT_SECONDS, tell)
    is_told.wait()
    return sum(answers)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--matches", type=int, default=2000)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds until the digests have come")
    said = parser.parse_args()
    if said.peers <= SHARERS or said.matches < 1:
        fail(f"--peers is more than {SHARERS}, and --matches at least 1")
    found = measure(said)
    save(said, {"benchmark": "storage_fleet", "peers": said.peers, "matches": said.matches, **found})


if __name__ == "__main__":
    main()
