"""Measuring a link: every step that is timed copies something, and what breaks on the way gives back what was taken."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from cachesvc.config import Config
from cachesvc.hardware import link_costs
from cachesvc.model.errors import Unavailable
from cachesvc.mover.processes import AT_ONCE_AHEAD_S
from gpu_ops.calibration import (
    LEAST_BYTES,
    MOVED_BYTES,
    RATE_BYTES,
    REPEATS,
    ROW_BYTES,
    SINGLE_WIDTHS,
    SINGLES_CALL_BYTES,
    STEPS,
    TALL_ROWS,
    TOUCH_S,
    calibrate,
    store_rate,
)
from gpu_ops.gpu import Gpu, GpuFacts
from gpu_ops.streams import PitchedCopies
from tests.long_cases import looped

FACTS = GpuFacts("GPU-0", 0, "none", "0000:00:00.0", 1 << 30, (9, 0), 1 << 31)


class CountingGpu:
    """Copies nothing at once. ``breaks``: the call that fails; ``held``: what was taken and not given back."""

    def __init__(self, breaks: str = "") -> None:
        self.facts = FACTS
        self.breaks = breaks
        self.held: Counter[str] = Counter()
        self.copies: list[PitchedCopies] = []
        self.steps: list[int] = []
        self.free_bytes = 1 << 30
        self.size_bytes = self.host = 0

    def call(self, name: str) -> None:
        if name == self.breaks:
            raise RuntimeError(f"{name} broke")

    def allocate(self, size_bytes: int, *, vmm: bool) -> CountingMemory:
        assert not vmm
        if size_bytes > self.free_bytes:
            raise MemoryError(size_bytes)
        self.size_bytes = size_bytes
        self.held["memory"] += 1
        return CountingMemory(self)

    def register_host(self, address: int, size_bytes: int) -> None:
        assert size_bytes in (self.size_bytes, RATE_BYTES)
        self.host = address
        self.call("register_host")
        self.held["pin"] += 1

    def unregister_host(self, address: int) -> None:
        assert address
        self.held["pin"] -= 1

    def queue(self) -> CountingQueue:
        return CountingQueue(self)


class CountingMemory:
    address = 1 << 40

    def __init__(self, gpu: CountingGpu) -> None:
        self._gpu = gpu

    def close(self) -> None:
        self._gpu.held["memory"] -= 1


class CountingQueue:
    is_batched = True
    takes_singles = True

    def __init__(self, gpu: CountingGpu) -> None:
        self._gpu = gpu

    def start(self) -> None:
        self._gpu.call("queue")
        self._gpu.held["queue"] += 1

    def copy(self, copies: PitchedCopies) -> None:
        self._gpu.call("copy")
        self._gpu.copies.append(copies)

    def write_words(self, words: list[tuple[int, int]]) -> None:
        assert words
        last = self._gpu.copies[-1]
        self._gpu.steps.append(int((last[:, 2] * last[:, 3]).sum()))

    def synchronize(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self._gpu.held["queue"] -= self._gpu.breaks != "queue"


def test_every_step_that_is_timed_is_as_large_as_the_others() -> None:
    gpu = CountingGpu()
    figures = calibrate(cast("Gpu", gpu), buffer_bytes=LEAST_BYTES)
    assert len(gpu.steps) % STEPS == 0
    assert set(gpu.steps) == {TALL_ROWS * ROW_BYTES}
    assert figures.max_pitch_bytes == FACTS.max_pitch_bytes
    assert not any(gpu.held.values())


@pytest.mark.parametrize("free_bytes", [1 << 30, LEAST_BYTES])
def test_rows_of_every_width_lie_anywhere_in_both_memories_and_elsewhere_each_time(free_bytes: int) -> None:
    gpu = CountingGpu()
    gpu.free_bytes = free_bytes
    size_bytes = min(2 * LEAST_BYTES, free_bytes)
    figures = calibrate(cast("Gpu", gpu), (656, 128 << 10), buffer_bytes=2 * LEAST_BYTES)
    assert gpu.size_bytes == size_bytes
    assert [width for width, _ in figures.row_ns] == [656, ROW_BYTES, 128 << 10]
    seen, singles = set(), Counter[int]()
    for copies in gpu.copies:
        is_load = gpu.host <= copies[0, 0] < gpu.host + size_bytes
        memories = (gpu.host, CountingMemory.address) if is_load else (CountingMemory.address, gpu.host)
        for column, pitch, memory in zip((0, 1), (4, 5), memories, strict=True):
            ends = copies[:, column] + (copies[:, 3] - 1) * copies[:, pitch] + copies[:, 2]
            assert copies[:, column].min() >= memory
            assert ends.max() <= memory + size_bytes
        size_bytes_moved = int((copies[:, 2] * copies[:, 3]).sum())
        if copies[0, 3] > 1 and len(copies) > 1:
            assert size_bytes_moved > 0.99 * MOVED_BYTES
            seen.add(copies.tobytes())
        elif len(copies) > 1:
            assert size_bytes_moved == SINGLES_CALL_BYTES, "a call as small as slices are"
            singles[int(copies[0, 2])] += 1
    assert len(seen) == (3 + 1) * (REPEATS + 1), "three widths, short ones"
    assert singles == dict.fromkeys(SINGLE_WIDTHS, (REPEATS + 1) * MOVED_BYTES // SINGLES_CALL_BYTES)
    assert [width for width, _ in figures.singles_us] == list(SINGLE_WIDTHS)


@pytest.mark.parametrize("name", ["register_host", "queue", "copy"])
def test_a_measurement_that_breaks_gives_back_what_it_took(name: str) -> None:
    gpu = CountingGpu(name)
    with pytest.raises(RuntimeError, match=f"{name} broke"):
        calibrate(cast("Gpu", gpu), buffer_bytes=LEAST_BYTES)
    assert not any(gpu.held.values())


def test_a_daemon_whose_gpu_cannot_be_measured_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="--calibration never"):
        link_costs(Config(), (Gpu(FACTS),), lambda _: None)


class TimedGpu(CountingGpu):
    """A GPU whose copies take time; between ``busy_from`` and ``busy_until`` three times as much."""

    def __init__(self, busy_from: float, busy_until: float) -> None:
        super().__init__()
        self.now, self.busy_from, self.busy_until = 0.0, busy_from, busy_until

    def queue(self) -> CountingQueue:
        return TimedQueue(self)

    def spend(self, spent_us: float) -> None:
        is_busy = self.busy_from <= self.now < self.busy_until
        self.now += spent_us * (3 if is_busy else 1) / 1e6


class TimedQueue(CountingQueue):
    def __init__(self, gpu: TimedGpu) -> None:
        super().__init__(gpu)
        self._timed = gpu

    def copy(self, copies: PitchedCopies) -> None:
        super().copy(copies)
        widths, heights = copies[:, 2], copies[:, 3]
        tall = heights > 1
        taken = widths * heights / BYTES_PER_US + tall * (COPY_US + ROW_US * heights)
        self._timed.spend(float(taken.sum()))

    def write_words(self, words: list[tuple[int, int]]) -> None:
        super().write_words(words)
        self._timed.spend(STEP_US)


BYTES_PER_US, COPY_US, ROW_US, STEP_US = 54_000.0, 2.5, 0.03, 6.0


@looped("busy_ms", range(0, 400, 25))
def test_what_keeps_the_machine_busy_for_a_while_is_in_no_figure(busy_ms: int) -> None:
    """For 50 ms: all repeats of one measurement would take less, were they made one after another."""
    gpu = TimedGpu(busy_ms / 1e3, busy_ms / 1e3 + 0.05)
    figures = calibrate(cast("Gpu", gpu), buffer_bytes=LEAST_BYTES, clock=lambda: gpu.now)
    assert gpu.now > 0.15
    assert figures.load_bytes_per_us == pytest.approx(BYTES_PER_US, rel=1e-3)
    assert figures.per_copy_us == pytest.approx(COPY_US, rel=0.02)
    assert figures.per_step_us == pytest.approx(STEP_US, rel=0.02)
    for width, taken_us in figures.singles_us:
        assert taken_us == pytest.approx(width / BYTES_PER_US, rel=1e-3)


def test_stores_beside_other_gpus_are_counted_from_the_common_beginning_on_and_go_to_memory_in_turns() -> None:
    gpu = CountingGpu()
    times = iter([5.0, 5.0, 5.2, 5.4, 5.6, 5.8, 6.0, 6.0])
    rate = store_rate(cast("Gpu", gpu), 5.0, 1.0, lambda: next(times))
    assert rate == len(gpu.copies) * LEAST_BYTES / 1.0
    places = [int(copies[0, 1]) - gpu.host for copies in gpu.copies]
    touched_bytes = len(set(places)) * LEAST_BYTES  # all of it, unless the machine is slow
    assert places == [turn * LEAST_BYTES % touched_bytes for turn in range(len(places))]
    assert len(places) > RATE_BYTES // LEAST_BYTES >= len(set(places))
    assert {int(copies[0, 0]) for copies in gpu.copies} == {CountingMemory.address}
    assert not any(gpu.held.values())


@pytest.mark.parametrize("call", ["register_host", "queue", "copy"])
def test_what_breaks_beside_other_gpus_gives_back_what_was_taken(call: str) -> None:
    gpu = CountingGpu(call)
    with pytest.raises(RuntimeError, match=call):
        store_rate(cast("Gpu", gpu), 0.0, 1.0, lambda: 0.0)
    assert not any(gpu.held.values())


def test_a_gpu_that_is_ready_after_the_others_have_stored_is_not_counted_beside_them() -> None:
    """Alone it stores as fast as its link carries: the node would seem to have no limit."""
    gpu = CountingGpu()
    with pytest.raises(RuntimeError, match=r"ready 0\.30 s late"):
        store_rate(cast("Gpu", gpu), 5.0, 0.1, lambda: 5.3)
    assert not gpu.copies
    assert not any(gpu.held.values())


def test_all_gpus_have_time_to_touch_their_memory_before_they_store_at_once() -> None:
    assert AT_ONCE_AHEAD_S > TOUCH_S
