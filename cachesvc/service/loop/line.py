"""Queue of long work: the order of turns on the event loop, round robin by process.

A flow of more than one turn, a call that wakes up, a landing and a chore each take one turn. One turn is taken in each
round of the loop, round robin by party: a process as admission knows it (``CallerKey``), or the daemon's own background
work. Within a party the first comes first, and all of its long calls are one (``LongCall``). So a short call waits
for one turn at most, and a long one for one turn of each other party between its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from kvcache.v1.status_pb2 import LoopStatus

from cachesvc.model.answers import Reserved
from cachesvc.model.errors import DeadlineExceeded, LimitExceeded, Unavailable
from cachesvc.model.numbers import Party, Rounds
from cachesvc.questions.view import Question
from cachesvc.service.access.admission import CallerKey

BACKGROUND: CallerKey = "(background)"
"""The daemon's own work: background tasks, lost devices. What a process has caused of it is in a row of its own."""
LANDED: CallerKey = "(landings)"
"""Transfers that land, for whichever process."""
OTHER_NODES: CallerKey = "(other nodes)"
"""Loans to other nodes."""

Turn = Callable[[], None]


KEPT_S = 0.25
"""Time for which freed pages are kept for a call that does not wait, seconds: several iterations of an engine."""


class AsksAgain(DeadlineExceeded):
    """Raised by a call that waits for no transfers. The pages that they free are kept for it: its caller asks again."""


def keep_a_moment(reserved: Reserved | None, now: float) -> None:
    """Keep what is reserved for a call that asks again, as long as its caller may take for that."""
    if reserved is not None:
        reserved.shorten(now + KEPT_S)


class Line:
    """Used on the running loop alone. A turn raises nothing: it is the root of a callback. ``now``: monotonic seconds.
    ``long_calls``: those of each process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.long_calls: dict[CallerKey, _Queue] = {}
        self._turns: Rounds[CallerKey | Party, Turn] = Rounds()
        self._has_taken = False  # a turn in this round, or one before that has not passed on yet

    @property
    def is_empty(self) -> bool:
        return not self._turns

    def add(self, party: CallerKey | Party, turn: Turn) -> None:
        """Have a turn taken in a later round, behind those that wait of its party."""
        self._turns.add(party, turn)
        self._pass_on()

    def take(self, party: CallerKey | Party, turn: Turn) -> None:
        """Take a turn at once where the round has had none; else ``add`` it."""
        if self._has_taken:
            self.add(party, turn)
        else:
            self._pass_on()
            turn()

    async def next_turn(self, party: CallerKey) -> None:
        """Until it is a party's turn again, behind its own that wait and round robin with all others."""
        sleeper = Sleeper(self, party)
        sleeper.yield_turn()
        await sleeper.future

    def _pass_on(self) -> None:
        if not self._has_taken:
            self._has_taken = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._has_taken = False
        if not self._turns:
            return
        turn = self._turns.take()
        self._pass_on()
        turn()


class Sleeper:
    """A call that waits: ``future`` is done once it has its turn. It has one turn, however many things rouse it."""

    __slots__ = ("_is_due", "_line", "future", "party")

    def __init__(self, line: Line, party: CallerKey) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = line
        self.party = party
        self._is_due = False

    def rouse(self) -> None:
        """Take a turn: what the call waits for is there."""
        if not self._is_due:
            self._is_due = True
            self._line.take(self.party, self.wake)

    def yield_turn(self) -> None:
        self._is_due = True
        self._line.add(self.party, self.wake)

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


# Long calls of each process: one at a time has turns, in the order in which they came.
#
# Calls that share turns evenly all end late: 200 equal ones all end at the time of the last, each with a part done. So
# a call that needs many turns waits until those of its process before it have ended, and then takes its turns among the
# process's short calls. Until its first turn it has changed nothing. It is refused before it begins where its deadline
# passes, or where the pace of the turns so far shows that it cannot end in time.

PACED_TURNS = 64
"""Turns after which the pace of a process's turns is known."""
PATIENCE = 1.5
"""Expected time, as a multiple of the time left, from which a call is refused: the pace may change."""
TURNS_AHEAD = "turns of long calls of this process before their deadline"


class _Queue:
    """Long calls of one process, first come first. ``turns``: that they are still to take, all together; ``taken``:
    those taken since ``since``."""

    def __init__(self, since: float) -> None:
        self.calls: dict[LongCall, None] = {}
        self.turns = 0
        self.taken = 0
        self.since = since

    @property
    def head(self) -> LongCall:
        return next(iter(self.calls))

    def require(self, turns: int, until: float, now: float) -> None:
        """Raises LimitExceeded where a call that ends after ``turns`` turns would end after ``until``."""
        if self.taken < PACED_TURNS:
            return
        each, left = (now - self.since) / self.taken, max(0.0, until - now)
        if each * turns > PATIENCE * left:
            raise LimitExceeded(TURNS_AHEAD, turns, int(left / each))


