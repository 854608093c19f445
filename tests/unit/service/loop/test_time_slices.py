"""A long question goes on in short slices: others run between them, and what needs no ledger is done elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.questions.view import Question, answer_at_once, off_loop
from cachesvc.service.loop.line import SLICE_SECONDS, Abandoned, Aside, LoopWatch, TimeSlices


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


async def test_work_that_hangs_is_given_up_and_left_behind() -> None:
    answers, ended = threading.Event(), threading.Event()
    aside = Aside("the check", 0.05)

    def work() -> None:
        aside.step()
        answers.wait()
        try:
            aside.step()
        except Abandoned:
            ended.set()
            raise

    with pytest.raises(Unavailable, match=r"the check has not got on for 0\.05 s, after 1 objects"):
        await aside.run(work)
    assert aside.hangs
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "aside"), "no end waits for it"
    answers.set()
    ended.wait()


async def test_work_aside_gives_what_it_returns_or_raises_and_hangs_no_more() -> None:
    aside = Aside("the check", 60.0)
    assert await aside.run(threading.get_ident) != threading.get_ident()
    assert not aside.hangs
    with pytest.raises(KeyError):
        await Aside("the check", 60.0).run(lambda: dict[str, int]()["absent"])


async def test_work_whose_waiter_leaves_ends_with_its_next_step() -> None:
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    left, ended = threading.Event(), threading.Event()
    aside = Aside("the check", 60.0)

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        left.wait()
        try:
            aside.step()
        except Abandoned:
            ended.set()
            raise

    waiting = asyncio.ensure_future(aside.run(work))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    left.set()
    ended.wait()
