"""The timeline: 32-bit words in a memory file that every engine maps.

Processors wait by futex or look; streams wait too, where the file is pinned.
"""

from __future__ import annotations

import os
import secrets

from cachesvc.memory.mapped import address_of, map_memfd, sealed_memfd
from cachesvc.memory.seam import Handle
from cachesvc.model.futex import WORD_BYTES, store_and_wake, words_of

TIMELINE_WORDS = 8192
TOKEN_BYTES = 16


class HostTimeline:
    """One device's words."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.fd: int | None = sealed_memfd("kvcache-timeline", words * WORD_BYTES)
        self.handle = Handle("memfd", secrets.token_bytes(TOKEN_BYTES), words * WORD_BYTES)
        self._view = map_memfd(self.fd, words * WORD_BYTES)
        self._array = words_of(self._view)

    @property
    def address(self) -> int:
        """Of the first word, in this process."""
        return address_of(self._view)

    def read(self, word: int) -> int:
        """Present value of a word."""
        return int(self._array[word])

    def write(self, word: int, value: int) -> None:
        """Set a word and wake whoever waits on it."""
        store_and_wake(self._array, word, value)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last reference to this timeline."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
