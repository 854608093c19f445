"""First-fit over the free bytes of the host pool's chunks, and which bytes were ever used. The pool's lock guards both.

A copy of the free ranges is cheap: a planner takes from one and throws it away.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

ALIGN_BYTES = 4096

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of one chunk."""

    chunk: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind."""
        return self.offset + self.size_bytes


class FreeRanges:
    """Free ranges as columns sorted by chunk and offset, replaced and never written to; neighbours are one range."""

    def __init__(self, chunks: Iterable[int], nodes: Sequence[int | None] = ()) -> None:
        """``chunks``: size in bytes of each, multiples of ``ALIGN_BYTES``; ``nodes``: the NUMA node of each, or none
        at all."""
        self._sizes: Int64s = np.array(list(chunks), np.int64)
        self._chunks: Int64s = np.arange(len(self._sizes), dtype=np.int64)
        self._offsets: Int64s = np.zeros_like(self._sizes)
        self._nodes: Int64s = np.array([-1 if node is None else node for node in nodes], np.int64)
        self.lacking: Mapping[str, Flags] = {}
        """By device, chunks that have come and that it cannot reach; a copy keeps those of its time."""

    def copy(self) -> Self:
        """Independent copy of the free ranges."""
        return copy.copy(self)

    @property
    def free_bytes(self) -> int:
        """Free bytes in all."""
        return int(self._sizes.sum())

    def room(self, page_bytes: int) -> int:
        """Pages that fit; none crosses the border of a chunk."""
        return int((self._sizes // page_bytes).sum())

    def take(
        self, page_bytes: int, pages: int, node: int | None = None, readers: Collection[str] = ()
    ) -> list[tuple[int, ByteRange]] | None:
        """(pages, bytes) pieces that hold ``pages`` in all; None, changing nothing, if short.

        Chunks that all ``readers`` can reach come first, then those on ``node``, those that every device can reach,
        which may be a reader one day, and lowest addresses.
        """
        if not pages:
            return []
        order = self._order(node, readers)
        held = np.cumsum(self._sizes[order] // page_bytes)
        if not len(held) or held[-1] < pages:
            return None
        last = int(np.searchsorted(held, pages))
        counts = np.diff(held[: last + 1], prepend=0)
        counts[last] -= held[last] - pages
        chosen = order[: last + 1][counts > 0]
        counts = counts[counts > 0]
        taken = np.zeros_like(self._sizes)
        taken[chosen] = -(-counts * page_bytes // ALIGN_BYTES) * ALIGN_BYTES
        columns = (counts, self._chunks[chosen], self._offsets[chosen], taken[chosen])
        self._offsets = self._offsets + taken
        self._sizes = self._sizes - taken
        self._keep(self._sizes > 0)
        return [
            (count, ByteRange(chunk, offset, size))
            for count, chunk, offset, size in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def give_back(self, back: Int64s) -> None:
        """Return what ``take`` gave, as columns (``columns_of``)."""
        self._chunks, self._offsets, self._sizes = (
            np.concatenate(columns) for columns in zip((self._chunks, self._offsets, self._sizes), back.T, strict=True)
        )
        self._keep(np.lexsort((self._offsets, self._chunks)))
        if not len(self._sizes):
            return
        ends = self._offsets[:-1] + self._sizes[:-1]
        is_joined = (self._chunks[1:] == self._chunks[:-1]) & (self._offsets[1:] == ends)
        heads = np.flatnonzero(np.concatenate(([True], ~is_joined)))
        sizes = np.add.reduceat(self._sizes, heads)
        self._keep(heads)
        self._sizes = sizes

    def _order(self, node: int | None, readers: Collection[str]) -> npt.NDArray[np.intp]:
        is_far = np.zeros(len(self._chunks), bool)
        if node is not None and len(self._nodes):
            is_far = self._nodes[self._chunks] != node
        return np.lexsort((self._lacked_by(self.lacking), is_far, self._lacked_by(readers)))

    def _lacked_by(self, devices: Collection[str]) -> Flags:
        is_lacked = np.zeros(len(self._chunks), bool)
        for lacked in (self.lacking[device] for device in devices if device in self.lacking):
            is_lacked |= lacked[self._chunks]
        return is_lacked

    def _keep(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> None:
        self._chunks, self._offsets, self._sizes = self._chunks[which], self._offsets[which], self._sizes[which]


def columns_of(ranges: Iterable[ByteRange]) -> Int64s:
    """``[ranges, 3]``: chunk, offset and size of each."""
    return np.array([(one.chunk, one.offset, one.size_bytes) for one in ranges], np.int64).reshape(-1, 3)


class UsedBytes:
    """Bytes that were used before: they are zeroed before they serve again. They only grow."""

    def __init__(self) -> None:
        self._spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by chunk: sorted, apart

    def mark(self, place: ByteRange) -> None:
        """Mark a range as used."""
        spans = self._spans[place.chunk]
        first = bisect_left(spans, (place.offset, 0))
        if first and spans[first - 1][1] >= place.offset:
            first -= 1
        last = first
        while last < len(spans) and spans[last][0] <= place.end:
            last += 1
        met = [(place.offset, place.end), *spans[first:last]]
        spans[first:last] = [(min(start for start, _ in met), max(end for _, end in met))]

    def overlap(self, place: ByteRange) -> bool:
        """True where any of these bytes were used."""
        spans = self._spans[place.chunk]
        at = bisect_left(spans, (place.end, 0))  # the last one that begins before the end
        return at > 0 and spans[at - 1][1] > place.offset
