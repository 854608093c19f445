"""Lessons of a policy that learns: when it learns again, and the lesson under way, which is done in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

FIRST_FIT, LONGEST_PERIOD = 20, 400
"""Requests before the first lesson, and the most between two."""


class Lessons:
    """One lesson at a time. Each is an iterator that does a step of some 0.2 ms whenever it is advanced."""

    def __init__(self) -> None:
        self._next = FIRST_FIT
        self._steps: Iterator[None] | None = None
        self._is_new = False

    def is_due(self, requests: int) -> bool:
        """True where a lesson is to begin after this number of requests."""
        return self._steps is None and requests >= self._next

    def begin(self, requests: int, steps: Iterator[None]) -> None:
        """Begin a lesson. The next one is due a tenth of all requests later."""
        self._next = requests + min(LONGEST_PERIOD, max(FIRST_FIT, requests // 10))
        self._steps = steps
        self._is_new = True

    def take(self) -> Callable[[], bool] | None:
        """Callable to be called until it returns True, while no call is served; None: nothing is new."""
        if not self._is_new:
            return None
        self._is_new = False
        return self._learn

    def _learn(self) -> bool:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        return self._steps is None
