"""An engine that says that it cannot work, or that it has lost everything: what follows for its user."""

from __future__ import annotations

from cachesvc.storage.seam import StorageBackend
from cachesvc.storage.tier.breaker import Breaker


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
