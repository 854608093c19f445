"""A stream for copies: pitched copies by the copy engines, words written in order, events to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_size_t, c_void_p
from queue import SimpleQueue
from threading import Thread

import numpy as np
import numpy.typing as npt

from gpu_ops.driver import Copy2D, CopyAttributes, Driver, WordOperation, current

PITCHED_FIELDS = ("src", "dst", "width", "height", "src_pitch", "dst_pitch")
PitchedCopies = npt.NDArray[np.int64]
"""``[copies, len(PITCHED_FIELDS)]``: addresses, and bytes but for ``height``, which counts rows."""

NON_BLOCKING = 1
LOWEST_PRIORITY = 0
"""Copies give way to whatever the engine runs."""
SLEEP_WHILE_WAITING, NO_TIMING = 1, 2
UNIFIED = 4
WRITE_WORD = 2
POINTER = 1
STREAM_ORDER = 1
PREFER_COPY_ENGINES = 1

_OPERAND = np.dtype(
    {
        "names": ["kind", "address", "pitch", "layer_height", "location", "device"],
        "formats": ["<u4", "<u8", "<u8", "<u8", "<u4", "<i4"],
        "offsets": [0, 8, 16, 24, 32, 36],
        "itemsize": 40,
    }
)
BATCH_ENTRY = np.dtype(
    {
        "names": ["src", "dst", "width", "height", "depth", "order", "flags"],
        "formats": [_OPERAND, _OPERAND, "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 40, 80, 88, 96, 104, 108],
        "itemsize": 112,
    }
)
"""CUDA_MEMCPY3D_BATCH_OP."""
_WORDS = 14
_PLACES = (1, 6, 10, 11, 2, 7)
"""Positions of PitchedCopies' columns in an entry of 14 words of 64 bits."""
_LIKE = np.zeros((), BATCH_ENTRY)
_LIKE["src"]["kind"] = _LIKE["dst"]["kind"] = POINTER
_LIKE["depth"], _LIKE["order"], _LIKE["flags"] = 1, STREAM_ORDER, PREFER_COPY_ENGINES
_LIKE_WORDS = np.frombuffer(_LIKE.tobytes(), np.int64)
"""The words that all entries share."""
SPLIT_COPIES = 256
"""From this number of narrow rows on a second thread submits half of them, on a stream of its own."""
WIDEST_SPLIT = 48 << 10
"""A wider row takes the link longer than one thread needs to submit it. Scattered rows of 32 KiB, layer by layer: 0.53
of one memcpy by one thread, 0.67 by two; of 64 KiB two gain nothing, and take half as much processor time again (two
H100s, 2026-11)."""
SLICE_COPIES = 2048
"""Number of copies with room from the start: as many as plans have in a part."""


