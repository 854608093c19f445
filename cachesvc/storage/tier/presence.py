"""An engine that says that it cannot work, or that it has lost everything: what follows for its user, and the log."""

from __future__ import annotations

from cachesvc.storage.seam import StorageBackend
from cachesvc.storage.tier.breaker import Breaker
from cachesvc.telemetry import events

TELL_SECONDS = 60.0
"""Least time between two log lines that say that a tier was given up, or that its calls hang, seconds."""
HANG_SECONDS = 2.0
"""Time for which calls are late before they are said to hang, seconds."""


class Presence:
    """Follows one engine's ``totals``."""

    def __init__(self, backend: StorageBackend, breaker: Breaker) -> None:
        self._backend = backend
        self._breaker = breaker
        self._was_usable = True
        self._losses = 0

    def look(self, now: float) -> bool:
        """Give up an engine that cannot work, and try it at once when it can again. True where all that it had is lost
        since the last look."""
        totals = self._backend.totals()
        if not totals.is_usable:
            self._breaker.open(totals.problem, now)
        elif not self._was_usable:
            self._breaker.hurry(now)
        self._was_usable = totals.is_usable
        is_lost, self._losses = totals.losses != self._losses, totals.losses
        return is_lost


class StateLog:
    """Logs changes of a tier's state. What changes to and fro is a line a minute at most, and its end another."""

    def __init__(self, tier: str, breaker: Breaker) -> None:
        self._tier = tier
        self._breaker = breaker
        self._opened = 0
        self._unused_since: float | None = None
        self._late_since: float | None = None
        self._hangs = False
        self._tell_at = {"given up": float("-inf"), "hang": float("-inf")}

    def look(self, now: float, late: int, problem: str) -> None:
        """``late``: objects that have not come back in time; ``problem``: of the engine's ``totals``."""
        breaker = self._breaker
        if breaker.is_closed:
            if self._unused_since is not None:
                events.event("storage_used_again", tier=self._tier, seconds=round(now - self._unused_since, 1))
                self._unused_since = None
        elif self._unused_since is None and self._is_due("given up", now):
            times, self._opened = breaker.opened - self._opened, breaker.opened
            events.warning("storage_given_up", tier=self._tier, reason=problem or breaker.reason, times=times)
            self._unused_since = now
        if not late:
            if self._hangs:
                events.event("storage_calls_back", tier=self._tier)
            self._late_since, self._hangs = None, False
            return
        self._late_since = now if self._late_since is None else self._late_since
        if not self._hangs and now - self._late_since >= HANG_SECONDS and self._is_due("hang", now):
            events.warning("storage_calls_hang", tier=self._tier, objects=late)
            self._hangs = True

    def _is_due(self, line: str, now: float) -> bool:
        is_due = now >= self._tell_at[line]
        if is_due:
            self._tell_at[line] = now + TELL_SECONDS
        return is_due
