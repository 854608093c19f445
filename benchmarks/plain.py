"""Plain copies to compare with: one big copy each way, between the same memory that swaps use."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.mover import Arrivals, Mover
from cachesvc.memory.cuda import CudaSlab
from cachesvc.memory.host_slab import HostSlab
from cachesvc.memory.mapped import address_of
from cachesvc.memory.seam import CopyJob, CopyStep, Slab
from cachesvc.model.transfer import Direction
from gpu_ops.streams import CopyQueue

LOAD, STORE = Direction


class PlainCopies:
    """``size_bytes`` each way, at most what is asked for and what lies together on the host.

    On a GPU each is one call of the driver on a stream of its own; otherwise one job on the backend's stream.
    """

    def __init__(self, mover: Mover, slab: Slab, host: HostSlab, wanted_bytes: int) -> None:
        self._mover = mover
        self._slab = slab
        extents = sorted(host.table.extents, key=lambda extent: -extent.pages)[:2]
        share = extents[-1].pages * host.page_bytes // (1 if len(extents) == len(Direction) else 2)
        self.size_bytes = min(wanted_bytes, share)
        self._extents = [extents[0], extents[-1]]
        self._offsets = [0, 0 if len(extents) == len(Direction) else self.size_bytes]
        self._addresses = [address_of(mover.host.view(host, extent.first_page)) for extent in self._extents]
        self._queues: dict[Direction, CopyQueue] = {}
        self._arrivals = Arrivals()
        self._tickets = itertools.count(1 << 40)

    def start(self) -> None:
        """Make the streams."""
        if self._mover.hardware.gpus:
            self._queues = {direction: self._mover.hardware.gpus[0].queue() for direction in Direction}
        for queue in self._queues.values():
            queue.start()

    def close(self) -> None:
        """Give the streams back."""
        for queue in self._queues.values():
            queue.close()

    def seconds(self, directions: Sequence[Direction]) -> float:
        """One copy for each direction, all at once."""
        began = time.perf_counter()
        for direction in directions:
            if self._queues:
                self._queue(direction)
            else:
                self._submit(direction)
        if self._queues:
            for direction in directions:
                self._queues[direction].synchronize()
        else:
            self._arrivals.wait(len(directions))
        return time.perf_counter() - began

    def one_way_seconds(self, directions: Sequence[Direction]) -> float:
        """One copy for each direction, one after another; the mean."""
        return sum(self.seconds([direction]) for direction in directions) / len(directions)

    def _queue(self, direction: Direction) -> None:
        slab = self._slab
        assert isinstance(slab, CudaSlab)
        part = place_of(direction)
        host = self._addresses[part] + self._offsets[part]
        device = slab.memory.address + part * self.size_bytes
        ends = (host, device) if direction is LOAD else (device, host)
        copy = np.array([(*ends, self.size_bytes, 1, self.size_bytes, self.size_bytes)], np.int64)
        self._queues[direction].copy(copy)

    def _submit(self, direction: Direction) -> None:
        part = place_of(direction)
        extent = self._extents[part]
        host = (extent.region, extent.offset + self._offsets[part])
        device = (self._slab.region, part * self.size_bytes)
        ends = (*host, *device) if direction is LOAD else (*device, *host)
        copies = np.array([(*ends, self.size_bytes, 1, self.size_bytes, self.size_bytes)], np.int64)
        backend, ticket = self._mover.backend, next(self._tickets)
        stream = (backend.load_stream if direction is LOAD else backend.store_stream)(self._mover.device)
        end = self._arrivals.done
        stream.submit(CopyJob(ticket, (CopyStep(copies),), None, None, 0, lambda error: end(ticket, error)))


def place_of(direction: Direction) -> int:
    """0 for loads, 1 for stores: they touch different halves."""
    return list(Direction).index(direction)
