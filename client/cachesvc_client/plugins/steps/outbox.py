"""Steps on their way: sent ahead from the engine's scheduler thread, which takes their answers in as they come.

Waiting for an answer there stops every request that runs. So answers are looked for, and waited for in two cases alone:
while the engine computes nothing, and where a running request would be preempted otherwise. ``Waits`` counts both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cachesvc_client import CacheClientError, DeadlineExceeded, PendingStep, StepStream

ANSWER_S = 1.0
"""An engine's scheduler waits no longer for an answer, once in an iteration: what it is about waits, and everything
else goes on. A burst of requests does not wait so long for each."""

LOOK_S = 0.0001
"""No answer comes sooner, and each of an iteration's many requests would look: a look is a system call."""

MOST_UNDER_WAY = 8
"""Steps without an answer, after which no other is sent. The client allows 16."""

Answer = Sequence[Any] | CacheClientError
"""Results of a step's operations, in order, or what refused the step as a whole."""

Take = Callable[[Answer], None]

log = logging.getLogger(__name__)


def never() -> bool:
    """Return False: until all answers have come."""
    return False


@dataclass(slots=True)
class Waits:
    """Number of times that the thread waited for an answer: while requests ``running``, or with the engine ``idle``."""

    running: int = 0
    idle: int = 0


class Outbox:
    """``runs``: whether requests run that a wait would stop. ``waits`` outlives the stream. Answers come in the order
    of the steps. Used from one thread."""

    def __init__(self, stream: StepStream, waits: Waits, runs: Callable[[], bool]) -> None:
        self.waits = waits
        self.runs = runs
        self.stream = stream
        self._under_way: deque[tuple[PendingStep, Take]] = deque()
        self._look_s = 0.0
        self._is_late = False

    def begin_step(self) -> None:
        """An iteration was scheduled: the next one may wait again."""
        self._is_late = False

    @property
    def is_empty(self) -> bool:
        """True where every step has its answer."""
        return not self._under_way

    @property
    def has_room(self) -> bool:
        """True where a step may be sent."""
        return self.has_room_for(1)

    def has_room_for(self, steps: int) -> bool:
        """Return whether this number of steps may be sent."""
        return len(self._under_way) + steps <= MOST_UNDER_WAY

    def take_waits(self) -> tuple[int, int]:
        """Waits since the last call, while requests were running and while none was."""
        waits = self.waits.running, self.waits.idle
        self.waits.running = self.waits.idle = 0
        return waits

    def send(self, batch: Any, take: Take) -> None:
        """Send a step, whose answer ``take`` gets during a later ``poll`` or ``wait``. Raises what ``StepStream.send``
        raises."""
        self._under_way.append((self.stream.send(batch), take))

    def poll(self) -> None:
        """Take in the answers that have come; another look follows ``LOOK_S`` after one that found none."""
        if self._under_way and time.monotonic() >= self._look_s:
            self._look()

    def wait_if_idle(self, is_done: Callable[[], bool]) -> None:
        """Wait, unless requests run."""
        if not (is_done() or self.runs()):
            self.wait(is_done)

    def wait(self, is_done: Callable[[], bool] = never) -> None:
        """Wait until ``is_done``, all answers have come, or ``ANSWER_S`` has passed; not at all where it has passed in
        this iteration."""
        self._look()
        if is_done() or not self._under_way or self._is_late:
            return
        if self.runs():
            self.waits.running += 1
        else:
            self.waits.idle += 1
        deadline_s = time.monotonic() + ANSWER_S
        while self._under_way and not is_done():
            step = self._under_way[0][0]
            try:
                step.results(max(0.0, deadline_s - time.monotonic()))
            except DeadlineExceeded as late:
                if not step.poll():
                    log.debug("answer_late why=%s", late)
                    self._is_late = True
                    return
            except CacheClientError as error:
                log.debug("step_refused why=%s", error)
            self._take_first()

    def _look(self) -> None:
        while self._under_way:
            step = self._under_way[0][0]
            if not step.is_answered and (self.stream.is_silent or not step.poll()):
                self._look_s = time.monotonic() + LOOK_S
                return
            self._take_first()

    def _take_first(self) -> None:
        step, take = self._under_way.popleft()
        self._is_late = False
        try:
            answer: Answer = step.results(0)
        except CacheClientError as error:
            answer = error
        take(answer)
