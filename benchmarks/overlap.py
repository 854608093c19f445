"""Time to first token of a prompt whose prefix lies on the host, loaded layer by layer behind the prefill of the rest.

    python -m benchmarks.overlap [--json OUT] [--prefixes 4096,16384,65536] [--repeats 5]

A daemon in one process, an engine with the compute of an 8B model (``prefill_model``) in this one. Every time counts
from Match to the last token's hidden state on the host. ``compute``: the prefix is on the device. ``transfer``: until
the whole prefix has come, and nothing is computed. ``overlapped``: streams wait for each layer. ``after``: everything
is loaded, then computed. ``recompute``: the whole prompt from nothing, in chunks. Before each load the device pages are
overwritten; the overlapped result must equal that of a resident prefix bit for bit. ``pages``: the device pool hands
out ``runs``, or every second page is held by somebody else, so that free ones are ``singles``. Budget: 1.05 times the
larger of compute and transfer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from cachesvc_client import BlockHasher, CacheClient, CacheClientError, gqa
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.sequence import Sequence
from cachesvc_ctl.daemon_process import DaemonFailed, DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.machine import describe_gpu, describe_machine, fail, require_gpu
from benchmarks.recording import write_result

if TYPE_CHECKING:
    from benchmarks.prefill_model import PrefillModel

NEW_TOKENS = 2048
CHUNK_TOKENS = 8192
BLOCK_TOKENS = 64
BLOCK_BYTES = 32 * 2 * 8 * BLOCK_TOKENS * 128 * 2
BUDGET = 1.05
GIB = 1 << 30
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Row:
    """Milliseconds, medians, of one length of prefix."""

    prefix_tokens: int
    pages: str
    prefix_bytes: int
    compute_ms: float
    transfer_ms: float
    overlapped_ms: float
    after_ms: float
    recompute_ms: float
    of_the_larger: float
    speed_up: float
    transfer_gb_per_s: float


class Engine:
    """A lease, a pool and a model; ``run`` methods return the last hidden state."""

    def __init__(self, lease: Lease, pool: AttachedPool, model_id: int, admin: admin_pb2_grpc.AdminServiceStub) -> None:
        import torch

        from benchmarks.prefill_model import PrefillModel

        self._lease = lease
        self._pool = pool
        self._model_id = model_id
        self._admin = admin
        self._namespace = lease.registration.namespace
        self._torch: Any = torch
        layers = lease.registration.layout.layers
        self.model: PrefillModel = PrefillModel(
            [(pool.to_torch(layer, "k"), pool.to_torch(layer, "v")) for layer in range(layers)]
        )
        self._evictions = iter(range(1, 1 << 30))
        self._others: list[Sequence] = []

    def keys(self, tokens: Any) -> bytes:
        """Block keys of a prompt."""
        hasher = BlockHasher(self._namespace, BLOCK_TOKENS)
        hasher.extend(tokens)
        return bytes(hasher.keys)

    def compute_prefix(self, tokens: Any) -> None:
        """Compute, publish, and wait until the host has it."""
        blocks = len(tokens) // BLOCK_TOKENS
        with self._lease.match(self.keys(tokens)) as sequence:
            assert not sequence.hit_blocks
            sequence.allocate(blocks)
            self.model.prefill(self._on_device(tokens), self._table(sequence), CHUNK_TOKENS)
            self._torch.cuda.synchronize()
            sequence.publish(blocks)
        until = time.monotonic() + WAIT_SECONDS
        while self._admin.GetStatus(admin_pb2.GetStatusRequest()).counters["tickets_running"]:
            assert time.monotonic() < until, "the prefix was not written to the host"
            time.sleep(LOOK_SECONDS)  # between two looks; nothing is timed here

    def leave_to_host(self) -> None:
        """Take everything off the device, and overwrite what it had there."""
        request = admin_pb2.EvictRequest(request_id=next(self._evictions), model_id=self._model_id, tier="device")
        self._admin.Evict(request)
        with self._lease.match(b"") as sequence:
            sequence.allocate(self._lease.registration.device_pages[0] - len(self._others))
            for planes in self.model.planes:
                for plane in planes:
                    plane.fill_(float("nan"))
            self._torch.cuda.synchronize()

    def take_every_second_page(self) -> None:
        """From now on no two free pages are neighbours."""
        self.leave_to_host()
        taken = []
        for _ in range(self._lease.registration.device_pages[0]):
            sequence = self._lease.match(b"")
            sequence.allocate(1)
            taken.append((int(sequence.tables[0][0]), sequence))
        for at, (_, sequence) in enumerate(sorted(taken, key=lambda one: one[0])):
            if at % 2:
                self._others.append(sequence)
            else:
                sequence.release()

    def start(self, prefix: bytes, blocks: int, *, on_host: bool) -> Sequence:
        """Match and allocate; checks that the prefix is where it should be."""
        sequence = self._lease.match(prefix)
        hit = len(prefix) // 32
        assert (sequence.host_blocks, sequence.device_blocks) == ((hit, 0) if on_host else (0, hit))
        sequence.allocate(blocks)
        return sequence

    def overlapped(self, prefix: bytes, tokens: Any, first: int, *, on_host: bool) -> Any:
        """Each layer waits for its own part of the prefix."""
        with self.start(prefix, first // BLOCK_TOKENS + len(tokens) // BLOCK_TOKENS, on_host=on_host) as sequence:
            tickets = sequence.tickets
            stream = self._torch.cuda.current_stream()

            def wait(layer: int) -> None:
                for ticket in tickets:
                    self._pool.wait_layer_on(stream, ticket, layer)

            result = self.model.forward(tokens, self._table(sequence), first, wait).cpu()
            self._pool.confirm(*tickets)
        return result

    def loaded_first(self, prefix: bytes, tokens: Any, first: int) -> Any:
        """Nothing is computed before everything has come."""
        with self.start(prefix, first // BLOCK_TOKENS + len(tokens) // BLOCK_TOKENS, on_host=True) as sequence:
            for ticket in sequence.tickets:
                self._pool.wait_ticket(ticket, WAIT_SECONDS)
            return self.model.forward(tokens, self._table(sequence), first).cpu()

    def transfer(self, prefix: bytes) -> None:
        """Load alone."""
        with self.start(prefix, len(prefix) // 32, on_host=True) as sequence:
            for ticket in sequence.tickets:
                self._pool.wait_ticket(ticket, WAIT_SECONDS)

    def recompute(self, tokens: Any) -> Any:
        """The whole prompt, without the cache."""
        with self._lease.match(b"") as sequence:
            sequence.allocate(len(tokens) // BLOCK_TOKENS)
            return self.model.prefill(tokens, self._table(sequence), CHUNK_TOKENS).cpu()

    def _table(self, sequence: Sequence) -> Any:
        return self._torch.from_numpy(sequence.tables[0].astype(np.int64)).cuda()

    def _on_device(self, tokens: Any) -> Any:
        return self._torch.from_numpy(np.asarray(tokens, np.int64)).cuda()

    def measure(self, prefix_tokens: int, repeats: int) -> Row:
        """One row."""
        from benchmarks.prefill_model import VOCABULARY

        rng = np.random.default_rng(prefix_tokens)
        tokens = rng.integers(0, VOCABULARY, prefix_tokens + NEW_TOKENS, np.int64)
        prefix = self.keys(tokens[:prefix_tokens])
        every, new = self._on_device(tokens), self._on_device(tokens[prefix_tokens:])
        if self._others:
            self.overlapped(prefix, new, prefix_tokens, on_host=True)  # it was computed before: bring it back
        else:
            self.compute_prefix(tokens[:prefix_tokens])
        resident = self.overlapped(prefix, new, prefix_tokens, on_host=False)
        compute = timed(repeats, lambda: self.overlapped(prefix, new, prefix_tokens, on_host=False))
        spent: dict[str, list[float]] = {"transfer": [], "overlapped": [], "after": []}
        for _ in range(repeats + 1):
            self.leave_to_host()
            spent["transfer"].append(clock(lambda: self.transfer(prefix))[0])
            self.leave_to_host()
            seconds, result = clock(lambda: self.overlapped(prefix, new, prefix_tokens, on_host=True))
            spent["overlapped"].append(seconds)
            assert self._torch.equal(result, resident), "the overlapped result differs from the resident one"
            self.leave_to_host()
            seconds, result = clock(lambda: self.loaded_first(prefix, new, prefix_tokens))
            spent["after"].append(seconds)
            assert self._torch.equal(result, resident), "the loaded result differs from the resident one"
        recompute = timed(2, lambda: self.recompute(every))
        transfer, overlapped, after = (statistics.median(one[1:]) * 1e3 for one in spent.values())
        size_bytes = prefix_tokens // BLOCK_TOKENS * BLOCK_BYTES
        return Row(
            prefix_tokens,
            "singles" if self._others else "runs",
            size_bytes,
            compute,
            transfer,
            overlapped,
            after,
            recompute,
            overlapped / max(compute, transfer),
            recompute / overlapped,
            size_bytes / transfer / 1e6,
        )


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def timed(repeats: int, work: Callable[[], Any]) -> float:
    """Median milliseconds, after one to warm up."""
    return statistics.median([clock(work)[0] for _ in range(repeats + 1)][1:]) * 1e3


def show(row: Row) -> None:
    """One line."""
    print(
        f"{row.prefix_tokens:>7} {row.pages:>8} {row.compute_ms:>9.1f} {row.transfer_ms:>9.1f} "
        f"{row.overlapped_ms:>11.1f} {row.of_the_larger:>6.3f} {row.after_ms:>9.1f} {row.recompute_ms:>10.1f} "
        f"{row.speed_up:>8.1f}x {row.transfer_gb_per_s:>6.1f}",
        flush=True,
    )


def run(prefixes: list[int], repeats: int) -> list[Row]:
    """Every length in a pool that hands out runs, then in one that has single pages alone."""
    from benchmarks.prefill_model import check_attend

    check_attend()
    blocks = (max(prefixes) + NEW_TOKENS) // BLOCK_TOKENS + 16
    pool_bytes = blocks * BLOCK_BYTES + GIB
    flags = {"--device-pool": 2 * pool_bytes, "--host-pool": 2 * pool_bytes, "--host-threads": 8}
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS)
    rows = []
    print(
        f"{'prefix':>7} {'pages':>8} {'compute':>9} {'transfer':>9} {'overlapped':>11} {'ratio':>6} {'after':>9} "
        f"{'recompute':>10} {'speed-up':>9} {'GB/s':>6}   (ms; ratio to the larger of compute and transfer)"
    )
    parts = [part for name, value in flags.items() for part in (name, str(value))]
    with (
        DaemonProcess(["--backend", "cuda", "--write-policy", "write_through", *parts]) as daemon,
        grpc.insecure_channel(f"unix:{daemon.socket}") as channel,
        CacheClient(daemon.socket, engine="overlap") as client,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        registration = client.register("overlap", layout, device_pages=[2 * blocks], host_pages=[2 * blocks])
        with client.open_lease(registration) as lease:
            engine = Engine(lease, lease.attach(), registration.model_id, admin)
            for prefix_tokens in prefixes:
                rows.append(engine.measure(prefix_tokens, repeats))
                show(rows[-1])
            engine.take_every_second_page()
            for prefix_tokens in prefixes:
                rows.append(engine.measure(prefix_tokens, repeats))
                show(rows[-1])
            del engine
    return rows


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--prefixes", default="4096,16384,65536", help="tokens, multiples of 64")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    require_gpu("torch")
    prefixes = [int(part) for part in arguments.prefixes.split(",")]
    if any(tokens % BLOCK_TOKENS for tokens in prefixes):
        fail(f"--prefixes {arguments.prefixes}: no multiples of {BLOCK_TOKENS}")
    try:
        rows = run(prefixes, arguments.repeats)
    except (DaemonFailed, CacheClientError) as error:
        fail(str(error))
    if arguments.json:
        found = {
            "benchmark": "overlap",
            "machine": describe_machine() | describe_gpu(),
            "new_tokens": NEW_TOKENS,
            "rows": [asdict(row) for row in rows],
        }
        write_result(arguments.json, found)


if __name__ == "__main__":
    main()
