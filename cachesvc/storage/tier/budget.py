"""Limits of writing: bytes a second, and bytes in flight."""

from __future__ import annotations

LONGEST_SECONDS = 1.0
"""Most seconds of unused rate that count: what is not written in one second is not written twice in the next."""


ANY_BLOCK_BYTES = 1 << 40
"""However large a block is, it may go when nothing else does."""


class WriteBudget:
    """A bucket of bytes, filled at ``rate`` a second, and a window of ``most_under_way``. One thread."""

    def __init__(self, rate: int, most_under_way: int, now: float) -> None:
        self._rate = rate
        self._most = most_under_way
        self._tokens = float(rate) * LONGEST_SECONDS
        self._filled = now
        self.under_way = 0

    def room(self, now: float) -> int:
        """Bytes that may be begun now."""
        full = self._rate * LONGEST_SECONDS
        self._tokens = min(full, self._tokens + self._rate * max(0.0, now - self._filled))
        self._filled = now
        if not self.under_way and self._tokens >= full:
            return max(self._most, ANY_BLOCK_BYTES)
        return max(0, min(int(self._tokens), self._most - self.under_way))

    def lift(self) -> None:
        """Drop the rate's limit, and keep the window's: the daemon ends, and no engine competes."""
        self._rate = ANY_BLOCK_BYTES

    def begin(self, size_bytes: int) -> None:
        """Count bytes in flight."""
        self._tokens -= size_bytes
        self.under_way += size_bytes

    def end(self, size_bytes: int) -> None:
        """Their memory is free again."""
        self.under_way -= size_bytes
