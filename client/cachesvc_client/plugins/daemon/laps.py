"""Parts of an engine's start that the daemon has a share in, by their time."""

from __future__ import annotations

import time


class Laps:
    """Seconds of the parts of a start, in their order. Used from one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """A part has ended, and the next one begins."""
        now_s = time.perf_counter()
        self.seconds[part] = now_s - self._since_s
        self._since_s = now_s

    def __str__(self) -> str:
        return " ".join(f"{part}_s={seconds:.3f}" for part, seconds in self.seconds.items())
