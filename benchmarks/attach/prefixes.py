"""An engine process that publishes prompts of recognisable bytes, finds them again, and tells how long that took.

``run_engine`` is the process: it attaches, says "ready", and then answers the name of a method and its arguments with
what the method returns; None ends it. Every page is written and checked by kernels. Needs CuPy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from cachesvc_client import (
    KEY_BYTES,
    AttachedPool,
    CacheClient,
    Layout,
    Lease,
    Plane,
    PlaneGroup,
    Registration,
    Sequence,
    block_keys,
)

from gpu_ops.kernels.pages import Stamps, count_wrong, stamp_pages, stamps

GROUP = "full"
BLOCK_TOKENS = 64
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_TOKENS * HEAD_DIM * 2
PAGE_SHAPES = {"head-major": (KV_HEADS, BLOCK_TOKENS, HEAD_DIM), "token-major": (BLOCK_TOKENS, KV_HEADS, HEAD_DIM)}
VOCABULARY = 128_000
SEED_STEP = 0x9E3779B97F4A7C15
"""Odd: seeds of one block differ in every plane."""


def paged_layout(order: str) -> Layout:
    """Keys and values of an 8B model in bf16; ``order`` of PAGE_SHAPES says how a page is laid out."""
    shape = PAGE_SHAPES[order]
    planes = tuple(Plane(name, layer, GROUP, shape, "bfloat16") for layer in range(LAYERS) for name in ("k", "v"))
    return Layout(BLOCK_TOKENS, 1, (PlaneGroup(GROUP),), planes)


@dataclass(frozen=True)
class Wish:
    """The model that an engine registers, and the blocks of each prompt that it publishes or finds."""

    model: str
    order: str
    device_pages: int
    host_pages: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Reused:
    """Findings of a fresh engine. ``phases_ms``: its steps in their order; ``since_spawn_ms``: until the first page."""

    phases_ms: dict[str, float]
    since_spawn_ms: float
    wrong_blocks: int


@dataclass(frozen=True)
class Hits:
    """From Match to the first page's bytes, each time anew."""

    seconds: list[float]
    wrong_blocks: int


@dataclass(frozen=True)
class Loaded:
    """From Match to the first layer (None: not looked at) and to all of a prefix that was on the host."""

    first_layer_s: float | None
    all_s: float
    wrong_blocks: int


class NotThere(Exception):
    """A prefix is not where the benchmark has put it."""


