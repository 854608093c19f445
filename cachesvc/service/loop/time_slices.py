"""Long work between calls: short slices of the event loop, and threads for what needs no ledger, or may hang."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from cachesvc.model.errors import Unavailable
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


class Abandoned(Exception):
    """The caller of the work has gone: stop it at the next step."""


class Aside:
    """Work that may hang, as calls into a filesystem do, on a thread of its own. The end of the process leaves the
    thread behind, and it takes no place in the pool that other calls need. ``what``: the work, in words."""

    def __init__(self, what: str, stall_seconds: float) -> None:
        self._what = what
        self._stall_seconds = stall_seconds
        self._moved = time.monotonic()
        self._steps = 0
        self._is_over = self._is_lost = False
        self._thread: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """True while work that was given up has not ended."""
        return self._is_lost and self._thread is not None and self._thread.is_alive()

    def step(self) -> None:
        """Note that the work gets on; called on its thread. Raises Abandoned where it was given up."""
        if self._is_over:
            raise Abandoned
        self._moved, self._steps = time.monotonic(), self._steps + 1

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` once. Raises what it raises, and Unavailable where it has not got on for the time given."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: Exception | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(result)  # type: ignore[arg-type]
            else:
                ended.set_exception(error)

        def root() -> None:
            try:
                done: tuple[Result | None, Exception | None] = work(), None
            except Exception as error:  # noqa: BLE001 - who waits gets it
                done = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(settle, *done)

        self._moved = time.monotonic()
        self._thread = threading.Thread(target=root, name="aside", daemon=True)
        self._thread.start()
        try:
            while (left := self._moved + self._stall_seconds - time.monotonic()) > 0:
                if (await asyncio.wait((ended,), timeout=left))[0]:
                    return ended.result()
            raise Unavailable(
                f"{self._what} has not got on for {self._stall_seconds:g} s, after {self._steps:,} objects: its disk "
                "or its store does not answer; try again when cachesvc status finds it well"
            )
        finally:
            self._is_over, self._is_lost = True, ended.cancel()


def _slice(question: Question[Any], result: Any) -> Callable[[], Any] | None:
    """Go on until there is work for a thread, or (None) the slice is over. Raises StopIteration at the end."""
    until = time.perf_counter() + SLICE_SECONDS
    work = question.send(result)
    while work is None and time.perf_counter() < until:
        work = question.send(None)
    return work
