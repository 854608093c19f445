"""Long calls of each process: one at a time has turns, in the order in which they came.

Calls that share turns evenly all end late: 200 equal ones all end at the time of the last, each with a part done. So a
call that needs many turns waits until those of its process before it have ended, and then takes its turns among the
process's short calls. Until its first turn it has changed nothing. It is refused before it begins where its deadline
passes, or where the pace of the turns so far shows that it cannot end in time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from cachesvc.model.errors import CacheError, DeadlineExceeded, LimitExceeded
from cachesvc.service.access.admission import CallerKey
from cachesvc.service.loop.line import Line, Sleeper

PACED_TURNS = 64
"""Turns after which the pace of a process's turns is known."""
PATIENCE = 1.5
"""Expected time, as a multiple of the time left, from which a call is refused: the pace may change."""
TURNS_AHEAD = "turns of long calls of this process before their deadline"


class LongCalls:
    """Long calls that wait or go on, by process. Used on the loop alone. ``now``: monotonic seconds."""

    def __init__(self, line: Line, now: Callable[[], float]) -> None:
        self._line = line
        self._now = now
        self._queues: dict[CallerKey, _Queue] = {}

    def enter(self, party: CallerKey, turns: int, until: float) -> LongCall:
        """Line up a call of ``turns`` turns, to be ended once. Raises LimitExceeded where it could not end in time."""
        queue = self._queues.get(party)
        if queue is None:
            queue = _Queue(self._now)
        queue.require(queue.turns + turns, until)
        self._queues[party] = queue
        call = LongCall(turns, until, Sleeper(self._line, party), self._next_turn, self._end)
        queue.calls[call] = None
        queue.turns += turns
        if queue.head is call:
            call.sleeper.yield_turn()
        else:
            loop = asyncio.get_running_loop()
            call.alarm = loop.call_later(max(0.0, until - self._now()), call.expire)
        return call

    def _next_turn(self, call: LongCall) -> None:
        queue = self._queues[call.party]
        queue.count_turn(call)
        call.sleeper = Sleeper(self._line, call.party)
        call.sleeper.yield_turn()
        queue.refuse_last()

    def _end(self, call: LongCall) -> None:
        queue = self._queues[call.party]
        was_head = queue.head is call
        del queue.calls[call]
        queue.turns -= call.turns
        if not queue.calls:
            del self._queues[call.party]
        elif was_head:
            queue.head.sleeper.yield_turn()


class LongCall:
    """One long call. ``turns``: those that it is still to take."""

    __slots__ = ("_end", "_next_turn", "alarm", "has_begun", "sleeper", "turns", "until")

    def __init__(
        self,
        turns: int,
        until: float,
        sleeper: Sleeper,
        next_turn: Callable[[LongCall], None],
        end: Callable[[LongCall], None],
    ) -> None:
        self.turns = turns
        self.until = until
        self.sleeper = sleeper
        self.has_begun = False
        self.alarm: asyncio.TimerHandle | None = None
        self._next_turn = next_turn
        self._end = end

    @property
    def party(self) -> CallerKey:
        """Process that it is of."""
        return self.sleeper.party

    async def turn(self) -> None:
        """Until it is its turn. Raises LimitExceeded, DeadlineExceeded before the first one."""
        if self.has_begun:
            self._next_turn(self)
        await self.sleeper.future
        self._quiet()
        self.has_begun = True

    def expire(self) -> None:
        """End the wait for the first turn: the deadline has passed."""
        self.refuse(
            DeadlineExceeded(
                "the turn of this call did not come before its deadline, and nothing was changed; "
                "send fewer long calls at a time",
                was_answered=True,
            )
        )

    def refuse(self, why: CacheError) -> None:
        """End the wait for the first turn with an error. Idempotent."""
        if not self.sleeper.future.done():
            self.sleeper.future.set_exception(why)

    def end(self) -> None:
        """Leave the line: the next of the process begins."""
        self._quiet()
        self._end(self)

    def _quiet(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class _Queue:
    """Long calls of one process, first come first. ``turns``: that they are still to take, all together."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.calls: OrderedDict[LongCall, None] = OrderedDict()
        self.turns = 0
        self._now = now
        self._since = now()
        self._taken = 0

    @property
    def head(self) -> LongCall:
        """The call that has turns."""
        return next(iter(self.calls))

    def count_turn(self, call: LongCall) -> None:
        """Count a turn that was taken."""
        self._taken += 1
        if call.turns > 1:
            call.turns -= 1
            self.turns -= 1

    def require(self, turns: int, until: float) -> None:
        """Raises LimitExceeded where a call that ends after ``turns`` turns would end after ``until``."""
        if self._taken < PACED_TURNS:
            return
        now = self._now()
        each, left = (now - self._since) / self._taken, max(0.0, until - now)
        if each * turns > PATIENCE * left:
            raise LimitExceeded(TURNS_AHEAD, turns, int(left / each))

    def refuse_last(self) -> None:
        """Refuse the call that came last where it cannot end in time."""
        last = next(reversed(self.calls))
        if last.has_begun or last is self.head:
            return
        try:
            self.require(self.turns, last.until)
        except LimitExceeded as why:
            last.refuse(why)
