"""How long the event loop was held at a time, by what held it: so long everybody else has waited.

The longest since somebody looked is kept, so it costs two readings of a clock a callback and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class LoopWatch:
    """Used on the loop alone."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}

    def note(self, what: str, began: float) -> None:
        """``what`` held the loop since ``began`` (``time.perf_counter``)."""
        seconds = time.perf_counter() - began
        if seconds > self._longest.get(what, 0.0):
            self._longest[what] = seconds

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """``what`` holds the loop meanwhile."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(what, began)

    def take(self) -> dict[str, float]:
        """Seconds of the longest hold by each since the last look."""
        longest, self._longest = self._longest, {}
        return longest
