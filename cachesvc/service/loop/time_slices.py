"""Long work between calls: short slices of the event loop, and a thread for what needs no ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from cachesvc.questions.steps import Question
from cachesvc.service.loop.latency import LoopWatch

SLICE_SECONDS = 0.0005
"""Length of a question's slice before calls get their turn, and of their turn, seconds."""

Result = TypeVar("Result")


class TimeSlices:
    """One long call's share of the loop; ``longest_seconds`` is the longest that it kept others waiting at a time."""

    def __init__(self, watch: LoopWatch) -> None:
        self.longest_seconds = 0.0
        self._watch = watch

    def take(self, work: Callable[[], Result]) -> Result:
        """Do a piece in one go."""
        began = self._watch.begin()
        try:
            return work()
        finally:
            self.longest_seconds = max(self.longest_seconds, self._watch.note("question", began))

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """Do a piece that touches nothing of the ledger on a thread."""
        return await asyncio.to_thread(work)

    async def answer(self, question: Question[Result]) -> Result:
        """Drive a question to its end, some steps at a time. Raises what it raises."""
        result: Any = None
        try:
            while True:
                work = self.take(partial(_slice, question, result))
                result = None
                if work is None:
                    await asyncio.sleep(SLICE_SECONDS)  # as long again for others
                else:
                    result = await self.off_loop(work)
        except StopIteration as ended:
            answer: Result = ended.value
            return answer
        finally:
            question.close()


def _slice(question: Question[Any], result: Any) -> Callable[[], Any] | None:
    """Go on until there is work for a thread, or (None) the slice is over. Raises StopIteration at the end."""
    until = time.perf_counter() + SLICE_SECONDS
    work = question.send(result)
    while work is None and time.perf_counter() < until:
        work = question.send(None)
    return work
