"""The kernels in NumPy: the oracle that their results are compared with, bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
GOLDEN = 0x9E3779B97F4A7C15
MIX_FIRST, MIX_SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Seeds = npt.NDArray[np.uint64]
PageBytes = npt.NDArray[np.uint8]
"""``[pages, width]``"""


def page_bytes(seeds: Seeds, width: int) -> PageBytes:
    """The bytes of pages of ``width`` bytes: splitmix64's words from each seed, little-endian, the last one cut."""
    words = np.arange(1, -(-width // WORD_BYTES) + 1, dtype=np.uint64)
    mixed = seeds.astype(np.uint64)[:, None] + words * np.uint64(GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(MIX_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(MIX_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return np.ascontiguousarray(mixed.astype("<u8").view(np.uint8)[:, :width])


def count_wrong(content: PageBytes, seeds: Seeds) -> npt.NDArray[np.uint32]:
    """For each page the words (a last part of one counts as one) that are not what its seed says."""
    pages, width = content.shape
    differs = content != page_bytes(seeds, width)
    padded = np.zeros((pages, -(-width // WORD_BYTES) * WORD_BYTES), np.bool_)
    padded[:, :width] = differs
    counted: npt.NDArray[np.uint32] = padded.reshape(pages, -1, WORD_BYTES).any(axis=2).sum(axis=1, dtype=np.uint32)
    return counted
