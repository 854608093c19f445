"""Work on a GPU's two streams: slices of copies, and the words that show their progress."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from cachesvc.memory.gpu_health import GpuHealth
from cachesvc.memory.gpu_seam import GpuDevice, GpuMark, GpuQueue, PitchedCopies
from cachesvc.memory.mapped import address_of
from cachesvc.memory.regions import Regions
from cachesvc.memory.seam import Slice
from cachesvc.memory.timeline import HostTimeline, Sheet
from cachesvc.model.futex import WORD_BYTES
from cachesvc.model.transfer import Direction, Urgency

SLICES_ON_WAY = 2
"""Slices in flight: while one is copied the next is submitted, so the link never waits for this process, which can
still reorder jobs."""
NEAR_S = 300e-6
"""Time around a job's expected end in which this thread polls instead of sleeping, seconds. To wake up takes a sleeper
50 to 100 us, in the driver too, and the waiter for the job that time once more (H100, 2026-11)."""
SLEEPER_LATE_S = 60e-6
"""Delay of the driver's wake-up after a slice has landed, seconds (H100, 2026-11)."""
USUAL_BYTES_PER_S = 50e9
"""Assumed rate of a link, until its slices have shown it."""
TELLING_BYTES = 4 << 20
"""Least size of a slice that shows the rate of its link: in smaller ones the driver's own time dominates."""


class CudaSheet(Sheet):
    """Words in pinned host memory: this GPU's streams write them, those of the model's engines wait for them.

    Measured against words on the device (H100, 2026-11): a waiting stream goes on 16 us after the write either way, a
    wait that is met costs 4.5 against 4.3 us, and waiting streams take nothing of the link. But processors read them
    at once, and a client whose daemon died can end its streams' waits with a store; from the device's side it may not:
    with 128 streams waiting, one more stream to release them never gets its turn.
    """

    def __init__(self, gpu: GpuDevice, words: int, fd: int | None = None) -> None:
        """``fd``: as of ``Sheet``. Raises OSError, RuntimeError."""
        super().__init__(words, is_shared=True, fd=fd)
        self._gpu = gpu
        with ExitStack() as undo:
            undo.callback(super().close)
            gpu.register_host(self.address, words * WORD_BYTES)
            undo.callback(gpu.unregister_host, self.address)
            self._base = gpu.device_address(self.address)
            undo.pop_all()
        self._is_pinned = True

    def place(self, word: int) -> int:
        """Address of a word for the GPU."""
        return self._base + WORD_BYTES * word

    def close(self) -> None:
        """Unpin, and close the descriptor. Idempotent."""
        try:
            if self._is_pinned:
                self._is_pinned = False
                self._gpu.unregister_host(self.address)
        finally:
            super().close()


PRACTICE_WIDTH, PRACTICE_ROWS = 1 << 10, 8


class PracticeGround:
    """Memory on both sides that holds nothing: a rehearsal copies it, so that the driver's calls are rehearsed too."""

    def __init__(self, gpu: GpuDevice, *, vmm: bool) -> None:
        """Takes the memory, of a started GPU, as slabs are taken there. Raises RuntimeError, MemoryError."""
        size_bytes = PRACTICE_WIDTH * PRACTICE_ROWS
        self._host = memoryview(mmap.mmap(-1, size_bytes))
        with ExitStack() as undo:
            self._device = gpu.allocate(size_bytes, vmm=vmm)
            undo.callback(self._device.close)
            gpu.register_host(address_of(self._host), size_bytes)
            undo.callback(gpu.unregister_host, address_of(self._host))
            self._undo = undo.pop_all()

    def copies(self, way: Direction) -> PitchedCopies:
        """Copies of either kind: of two rows, and of one."""
        half, width = PRACTICE_WIDTH * PRACTICE_ROWS // 2, PRACTICE_WIDTH
        ends = np.array([address_of(self._host), self._device.address], np.int64)
        source, target = ends if way is Direction.LOAD else ends[::-1]
        tall = [(source + at, target + at, width, 2, width, width) for at in range(0, half, 2 * width)]
        single = [(source + at, target + at, width, 1, width, width) for at in range(half, 2 * half, width)]
        return np.array(tall + single, np.int64)

    def close(self) -> None:
        """Give the memory back; no copy is on its way. Idempotent. Raises RuntimeError."""
        self._undo.close()


