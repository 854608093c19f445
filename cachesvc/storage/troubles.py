"""Errors of a storage engine: counted, and logged once a minute for each kind, however many there are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

NOTE_SECONDS = 60.0
"""Interval between two log lines of a kind, seconds."""


class Troubles:
    """``count``: errors since the start; ``last``: the text of the last one. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self.last = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._untold: Counter[str] = Counter()
        self._note_at: dict[str, float] = {}

    def note(self, kind: str, reason: str) -> int:
        """Note an error; returns how many of the kind a log line is due for now, or 0."""
        with self._lock:
            self.count += 1
            self.last = reason
            self._untold[kind] += 1
            now = self._clock()
            if now < self._note_at.get(kind, now):
                return 0
            self._note_at[kind] = now + NOTE_SECONDS
            return self._untold.pop(kind)
