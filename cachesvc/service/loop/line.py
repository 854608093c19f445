"""Queue of long work: the order of turns on the event loop, round robin by process.

A flow of more than one turn, a call that wakes up, a landing and a chore each take one turn. One turn is taken in each
round of the loop, round robin by party: a process as admission knows it (``CallerKey``), or the daemon's own background
work. Within a party the first comes first, and all of its long calls are one (``long_calls.py``). So a short call waits
for one turn at most, and a long one for one turn of each other party between its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cachesvc.model.answers import Reserved
from cachesvc.model.errors import DeadlineExceeded
from cachesvc.model.numbers.sharing import Party, Rounds
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
    """Used on the running loop alone. A turn raises nothing: it is the root of a callback."""

    def __init__(self) -> None:
        self._turns: Rounds[CallerKey | Party, Turn] = Rounds()
        self._has_taken = False  # a turn in this round, or one before that has not passed on yet

    @property
    def is_empty(self) -> bool:
        """True where no turn waits."""
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
        """Wait for the next turn alone."""
        self._is_due = True
        self._line.add(self.party, self.wake)

    def wake(self) -> None:
        """Wake it up at once. Idempotent."""
        if not self.future.done():
            self.future.set_result(None)
