"""Copies of a batch against the borders of their regions, and the copies themselves on mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachesvc.memory.extents import Int64s
from cachesvc.memory.interface import CopyBatch, require_inside
from cachesvc.model.errors import InvalidRequest

PitchedCopies = npt.NDArray[np.int64]
"""``[copies, 6]``: source and destination address, width in bytes, height in rows, source and destination pitch."""


class CopyOutOfBounds(InvalidRequest):
    """A copy reaches beyond its region, or names a region that does not exist (any more): nothing was
    copied."""

    def __init__(self, side: str, copy: list[int], region_bytes: int) -> None:
        super().__init__(f"copy {copy} is outside of its {side} region of {region_bytes} bytes")
        self.side = side
        self.copy = copy
        self.region_bytes = region_bytes


def check_sizes(copies: CopyBatch, src_bytes: Int64s, dst_bytes: Int64s) -> None:
    """Raises CopyOutOfBounds for the first copy that is not wholly inside its two regions, by the sizes of each copy's
    regions: -1 for one that does not exist."""
    width, height = copies[:, 4], copies[:, 5]
    for side, offset, pitch, size in (("source", 1, 6, src_bytes), ("destination", 3, 7, dst_bytes)):
        bad = _is_outside(copies[:, offset], copies[:, pitch], width, height, size)
        if bad.any():
            first = int(np.argmax(bad))
            raise CopyOutOfBounds(side, copies[first].tolist(), int(size[first]))


def _is_outside(offset: Int64s, pitch: Int64s, width: Int64s, height: Int64s, size: Int64s) -> npt.NDArray[np.bool_]:
    shape: npt.NDArray[np.bool_] = (offset < 0) | (width < 1) | (height < 1) | ((height > 1) & (pitch < width))
    last = size - width  # nothing is added or multiplied until it is known to be small: these are any 64 bits
    rows: npt.NDArray[np.bool_] = height > (last - offset) // np.maximum(pitch, 1) + 1
    return shape | (offset > last) | ((height > 1) & rows)


def extremes(copies: CopyBatch) -> tuple[list[int], list[int]]:
    """The least and the most of each column of some copies, as numbers that do not overflow."""
    columns = np.ascontiguousarray(copies.T)  # five times as fast as along the copies
    return np.minimum.reduce(columns, axis=1).tolist(), np.maximum.reduce(columns, axis=1).tolist()


def run_copies(copies: CopyBatch, regions: Mapping[int, memoryview]) -> None:
    """Execute checked copies in order. NumPy lets go of the GIL for all but the smallest."""
    views, copyto, uint8 = np.ndarray, np.copyto, np.uint8
    for src, src_at, dst, dst_at, width, height, src_pitch, dst_pitch in copies.tolist():
        copyto(
            views((height, width), uint8, regions[dst], dst_at, (dst_pitch, 1)),
            views((height, width), uint8, regions[src], src_at, (src_pitch, 1)),
        )


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a copy may address: ``view`` is mapped here, else ``fetch(address, bytes)`` reads it."""

    address: int
    size_bytes: int
    view: memoryview | None = None
    fetch: Callable[[int, int], bytes] | None = None

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Raises InvalidRequest for bytes outside of it."""
        require_inside(offset, size_bytes, self.size_bytes)
        if self.view is not None:
            return bytes(self.view[offset : offset + size_bytes])
        assert self.fetch is not None
        return self.fetch(self.address + offset, size_bytes)


class Regions:
    """An immutable set of regions, with their places as columns by number: what a copy thread looks up at once."""

    def __init__(self, known: Mapping[int, Region]) -> None:
        self.known = known
        self._views = {number: region.view for number, region in known.items() if region.view is not None}
        count = max(known, default=0) + 1
        self._addresses = np.zeros(count, np.int64)
        self._sizes = [-1] * count  # a list: few are looked at, or all by a call that is rare
        for number, region in known.items():
            self._addresses[number], self._sizes[number] = region.address, region.size_bytes

    def run(self, copies: CopyBatch) -> None:
        """Execute copies between mapped regions. Raises CopyOutOfBounds, with nothing copied."""
        self._check(copies)
        run_copies(copies, self._views)

    def addressed(self, copies: CopyBatch) -> PitchedCopies:
        """Copies by address. Raises CopyOutOfBounds."""
        self._check(copies)
        addressed = np.empty((len(copies), 6), np.int64, order="F")
        addressed[:, 0] = self._addresses[copies[:, 0]] + copies[:, 1]
        addressed[:, 1] = self._addresses[copies[:, 2]] + copies[:, 3]
        addressed[:, 2:] = copies[:, 4:]
        return addressed

    def _check(self, copies: CopyBatch) -> None:
        if not self._are_inside(copies):
            columns = copies[:, (0, 2)]
            outside = (columns < 0) | (columns >= len(self._sizes))
            sizes = np.array(self._sizes)[np.where(outside, 0, columns)]  # region 0 never exists
            check_sizes(copies, sizes[:, 0], sizes[:, 1])

    def _are_inside(self, copies: CopyBatch) -> bool:
        """True where the least and the most of each column prove it of all copies, as they do of most batches."""
        if not len(copies):
            return True
        least, most = extremes(copies)
        if min(least) < 0 or min(least[4:6]) < 1 or max(most[0], most[2]) >= len(self._sizes):
            return False
        width, height = most[4:6]
        for region, offset, pitch in ((0, 1, 6), (2, 3, 7)):
            room = min(self._sizes[least[region] : most[region] + 1])  # -1 where one of them does not exist
            if most[offset] + (height - 1) * most[pitch] + width > room or (height > 1 and least[pitch] < width):
                return False
        return True
