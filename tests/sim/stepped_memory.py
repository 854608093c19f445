"""Memory of the stepped backend: arrays in place of device memory, and of the words that waiters follow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from cachesvc.memory.interface import CopyBatch, Handle
from cachesvc.memory.memcpy import check_sizes
from cachesvc.model.errors import NotFound

_sheets = itertools.count()


def check_bounds(copies: CopyBatch, region_bytes: Mapping[int, int]) -> None:
    """Raises CopyOutOfBounds for the first copy that is not wholly inside its two regions."""
    sizes = []
    for region in (0, 2):
        named, index = np.unique(copies[:, region], return_inverse=True)
        sizes.append(np.array([region_bytes.get(int(one), -1) for one in named], np.int64)[index])
    check_sizes(copies, sizes[0], sizes[1])


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