class LongCall:
    """One long call of ``turns`` turns, which is queued from when it is made until ``end``. Raises LimitExceeded where
    it could not end in time."""

    def __init__(self, line: Line, party: CallerKey, turns: int, until: float) -> None:
        now = line.now()
        self._line = line
        self._party = party
        self._turns = turns
        self.until = until
        self.sleeper = Sleeper(line, party)
        self._has_begun = False
        self._queue = queue = line.long_calls.get(party) or _Queue(now)
        queue.require(queue.turns + turns, until, now)
        line.long_calls[party] = queue
        queue.calls[self] = None
        queue.turns += turns
        if queue.head is self:
            self.sleeper.yield_turn()

    async def turn(self) -> None:
        """Until it is its turn. Raises LimitExceeded, DeadlineExceeded before the first one."""
        queue = self._queue
        if self._has_begun:
            queue.taken += 1
            if self._turns > 1:
                self._turns -= 1
                queue.turns -= 1
            self.sleeper = Sleeper(self._line, self._party)
            self.sleeper.yield_turn()
            self._refuse_last()
            await self.sleeper.future
            return
        left = None if queue.head is self else max(0.0, self.until - self._line.now())
        try:
            await asyncio.wait_for(self.sleeper.future, left)
        except TimeoutError:
            raise DeadlineExceeded(
                "the turn of this call did not come before its deadline, and nothing was changed; "
                "send fewer long calls at a time",
                was_answered=True,
            ) from None
        self._has_begun = True

    def end(self) -> None:
        """Leave the queue: the next call of the process begins."""
        queue = self._queue
        was_head = queue.head is self
        del queue.calls[self]
        queue.turns -= self._turns
        if not queue.calls:
            del self._line.long_calls[self._party]
        elif was_head:
            queue.head.sleeper.yield_turn()

    def _refuse_last(self) -> None:
        """Refuse the call that came last, which has not begun, where it cannot end in time."""
        last = next(reversed(self._queue.calls))
        if last is self or last.sleeper.future.done():
            return
        try:
            self._queue.require(self._queue.turns, last.until, self._line.now())
        except LimitExceeded as why:
            last.sleeper.future.set_exception(why)


SLICE_SECONDS = 0.0005
"""Length of a question's slice before calls get their turn, and of their turn, seconds."""

Result = TypeVar("Result")


class TimeSlices:
    """One long call's share of the loop; ``longest_seconds`` is the longest that it kept others waiting at a time."""

    def __init__(self, watch: LoopWatch) -> None:
        self.longest_seconds = 0.0
        self._watch = watch

    def take(self, work: Callable[[], Result]) -> Result:
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
    """The work was given up: its waiter has left, or it has not got on."""


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


# Watch of the event loop: longest rounds, and longest holds by flow; all other calls waited that long.
#
# A round is all that the loop runs between two looks at its sockets. ``begin`` stands where work comes in: messages
# before they are parsed, turns, slices of questions, events to send. The first of them has the loop call back in its
# next round, which ends the round. Where it took a while, the next one is watched too: more may follow. A call back
# costs some microseconds, so a short call has one.
#
# Each figure is the longest of the last one to two minutes, to any number of readers.

WINDOW_SECONDS = 60.0
LONG_ROUND_SECONDS = 0.002
"""Length of a round above which it is counted."""
SHORT_ROUND_SECONDS = 0.0003
"""Length of a round up to which nothing long is taken to follow."""
ROUND = "round"


class Loop(Protocol):
    """An event loop."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...


class Longest:
    """Longest times by name, in this window and the one before it."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._until = time.perf_counter() + WINDOW_SECONDS

    def note(self, what: str, seconds: float, now: float) -> None:
        if now >= self._until:
            self._turn_over(now)
        if seconds > self._longest.get(what, 0.0):
            self._longest[what] = seconds

    def get(self) -> dict[str, float]:
        now = time.perf_counter()
        if now >= self._until:
            self._turn_over(now)
        both = self._before | self._longest
        return {what: max(seconds, self._before.get(what, 0.0)) for what, seconds in both.items()}

    def _turn_over(self, now: float) -> None:
        self._before = self._longest if now < self._until + WINDOW_SECONDS else {}
        self._longest = {}
        self._until = now + WINDOW_SECONDS


class LoopWatch:
    """Used on the loop alone. ``long_rounds``: rounds above ``LONG_ROUND_SECONDS`` since the start."""

    def __init__(self) -> None:
        self.long_rounds = 0
        self._flows = Longest()
        self._rounds = Longest()
        self._loop: Loop | None = None
        self._is_watching = False
        self._round_began = 0.0

    def start(self, loop: Loop) -> None:
        self._loop = loop

    def begin(self) -> float:
        """Begin some work; returns ``time.perf_counter``, for ``note``."""
        now = time.perf_counter()
        if not self._is_watching and self._loop is not None:
            self._is_watching = True
            self._begin_round(self._loop, now)
        return now

    def note(self, what: str, began: float) -> float:
        """Note that ``what`` held the loop since ``began`` (``time.perf_counter``); returns the seconds."""
        now = time.perf_counter()
        held = now - began
        self._flows.note(what, held, now)
        return held

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Count the time for which ``what`` holds the loop."""
        began = self.begin()
        try:
            yield
        finally:
            self.note(what, began)

    def longest(self) -> dict[str, float]:
        """Seconds of the longest hold by each flow."""
        return self._flows.get()

    def longest_round(self) -> float:
        return self._rounds.get().get(ROUND, 0.0)

    def status(self) -> LoopStatus:
        """Longest round lately, rounds above 2 ms since the start, and the flow that held the loop longest."""
        flows = self.longest()
        flow = max(flows, key=flows.__getitem__, default="")
        return LoopStatus(
            longest_round_ms=self.longest_round() * 1e3,
            long_rounds=self.long_rounds,
            longest_flow=flow,
            longest_flow_ms=flows.get(flow, 0.0) * 1e3,
        )

    def _begin_round(self, loop: Loop, now: float) -> None:
        self._round_began = now
        loop.call_soon(self._end_round, loop)

    def _end_round(self, loop: Loop) -> None:
        now = time.perf_counter()
        took = now - self._round_began
        self._rounds.note(ROUND, took, now)
        self.long_rounds += took > LONG_ROUND_SECONDS
        self._is_watching = took > SHORT_ROUND_SECONDS
        if self._is_watching:
            self._begin_round(loop, now)