class PrefixEngine:
    """``spawned_s`` and all times within: of the monotonic clock, which processes share."""

    def __init__(self, socket: str, wish: Wish, spawned_s: float, stream: Any) -> None:
        self._wish = wish
        self._spawned_s = self._last_s = spawned_s
        self._stream = stream
        self._client = CacheClient(socket, engine="benchmark")
        self._prompts = [
            np.random.default_rng(number).integers(0, VOCABULARY, blocks * BLOCK_TOKENS)
            for number, blocks in enumerate(wish.prompts)
        ]
        self._phases_ms: dict[str, float] = {}
        self._registration: Registration | None = None
        self._lease: Lease | None = None
        self._pool: AttachedPool | None = None

    @property
    def lease(self) -> Lease:
        """The open lease."""
        assert self._lease is not None
        return self._lease

    @property
    def pool(self) -> AttachedPool:
        """The attached pool."""
        assert self._pool is not None
        return self._pool

    def lap(self, phase: str, ended_s: float) -> None:
        """Note a phase that followed the last one."""
        self._phases_ms[phase] = (ended_s - self._last_s) * 1e3
        self._last_s = ended_s

    def start(self) -> None:
        """Connect, register, open the lease, attach."""
        wish = self._wish
        self._client.connect()
        self.lap("connect", time.monotonic())
        self._registration = self._client.register(
            wish.model, paged_layout(wish.order), device_pages=[wish.device_pages], host_pages=[wish.host_pages]
        )
        self.lap("register", time.monotonic())
        self._lease = self._client.open_lease(self._registration)
        self.lap("lease", time.monotonic())
        self._pool = self._lease.attach(0)
        self.lap("attach", time.monotonic())

    def close(self) -> None:
        """End the lease and disconnect."""
        self._client.close()

    def model_id(self) -> int:
        """The daemon's number of the model."""
        assert self._registration is not None
        return self._registration.model_id

    def publish(self) -> None:
        """Compute and publish every prompt."""
        for tokens in self._prompts:
            keys = self._keys(tokens)
            blocks = len(keys) // KEY_BYTES
            with self.lease.match(keys) as sequence:
                self._require(sequence, device=0, host=0)
                sequence.allocate(blocks)
                self._stamp(sequence, keys)
                sequence.publish(blocks)

    def reuse(self) -> Reused:
        """Find every prompt on the device, beginning with what ``start`` took; then check all bytes."""
        assert self._registration is not None
        if not self._registration.existed:
            raise NotThere(f"the pools of {self._wish.model} are new; nothing was there to be found")
        self._last_s = time.monotonic()
        with ExitStack() as held:
            prompts = [self._keys(tokens) for tokens in self._prompts[:1]]
            first = held.enter_context(self.lease.match(prompts[0]))
            first.allocate(first.device_blocks + 1)
            self.lap("match", time.monotonic())
            self._see(first)
            self.lap("page", time.monotonic())
            since_spawn_ms = (self._last_s - self._spawned_s) * 1e3
            prompts += [self._keys(tokens) for tokens in self._prompts[1:]]
            found = [first, *(held.enter_context(self.lease.match(keys)) for keys in prompts[1:])]
            self.lap("others", time.monotonic())
            wrong = 0
            for sequence, keys in zip(found, prompts, strict=True):
                self._require(sequence, device=len(keys) // KEY_BYTES, host=0)
                wrong += self._wrong(sequence, keys)
        return Reused(dict(self._phases_ms), since_spawn_ms, wrong)

    def hit(self, repeats: int) -> Hits:
        """Find the first prompt on the device again and again; then check all bytes."""
        keys = self._keys(self._prompts[0])
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            with self.lease.match(keys) as sequence:
                self._see(sequence)
                seconds.append(time.perf_counter() - began)
                self._require(sequence, device=len(keys) // KEY_BYTES, host=0)
        with self.lease.match(keys) as sequence:
            return Hits(seconds, self._wrong(sequence, keys))

    def scribble(self) -> None:
        """Write other bytes into every page of the device, all of them free: what is right later was loaded."""
        pages = self._wish.device_pages
        with self.lease.match(b"") as sequence:
            sequence.allocate(pages)
            self._stamp(sequence, np.random.default_rng(pages).bytes(pages * KEY_BYTES))

    def load(self, by_layer: bool) -> Loaded:
        """Load the first prompt from the host: with a wait for each layer in turn, or one for all; check all bytes."""
        keys = self._keys(self._prompts[0])
        first_s: float | None = None
        began = time.perf_counter()
        with self.lease.match(keys) as sequence:
            sequence.allocate(len(keys) // KEY_BYTES)
            if by_layer:
                self._wait_layer(sequence, 0)
                first_s = time.perf_counter() - began
                for layer in range(1, LAYERS):
                    self._wait_layer(sequence, layer)
            else:
                for ticket in sequence.tickets:
                    self.pool.wait_ticket_on(self._stream, ticket)
                self._stream.synchronize()
            all_s = time.perf_counter() - began
            self.pool.confirm(*sequence.tickets)
            self._require(sequence, device=0, host=len(keys) // KEY_BYTES)
            return Loaded(first_s, all_s, self._wrong(sequence, keys))

    def _wait_layer(self, sequence: Sequence, layer: int) -> None:
        for ticket in sequence.tickets:
            self.pool.wait_layer_on(self._stream, ticket, layer)
        self._stream.synchronize()

    def _keys(self, tokens: npt.NDArray[np.int64]) -> bytes:
        assert self._registration is not None
        return block_keys(self._registration.namespace, tokens, BLOCK_TOKENS)

    def _see(self, sequence: Sequence) -> None:
        """Bring one page's bytes to this process."""
        self.pool.planes[0, "k"][int(sequence.tables[0][0])].get()

    def _require(self, sequence: Sequence, *, device: int, host: int) -> None:
        if (sequence.device_blocks, sequence.host_blocks) != (device, host):
            raise NotThere(
                f"{sequence.device_blocks} blocks on the device and {sequence.host_blocks} on the host, not "
                f"{device} and {host}"
            )

    def _marked(self, sequence: Sequence, keys: bytes) -> Iterator[tuple[Any, Stamps]]:
        """Each plane with what belongs into its pages."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0]
        pages = sequence.tables[0][: len(words)]
        for number, plane in enumerate(self.pool.group_planes(GROUP).values()):
            yield plane, stamps(pages, words ^ np.uint64(number * SEED_STEP % (1 << 64)))

    def _stamp(self, sequence: Sequence, keys: bytes) -> None:
        kept = []
        for plane, marks in self._marked(sequence, keys):
            stamp_pages(plane, marks, self._stream.ptr)
            kept.append(marks)
        self._stream.synchronize()

    def _wrong(self, sequence: Sequence, keys: bytes) -> int:
        """Blocks that hold other bytes than they should, in whatever plane."""
        wrong: npt.NDArray[np.bool_] = np.zeros(len(keys) // KEY_BYTES, np.bool_)
        for plane, marks in self._marked(sequence, keys):
            wrong |= count_wrong(plane, marks, self._stream.ptr) > 0
        return int(wrong.sum())


def run_engine(socket: str, wish: Wish, spawned_s: float, pipe: Connection) -> None:
    """The process. Its phases: Python with the benchmark's modules, CuPy with the GPU's context, then its own."""
    entered_s = time.monotonic()
    import cupy

    import_module("cachesvc_client.memory.cuda")  # otherwise imported by the first attach
    cupy.zeros(1, np.uint8).get()
    engine = PrefixEngine(socket, wish, spawned_s, cupy.cuda.Stream(non_blocking=True))
    engine.lap("python", entered_s)
    engine.lap("cuda", time.monotonic())
    engine.start()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, *arguments = order
        pipe.send(getattr(engine, name)(*arguments))
    engine.close()
