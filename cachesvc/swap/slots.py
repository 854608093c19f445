"""Hands out timeline words: one pair (progress, failure) for each ticket, the same indices on every rank.

A pair that was used goes to the end of the line, and half of all pairs always wait there, so whoever comes
late to an old ticket still finds its words as they were left. A word only ever moves forward: the next
ticket begins where the last one ended, so a cyclic comparison stays right on either side of a reuse.
"""

from __future__ import annotations

import threading
from collections import deque

from cachesvc.model.errors import LimitExceeded
from cachesvc.model.transfer import TimelineSlot


class SlotPool:
    """``words`` timeline words as pairs (2 i, 2 i + 1)."""

    def __init__(self, words: int) -> None:
        self._bases = [0] * (words // 2)
        self._waiting = deque(range(words // 2))
        self._resting = words // 4
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Slots that can be acquired now."""
        return len(self._waiting) - self._resting

    def acquire(self, layers: int) -> TimelineSlot:
        """The pair that has rested longest. Raises LimitExceeded when all that may be out are out."""
        with self._lock:
            if len(self._waiting) <= self._resting:
                limit = len(self._bases) - self._resting
                raise LimitExceeded("transfers in flight", limit + 1, limit)
            pair = self._waiting.popleft()
            return TimelineSlot(word=2 * pair, failed_word=2 * pair + 1, base=self._bases[pair], layers=layers)

    def release(self, slot: TimelineSlot) -> None:
        """The ticket has ended: its word stands at ``slot.end`` on every rank."""
        with self._lock:
            self._bases[slot.word // 2] = slot.end
            self._waiting.append(slot.word // 2)
