"""A long question goes on in short slices: others run between them, and what needs no ledger is done elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cachesvc.questions.steps import Question, answer_at_once, off_loop
from cachesvc.service.loop.latency import LoopWatch
from cachesvc.service.loop.time_slices import SLICE_SECONDS, TimeSlices


def counting(steps: int) -> Question[int]:
    """A number of steps, each of half a slice."""
    for _ in range(steps):
        until = time.perf_counter() + SLICE_SECONDS / 2
        while time.perf_counter() < until:
            pass
        yield None
    return steps


def elsewhere() -> Question[list[int]]:
    """The threads that a question is on, and that its work is done on."""
    before = threading.get_ident()
    work = yield from off_loop(threading.get_ident)
    return [before, work, threading.get_ident()]


async def test_others_run_between_the_slices_of_a_question() -> None:
    turns = 0
    asked = asyncio.ensure_future(TimeSlices(LoopWatch()).answer(counting(64)))
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
    assert await asked == 64
    assert turns > 16


async def test_work_that_needs_no_ledger_is_done_on_another_thread() -> None:
    before, work, after = await TimeSlices(LoopWatch()).answer(elsewhere())
    assert before == after == threading.get_ident() != work


def test_at_once_everything_is_done_here() -> None:
    assert set(answer_at_once(elsewhere())) == {threading.get_ident()}
    assert answer_at_once(counting(3)) == 3


async def test_the_longest_slice_is_told() -> None:
    slices = TimeSlices(LoopWatch())
    await slices.answer(counting(8))
    assert slices.longest_seconds >= SLICE_SECONDS / 2


@pytest.mark.parametrize("is_off_loop", [False, True])
async def test_a_question_that_breaks_says_so_and_is_over(is_off_loop: bool) -> None:
    ended = []

    def broken() -> Question[None]:
        def work() -> None:
            raise LookupError("no such row")

        try:
            if is_off_loop:
                yield from off_loop(work)
            yield None
            work()
        finally:
            ended.append(True)

    with pytest.raises(LookupError, match="no such row"):
        await TimeSlices(LoopWatch()).answer(broken())
    assert ended == [True]


async def test_a_question_whose_caller_goes_is_over() -> None:
    ended = []

    def long() -> Question[None]:
        try:
            yield from counting(1 << 30)
        finally:
            ended.append(True)

    asked = asyncio.ensure_future(TimeSlices(LoopWatch()).answer(long()))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert ended == [True]
