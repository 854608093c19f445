"""Steps on their way: sent ahead from the engine's scheduler thread, which takes their answers in as they come.

Waiting for an answer there stops every request that runs. So answers are looked for, and waited for in two cases alone:
while the engine computes nothing, and where a running request would be preempted otherwise. ``Waits`` counts both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from cachesvc_client import (
    CacheClientError,
    DaemonUnavailable,
    DeadlineExceeded,
    Lease,
    LeaseLost,
    PendingStep,
    StepStream,
)

ANSWER_S = 1.0
"""An engine's scheduler waits no longer for an answer, once in an iteration: what it is about waits, and everything
else goes on. A burst of requests does not wait so long for each."""

# Fencing: discard a step's tokens unless the lease was held while their pages were read.
#
# An engine that was stopped for longer than its lease goes on where it was: in the middle of a step, whose hits the
# daemon let go meanwhile, and others may have written. So an iteration begins with a look at the lease, after which
# what is lost is not scheduled; and ends with one, when a step's output has come. By then all that the step read was
# read, on every rank and by every kernel: tokens wait for the last of them. The engine gives them out after that.
#
#     look  ->  schedule  ->  begin_step  ->  kernels  ->  end_step  ->  tokens
#
# Both cost a comparison while beats are answered in time (``Lease.is_sure``), and a round trip where they were late.

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


LEASE_LOOK_S = 1.0
"""The scheduler waits no longer for a daemon that says nothing; the end of the step waits for as long as a lease."""


class Dropped(Enum):
    """Verdict of the workers on an output. REPEATED: it is void, and the engine computes it again; LOST: it is void,
    and the engine could not be told."""

    NOT = auto()
    REPEATED = auto()
    LOST = auto()


class PagesLapsed(RuntimeError):
    """Requests under way may have read another engine's pages. There is no way to take back a step whose output
    has come, so the engine ends, and gives none of it out."""


class Vouching:
    """``lease``: the one that the engine is on. Used from the engine's scheduler thread."""

    def __init__(self, lease: Callable[[], Lease]) -> None:
        self._lease = lease
        self._has_looked = False
        self._under_way: deque[Lease | None] = deque()

    def look(self) -> bool:
        """Look for a lost lease before anything is scheduled. True once in each iteration."""
        if self._has_looked:
            return False
        self._has_looked = True
        lease = self._lease()
        if not lease.is_sure:
            with suppress(CacheClientError):  # the lease says it from now on; without an answer, the end asks again
                lease.make_sure(LEASE_LOOK_S)
        return True

    def begin_step(self, *, computes: bool) -> None:
        self._has_looked = False
        self._under_way.append(self._lease() if computes else None)

    def end_step(self, dropped: Dropped) -> bool:
        """The output of the first of the steps under way has come. ``dropped``: whether a worker has found it void.
        Where all requests with pages were begun anew, that is good if none of them was scheduled again, and if they
        will find the lease lost. True where the step has computed. Raises PagesLapsed."""
        lease = self._under_way.popleft()
        is_dropped = dropped is not Dropped.NOT
        if lease is None or (lease.is_sure and not is_dropped):
            return lease is not None
        limit_s, why = lease.record.silence_limit_s, "a worker says so"
        try:
            lease.make_sure(limit_s)
            if not is_dropped:
                return True
        except (LeaseLost, DaemonUnavailable) as lost:
            if dropped is Dropped.REPEATED and not self._under_way:
                log.warning("step_computed_again lease=%s why=%s", lease.id, lost)
                return True
            why = str(lost)
        except CacheClientError as error:
            why = str(error)
        raise PagesLapsed(
            f"this engine was stopped, or said nothing, for longer than its lease of {limit_s:g} s ({why}). Others may "
            "have got the pages that its requests read: it gives out none of their tokens, and ends. Start it again, "
            "and end an engine rather than freeze it"
        )
