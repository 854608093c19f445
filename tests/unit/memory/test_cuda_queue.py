"""A GPU's slices as they end: waiters of a slice's word are woken, once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cachesvc.memory.cuda import CudaRunner, GpuHealth
from cachesvc.memory.interface import CopyJob, Slice
from cachesvc.memory.memcpy import PitchedCopies, Region, Regions
from cachesvc.memory.timeline import HostTimeline
from cachesvc.model.words import Urgency

WORD, BYTES = 3, 1 << 20


class Timeline(HostTimeline):
    """Keeps which words' waiters were woken."""

    def __init__(self) -> None:
        super().__init__(64)
        self.open(0)
        self.woken: list[int] = []

    def wake(self, word: int) -> None:
        super().wake(word)
        self.woken.append(word)


class Mark:
    """Reached when a test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.is_closed = False
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.come.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.is_closed = True


class Queue:
    """Keeps what is submitted, and copies nothing."""

    def __init__(self) -> None:
        self.copies: list[PitchedCopies] = []
        self.marks: list[Mark] = []

    def start(self) -> None:
        pass

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> Mark:
        self.copies.append(copies)
        self.marks.append(Mark())
        return self.marks[-1]

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def runner() -> tuple[CudaRunner, Queue, Timeline]:
    queue, timeline = Queue(), Timeline()
    regions = Regions({1: Region(1 << 30, BYTES), 2: Region(1 << 40, BYTES)})
    return CudaRunner(queue, timeline, lambda: regions, GpuHealth("gpu")), queue, timeline


def piece(urgency: Urgency = Urgency.AWAITED, *, is_last: bool = True, word: int | None = WORD) -> Slice:
    job = CopyJob(1, (), word, None, 9, lambda _: None, urgency)
    return Slice(job, np.array([(1, 0, 2, 0, BYTES, 1, BYTES, BYTES)], np.int64), BYTES, 9, is_last)


@pytest.mark.parametrize(
    ("of", "woken"),
    [
        (piece(), [WORD]),
        (piece(is_last=False), [WORD]),
        (piece(word=None), []),
        (replace(piece(), word_value=None), []),
    ],
    ids=["last", "not the last", "no word", "no value"],
)
def test_waiters_of_a_word_that_moves_with_a_slice_are_woken_once(of: Slice, woken: list[int]) -> None:
    made, queue, timeline = runner()
    started = made.submit(of)
    queue.marks[0].come.set()
    made.wait(started)
    assert timeline.woken == woken


def test_what_breaks_at_the_end_is_raised() -> None:
    made, queue, _ = runner()
    started = made.submit(piece())
    queue.marks[0].error = RuntimeError("uncorrectable")
    queue.marks[0].come.set()
    with pytest.raises(RuntimeError, match="uncorrectable"):
        made.wait(started)
    assert queue.marks[0].is_closed
