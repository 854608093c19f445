"""Plain copies to compare with: one big copy each way, made by the calling process.

On a GPU each is one call of the driver on a stream of its own, between pinned memory and device memory of this
process; without one, one NumPy copy on a thread of its own with a copy thread's priority.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from cachesvc.memory import numa
from cachesvc.memory.extents import address_of, populate, yield_to_callers
from cachesvc.model.words import Direction
from gpu_ops.gpu import gpu_by_uuid
from gpu_ops.streams import CopyQueue

LOAD, STORE = Direction
MOST_BYTES = 1 << 30


class PlainCopies:
    """``size_bytes`` each way: at most ``MOST_BYTES`` of what is asked for. ``uuid``: of the GPU, or empty. ``node``:
    where its host memory is to be; None: anywhere."""

    def __init__(self, uuid: str, wanted_bytes: int, node: int | None = None) -> None:
        self.size_bytes = min(wanted_bytes, MOST_BYTES)
        self._uuid = uuid
        self._node = node
        self._threads: list[threading.Thread] = []
        self._busy: list[CopyQueue] = []
        self._undo = ExitStack()
        self._queues: dict[Direction, CopyQueue] = {}
        self._ends: dict[Direction, tuple[int, int]] = {}
        self._views: dict[Direction, tuple[memoryview, memoryview]] = {}
        self._pinned: list[memoryview] = []  # mapped for as long as a GPU may copy

    def start(self) -> None:
        """Take memory for each way, and touch all of it. Raises CudaError."""
        views = {way: self._memory() for way in Direction}
        if not self._uuid:
            self._views = {way: (views[way], self._memory()) for way in Direction}
            return
        self._pinned = list(views.values())
        gpu = gpu_by_uuid(self._uuid)
        gpu.start()
        self._undo.callback(gpu.close)
        for way, view in views.items():
            host = address_of(view)
            gpu.register_host(host, self.size_bytes)
            self._undo.callback(gpu.unregister_host, host)
            device = gpu.allocate(self.size_bytes, vmm=False)
            self._undo.callback(device.close)
            self._ends[way] = (host, device.address) if way is LOAD else (device.address, host)
            queue = self._queues[way] = gpu.queue()
            queue.start()
            self._undo.callback(queue.close)

    def close(self) -> None:
        """Give all of it back."""
        self._undo.close()
        self._views.clear()
        self._pinned.clear()

    def seconds(self, directions: Sequence[Direction], size_bytes: int = MOST_BYTES) -> float:
        """Time one copy of ``size_bytes`` (or of all that there is, if less) for each direction, all at once."""
        return seconds_at_once([self], directions, size_bytes)

    def begin(self, directions: Sequence[Direction], size_bytes: int) -> None:
        """Start a copy of ``size_bytes`` for each direction."""
        if self._queues:
            self._busy = [self._queues[way] for way in directions]
            for way in directions:
                self._queues[way].copy(np.array([(*self._ends[way], size_bytes, 1, *[size_bytes] * 2)], np.int64))
            return
        self._threads = [threading.Thread(target=self._copy, args=(way, size_bytes)) for way in directions]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait for the copies that were started."""
        for thread in self._threads:
            thread.join()
        for queue in self._busy:
            queue.synchronize()

    def one_way_seconds(self, directions: Sequence[Direction], size_bytes: int) -> float:
        """One copy for each direction, one after another; the mean."""
        return sum(self.seconds([direction], size_bytes) for direction in directions) / len(directions)

    def _memory(self) -> memoryview:
        view = memoryview(mmap.mmap(-1, self.size_bytes))
        numa.bind(address_of(view), self.size_bytes, self._node)
        populate(view, 0, self.size_bytes)
        return view

    def _copy(self, way: Direction, size_bytes: int) -> None:
        yield_to_callers()
        source, target = self._views[way]
        np.copyto(np.frombuffer(target, np.uint8, size_bytes), np.frombuffer(source, np.uint8, size_bytes))


def seconds_at_once(
    every: Sequence[PlainCopies], directions: Sequence[Direction], size_bytes: int = MOST_BYTES
) -> float:
    """One copy for each direction with each of them, all at once: all are started, then all are waited for."""
    began = time.perf_counter()
    for one in every:
        one.begin(directions, min(size_bytes, one.size_bytes))
    for one in every:
        one.end()
    return time.perf_counter() - began
