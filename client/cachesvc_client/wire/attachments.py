"""Count of the pools of a rank that this process has mapped under a lease. The daemon knows only whether it has any,
and treats it as no writer after a Detach of the rank: so only the last pool may send one."""

from __future__ import annotations

import threading
from collections import Counter


class Attachments:
    """Those of one connection. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def begin(self, lease_id: str, rank: int) -> None:
        """A pool is about to be attached."""
        with self._lock:
            self._counts[lease_id, rank] += 1

    def end(self, lease_id: str, rank: int) -> bool:
        """One was unmapped, or never came; True when it was the last."""
        with self._lock:
            self._counts[lease_id, rank] -= 1
            left = self._counts[lease_id, rank]
            if not left:
                del self._counts[lease_id, rank]
        return not left

    def has(self, lease_id: str, rank: int) -> bool:
        """True while one is mapped."""
        with self._lock:
            return (lease_id, rank) in self._counts
