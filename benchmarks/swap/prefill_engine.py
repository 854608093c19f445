"""An engine that finds a prefix, loads what is not on its device, and computes the rest; everything it does is a call
that a benchmark times.

What it computes with is a seam (``Compute``): ``GpuCompute`` is torch with ``prefill_model``; ``plain_compute`` has
one for shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt
from cachesvc_client import CacheClient, Layout, Timeouts, block_keys
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.sequence import Sequence
from kvcache.v1 import admin_pb2, admin_pb2_grpc

NEW_TOKENS = 2048
CHUNK_TOKENS = 8192
BLOCK_TOKENS = 64
VOCABULARY = 32_000
KEY_BYTES = 32
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.01

Tokens = npt.NDArray[np.int64]
BeforeLayer = Callable[[int], None]


class Compute(Protocol):
    """A model over a pool's planes. Results are bytes on the host."""

    def to_device(self, numbers: Tokens) -> Any:
        """Tokens or pages as ``forward`` takes them."""

    def forward(self, tokens: Any, table: Any, first: int, before_layer: BeforeLayer) -> Any:
        """Hidden state of the last of ``tokens``, whose positions begin at ``first``; writes their pages."""

    def to_host(self, result: Any) -> bytes:
        """Wait until it is computed."""

    def finish(self) -> None:
        """Wait until all is computed."""

    def scribble(self) -> None:
        """Overwrite every page."""

    def wait_layer(self, tickets: Iterable[Any], layer: int) -> None:
        """Let nothing that is computed later run before the layer is in place."""

    def close(self) -> None:
        """Let go of the planes."""


class GpuCompute:
    """torch on the first GPU."""

    def __init__(self, pool: AttachedPool) -> None:
        import torch

        from benchmarks.swap.prefill_model import LAYERS, PrefillModel

        self._torch: Any = torch
        self._pool = pool
        self._model = PrefillModel([(pool.to_torch(layer, "k"), pool.to_torch(layer, "v")) for layer in range(LAYERS)])

    def to_device(self, numbers: Tokens) -> Any:
        return self._torch.from_numpy(np.asarray(numbers, np.int64)).cuda()

    def forward(self, tokens: Any, table: Any, first: int, before_layer: BeforeLayer) -> Any:
        return self._model.forward(tokens, table, first, before_layer)

    def to_host(self, result: Any) -> bytes:
        return bytes(result.cpu().view(self._torch.uint8).numpy())

    def finish(self) -> None:
        self._torch.cuda.synchronize()

    def scribble(self) -> None:
        for planes in self._model.planes:
            for plane in planes:
                plane.fill_(float("nan"))
        self.finish()

    def wait_layer(self, tickets: Iterable[Any], layer: int) -> None:
        stream = self._torch.cuda.current_stream()
        for ticket in tickets:
            self._pool.wait_layer_on(stream, ticket, layer)

    def close(self) -> None:
        self._model.planes = []


