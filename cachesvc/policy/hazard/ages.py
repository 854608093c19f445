"""Ages in half octaves of seconds: bin k begins at 2^(k/2) - 1."""

from __future__ import annotations

from math import log2

import numpy as np

BINS = 30
EDGES = np.array([2 ** (k / 2) - 1 for k in range(BINS)])
"""Beginnings of the bins, in seconds."""
WIDTHS = np.append(np.diff(EDGES), 1e5)
"""Seconds of each bin; the last one has no end."""

_EDGES: list[float] = EDGES.tolist()


def bin_of(age: float) -> int:
    """The bin of an age in seconds; one below 0 counts as 0."""
    return min(int(2 * log2(1 + age)), BINS - 1) if age > 0 else 0


def begin_of(number: int) -> float:
    """Beginning of a bin, in seconds."""
    return _EDGES[number]


def exposure(age: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds spent in each bin until ``age``."""
    spent: np.ndarray[tuple[int], np.dtype[np.float64]] = np.clip(age - EDGES, 0.0, _SPENT_MOST)
    return spent


_SPENT_MOST = np.append(np.diff(EDGES), np.inf)
