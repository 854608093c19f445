"""Parts of an object that come by requests of their own, to memory that lies in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from cachesvc.storage.seam import Outcome


def ranges(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Parts of an object, as (start, length): one where there would be less than two."""
    if size_bytes < 2 * part_bytes:
        return [(0, size_bytes)]
    return [(start, min(part_bytes, size_bytes - start)) for start in range(0, size_bytes, part_bytes)]


def scatter(pieces: Sequence[memoryview], start: int, content: memoryview) -> None:
    """Copy content to the pieces, which lie one after another, from byte ``start`` of them on. Outside of the GIL."""
    at, source = 0, np.frombuffer(content, np.uint8)
    for piece in pieces:
        first, last = max(at, start), min(at + len(piece), start + len(content))
        if first < last:
            np.frombuffer(piece, np.uint8)[first - at : last - at] = source[first - start : last - start]
        at += len(piece)


def gather(pieces: Sequence[memoryview]) -> memoryview:
    """Copy of pieces, one after another. Outside of the GIL."""
    joined = np.empty(sum(map(len, pieces)), np.uint8)
    at = 0
    for piece in pieces:
        joined[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return joined.data


class Gather:
    """Ends once all parts of an object have ended: by the first outcome that is not OK, if there is one. Any thread."""

    def __init__(self, count: int, end: Callable[[Outcome], None]) -> None:
        self._left = count
        self._outcome = Outcome.OK
        self._end = end
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        """Note that a part has ended."""
        with self._lock:
            self._left -= 1
            if self._outcome is Outcome.OK:
                self._outcome = outcome
            is_last = not self._left
        if is_last:
            self._end(self._outcome)
