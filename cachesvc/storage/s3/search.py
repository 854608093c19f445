"""Number of leading names that are there, by few questions.

A block is of use only with all before it, and is written after them, so presence along a prompt is a step: the first
name is asked alone, as most prompts have none, then a few at a time between what is there and what is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

WIDTH = 16
"""Questions asked at a time: 1,024 names take four rounds."""

Answer = Callable[[bool | None], None]
"""Told whether a name is there; None: the question failed."""
Ask = Callable[[int, Answer], None]
"""``(index, answer)``: asks for one name; ``answer`` is called once, on any thread."""


class Search:
    """``found`` is called once, with the number of leading names that are there, or None where a question failed."""

    def __init__(self, count: int, ask: Ask, found: Callable[[int | None], None]) -> None:
        self._ask = ask
        self._found = found
        self._low, self._high = 0, count
        self._answers: dict[int, bool | None] = {}
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Ask for the first name."""
        if not self._high:
            self._found(0)
            return
        self._round([0])

    def _round(self, indexes: Sequence[int]) -> None:
        self._answers, self._left = {}, len(indexes)
        for index in indexes:
            self._ask(index, lambda is_there, index=index: self._answered(index, is_there))  # type: ignore[misc]

    def _answered(self, index: int, is_there: bool | None) -> None:
        with self._lock:
            self._answers[index] = is_there
            self._left -= 1
            if self._left:
                return
        if None in self._answers.values():
            self._found(None)
            return
        for asked in sorted(self._answers):
            if not self._answers[asked]:
                self._high = asked
                break
            self._low = asked + 1
        if self._low >= self._high:
            self._found(self._low)
            return
        self._round(_spread(self._low, self._high))


def _spread(low: int, high: int) -> list[int]:
    """Up to WIDTH indexes in [low, high), the last of them included."""
    room = high - low
    if room <= WIDTH:
        return list(range(low, high))
    return sorted({low + room * at // WIDTH - 1 for at in range(1, WIDTH + 1)})
