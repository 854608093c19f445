"""Stand-in for a model on machines without a GPU: checksums, so that a result depends on every byte of the prefix."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from cachesvc_client.memory.pool import AttachedPool

from benchmarks.swap.prefill_engine import BLOCK_TOKENS, WAIT_SECONDS, BeforeLayer, Tokens

SCRIBBLE = 0x7FC1


class PlainCompute:
    """NumPy over shared memory; a token's K and V tell the token and the layer."""

    def __init__(self, pool: AttachedPool) -> None:
        self._pool = pool
        self._planes = pool.planes

    def to_device(self, numbers: Tokens) -> Tokens:
        return numbers

    def forward(self, tokens: Tokens, table: Tokens, first: int, before_layer: BeforeLayer) -> int:
        own, told = table[first // BLOCK_TOKENS :], 0
        for layer in range(len(self._pool.layout.planes) // 2):
            before_layer(layer)
            for at, name in enumerate(("k", "v")):
                plane = self._planes[layer, name]
                numbers = (tokens * (2 * layer + at + 3)).astype(plane.dtype)
                plane[own] = numbers.reshape(-1, 1, BLOCK_TOKENS, 1)
                told = zlib.crc32(plane[table].tobytes(), told)
        return told

    def to_host(self, result: Any) -> bytes:
        return int(result).to_bytes(4, "little")

    def finish(self) -> None:
        """Do nothing: each call computes at once."""

    def scribble(self) -> None:
        for plane in self._planes.values():
            plane.fill(SCRIBBLE)

    def wait_layer(self, tickets: Iterable[Any], layer: int) -> None:
        for ticket in tickets:
            self._pool.wait_layer(ticket, layer, WAIT_SECONDS)

    def close(self) -> None:
        self._planes = {}
