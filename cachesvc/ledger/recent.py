"""The prompts of a model's last requests: what a simulation of another policy, or of bigger pools, is run on.

Of each block so much of its key is kept that two are not taken for one. Nothing is decided by it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from cachesvc.model.keys import KEY_BYTES

ID_BYTES = 8
"""Of a key: among a million blocks two are taken for one once in thirty million times."""


class RecentRequest:
    """When it came (seconds), ``ID_BYTES`` of each of its blocks' keys, root to leaf, and the tokens of its output (0:
    nobody told)."""

    __slots__ = ("block_ids", "output_tokens", "seconds")

    def __init__(self, seconds: float, block_ids: bytes) -> None:
        self.seconds = seconds
        self.block_ids = block_ids
        self.output_tokens = 0

    @property
    def blocks(self) -> int:
        """How long it was."""
        return len(self.block_ids) // ID_BYTES


class RecentRequests:
    """The last requests, oldest first, with as many blocks as may be kept. ``blocks``: how many are."""

    def __init__(self) -> None:
        self.blocks = 0
        self._kept: deque[RecentRequest] = deque()

    def add(self, seconds: float, keys: bytes, most_blocks: int) -> RecentRequest:
        """A prompt of packed ``keys`` came: what is older goes until ``most_blocks`` are left."""
        words = np.frombuffer(keys, np.uint64)[:: KEY_BYTES // ID_BYTES]
        request = RecentRequest(seconds, words.tobytes())
        self._kept.append(request)
        self.blocks += request.blocks
        while self.blocks > most_blocks or len(self._kept) > most_blocks:
            self.blocks -= self._kept.popleft().blocks
        return request

    def all(self) -> list[RecentRequest]:
        """As they are now, oldest first."""
        return list(self._kept)
