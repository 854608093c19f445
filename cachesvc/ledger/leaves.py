"""Candidates for eviction, lowest rank first, kept lazily: a stale entry is thrown away when it comes up."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Rank = tuple[int, ...]


class LeafHeap:
    """``(rank, row)`` entries. An entry counts only while ``is_current(rank, row)`` says so; duplicates are harmless."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._limit = 1024

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, rank: Rank, row: int, is_current: Callable[[Rank, int], bool]) -> None:
        """Add a candidate; drops stale entries when they have come to outweigh the live ones."""
        heapq.heappush(self._heap, (rank, row))
        if len(self._heap) > self._limit:
            live = {entry for entry in self._heap if is_current(*entry)}
            self._heap = list(live)
            heapq.heapify(self._heap)
            self._limit = max(1024, 2 * len(live))

    def pop(self, is_current: Callable[[Rank, int], bool]) -> tuple[Rank, int] | None:
        """Remove and return the lowest current entry, or None."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if is_current(*entry):
                return entry
        return None
