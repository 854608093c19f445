"""Measures a GPU's link: what bytes, copies, rows and steps cost. Some 100 ms; for planners and for operators.

The model: a pitched copy of h rows of w bytes takes ``per_copy_us + h * per_row_ns / 1000 + h * w / bytes_per_us``. The
cost of a row is read off tall copies of narrow rows, that of a copy off many copies of two rows. Copies of one row go
another way where the driver has it, and are limited by the processor: ``per_single_us`` is what each takes it.
"""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from gpu_ops.gpu import Gpu
from gpu_ops.streams import PITCHED_FIELDS, CopyQueue, PitchedCopies

BUFFER_BYTES = 64 << 20
ROW_BYTES = 8 << 10
TALL_ROWS = 64
SHORT_ROWS = 2
STEPS = 64
REPEATS = 5
HALF = 0.5


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What was measured. ``bytes_per_us`` is MB/s; ``both`` counts the bytes of both ways together. ``per_single_us``:
    infinite where copies of one row are copies like others."""

    load_bytes_per_us: float
    store_bytes_per_us: float
    both_bytes_per_us: float
    per_copy_us: float
    per_row_ns: float
    per_step_us: float
    max_pitch_bytes: int
    is_batched: bool
    per_single_us: float = math.inf

    @property
    def narrow_plane_bytes(self) -> int:
        """Planes narrower than this load at less than half of the link's speed, one copy for each block of 64."""
        per_row_us = self.per_row_ns / 1e3 + self.per_copy_us / TALL_ROWS
        return int(HALF / (1 - HALF) * per_row_us * self.load_bytes_per_us)


def calibrate(gpu: Gpu) -> LinkFigures:
    """Measure a started GPU that nobody else uses much. Raises CudaError."""
    host = mmap.mmap(-1, BUFFER_BYTES)
    view = np.frombuffer(host, np.uint8)
    view[:: mmap.PAGESIZE] = 1  # give it its pages: a zero page is nobody's memory
    address = int(view.ctypes.data)
    with ExitStack() as undo:
        device = gpu.allocate(BUFFER_BYTES, vmm=False)
        undo.callback(device.close)
        gpu.register_host(address, BUFFER_BYTES)
        undo.callback(gpu.unregister_host, address)
        queues = (gpu.queue(), gpu.queue())
        for queue in queues:
            undo.callback(queue.close)
            queue.start()
        return _measure(gpu, queues, address, device.address)


def _measure(gpu: Gpu, queues: tuple[CopyQueue, CopyQueue], host: int, device: int) -> LinkFigures:
    loads, stores = queues
    half = BUFFER_BYTES // 2
    load_us = _timed(queues, lambda: loads.copy(_flat(host, device, BUFFER_BYTES)))
    store_us = _timed(queues, lambda: stores.copy(_flat(device, host, BUFFER_BYTES)))

    def both() -> None:
        loads.copy(_flat(host, device, half))
        stores.copy(_flat(device + half, host + half, half))

    both_us = _timed(queues, both)
    rate = BUFFER_BYTES / load_us
    tall = _pitched(host, device, TALL_ROWS)
    short = _pitched(host, device, SHORT_ROWS)
    singles = _pitched(host, device, 1)
    tall_us = _timed(queues, lambda: loads.copy(tall))
    short_us = _timed(queues, lambda: loads.copy(short))
    singles_us = _timed(queues, lambda: loads.copy(singles))
    rows = len(singles)
    beyond_tall = max(0.0, tall_us - rows * ROW_BYTES / rate)
    beyond_short = max(beyond_tall, short_us - rows * ROW_BYTES / rate)
    # rows / h * copy + rows * row = beyond, for h of SHORT_ROWS and of TALL_ROWS
    per_copy = (beyond_short - beyond_tall) / (rows * (1 / SHORT_ROWS - 1 / TALL_ROWS))
    per_row = max(0.0, beyond_tall / rows - per_copy / TALL_ROWS)

    def steps() -> None:
        for step in range(STEPS):
            at = step % len(tall)
            loads.copy(tall[at : at + 1])
            loads.write_words([(device, step)])

    steps_us = _timed(queues, steps)
    one_us = per_copy + TALL_ROWS * (per_row + ROW_BYTES / rate)
    return LinkFigures(
        load_bytes_per_us=rate,
        store_bytes_per_us=BUFFER_BYTES / store_us,
        both_bytes_per_us=BUFFER_BYTES / both_us,
        per_copy_us=per_copy,
        per_row_ns=per_row * 1e3,
        per_step_us=max(0.0, steps_us / STEPS - one_us),
        max_pitch_bytes=gpu.facts.max_pitch_bytes,
        is_batched=loads.is_batched,
        per_single_us=singles_us / rows if loads.takes_singles else math.inf,
    )


def _timed(queues: tuple[CopyQueue, CopyQueue], work: Callable[[], None]) -> float:
    """Median microseconds until everything has landed."""
    spent = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        for queue in queues:
            queue.synchronize()
        spent.append((time.perf_counter() - began) * 1e6)
    return statistics.median(spent[1:])


def _flat(src: int, dst: int, size_bytes: int) -> PitchedCopies:
    return np.array([(src, dst, size_bytes, 1, size_bytes, size_bytes)], np.int64)


def _pitched(host: int, device: int, height: int) -> PitchedCopies:
    """A quarter of the buffer in rows of ``ROW_BYTES``, ``height`` a copy: dense on the host, spaced on the device."""
    rows = BUFFER_BYTES // 4 // ROW_BYTES
    copies = np.empty((rows // height, len(PITCHED_FIELDS)), np.int64)
    first = np.arange(len(copies), dtype=np.int64) * height
    copies[:, 0] = host + first * ROW_BYTES
    copies[:, 1] = device + first * 2 * ROW_BYTES
    copies[:, 2:] = (ROW_BYTES, height, ROW_BYTES, 2 * ROW_BYTES)
    return copies
