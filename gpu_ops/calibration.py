"""Measures a GPU's link: what bytes, copies, rows and steps cost. Some 0.5 s; for planners and for operators.

The model: a pitched copy of h rows of w bytes takes ``per_copy_us + h * row_ns(w) / 1000 + h * w / bytes_per_us``. The
cost of a row is read off tall copies of rows of several widths, that of a copy off many copies of two rows. Copies of
one row go another way where the driver has it: what each takes is measured for several widths, in calls as small as
slices are: one call for all would first be submitted whole. Copies are like those of pages: anywhere in both memories,
dense on the host and a plane apart on the device, and other ones each time, for what was copied just before is in
caches that a page is not in.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_ops.gpu import Gpu
from gpu_ops.streams import PITCHED_FIELDS, CopyQueue, PitchedCopies

BUFFER_BYTES = 1 << 30
LEAST_BYTES = 64 << 20
"""Least bytes, where the device has no more, or the host not in time."""
RATE_BYTES = 4 * LEAST_BYTES
"""Host memory that is stored to in turns beside other GPUs: more than a processor's caches hold."""
TOUCH_S = 0.5
"""1 GiB takes 0.3 s in huge pages, and 2 s where there are none."""
MOVED_BYTES = 64 << 20
"""Bytes moved at a time, in any rows: the fixed cost of a measurement is the same for all."""
ROW_BYTES = 8 << 10
WIDTHS = (4 << 10, ROW_BYTES, 8448, 32 << 10, 72 << 10, 128 << 10)
"""Widths of rows to measure: planes of common layouts. 8448 is a DSA indexer's page, whose rows are not aligned."""
SINGLE_WIDTHS = (32 << 10, 64 << 10)
SINGLES_CALL_BYTES = 8 << 20
TALL_ROWS = 64
SHORT_ROWS = 2
STEPS = 64
MOST_STEP_US = 20.0
"""A word and its call: 6 to 12 us, and 41 on a machine that was busy (H200, 2026-11)."""
REPEATS = 9
HALF = 0.5
Prepare = Callable[[int], Callable[[], None]]
"""Makes what is timed, for a repeat."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Measured figures of a link. ``bytes_per_us`` is MB/s; ``both`` counts the bytes of both ways together.
    ``per_single_us``: infinite where copies of one row are copies like others, else as of the widest of ``singles_us``,
    which has each width that was tried. ``per_row_ns`` is of rows of ``ROW_BYTES``, ``row_ns`` of each width that was
    tried."""

    load_bytes_per_us: float
    store_bytes_per_us: float
    both_bytes_per_us: float
    per_copy_us: float
    per_row_ns: float
    per_step_us: float
    max_pitch_bytes: int
    is_batched: bool
    per_single_us: float = math.inf
    row_ns: tuple[tuple[int, float], ...] = ()
    singles_us: tuple[tuple[int, float], ...] = ()

    @property
    def narrow_plane_bytes(self) -> int:
        """Planes narrower than this load at less than half of the link's speed, one copy for each block of 64."""
        per_row_us = self.per_row_ns / 1e3 + self.per_copy_us / TALL_ROWS
        return int(HALF / (1 - HALF) * per_row_us * self.load_bytes_per_us)


class _Ground(NamedTuple):
    host: int
    device: int
    size_bytes: int


