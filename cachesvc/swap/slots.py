"""Allocator of a model's timeline words: one pair (progress, failure) for each ticket, the same on every rank.

A pair that was used goes to the end of the line, and half of all pairs always wait there, so a waiter that comes late
to an old ticket still finds its final words. A word only ever moves forward: the next ticket begins where the last one
ended, so a cyclic comparison stays right on either side of a reuse.
"""

from __future__ import annotations

import threading
from collections import deque

from cachesvc.model.errors import LimitExceeded
from cachesvc.model.transfer import TimelineSlot


class SlotPool:
    """The ``words`` words of a sheet, numbered from ``first`` on, as pairs (first + 2 i, first + 2 i + 1)."""

    def __init__(self, words: int, first: int = 0) -> None:
        self._first = first
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
            word = self._first + 2 * pair
            return TimelineSlot(word=word, failed_word=word + 1, base=self._bases[pair], layers=layers)

    def release(self, slot: TimelineSlot) -> None:
        """The ticket has ended: its word stands at ``slot.end`` on every rank."""
        pair = (slot.word - self._first) // 2
        with self._lock:
            self._bases[pair] = slot.end
            self._waiting.append(pair)

    def told(self, slot: TimelineSlot) -> TimelineSlot:
        """Slot with the numbers of engines, which have this sheet alone."""
        return TimelineSlot(slot.word - self._first, slot.failed_word - self._first, slot.base, slot.layers)
