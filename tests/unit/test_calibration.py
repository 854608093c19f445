"""Measuring a link: every step that is timed copies something, and what breaks on the way gives back what was taken."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from cachesvc.config import Config
from cachesvc.hardware import link_costs
from cachesvc.model.errors import Unavailable
from gpu_ops.calibration import ROW_BYTES, STEPS, TALL_ROWS, calibrate
from gpu_ops.gpu import Gpu, GpuFacts
from gpu_ops.streams import PitchedCopies

FACTS = GpuFacts("GPU-0", 0, "none", "0000:00:00.0", 1 << 30, (9, 0), 1 << 31)


class CountingGpu:
    """Copies nothing at once. ``breaks``: the call that fails; ``held``: what was taken and not given back."""

    def __init__(self, breaks: str = "") -> None:
        self.facts = FACTS
        self.breaks = breaks
        self.held: Counter[str] = Counter()
        self.copies: list[PitchedCopies] = []
        self.steps: list[int] = []

    def call(self, name: str) -> None:
        if name == self.breaks:
            raise RuntimeError(f"{name} broke")

    def allocate(self, size_bytes: int, *, vmm: bool) -> CountingMemory:
        assert size_bytes
        assert not vmm
        self.held["memory"] += 1
        return CountingMemory(self)

    def register_host(self, address: int, size_bytes: int) -> None:
        assert address
        assert size_bytes
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
    figures = calibrate(cast("Gpu", gpu))
    assert len(gpu.steps) % STEPS == 0
    assert set(gpu.steps) == {TALL_ROWS * ROW_BYTES}
    assert figures.max_pitch_bytes == FACTS.max_pitch_bytes
    assert not any(gpu.held.values())


@pytest.mark.parametrize("name", ["register_host", "queue", "copy"])
def test_a_measurement_that_breaks_gives_back_what_it_took(name: str) -> None:
    gpu = CountingGpu(name)
    with pytest.raises(RuntimeError, match=f"{name} broke"):
        calibrate(cast("Gpu", gpu))
    assert not any(gpu.held.values())


def test_a_daemon_whose_gpu_cannot_be_measured_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="--calibration never"):
        link_costs(Config(), (Gpu(FACTS),), lambda _: None)
