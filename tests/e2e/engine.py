"""An engine as the end-to-end tests need it: it computes bytes that tell their block, and knows them again.

The test's own process holds one directly; ``remote`` runs the same in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from cachesvc_client import (
    KEY_BYTES,
    NO_PAGE,
    AttachedPool,
    CacheClient,
    Layout,
    Lease,
    PoolExhausted,
    Registration,
    Timeouts,
    block_keys,
    gqa_windowed,
    opaque,
)
from cachesvc_client.records.sequence_record import Pages

BLOCK_TOKENS = 16
LAYERS = 4
WINDOW_TOKENS = 40
WAIT_SECONDS = 30.0
PLAIN = opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS, layers=LAYERS)
WINDOWED = gqa_windowed(
    window_layers=[False, True, False], kv_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS, window_tokens=WINDOW_TOKENS
)
ALL_WINDOWED = gqa_windowed(
    window_layers=[True, True], kv_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS, window_tokens=WINDOW_TOKENS
)
LAYOUTS = {"plain": PLAIN, "windowed": WINDOWED, "all windowed": ALL_WINDOWED}
Bytes = npt.NDArray[np.uint8]


class Tabled(Protocol):
    """A sequence, or its tables as they once were."""

    @property
    def tables(self) -> tuple[Pages, ...]:
        """For each group the page of each block."""


class Served(NamedTuple):
    """One prompt from Match to release: blocks by where they came from, the tables that it used, and what was bad."""

    device: int
    host: int
    computed: int
    duplicates: int
    pages: list[list[int]]
    bad: list[str]


def prompt(seed: int, blocks: int) -> list[int]:
    """Tokens of exactly ``blocks`` blocks; prompts of one seed are prefixes of each other."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, 1024 * BLOCK_TOKENS)
    return [int(token) for token in tokens[: blocks * BLOCK_TOKENS]]


def expected(keys: bytes, position: int, layer: int, name: str, size_bytes: int) -> Bytes:
    """The bytes that stand for the KV of one block in one plane."""
    seed = [int.from_bytes(keys[position * KEY_BYTES :][:8], "little"), layer, *name.encode()]
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


class Engine(AbstractContextManager["Engine"]):
    """A client with one lease and one attached pool. ``device_pages`` and ``host_pages``: the same in every group."""

    def __init__(
        self,
        socket: str,
        *,
        name: str = "local",
        model: str = "model@1",
        layout: Layout = PLAIN,
        salt: bytes = b"",
        devices: Sequence[str] = (),
        device_pages: int | None = 64,
        host_pages: int | None = 0,
        timeouts: Timeouts | None = None,
        instance: str = "",
    ) -> None:
        self.client = CacheClient(socket, engine=name, timeouts=timeouts or Timeouts(call_s=WAIT_SECONDS))
        self.layout = layout
        self._model = model
        self._salt = salt
        self._devices = devices
        self._instance = instance
        self._device_pages = device_pages
        self._host_pages = host_pages
        self._lease: Lease | None = None
        self._pool: AttachedPool | None = None
        self._registration: Registration | None = None

    @property
    def lease(self) -> Lease:
        """The open lease."""
        assert self._lease is not None
        return self._lease

    @property
    def pool(self) -> AttachedPool:
        """Rank 0's pool."""
        assert self._pool is not None
        return self._pool

    @property
    def registration(self) -> Registration:
        """Registration that the daemon granted."""
        assert self._registration is not None
        return self._registration

    def start(self) -> Engine:
        """Connect, register, open the lease, attach."""
        self.client.connect()
        return self.start_again()

    def start_again(self) -> Engine:
        """Register, open a lease, attach."""
        groups = len(self.layout.own_groups)
        self._registration = self.client.register(
            self._model,
            self.layout,
            tenant_salt=self._salt,
            devices=self._devices,
            device_pages=None if self._device_pages is None else [self._device_pages] * groups,
            host_pages=None if self._host_pages is None else [self._host_pages] * groups,
        )
        self._lease = self.client.open_lease(self._registration, instance=self._instance)
        self._pool = self._lease.attach(0)
        return self

    def take(self, lease: Lease) -> None:
        """Go on under another lease, as after ``reconnect``."""
        self.pool.close()
        self._lease, self._registration = lease, lease.registration
        self._pool = lease.attach(0)

    def close(self, *, quiesced: bool = True) -> None:
        """End the lease and disconnect."""
        self.client.close(quiesced=quiesced)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=kind is None)

    def keys(self, tokens: Sequence[int]) -> bytes:
        """Packed keys of the full blocks."""
        return block_keys(self.registration.namespace, tokens, self.layout.block_tokens)

    def fill(self, sequence: Tabled, keys: bytes, positions: Iterable[int]) -> None:
        """Compute blocks: write the bytes that belong there."""
        for position in positions:
            for (layer, name, _), page in self._pages(sequence, position):
                page[:] = expected(keys, position, layer, name, page.size)

    def bad(
        self, sequence: Tabled, keys: bytes, positions: Iterable[int], layers: Iterable[int] | None = None
    ) -> list[str]:
        """Planes of blocks that hold other bytes than they should; holes are passed over."""
        wanted = set(range(self.layout.layers) if layers is None else layers)
        return [
            f"block {position} {name}.{layer}.{group}"
            for position in positions
            for (layer, name, group), page in self._pages(sequence, position)
            if layer in wanted and not np.array_equal(page, expected(keys, position, layer, name, page.size))
        ]

    def serve(self, tokens: Sequence[int]) -> Served:
        """Match, check what was hit, compute the rest, publish, release."""
        keys = self.keys(tokens)
        blocks = len(keys) // KEY_BYTES
        with self.lease.match(keys) as sequence:
            sequence.allocate(blocks)
            sequence.wait_loaded(WAIT_SECONDS)
            hit = sequence.hit_blocks
            bad = self.bad(sequence, keys, range(hit))
            self.fill(sequence, keys, range(hit, blocks))
            duplicates = len(sequence.publish(blocks).duplicate_positions) if hit < blocks else 0
            pages = [table.tolist() for table in sequence.tables]
            return Served(sequence.device_blocks, sequence.host_blocks, blocks - hit, duplicates, pages, bad)

    def _pages(self, sequence: Tabled, position: int) -> Iterable[tuple[tuple[int, str, str], Bytes]]:
        for group, table in zip(self.layout.own_groups, sequence.tables, strict=False):
            page = int(table[position])
            if page != NO_PAGE:
                for (layer, name), view in self.pool.page(group.name, page).items():
                    yield (layer, name, group.name), view.reshape(-1).view(np.uint8)


def is_full(engine: Engine, blocks: int) -> bool:
    """True when ``blocks`` blocks cannot be had at once."""
    with engine.lease.match(b"") as sequence:
        try:
            sequence.allocate(blocks)
        except PoolExhausted:
            return True
    return False
