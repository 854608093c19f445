"""Bytes between two nodes: one daemon borrows a prompt's blocks from another over loopback, beside plain TCP streams.

    python -m benchmarks.storage.peers [--json OUT] [--tokens 32768] [--block-tokens 16 64] [--repeats 5]

The shape is that of an 8B model, 128 KiB a token. The first daemon has the prompt in its host pool; an engine of the
second one expects it from there (``Match.expected``). Time counts from Match until all blocks are in the second host
pool, verified. Each repeat has the plain streams too, one after another: processes that send and receive and do nothing
else, over memory that no cache holds. Processor seconds are of both sides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from cachesvc_client import CacheClient, Expected, Timeouts, gqa
from cachesvc_client.lease import Lease
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.storage.plain_streams import Moved, PlainStreams
from benchmarks.support.calls import compute
from benchmarks.support.daemon_log import event_of
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save

MIB = 1 << 20
LAYERS, HEADS, HEAD_DIM = 32, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2
STREAMS = (1, 2, 4)
LENDS = ("--peer-listen", "127.0.0.1:0", "--write-policy", "write_through")
BORROWS = ("--peer-allow", "127.0.0.0/8")
SPARE_BLOCKS = 16
WAIT_SECONDS = 120.0


class Peer(NamedTuple):
    """A daemon and its engine."""

    daemon: DaemonProcess
    lease: Lease
    admin: admin_pb2_grpc.AdminServiceStub

    def counters(self) -> dict[str, int]:
        """The daemon's."""
        return dict(self.admin.GetStatus(admin_pb2.GetStatusRequest()).counters)

    def evict(self, tier: str, request: int) -> None:
        """Take everything off a tier."""
        model = self.lease.registration.model_id
        self.admin.Evict(admin_pb2.EvictRequest(request_id=request, model_id=model, tier=tier))

    def cpu_seconds(self) -> float:
        """Processor seconds of the daemon. Its movers have nothing to do here."""
        fields = Path(f"/proc/{self.daemon.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_peer(block_tokens: int, device_blocks: int, host_blocks: int, *flags: str) -> Iterator[Peer]:
    """A daemon with some room, until the end of the block."""
    layout = gqa(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, block_tokens=block_tokens)
    block_bytes = block_tokens * TOKEN_BYTES
    pools = [("--device-pool", device_blocks), ("--host-pool", host_blocks)]
    sizes = [part for name, blocks in pools for part in (name, str(blocks * block_bytes + 64 * MIB))]
    every = ["--backend", "shm", "--host-chunk", "64MiB", *sizes, *flags]
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(every, whole=True))
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{daemon.socket}"))
        timeouts = Timeouts(call_s=2 * WAIT_SECONDS)
        client = stack.enter_context(CacheClient(daemon.socket, engine="peers", timeouts=timeouts))
        registration = client.register("8b", layout, device_pages=[device_blocks], host_pages=[host_blocks])
        lease = stack.enter_context(client.open_lease(registration))
        yield Peer(daemon, lease, admin_pb2_grpc.AdminServiceStub(channel))


def measure(said: argparse.Namespace, block_tokens: int, plain: PlainStreams) -> dict[str, Any]:
    """Figures for one size of blocks."""
    blocks = said.tokens // block_tokens
    size_bytes = blocks * block_tokens * TOKEN_BYTES
    keys = np.random.default_rng(block_tokens).bytes(32 * blocks)
    found: dict[str, list[Moved]] = {}
    with ExitStack() as stack:
        room = blocks + SPARE_BLOCKS
        lender = stack.enter_context(running_peer(block_tokens, room, room, *LENDS))
        borrower = stack.enter_context(running_peer(block_tokens, room, 2 * room, *BORROWS))
        fill(lender, keys, blocks)
        address = f"127.0.0.1:{event_of(lender.daemon, 'peers_ready')['port']}"
        for repeat in range(said.repeats + 1):
            for streams in STREAMS:
                found.setdefault(f"plain {streams}", []).append(plain.move(streams, size_bytes))
            asked = keys[: len(keys) - 32 * repeat]  # an expectation that has ended is not begun again for a while
            found.setdefault("peers", []).append(borrow(lender, borrower, asked, address))
            borrower.evict("host", repeat + 1)
    rows = {name: row(moved[1:]) for name, moved in found.items()}  # the first one warms up
    ours = rows["peers"]["gb_per_s"]
    ratios = {name: round(ours / each["gb_per_s"], 2) for name, each in rows.items() if name != "peers"}
    print(f"blocks of {block_tokens} tokens, {blocks} of them, {size_bytes / 1e9:.2f} GB")
    for name, each in rows.items():
        beside = f"   peers beside it: {ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:>10} {each['gb_per_s']:7.2f} GB/s {each['cpu_seconds_per_gb']:7.3f} cpu s/GB{beside}", flush=True)
    return {"block_tokens": block_tokens, "bytes": size_bytes, "rows": rows, "peers_beside": ratios}


def fill(lender: Peer, keys: bytes, blocks: int) -> None:
    """Have all blocks on the lender's host."""
    compute(lender.lease, keys)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        with lender.lease.match(keys) as sequence:
            if sequence.hit_blocks == blocks and not lender.counters()["tickets_running"]:
                return
        assert time.monotonic() < until, "the lender's host has not got all blocks"
        time.sleep(0.02)  # between two looks; nothing is timed here


def borrow(lender: Peer, borrower: Peer, keys: bytes, address: str) -> Moved:
    """Have all blocks come to the borrower's host."""
    before = lender.cpu_seconds() + borrower.cpu_seconds()
    began = time.perf_counter()
    with borrower.lease.match(keys, expected=Expected(address, patience=60.0, is_computed=True)) as sequence:
        seconds = time.perf_counter() - began
        found = sequence.host_blocks, sequence.coming_blocks
    assert found == (len(keys) // 32, 0), f"{found} blocks on the host and to come"
    size_bytes = found[0] * lender.lease.registration.layout.block_tokens * TOKEN_BYTES
    return Moved(size_bytes, seconds, lender.cpu_seconds() + borrower.cpu_seconds() - before)


def row(moved: list[Moved]) -> dict[str, float]:
    """Medians, and the slowest."""
    return {
        "gb_per_s": round(statistics.median(each.gb_per_s for each in moved), 3),
        "gb_per_s_least": round(min(each.gb_per_s for each in moved), 3),
        "cpu_seconds_per_gb": round(statistics.median(each.cpu_seconds_per_gb for each in moved), 3),
    }


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    said = parser.parse_args()
    if said.tokens < max(said.block_tokens) or said.repeats < 1:
        fail("--tokens is at least one block, and --repeats at least 1")
    plain = PlainStreams(max(STREAMS), said.tokens * TOKEN_BYTES)
    plain.start()
    began = time.monotonic()
    try:
        cases = [measure(said, block_tokens, plain) for block_tokens in said.block_tokens]
    finally:
        plain.close()
    seconds = round(time.monotonic() - began, 1)
    facts = {"benchmark": "storage_peers", "tokens": said.tokens}
    save(said, {**facts, "repeats": said.repeats, "seconds": seconds, "cases": cases})


if __name__ == "__main__":
    main()
