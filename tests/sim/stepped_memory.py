"""Memory of the stepped backend: arrays in place of device memory, and of the words that waiters follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from cachesvc.memory.interface import Handle
from cachesvc.model.errors import LedgerBroken, NotFound

_sheets = itertools.count()


class SteppedSlab:
    """An array in place of device memory."""

    fd: int | None = None

    def __init__(self, region: int, size_bytes: int, on_close: Callable[[], None]) -> None:
        self.region = region
        self.handle = Handle("memory", region.to_bytes(16, "little"), size_bytes)
        self._on_close = on_close
        self._is_open = True

    def close(self) -> None:
        """Give the memory back. Raises LedgerBroken when it was given back before."""
        if not self._is_open:
            raise LedgerBroken(f"slab of region {self.region} was closed before")
        self._is_open = False
        self._on_close()


class SteppedSheet:
    """Words in an array."""

    fd: int | None = None
    writers: tuple[Handle, int] | None = None

    def __init__(self, words: int) -> None:
        self.handle = Handle("memory", b"sheet" + next(_sheets).to_bytes(11, "little"), 4 * words)
        self.values = np.zeros(words, np.uint32)

    def read(self, word: int) -> int:
        """Present value of a word."""
        return int(self.values[word])


class SteppedTimeline:
    """Sheets of words. ``history`` keeps every write: (word, value)."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.history: list[tuple[int, int]] = []
        self.open: dict[int, SteppedSheet] = {}

    def sheet(self, number: int) -> SteppedSheet:
        """Raises NotFound."""
        if number not in self.open:
            raise NotFound("sheet", number)
        return self.open[number]

    def read(self, word: int) -> int:
        """Present value of a word."""
        return self.open[word // self.words].read(word % self.words)

    def write(self, word: int, value: int) -> None:
        """Set a word."""
        self.open[word // self.words].values[word % self.words] = value
        self.history.append((word, value))
