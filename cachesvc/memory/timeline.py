"""The timeline: 32-bit words in a memory file that every engine maps.

Processors wait by futex or look; streams wait too, where the file is pinned.
"""

from __future__ import annotations

import os
import secrets

from cachesvc.memory.mapped import address_of, mapped_for_all, mapped_for_reading
from cachesvc.memory.seam import Handle
from cachesvc.model.futex import WORD_BYTES, store_and_wake, words_of

TIMELINE_WORDS = 8192
TOKEN_BYTES = 16


class HostTimeline:
    """One device's words. Nobody else can write them, because a word says that bytes are there; unless engines must
    (``is_shared``), to end their streams' waits once the daemon is gone."""

    def __init__(self, words: int, *, is_shared: bool = False) -> None:
        make = mapped_for_all if is_shared else mapped_for_reading
        fd, self._view = make("kvcache-timeline", words * WORD_BYTES)
        self.fd: int | None = fd
        self.words = words
        self.handle = Handle("memfd", secrets.token_bytes(TOKEN_BYTES), words * WORD_BYTES)
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