class CopyQueue:
    """Copies, and words and marks behind them: each of these comes after all that was queued before it. Copies may pass
    one another, on a stream of their own or the one of the second thread, so none may need what another brings unless
    the caller has waited between them. Nothing here runs a kernel. One thread at a time.

    ``is_batched``: one call submits many copies; ``takes_singles``: copies of one row go together in a cheaper call
    (drivers from CUDA 12.8 on)."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._stream = 0
        self.is_batched = False
        self.takes_singles = False
        self._events: list[int] = []
        self._entries = BatchEntries(SLICE_COPIES)
        self._second = _SecondThread(context)

    def start(self) -> None:
        """Make the stream. Raises CudaError."""
        with current(self._context) as cuda:
            self._stream = cuda.number("cuStreamCreateWithPriority", c_void_p, NON_BLOCKING, LOWEST_PRIORITY)
            self.is_batched = cuda.has("cuMemcpy3DBatchAsync")
            self.takes_singles = cuda.has("cuMemcpyBatchAsync")

    def copy(self, copies: PitchedCopies) -> None:
        """Queue copies between any two memories that this GPU reaches. Raises CudaError; some may be queued then."""
        with current(self._context) as cuda:
            self._copy(cuda, copies)

    def write_words(self, words: Sequence[tuple[int, int]]) -> None:
        """Set each (address, value), in order, after everything before is done."""
        with current(self._context) as cuda:
            self._write_words(cuda, words)

    def mark(self) -> Mark:
        """Something to wait for: everything that was queued so far."""
        with current(self._context) as cuda:
            return self._mark(cuda)

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> Mark:
        with current(self._context) as cuda:
            self._copy(cuda, copies)
            if words:
                self._write_words(cuda, words)
            return self._mark(cuda)

    def synchronize(self) -> None:
        """Wait until everything is done. Raises CudaError for what broke on the way."""
        with current(self._context) as cuda:
            cuda.call("cuStreamSynchronize", self._stream)
            self._second.synchronize(cuda)

    def close(self) -> None:
        """Wait, and give the stream back. Idempotent. Raises CudaError for what broke on the way."""
        if not self._stream:
            return
        try:
            self.synchronize()
        finally:  # where that breaks, nothing goes on any more either
            stream, self._stream = self._stream, 0
            self._second.close()
            with current(self._context) as cuda:
                cuda.call("cuStreamDestroy_v2", stream)
                while self._events:
                    cuda.call("cuEventDestroy_v2", self._events.pop())

    def _copy(self, cuda: Driver, copies: PitchedCopies) -> None:
        if len(copies) and self.takes_singles:
            is_single = copies[:, 3] == 1
            singles = np.count_nonzero(is_single)
            if singles == len(copies):
                self._copy_singles(cuda, copies)
                return
            if singles:
                self._copy_singles(cuda, copies[is_single])
                copies = copies[~is_single]
        if not len(copies):
            return
        if not self.is_batched:
            self._copy_one_by_one(cuda, copies)
            return
        if len(copies) > self._entries.room:
            self._entries = BatchEntries(len(copies))
        address, failed = self._entries.fill(copies), c_size_t()
        cuda.call("cuMemcpy3DBatchAsync", len(copies), address, ctypes.byref(failed), 0, self._stream)

    def _copy_singles(self, cuda: Driver, copies: PitchedCopies) -> None:
        if len(copies) < SPLIT_COPIES or copies[:, 2].max() > WIDEST_SPLIT:
            _copy_rows(cuda, copies, self._stream)
            return
        half = len(copies) // 2
        self._second.begin(copies[half:])
        try:
            _copy_rows(cuda, copies[:half], self._stream)
        finally:
            reached = self._second.end()
        cuda.call("cuStreamWaitEvent", self._stream, reached, 0)

    def _copy_one_by_one(self, cuda: Driver, copies: PitchedCopies) -> None:
        one = Copy2D(src_type=UNIFIED, dst_type=UNIFIED)
        for src, dst, width, height, src_pitch, dst_pitch in copies.tolist():
            if height == 1:
                cuda.call("cuMemcpyAsync", dst, src, width, self._stream)
                continue
            one.src_device, one.dst_device, one.width, one.height = src, dst, width, height
            one.src_pitch, one.dst_pitch = src_pitch, dst_pitch
            cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(one), self._stream)

    def _write_words(self, cuda: Driver, words: Sequence[tuple[int, int]]) -> None:
        operations = (WordOperation * len(words))()
        for operation, (address, value) in zip(operations, words, strict=True):
            operation.operation, operation.address, operation.value = WRITE_WORD, address, value & 0xFFFFFFFF
        cuda.call("cuStreamBatchMemOp_v2", self._stream, len(words), operations, 0)

    def _mark(self, cuda: Driver) -> Mark:
        event = self._events.pop() if self._events else _new_event(cuda)
        cuda.call("cuEventRecord", event, self._stream)
        return Mark(self._context, event, self._events)


def _copy_rows(cuda: Driver, copies: PitchedCopies, stream: int) -> None:
    """Copies of one row, at a fifth of what pitched ones cost (H100, 2026-11: 0.65 us each)."""
    columns = np.ascontiguousarray(copies[:, :3].T)
    sources, column_bytes = columns.ctypes.data, columns.strides[0]
    rules, first, failed = CopyAttributes(order=STREAM_ORDER, flags=PREFER_COPY_ENGINES), c_size_t(), c_size_t()
    cuda.call(
        "cuMemcpyBatchAsync",
        sources + column_bytes,
        sources,
        sources + 2 * column_bytes,
        len(copies),
        ctypes.byref(rules),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        stream,
    )


class _SecondThread:
    """Submits rows beside a queue's own thread, on a stream of its own; both are there from the first ``begin`` on.
    What it queues waits for nothing that the queue has queued."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._stream = self._reached = 0
        self._thread: Thread | None = None
        self._wanted: SimpleQueue[PitchedCopies | None] = SimpleQueue()
        self._done: SimpleQueue[Exception | None] = SimpleQueue()

    def begin(self, copies: PitchedCopies) -> None:
        """Have rows submitted; ``end`` comes next. Raises CudaError, and RuntimeError where no thread can be started:
        then nothing was begun."""
        if not self._stream:
            with current(self._context) as cuda:
                self._reached = self._reached or _new_event(cuda)
                self._stream = cuda.number("cuStreamCreateWithPriority", c_void_p, NON_BLOCKING, LOWEST_PRIORITY)
        if self._thread is None:
            thread = Thread(target=self._serve, name="copy-rows", daemon=True)
            thread.start()
            self._thread = thread
        self._wanted.put(copies)

    def end(self) -> int:
        """Event that is reached when the submitted copies are done. Raises CudaError."""
        if (failed := self._done.get()) is not None:
            raise failed
        return self._reached

    def synchronize(self, cuda: Driver) -> None:
        """Wait until all is copied. Raises CudaError."""
        if self._stream:
            cuda.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """End the thread, and give the stream back, once nothing is in flight. Idempotent. Raises CudaError."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wanted.put(None)
            thread.join()
        stream, self._stream = self._stream, 0
        event, self._reached = self._reached, 0
        if stream:
            with current(self._context) as cuda:
                cuda.call("cuStreamDestroy_v2", stream)
                cuda.call("cuEventDestroy_v2", event)

    def _serve(self) -> None:
        while (copies := self._wanted.get()) is not None:
            failed = None
            try:
                with current(self._context) as cuda:
                    _copy_rows(cuda, copies, self._stream)
                    cuda.call("cuEventRecord", self._reached, self._stream)
            except Exception as error:  # noqa: BLE001 - a thread's root: the waiter raises it
                failed = error
            self._done.put(failed)


def _new_event(cuda: Driver) -> int:
    return cuda.number("cuEventCreate", c_void_p, SLEEP_WHILE_WAITING | NO_TIMING)


class Mark:
    """A point on a stream. Waiting sleeps; ``close`` when it is not needed any more: its event is used again."""

    def __init__(self, context: int, event: int, events: list[int]) -> None:
        self._context = context
        self._event = event
        self._events = events

    def wait(self) -> None:
        """Wait until the stream has come here. Raises CudaError for what broke on the way."""
        with current(self._context) as cuda:
            cuda.call("cuEventSynchronize", self._event)

    def close(self) -> None:
        if self._event:
            self._events.append(self._event)
            self._event = 0


class BatchEntries:
    """Room for copies as the driver's structures, which it reads during a call and not after."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._words = np.empty((room, _WORDS), np.int64)
        self._words[:] = _LIKE_WORDS
        self._address = int(self._words.ctypes.data)

    def fill(self, copies: PitchedCopies) -> int:
        """Fill the structures of the copies; their address, valid until the next call."""
        self._words[: len(copies), _PLACES] = copies
        return self._address

    def filled(self, count: int) -> npt.NDArray[np.void]:
        """The first of them, ``[count]`` of ``BATCH_ENTRY``."""
        return self._words[:count].view(BATCH_ENTRY)[:, 0]