class Engine:
    """A lease, a pool and a model. ``matched_s``, ``loaded_s``: of ``time.perf_counter``, when the last Match returned,
    and when the last wait for a whole prefix did."""

    def __init__(
        self,
        lease: Lease,
        pool: AttachedPool,
        compute: Compute,
        admin: admin_pb2_grpc.AdminServiceStub,
    ) -> None:
        self._lease = lease
        self._pool = pool
        self._compute = compute
        self._admin = admin
        self._evictions = iter(range(1, 1 << 30))
        self._others: list[Sequence] = []
        self.matched_s = self.loaded_s = 0.0

    @property
    def has_singles_alone(self) -> bool:
        """True once ``take_every_second_page`` was called."""
        return bool(self._others)

    def keys(self, tokens: Tokens) -> bytes:
        """Block keys of a prompt."""
        return block_keys(self._lease.registration.namespace, tokens, BLOCK_TOKENS)

    def to_device(self, numbers: Tokens) -> Any:
        """Tokens as the calls below take them."""
        return self._compute.to_device(numbers)

    def counters(self) -> dict[str, int]:
        """The daemon's."""
        return dict(self._admin.GetStatus(admin_pb2.GetStatusRequest()).counters)

    def wait_until(self, holds: Callable[[dict[str, int]], bool], what: str) -> None:
        """Until the daemon's counters are so."""
        until = time.monotonic() + WAIT_SECONDS
        while not holds(self.counters()):
            assert time.monotonic() < until, f"still not so: {what}"
            time.sleep(LOOK_SECONDS)  # between two looks; nothing is timed here

    def compute_prefix(self, tokens: Tokens) -> None:
        """Compute, publish, and wait until the host has it."""
        blocks = len(tokens) // BLOCK_TOKENS
        with self._lease.match(self.keys(tokens)) as sequence:
            assert not sequence.hit_blocks
            sequence.allocate(blocks)
            self._prefill(self.to_device(tokens), self._table(sequence))
            self._compute.finish()
            sequence.publish(blocks)
        self.settle()

    def settle(self) -> None:
        """Until the daemon knows that all transfers have ended: a load's last word comes before it does."""
        self.wait_until(lambda counters: not counters["tickets_running"], "nothing is under way")

    def leave_to_host(self) -> None:
        """Take everything off the device, and overwrite what it had there."""
        self._evict("device")
        with self._lease.match(b"") as sequence:
            sequence.allocate(self._lease.registration.device_pages[0] - len(self._others))
            self._compute.scribble()

    def leave_to_storage(self) -> None:
        """Take everything off the device and off the host, of which nothing is under way any more."""
        self.settle()
        self.leave_to_host()
        self._evict("host")

    def _evict(self, tier: str) -> None:
        model_id = self._lease.registration.model_id
        self._admin.Evict(admin_pb2.EvictRequest(request_id=next(self._evictions), model_id=model_id, tier=tier))

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
        self.matched_s = time.perf_counter()
        hit = len(prefix) // KEY_BYTES
        found = (sequence.host_blocks, sequence.device_blocks)
        assert found == ((hit, 0) if on_host else (0, hit)), f"{found} blocks on host and device, not all {hit} on one"
        sequence.allocate(blocks)
        return sequence

    def overlapped(self, prefix: bytes, tokens: Any, first: int, *, on_host: bool) -> bytes:
        """Each layer waits for its own part of the prefix."""
        with self.start(prefix, first // BLOCK_TOKENS + len(tokens) // BLOCK_TOKENS, on_host=on_host) as sequence:
            tickets = sequence.tickets

            def wait(layer: int) -> None:
                self._compute.wait_layer(tickets, layer)

            result = self._compute.to_host(self._compute.forward(tokens, self._table(sequence), first, wait))
            self._pool.confirm(*tickets)
        return result

    def loaded_first(self, prefix: bytes, tokens: Any, first: int) -> bytes:
        """Nothing is computed before everything has come."""
        with self.start(prefix, first // BLOCK_TOKENS + len(tokens) // BLOCK_TOKENS, on_host=True) as sequence:
            self._wait_loaded(sequence)
            return self._compute.to_host(self._compute.forward(tokens, self._table(sequence), first, wait_for_nothing))

    def transfer(self, prefix: bytes) -> None:
        """Load alone."""
        with self.start(prefix, len(prefix) // KEY_BYTES, on_host=True) as sequence:
            self._wait_loaded(sequence)

    def recompute(self, tokens: Any) -> bytes:
        """The whole prompt, without the cache."""
        with self._lease.match(b"") as sequence:
            sequence.allocate(len(tokens) // BLOCK_TOKENS)
            return self._compute.to_host(self._prefill(tokens, self._table(sequence)))

    def close(self) -> None:
        """Let go of the pool: nothing holds its planes then."""
        self._compute.close()
        self._pool.close()

    def _wait_loaded(self, sequence: Sequence) -> None:
        for ticket in sequence.tickets:
            self._pool.wait_ticket(ticket, WAIT_SECONDS)
        self.loaded_s = time.perf_counter()

    def _prefill(self, tokens: Any, table: Any) -> Any:
        """Call ``forward`` for a whole prompt, in chunks."""
        last = None
        for first in range(0, len(tokens), CHUNK_TOKENS):
            part = tokens[first : first + CHUNK_TOKENS]
            blocks = (first + len(part)) // BLOCK_TOKENS
            last = self._compute.forward(part, table[:blocks], first, wait_for_nothing)
        return last

    def _table(self, sequence: Sequence) -> Any:
        return self._compute.to_device(sequence.tables[0].astype(np.int64))


@contextmanager
def running_engine(
    socket: str, layout: Layout, compute: Callable[[AttachedPool], Compute], *, device_pages: int, host_pages: int
) -> Iterator[Engine]:
    """An engine of a daemon, until the end of the block."""
    timeouts = Timeouts(call_s=2 * WAIT_SECONDS)
    with (
        grpc.insecure_channel(f"unix:{socket}") as channel,
        CacheClient(socket, engine="prefill", timeouts=timeouts) as client,
    ):
        registration = client.register("prefill", layout, device_pages=[device_pages], host_pages=[host_pages])
        with client.open_lease(registration) as lease:
            pool = lease.attach()
            engine = Engine(lease, pool, compute(pool), admin_pb2_grpc.AdminServiceStub(channel))
            yield engine
            engine.close()


def wait_for_nothing(layer: int) -> None:
    """For a prefix that is in place."""
    del layer


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
