"""Candidates for eviction, lowest rank first, kept lazily: an entry is put right or thrown away when it comes up.

Whoever may go now must have an entry whose rank is not above its own. Ranks only rise with use, so an entry of a block
that was used since comes up too early, never too late, and is then put back where it belongs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Rank = tuple[int, ...]
RankNow = Callable[[int], Rank | None]
"""A row's rank, or None while it may not go."""

_SMALL = 1024


class LeafHeap:
    """``(rank, row)`` entries; duplicates are harmless."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._limit = _SMALL

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, rank: Rank, row: int, rank_now: RankNow) -> None:
        """Add a candidate; drops stale entries when they have come to outweigh the live ones."""
        heapq.heappush(self._heap, (rank, row))
        if len(self._heap) > self._limit:
            ranks = {row: rank_now(row) for _, row in self._heap}
            self._heap = [(now, row) for row, now in ranks.items() if now is not None]
            heapq.heapify(self._heap)
            self._limit = max(_SMALL, 2 * len(self._heap))

    def pop(self, rank_now: RankNow) -> tuple[Rank, int] | None:
        """Remove and return the lowest current entry, or None."""
        heap = self._heap
        while heap:
            entry = heapq.heappop(heap)
            now = rank_now(entry[1])
            if now == entry[0]:
                return entry
            if now is not None:
                heapq.heappush(heap, (now, entry[1]))
        return None

    def entries(self) -> list[tuple[Rank, int]]:
        """A copy of all entries, in no order."""
        return list(self._heap)

    def lowest(self) -> dict[int, Rank]:
        """The lowest entry of each row, for audits."""
        return {row: rank for rank, row in sorted(self._heap, reverse=True)}
