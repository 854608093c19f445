"""A GPU's slices as they end: the waiter for the last one of a job is awake by then, and sleeps through all others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cachesvc.memory.cuda_queue import CudaRunner, PracticeGround
from cachesvc.memory.gpu_health import GpuHealth
from cachesvc.memory.gpu_seam import PitchedCopies
from cachesvc.memory.regions import Region, Regions
from cachesvc.memory.seam import CopyJob, Slice
from cachesvc.memory.timeline import HostTimeline
from cachesvc.model.transfer import Direction, Urgency
from tests.contracts.host_gpu import HostGpu

WORD, BYTES = 3, 1 << 20


class Timeline(HostTimeline):
    """Keeps which words' waiters were woken."""

    def __init__(self) -> None:
        super().__init__(64)
        self.open(0)
        self.woken: list[int] = []
        self.came = threading.Semaphore(0)

    def wake(self, word: int) -> None:
        super().wake(word)
        self.woken.append(word)
        self.came.release()


class Mark:
    """Reached when a test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.is_closed = False
        self.error: RuntimeError | None = None

    @property
    def is_reached(self) -> bool:
        return self.come.is_set()

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


PRACTICE = np.array([(1, 2, 3, 1, 3, 3)], np.int64)


def runner() -> tuple[CudaRunner, Queue, Timeline]:
    queue, timeline = Queue(), Timeline()
    regions = Regions({1: Region(1 << 30, BYTES, None), 2: Region(1 << 40, BYTES, None)})
    return CudaRunner(queue, timeline, lambda: regions, GpuHealth("gpu"), PRACTICE), queue, timeline


def piece(urgency: Urgency = Urgency.AWAITED, *, is_last: bool = True, word: int | None = WORD) -> Slice:
    job = CopyJob(1, (), word, None, 9, lambda _: None, urgency)
    return Slice(job, np.array([(1, 0, 2, 0, BYTES, 1, BYTES, BYTES)], np.int64), BYTES, 9, is_last)


def test_who_waits_for_a_job_is_woken_before_its_last_slice_has_landed_and_again_then() -> None:
    made, queue, timeline = runner()
    waiting = threading.Thread(target=made.wait, args=(made.submit(piece()),))
    waiting.start()
    timeline.came.acquire()
    assert not queue.marks[0].come.is_set()
    queue.marks[0].come.set()
    waiting.join()
    assert timeline.woken == [WORD, WORD]
    assert queue.marks[0].is_closed


@pytest.mark.parametrize(
    ("of", "woken"),
    [
        (piece(is_last=False), [WORD]),
        (piece(Urgency.BACKGROUND), [WORD]),
        (piece(word=None), []),
        (replace(piece(), word_value=None), []),
    ],
    ids=["not the last", "no waiter", "no word", "no value"],
)
def test_nobody_is_woken_early_for_anything_else(of: Slice, woken: list[int]) -> None:
    made, queue, timeline = runner()
    started = made.submit(of)
    queue.marks[0].come.set()
    made.wait(started)
    assert timeline.woken == woken


def test_a_slice_that_lands_long_before_it_was_expected_is_not_slept_through() -> None:
    """Wide rows land so behind narrow ones, by whose speed they were expected."""
    made, queue, timeline = runner()
    started = made.submit(replace(piece(), size_bytes=1 << 60))
    waiting = threading.Thread(target=made.wait, args=(started,), daemon=True)
    waiting.start()
    queue.marks[0].come.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert timeline.woken[-1] == WORD


def test_what_breaks_at_the_end_is_raised_though_it_was_looked_for() -> None:
    made, queue, _ = runner()
    started = made.submit(piece())
    queue.marks[0].error = RuntimeError("uncorrectable")
    queue.marks[0].come.set()
    with pytest.raises(RuntimeError, match="uncorrectable"):
        made.wait(started)
    assert queue.marks[0].is_closed


def test_a_rehearsal_copies_what_is_there_for_practice_and_a_word_alone_waits_for_no_copy() -> None:
    made, queue, _ = runner()
    for word in (None, WORD):
        made.submit(replace(piece(word=word), copies=np.empty((0, 8), np.int64), size_bytes=0))
    assert [len(copies) for copies in queue.copies] == [len(PRACTICE), 0]


@pytest.mark.parametrize("way", Direction)
def test_practice_stays_in_its_own_memory_and_takes_both_calls(way: Direction) -> None:
    gpu = HostGpu()
    gpu.start()
    ground = PracticeGround(gpu, vmm=False)
    assert (gpu.pins(), gpu.held["memory"]) == (1, 1)
    copies = ground.copies(way)
    assert set(copies[:, 3].tolist()) == {1, 2}
    for column, pitch in ((0, 4), (1, 5)):
        spans = [(row[column], row[column] + (row[3] - 1) * row[pitch] + row[2]) for row in copies.tolist()]
        assert max(stop for _, stop in spans) - min(start for start, _ in spans) == (copies[:, 2] * copies[:, 3]).sum()
    queue = gpu.queue()
    queue.start()
    queue.submit(copies, []).close()
    queue.close()
    ground.close()
    ground.close()
    assert (gpu.pins(), gpu.held["memory"]) == (0, 0)