def calibrate(
    gpu: Gpu,
    widths: Sequence[int] = WIDTHS,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkFigures:
    """Measure a started GPU that is otherwise nearly idle, by rows of ``ROW_BYTES`` and ``widths``, on ``buffer_bytes``
    of memory at most on either side. Raises CudaError."""
    view, size_bytes = _host_memory(max(LEAST_BYTES, buffer_bytes // LEAST_BYTES * LEAST_BYTES))
    address = int(view.ctypes.data)
    with ExitStack() as undo:
        try:
            device = gpu.allocate(size_bytes, vmm=False)
        except MemoryError:
            size_bytes = LEAST_BYTES
            device = gpu.allocate(size_bytes, vmm=False)
        undo.callback(device.close)
        gpu.register_host(address, size_bytes)
        undo.callback(gpu.unregister_host, address)
        queues = (gpu.queue(), gpu.queue())
        for queue in queues:
            undo.callback(queue.close)
            queue.start()
        ground = _Ground(address, device.address, size_bytes)
        every = sorted({ROW_BYTES, *widths})
        return _figures(gpu, queues[0], _least_us(queues, _works(queues, ground, every), clock), every)


def store_rate(gpu: Gpu, begin: float, seconds: float, clock: Callable[[], float] = time.monotonic) -> float:
    """Bytes a second that a started GPU stores from ``begin`` on, while other GPUs of the host do so. Raises
    CudaError, MemoryError, and RuntimeError where it is ready only once they have ended."""
    view, touched_bytes = _host_memory(RATE_BYTES)
    ground = _Ground(int(view.ctypes.data), 0, touched_bytes)
    with ExitStack() as undo:
        device = gpu.allocate(LEAST_BYTES, vmm=False)
        undo.callback(device.close)
        gpu.register_host(ground.host, RATE_BYTES)
        undo.callback(gpu.unregister_host, ground.host)
        queue = gpu.queue()
        undo.callback(queue.close)
        queue.start()
        time.sleep(max(0.0, begin - clock()))  # all GPUs begin at one moment
        began, moved = clock(), 0
        if began > begin + seconds:
            raise RuntimeError(f"it was ready {began - begin:.2f} s late, after the others had stored")
        while not moved or clock() < begin + seconds:
            at = ground.host + moved % ground.size_bytes
            queue.copy(np.array([(device.address, at, LEAST_BYTES, 1, LEAST_BYTES, LEAST_BYTES)], np.int64))
            queue.synchronize()
            moved += LEAST_BYTES
        return moved / (clock() - began)


def _host_memory(size_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Memory whose pages are faulted in before they are measured, since an untouched page maps the shared zero page,
    and the bytes that were touched in time."""
    host = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        host.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(host, np.uint8)
    until = time.perf_counter() + TOUCH_S
    touched = 0
    while touched < len(view) and (not touched or time.perf_counter() < until):
        view[touched : touched + LEAST_BYTES : mmap.PAGESIZE] = 1
        touched = min(len(view), touched + LEAST_BYTES)
    return view, touched


def _works(queues: tuple[CopyQueue, CopyQueue], ground: _Ground, widths: Sequence[int]) -> dict[str, Prepare]:
    loads, stores = queues

    def flat(queue: CopyQueue, size_bytes: int = MOVED_BYTES, first: int = 0) -> Prepare:
        def prepare(repeat: int) -> Callable[[], None]:
            copies = _flat(ground, first + repeat * MOVED_BYTES % ground.size_bytes, size_bytes, is_load=queue is loads)
            return lambda: queue.copy(copies)

        return prepare

    def pitched(width: int, height: int) -> Prepare:
        def prepare(repeat: int) -> Callable[[], None]:
            copies = _pitched(ground, width, height, repeat)
            return lambda: loads.copy(copies)

        return prepare

    def both(repeat: int) -> Callable[[], None]:
        half = MOVED_BYTES // 2
        works = flat(loads, half)(repeat), flat(stores, half, half)(repeat)
        return lambda: [work() for work in works][-1]

    def steps(repeat: int) -> Callable[[], None]:
        tall = _pitched(ground, ROW_BYTES, TALL_ROWS, repeat)

        def work() -> None:
            for step in range(STEPS):
                at = step % len(tall)
                loads.copy(tall[at : at + 1])
                loads.write_words([(ground.device, step)])

        return work

    return {
        "load": flat(loads),
        "store": flat(stores),
        "both": both,
        "short": pitched(ROW_BYTES, SHORT_ROWS),
        "steps": steps,
        **{f"tall {width}": pitched(width, TALL_ROWS) for width in widths},
        **{f"single {width}": _singles(loads, ground, width) for width in _single_widths(loads)},
    }


def _figures(gpu: Gpu, loads: CopyQueue, least: Mapping[str, float], widths: Sequence[int]) -> LinkFigures:
    rate = MOVED_BYTES / least["load"]
    rows = {width: _rows_of(width) for width in widths}
    tall_us = {width: least[f"tall {width}"] for width in widths}
    single_us = {width: least[f"single {width}"] / _rows_of(width) for width in _single_widths(loads)}
    beyond = {width: max(0.0, tall_us[width] - rows[width] * width / rate) / rows[width] for width in widths}
    beyond_short = max(beyond[ROW_BYTES], least["short"] / rows[ROW_BYTES] - ROW_BYTES / rate)
    # a row of a copy of h costs copy / h + row, for h of SHORT_ROWS and of TALL_ROWS
    per_copy = (beyond_short - beyond[ROW_BYTES]) / (1 / SHORT_ROWS - 1 / TALL_ROWS)
    row_us = {width: max(0.0, beyond[width] - per_copy / TALL_ROWS) for width in widths}
    one_us = per_copy + TALL_ROWS * (row_us[ROW_BYTES] + ROW_BYTES / rate)
    return LinkFigures(
        load_bytes_per_us=rate,
        store_bytes_per_us=MOVED_BYTES / least["store"],
        both_bytes_per_us=MOVED_BYTES / least["both"],
        per_copy_us=per_copy,
        per_row_ns=row_us[ROW_BYTES] * 1e3,
        per_step_us=min(MOST_STEP_US, max(0.0, least["steps"] / STEPS - one_us)),
        max_pitch_bytes=gpu.facts.max_pitch_bytes,
        is_batched=loads.is_batched,
        per_single_us=single_us[max(single_us)] if single_us else math.inf,
        row_ns=tuple((width, us * 1e3) for width, us in row_us.items()),
        singles_us=tuple(single_us.items()),
    )


def _single_widths(queue: CopyQueue) -> Sequence[int]:
    """Widths of single rows to measure; none where single rows are copies like others."""
    return SINGLE_WIDTHS if queue.takes_singles else ()


def _singles(queue: CopyQueue, ground: _Ground, width: int) -> Prepare:

    def prepare(repeat: int) -> Callable[[], None]:
        copies = _pitched(ground, width, 1, repeat)
        rows = SINGLES_CALL_BYTES // width
        calls = [copies[at : at + rows] for at in range(0, len(copies), rows)]

        def work() -> None:
            for call in calls:
                queue.copy(call)

        return work

    return prepare


def _rows_of(width: int) -> int:
    return MOVED_BYTES // (TALL_ROWS * width) * TALL_ROWS


def _least_us(
    queues: tuple[CopyQueue, CopyQueue], works: Mapping[str, Prepare], clock: Callable[[], float]
) -> dict[str, float]:
    """Least microseconds until all copies of each work have landed. Other load of the machine only adds time, and would
    distort figures that are differences. The works take turns, so that a burst of load does not hit all repeats of
    one."""
    least = dict.fromkeys(works, math.inf)
    for repeat in range(REPEATS + 1):
        for name, prepare in works.items():
            work = prepare(repeat)
            began = clock()
            work()
            for queue in queues:
                queue.synchronize()
            if repeat:  # the first one warms up
                least[name] = min(least[name], (clock() - began) * 1e6)
    return least


def _flat(ground: _Ground, at: int, size_bytes: int, *, is_load: bool) -> PitchedCopies:
    ends = (ground.host + at, ground.device + at) if is_load else (ground.device + at, ground.host + at)
    return np.array([(*ends, size_bytes, 1, size_bytes, size_bytes)], np.int64)


def _pitched(ground: _Ground, width: int, height: int, repeat: int) -> PitchedCopies:
    """Copies of some ``MOVED_BYTES`` in pages of ``TALL_ROWS`` rows of ``width``, anywhere on both sides, ``height`` a
    copy."""
    pages = ground.size_bytes // (TALL_ROWS * width)
    plane_bytes = pages * width
    rng = np.random.default_rng((width, repeat))
    count = MOVED_BYTES // (TALL_ROWS * width)
    ours, theirs = rng.permutation(pages)[:count, None], rng.permutation(pages)[:count, None]
    first_rows = np.arange(0, TALL_ROWS, height)
    copies = np.empty((len(ours) * len(first_rows), len(PITCHED_FIELDS)), np.int64)
    copies[:, 0] = ground.host + ((theirs * TALL_ROWS + first_rows) * width).ravel()
    copies[:, 1] = ground.device + (first_rows * plane_bytes + ours * width).ravel()
    copies[:, 2:] = (width, height, width, plane_bytes)
    return copies
