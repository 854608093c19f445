"""The prompts of a model's last requests: input of simulations of another policy, or of bigger pools.

Of each block a part of its key is kept that distinguishes it from all others. Nothing is decided by it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from cachesvc.model.keys import KEY_BYTES

ID_BYTES = 8
"""Bytes kept of a key: among a million blocks two are taken for one once in thirty million times."""
REQUEST_BLOCKS = 16
"""Cost of keeping a request beside its blocks' ids, in ids (some 120 bytes)."""


class RecentRequest:
    """Time of its arrival (seconds), ``ID_BYTES`` of each of its blocks' keys, root to leaf, and the tokens of its
    output (0: not reported)."""

    __slots__ = ("block_ids", "output_tokens", "seconds")

    def __init__(self, seconds: float, block_ids: bytes) -> None:
        self.seconds = seconds
        self.block_ids = block_ids
        self.output_tokens = 0

    @property
    def blocks(self) -> int:
        """Its length in blocks."""
        return len(self.block_ids) // ID_BYTES


class RecentRequests:
    """The last requests that had blocks, oldest first, in the memory of a limited number of blocks' ids."""

    def __init__(self) -> None:
        self._ids = 0
        self._kept: deque[RecentRequest] = deque()

    def add(self, seconds: float, keys: bytes, most_blocks: int) -> RecentRequest:
        """A prompt of packed ``keys`` came: what is older goes until all take the memory of ``most_blocks`` ids."""
        words = np.frombuffer(keys, np.uint64)[:: KEY_BYTES // ID_BYTES]
        request = RecentRequest(seconds, words.tobytes())
        if len(words):
            self._kept.append(request)
            self._ids += REQUEST_BLOCKS + len(words)
        while self._ids > most_blocks:
            self._ids -= REQUEST_BLOCKS + self._kept.popleft().blocks
        return request

    def all(self) -> list[RecentRequest]:
        """Copy of the requests, oldest first."""
        return list(self._kept)
