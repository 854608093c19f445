"""Does again, while nothing is to be done, what the last job began with, so that the processor still knows it when the
next one comes.

After 10 ms of sleep it has nothing of that in its caches: from the wake-up to the driver's call a whole ticket of 64
MiB takes it 0.52 ms, and 0.3 where a rehearsal was 4 ms before (EPYC, two busy cores, 2026-11). A rehearsal is a job of
no copies that passes through all that others do, the driver too, and plans the last one's first part on its way.
"""

from __future__ import annotations

from typing import Protocol

from cachesvc.model.errors import CacheError
from cachesvc.mover.records import Listener
from cachesvc.mover.ring import LOOK_S
from cachesvc.swap.movers import RankJob

EVERY_S = 0.004
"""Longer, and much is forgotten."""
TIMES = 50
"""Rehearsals after each job: engines that load now and then do so more often, and an idle one costs nothing. Each takes
a processor 0.4 ms, so all of them 20 (EPYC, 2026-11)."""
MOST_BYTES = 16 << 10
"""Most bytes of a job's record: a thousand blocks. A waiter for more of them does not notice how they begin."""


class Planner(Protocol):
    """The part of ``Inside`` that rehearsals use."""

    @property
    def is_busy(self) -> bool:
        """True while a job has not ended."""

    def rehearse(self, job: RankJob) -> None:
        """Do all for a job but to copy. Raises CacheError."""


class Rehearsal:
    """Rehearsals of the thread that reads jobs."""

    def __init__(self, listener: Listener, planner: Planner) -> None:
        self._listener = listener
        self._planner = planner
        self._record = b""
        self._left = 0

    def remember(self, record: bytes) -> None:
        """A job was taken."""
        is_small = len(record) <= MOST_BYTES
        self._record, self._left = (record, TIMES + 1) if is_small else (b"", 0)

    def meanwhile(self) -> float:
        """Rehearse, but not at once after a job. Returns the seconds to wait before the next call."""
        if not self._left:
            return LOOK_S
        if not self._planner.is_busy:
            self._left -= 1
            if self._left < TIMES:
                self._rehearse()
        return EVERY_S

    def _rehearse(self) -> None:
        try:
            self._planner.rehearse(self._listener.job(self._record))
        except (KeyError, CacheError):  # its pools were forgotten, or nothing can be done now
            self._left = 0
