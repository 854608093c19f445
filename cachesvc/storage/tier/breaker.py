"""Circuit breaker of a storage engine: decides whether it is used. It opens on errors and on latency, since what is
frozen does not err, and closes when a canary came back: no engine's word is taken for its health."""

from __future__ import annotations

from collections import deque
from enum import Enum

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
LAST_OUTCOMES = 32
MOST_BAD = 8.0
"""Weighed sum of the last outcomes above which the breaker opens."""


class State(Enum):
    """CLOSED: the engine is used. OPEN: it is not. PROBING: a canary is on its way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Breaker of one engine, for one thread. ``reason``: why it opened last; ``opened``: how often it has."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.reason = ""
        self.opened = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._until = 0.0
        self._last: deque[float] = deque(maxlen=LAST_OUTCOMES)

    @property
    def is_closed(self) -> bool:
        """True while the engine is used."""
        return self.state is State.CLOSED

    def note(self, bad: float, reason: str, now: float) -> None:
        """An outcome: 0 is good, 1 an error; what only does not help lies between. ``reason``: what it was."""
        self._last.append(bad)
        if bad and self.is_closed and sum(self._last) > MOST_BAD:
            self.open(reason, now)

    def open(self, reason: str, now: float) -> None:
        """Use the engine no more, until a canary comes back."""
        if self.is_closed:
            self.state, self.reason, self._pause = State.OPEN, reason, FIRST_PAUSE_SECONDS
            self.opened += 1
            self._until = now + self._pause

    def hurry(self, now: float) -> None:
        """Send the next canary now: what kept the engine from working has passed."""
        self._until, self._pause = now, FIRST_PAUSE_SECONDS

    def wants_probe(self, now: float) -> bool:
        """True once a canary is due; it is on its way then."""
        if self.state is State.OPEN and now >= self._until:
            self.state = State.PROBING
            return True
        return False

    def probed(self, now: float, *, is_good: bool) -> None:
        """The canary came back whole and in time, or it did not: then a longer pause."""
        if self.state is not State.PROBING:
            return
        if is_good:
            self.state = State.CLOSED
            self._last.clear()
            return
        self.state = State.OPEN
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._until = now + self._pause
