"""Converts access sequence numbers to ages in seconds.

The service marks the time now and then; between two marks the time is not known better than that. The ledger decides
nothing by it: operators see it.
"""

from __future__ import annotations

from bisect import bisect_left

MARKS_KEPT = 4096
"""Marks a second apart cover the last hour to the second; older ones are thinned out, so that days fit too."""


class Ages:
    """Times at which access numbers were reached."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stamps: list[int] = []
        self._times: list[float] = []

    def mark(self, stamp: int, now: float) -> None:
        """Note that ``stamp`` was the last access number at ``now`` (seconds)."""
        self.now = now
        if self._stamps and self._stamps[-1] == stamp:
            return
        self._stamps.append(stamp)
        self._times.append(now)
        if len(self._stamps) > MARKS_KEPT:
            half = MARKS_KEPT // 2
            del self._stamps[1:half:2], self._times[1:half:2]

    def age(self, stamp: int) -> float:
        """Seconds since the access, as of the last mark; one since then is 0 old."""
        at = bisect_left(self._stamps, stamp)
        return self.now - self._times[at] if at < len(self._times) else 0.0

    def age_of_use(self, stamp: int) -> float | None:
        """``age``; None for 0, under which a block counts as never used."""
        return self.age(stamp) if stamp else None
