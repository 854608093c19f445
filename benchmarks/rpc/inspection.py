"""Cost to engines of an operator's questions about a large index: ``python -m benchmarks.rpc.inspection --json OUT
[--blocks N]``.

A real daemon holds N blocks in chains of 2,048 that share their first 64, all filled through its API. One engine then
sends Steps of 32 growing sequences, first alone, then while another process asks one question again and again. Reported
are the Step's p50 and p99, each question's time, and the daemon's own figure of the longest wait of a call.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import grpc
import numpy as np
from cachesvc_client import Lease, opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc, inspect_pb2

from benchmarks.rpc.round_trips import step_times
from benchmarks.support.calls import Beside, leased, spread
from benchmarks.support.recording import parser_of, save

CHAIN_BLOCKS = 2048
SHARED_BLOCKS = 64
BLOCK_BYTES = 64
SPARE_PAGES = 16384
SEQUENCES = 32
DEADLINE_SECONDS = 600.0
Ask = Callable[[admin_pb2_grpc.AdminServiceStub], object]

QUESTIONS: dict[str, Ask] = {
    "status": lambda admin: admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS),
    "blocks": lambda admin: admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=1), timeout=DEADLINE_SECONDS),
    "tree": lambda admin: admin.GetTree(admin_pb2.GetTreeRequest(model_id=1, limit=64), timeout=DEADLINE_SECONDS),
    "key prefix": lambda admin: admin.ListBlocks(
        admin_pb2.ListBlocksRequest(model_id=1, key_hex=[bytes(2).hex()]), timeout=DEADLINE_SECONDS
    ),
    "verify": lambda admin: admin.Verify(admin_pb2.VerifyRequest(), timeout=DEADLINE_SECONDS),
    "dump": lambda admin: sum(
        1 for _ in admin.DumpIndex(inspect_pb2.DumpIndexRequest(model_id=1), timeout=DEADLINE_SECONDS)
    ),
}


def main() -> None:
    """Print a line a question and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=400, help="Steps a figure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pool = BLOCK_BYTES * (arguments.blocks + SPARE_PAGES) + (1 << 20)
        daemon = DaemonProcess(["--backend", "shm", "--device-pool", str(pool), "--host-pool", "0"], folder=folder)
        with daemon:
            result = measure(daemon.socket, arguments.blocks, arguments.rounds)
    save(arguments, result)


def measure(socket: str, blocks: int, rounds: int) -> dict[str, object]:
    """Fill, then one figure alone and one for each question."""
    gc.freeze()
    layout = opaque(block_bytes=BLOCK_BYTES, block_tokens=64)
    questions: dict[str, dict[str, Any]] = {}
    with leased(socket, layout, blocks + SPARE_PAGES) as lease:
        began = time.perf_counter()
        fill(lease, blocks)
        print(f"{blocks:,} blocks published in {time.perf_counter() - began:.0f} s", flush=True)
        step_times(lease, SEQUENCES, 50, publish=False)
        alone = spread(step_times(lease, SEQUENCES, rounds, publish=False))
        print(f"{'alone':12} Step p50 {alone['p50']:.2f} ms, p99 {alone['p99']:.2f} ms", flush=True)
        for name in QUESTIONS:
            questions[name] = ask_meanwhile(socket, name, lease, rounds)
            show(name, questions[name])
    return {"blocks": blocks, "alone_ms": alone, "questions": questions}


def show(name: str, found: dict[str, Any]) -> None:
    """One line."""
    step = found["step_ms"]
    print(
        f"{name:12} Step p50 {step['p50']:.2f} ms, p99 {step['p99']:.2f} ms; answered in {found['seconds']:.2f} s, "
        f"longest pause {found['longest_pause_ms']:.2f} ms",
        flush=True,
    )


def fill(lease: Lease, blocks: int) -> None:
    """Publish chains until the index holds ``blocks`` blocks."""
    rng = np.random.default_rng(1)
    shared = rng.bytes(32 * SHARED_BLOCKS)
    published = 0
    while published < blocks:
        fresh = min(CHAIN_BLOCKS - SHARED_BLOCKS, blocks - published)
        keys = shared + rng.bytes(32 * fresh)
        with lease.match(keys) as sequence:
            new = SHARED_BLOCKS + fresh - sequence.device_blocks
            sequence.allocate(SHARED_BLOCKS + fresh)
            sequence.publish(SHARED_BLOCKS + fresh)
        published += new


def ask_meanwhile(socket: str, name: str, lease: Lease, rounds: int) -> dict[str, Any]:
    """Steps while another process asks."""
    steps: list[float] = []
    with Beside(keep_asking, socket, name) as asking:
        is_answered = False
        while not is_answered or len(steps) < rounds:  # at least one whole question
            steps += step_times(lease, SEQUENCES, 100, publish=False)
            is_answered = is_answered or asking.pipe.poll()
    seconds, pause_ms = asking.result
    return {"step_ms": spread(steps), "seconds": seconds, "longest_pause_ms": pause_ms}


def keep_asking(stop: Event, answer: Connection, socket: str, name: str) -> None:
    """Ask again and again. Reports the first answer, and at the end the median seconds and the longest pause."""
    times: list[float] = []
    pause_ms = 0.0
    options = [("grpc.max_receive_message_length", 64 << 20)]
    with grpc.insecure_channel(f"unix:{socket}", options) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        admin.GetStatus(admin_pb2.GetStatusRequest())
        answer.send("asking")
        while not stop.is_set():
            began = time.perf_counter()
            try:
                said = QUESTIONS[name](admin)
            except grpc.RpcError as error:  # no key begins so: the whole index was searched
                if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                    raise
                said = None
            times.append(time.perf_counter() - began)
            if isinstance(said, admin_pb2.VerifyResponse):
                assert said.ok, said.problems
                pause_ms = max(pause_ms, said.longest_pause_ms)
            if len(times) == 1:
                answer.send("answered")
    answer.send((sorted(times)[len(times) // 2], pause_ms))


if __name__ == "__main__":
    main()