class _OnWay(NamedTuple):
    """A slice that was queued, when, and the word that moves with it. ``is_awaited``: its end has a waiter."""

    mark: GpuMark
    word: int | None
    size_bytes: int
    queued_at: float
    is_awaited: bool


class CudaRunner:
    """Queues slices on one stream."""

    depth = SLICES_ON_WAY
    only_queues = True

    def __init__(
        self,
        queue: GpuQueue,
        timeline: HostTimeline,
        regions: Callable[[], Regions],
        health: GpuHealth,
        practice: PitchedCopies,
    ) -> None:
        """``practice``: what is copied for a job that has neither copies nor a word, for it is a rehearsal."""
        self._practice = practice
        self._queue = queue
        self._timeline = timeline
        self._regions = regions
        self._health = health
        self._landed_at = 0.0
        self._bytes_per_s = USUAL_BYTES_PER_S

    def begin(self) -> None:
        """No-op: calls make the context current by themselves."""

    def submit(self, piece: Slice) -> _OnWay:
        """Queue the copies and the word. Raises CopyOutOfBounds, RuntimeError, and Unavailable once the GPU has broken;
        nothing is on its way then."""
        self._health.check()
        is_rehearsal = piece.job.word is None and not len(piece.copies)
        copies = self._practice if is_rehearsal else self._regions().addressed(piece.copies)
        word = piece.job.word if piece.word_value is not None else None
        words = [] if word is None or piece.word_value is None else [(self._timeline.place(word), piece.word_value)]
        is_awaited = piece.is_last and word is not None and piece.job.urgency is Urgency.AWAITED
        try:
            return _OnWay(self._queue.submit(copies, words), word, piece.size_bytes, time.monotonic(), is_awaited)
        except RuntimeError as error:
            self._settle(error)
            raise

    def wait(self, started: object) -> None:
        """Wait until the mark is reached, then wake the waiters on its word. Where that is a job's last, they are woken
        once before too, to be awake by then. Raises RuntimeError, and Unavailable once the GPU has broken."""
        assert isinstance(started, _OnWay)
        try:
            has_slept = not (started.is_awaited and self._has_landed_in_time(started))
            if has_slept:
                started.mark.wait()
            if started.word is not None:
                self._timeline.wake(started.word)
            self._learn(started, time.monotonic() - SLEEPER_LATE_S * has_slept)
        except RuntimeError as error:
            self._settle(error)
            raise
        finally:
            started.mark.close()

    def _has_landed_in_time(self, started: _OnWay) -> bool:
        """Sleep until a slice is about to land, and look until it has; False where it does not for some time."""
        assert started.word is not None
        due = max(self._landed_at, started.queued_at) + started.size_bytes / self._bytes_per_s
        while (early_s := due - NEAR_S - time.monotonic()) > 0 and not started.mark.is_reached:
            time.sleep(min(early_s, NEAR_S))  # the link may be faster than its slices have told: narrow rows are slow
        self._timeline.wake(started.word)
        until = max(due, time.monotonic()) + NEAR_S
        while not started.mark.is_reached:
            if time.monotonic() > until:
                return False
            time.sleep(0)  # the other threads of this process go on
        started.mark.wait()  # raises what broke
        return True

    def _learn(self, started: _OnWay, landed_at: float) -> None:
        """Learn the link's rate from a slice that has landed: what it waited for had landed before."""
        took_s = landed_at - max(self._landed_at, started.queued_at)
        self._landed_at = landed_at
        if started.size_bytes >= TELLING_BYTES and took_s > 0:
            self._bytes_per_s = (self._bytes_per_s + started.size_bytes / took_s) / 2

    def _settle(self, error: RuntimeError) -> None:
        """Wait for what may be on its way. Where that breaks too, it was not one call alone: raises Unavailable."""
        try:
            self._queue.synchronize()
        except RuntimeError:
            self._health.broke(error)
            self._health.check()
