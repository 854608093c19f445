"""Addresses of regions, for copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cachesvc.memory.copy.memcpy import check_sizes, extremes
from cachesvc.memory.cuda.interface import GpuDevice, PitchedCopies
from cachesvc.memory.interface import CopyBatch


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a copy may address. ``gpu`` holds it; None for pinned host memory."""

    address: int
    size_bytes: int
    gpu: GpuDevice | None


class Regions:
    """An immutable set of regions, with their places as columns by number: what a copy thread looks up at once."""

    def __init__(self, known: Mapping[int, Region]) -> None:
        self.known = known
        count = max(known, default=0) + 1
        self._addresses = np.zeros(count, np.int64)
        self._sizes = [-1] * count  # a list: few are looked at, or all by a call that is rare
        for number, region in known.items():
            self._addresses[number], self._sizes[number] = region.address, region.size_bytes

    def addressed(self, copies: CopyBatch) -> PitchedCopies:
        """Copies by address. Raises CopyOutOfBounds."""
        if not self._are_inside(copies):
            columns = copies[:, (0, 2)]
            outside = (columns < 0) | (columns >= len(self._sizes))
            sizes = np.array(self._sizes)[np.where(outside, 0, columns)]  # region 0 never exists
            check_sizes(copies, sizes[:, 0], sizes[:, 1])
        addressed = np.empty((len(copies), 6), np.int64, order="F")
        addressed[:, 0] = self._addresses[copies[:, 0]] + copies[:, 1]
        addressed[:, 1] = self._addresses[copies[:, 2]] + copies[:, 3]
        addressed[:, 2:] = copies[:, 4:]
        return addressed

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
