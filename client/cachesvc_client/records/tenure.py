"""Time until which a lease surely lives, as a process knows it without asking.

The daemon revokes a lease once it has listened for longer than the silence limit without a heartbeat. So a lease lives
for that long after the sending of a heartbeat that was answered. Where a daemon hangs and answers none, it lives while
one heartbeat follows the other: a daemon that does not listen counts no silence. A process that was stopped for longer
than its lease has sent none meanwhile, and looks at a clock that went on: then nothing is sure before the daemon has
answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Tenure:
    """Validity of a lease that was asked for at ``asked_s`` and that the daemon gave. ``clock``: one that goes on while
    the process is stopped. Safe to use from several threads."""

    def __init__(self, silence_limit_s: float, asked_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_limit_s = silence_limit_s
        self._follows_s = silence_limit_s / 2
        self._clock = clock
        self._answered_s = asked_s
        self._sent_s = asked_s
        self._lock = threading.Lock()

    @property
    def is_sure(self) -> bool:
        """True while the lease surely lives. False where it may not: ask."""
        return self._clock() < max(self._answered_s + self._silence_limit_s, self._sent_s + self._follows_s)

    def begin_beat(self) -> float:
        """A beat is about to be sent: the time, for its answer. It may never have left where the process is stopped
        now; but the one before it has, so it counts for half of the limit, and only where it follows that closely."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._sent_s <= self._follows_s:
                self._sent_s = now_s
            return now_s

    def end_beat(self, sent_s: float) -> None:
        """The beat that was sent then was answered: the lease has lived all the time."""
        with self._lock:
            self._answered_s = max(self._answered_s, sent_s)
            self._sent_s = max(self._sent_s, sent_s)

    def break_off(self) -> None:
        """Beats do not come through: what was sent and not answered counts for nothing."""
        with self._lock:
            self._sent_s = self._answered_s
