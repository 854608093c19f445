"""Back-off of an engine: it gives back what it got for requests that wait. Engines on one pool know nothing of each
other: two of which neither runs anything may each have what the other waits for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Clock = Callable[[], float]
TRIES_S = 0.05
"""Time for which an engine that runs nothing tries, seconds; then it backs off for once to twice as long, so that
engines separate."""


class GivingWay:
    """Used from one thread. ``is_away``: nothing is asked for now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = math.inf
        self._away_until_s = 0.0

    @property
    def is_away(self) -> bool:
        """True for a moment after ``is_due`` was."""
        return self._clock() < self._away_until_s

    def admit(self) -> None:
        """Reset the back-off: a request found room."""
        self._since_s = math.inf

    def is_due(self, *, is_idle: bool) -> bool:
        """A request found no room: True where it is time to give back. ``is_idle``: nothing of this engine runs."""
        now_s = self._clock()
        if not is_idle:
            self._since_s = math.inf
        elif self._since_s == math.inf:
            self._since_s = now_s
        elif now_s - self._since_s > TRIES_S:
            self._away_until_s = self._since_s = now_s + TRIES_S * (1 + random.random())
            return True
        return False
