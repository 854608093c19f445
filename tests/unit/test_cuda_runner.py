"""How a GPU's stream is waited for: closely where a word moves, by the driver's wake-up elsewhere and in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from cachesvc.memory.cuda_queue import LOOK_S, LOOKED_S, CudaRunner
from cachesvc.memory.gpu_health import GpuHealth
from cachesvc.memory.gpu_seam import PitchedCopies
from cachesvc.memory.regions import Regions
from cachesvc.memory.seam import COPY_FIELDS, CopyJob, Slice
from cachesvc.memory.timeline import HostTimeline

NOTHING = np.empty((0, len(COPY_FIELDS)), np.int64)


@dataclass
class Stream:
    """Comes to its mark after so many looks; ``log`` has what is done. Each sleep moves the clock."""

    looks: int
    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Nothing to make."""

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> Stream:
        assert len(copies) == 0
        self.log.append(f"words {len(words)}")
        return self

    def has_come(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.log.append("driver")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self.log.append("close")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(stream: Stream, word_value: int | None) -> list[str]:
    """What a runner does for one slice."""
    timeline = HostTimeline(2)
    timeline.open(0)
    runner = CudaRunner(
        stream, timeline, lambda: Regions({}), GpuHealth("GPU-0"), clock=lambda: stream.now, sleep=stream.sleep
    )
    job = CopyJob(1, (), 0, 1, 1, lambda _: None)
    runner.wait(runner.submit(Slice(job, NOTHING, 0, word_value, is_last=True)))
    timeline.close()
    return stream.log


@pytest.mark.parametrize("looks", [0, 1, 30])
def test_a_word_is_looked_for_and_the_driver_wakes_nobody(looks: int) -> None:
    stream = Stream(looks)
    assert waited(stream, 1) == ["words 1", "close"]
    assert stream.now == pytest.approx(looks * LOOK_S)


def test_who_has_looked_long_enough_leaves_it_to_the_driver() -> None:
    stream = Stream(1 << 30)
    assert waited(stream, 1) == ["words 1", "driver", "close"]
    assert stream.now == pytest.approx(LOOKED_S, abs=LOOK_S)


def test_a_slice_without_a_word_is_not_looked_for() -> None:
    assert waited(Stream(3), None) == ["words 0", "driver", "close"]
