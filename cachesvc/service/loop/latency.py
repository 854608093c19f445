"""Longest holds of the event loop, by flow: all other calls waited that long.

It reports the longest hold of the last one to two minutes, to any number of readers. It costs two readings of a clock a
callback.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW_SECONDS = 60.0


class LoopWatch:
    """Used on the loop alone."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._until = time.perf_counter() + WINDOW_SECONDS

    def note(self, what: str, began: float) -> float:
        """Note that ``what`` held the loop since ``began`` (``time.perf_counter``); returns the seconds."""
        now = time.perf_counter()
        held = now - began
        if now >= self._until:
            self._turn_over(now)
        if held > self._longest.get(what, 0.0):
            self._longest[what] = held
        return held

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Count the time for which ``what`` holds the loop."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(what, began)

    def longest(self) -> dict[str, float]:
        """Seconds of the longest hold by each, in this window and the one before it."""
        now = time.perf_counter()
        if now >= self._until:
            self._turn_over(now)
        both = self._before | self._longest
        return {what: max(seconds, self._before.get(what, 0.0)) for what, seconds in both.items()}

    def _turn_over(self, now: float) -> None:
        self._before = self._longest if now < self._until + WINDOW_SECONDS else {}
        self._longest = {}
        self._until = now + WINDOW_SECONDS
