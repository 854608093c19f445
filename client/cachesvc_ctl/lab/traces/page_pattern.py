"""Bytes that tell their block: what replayed engines write for KV, and know again in every page that is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from cachesvc_client.memory.pool import AttachedPool

from cachesvc.model.keys import KEY_BYTES

CHUNK_WORDS = 1 << 17
"""Bytes written or checked at a time: a megabyte."""
STRIDE = np.uint64(0x9E3779B97F4A7C15)


class PagePattern:
    """The pages of one attached pool of the opaque layout, whose ``layers`` planes share ``block_bytes``.

    Holds views of the pool: drop it before the pool is closed.
    """

    def __init__(self, pool: AttachedPool, *, block_bytes: int, layers: int) -> None:
        self._planes = [pool.planes[layer, "bytes"].view(np.uint64) for layer in range(layers)]
        self._arrays = _module_of(self._planes[0])
        words = block_bytes // layers // 8
        self._ramp = self._arrays.asarray(np.arange(words, dtype=np.uint64) * STRIDE)
        self._blocks_at_once = max(1, CHUNK_WORDS // words)

    def write(self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int) -> None:
        """Write the bytes of blocks ``[first, last)`` into their pages, done when this returns."""
        for plane, pages, seeds in self._parts(table, keys, first, last):
            plane[pages] = self._ramp + seeds
        if self._arrays is not np:  # what is published must have been written
            self._arrays.cuda.get_current_stream().synchronize()

    def count_wrong(self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int) -> int:
        """Blocks of ``[first, last)`` whose pages hold other bytes in any plane."""
        good = np.ones(last - first, bool)
        for at, (plane, pages, seeds) in enumerate(self._parts(table, keys, first, last)):
            start = at // len(self._planes) * self._blocks_at_once
            holds = (plane[pages] - seeds == self._ramp).all(axis=1)
            good[start : start + len(pages)] &= holds if self._arrays is np else holds.get()
        return int((~good).sum())

    def _parts(
        self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        """(plane, pages, seeds as a column) of each layer, for some blocks at a time."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0]
        for start in range(first, last, self._blocks_at_once):
            part = slice(start, min(start + self._blocks_at_once, last))
            pages = self._arrays.asarray(table[part])
            for layer, plane in enumerate(self._planes):
                yield plane, pages, self._arrays.asarray(words[part, None] ^ np.uint64(layer))


def _module_of(plane: Any) -> Any:
    """NumPy, or CuPy where the pool is on a GPU."""
    if isinstance(plane, np.ndarray):
        return np
    import cupy

    return cupy
