"""Work on a GPU's two streams: slices of copies, and the words that show their progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from cachesvc.memory.cuda.health import GpuHealth
from cachesvc.memory.cuda.interface import GpuDevice, GpuMark, GpuQueue
from cachesvc.memory.cuda.regions import Regions
from cachesvc.memory.interface import Slice
from cachesvc.memory.timeline import HostTimeline, MappedSheet
from cachesvc.model.futex import WORD_BYTES

SLICES_ON_WAY = 2
"""While one is copied the next is submitted: the link never waits for this process, which can still change its mind."""


class CudaSheet(MappedSheet):
    """Words in pinned host memory: this GPU's streams write them, those of the model's engines wait for them.

    Measured against words on the device (H100, 2026-11): a waiting stream goes on 16 us after the write either way, a
    wait that is met costs 4.5 against 4.3 us, and waiting streams take nothing of the link. But processors read them
    at once, and a client whose daemon died can end its streams' waits with a store; from the device's side it may not:
    with 128 streams waiting, one more stream to release them never gets its turn.
    """

    def __init__(self, gpu: GpuDevice, words: int, fd: int | None = None) -> None:
        """``fd``: as of ``MappedSheet``. Raises OSError, RuntimeError."""
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


class _OnWay(NamedTuple):
    """A slice that was queued, and the word that moves with it."""

    mark: GpuMark
    word: int | None


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
    ) -> None:
        self._queue = queue
        self._timeline = timeline
        self._regions = regions
        self._health = health

    def begin(self) -> None:
        """No-op: calls make the context current by themselves."""

    def submit(self, piece: Slice) -> _OnWay:
        """Queue the copies and the word. Raises CopyOutOfBounds, RuntimeError, and Unavailable once the GPU has broken;
        nothing is on its way then."""
        self._health.check()
        copies = self._regions().addressed(piece.copies)
        word = piece.job.word if piece.word_value is not None else None
        words = [] if word is None or piece.word_value is None else [(self._timeline.place(word), piece.word_value)]
        try:
            return _OnWay(self._queue.submit(copies, words), word)
        except RuntimeError as error:
            self._settle(error)
            raise

    def wait(self, started: object) -> None:
        """Wait for the mark, then wake the waiters of its word. Raises RuntimeError, and Unavailable once the GPU has
        broken."""
        assert isinstance(started, _OnWay)
        try:
            started.mark.wait()
            if started.word is not None:
                self._timeline.wake(started.word)
        except RuntimeError as error:
            self._settle(error)
            raise
        finally:
            started.mark.close()

    def _settle(self, error: RuntimeError) -> None:
        """Wait for what may be on its way. Where that breaks too, it was not one call alone: raises Unavailable."""
        try:
            self._queue.synchronize()
        except RuntimeError:
            self._health.broke(error)
            self._health.check()
