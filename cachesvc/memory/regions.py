"""Where regions lie, for copies by address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cachesvc.memory.copies import check_sizes
from cachesvc.memory.gpu_seam import GpuDevice, PitchedCopies
from cachesvc.memory.seam import CopyBatch


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
        self._sizes = np.full(count, -1, np.int64)
        for number, region in known.items():
            self._addresses[number], self._sizes[number] = region.address, region.size_bytes

    def addressed(self, copies: CopyBatch) -> PitchedCopies:
        """Copies by address. Raises CopyOutOfBounds."""
        columns = copies[:, (0, 2)]
        outside = (columns < 0) | (columns >= len(self._sizes))
        numbers = np.where(outside, 0, columns)  # region 0 never exists
        sizes = self._sizes[numbers]
        check_sizes(copies, sizes[:, 0], sizes[:, 1])
        addressed = np.empty((len(copies), 6), np.int64)
        addressed[:, :2] = self._addresses[numbers] + copies[:, (1, 3)]
        addressed[:, 2:] = copies[:, 4:]
        return addressed
