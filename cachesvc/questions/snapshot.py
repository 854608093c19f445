"""Copies of the index's arrays, taken in one go: one moment of the ledger, while the ledger goes on.

Copying a column of a million blocks is some megabytes of memory; walking it in Python is a second. So a question about
everything copies the columns that it needs in one go, and computes off the loop. A view of an array is never kept: an
array that is exported cannot grow.
"""

from __future__ import annotations

from array import array
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import NO_ROW, Place

Ints = npt.NDArray[np.int64]
Column = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]


def int32s(column: array[int]) -> Int32s:
    """A copy of an array of 32-bit numbers."""
    return np.frombuffer(column, np.int32).copy() if column else np.empty(0, np.int32)


def int64s(column: array[int]) -> Ints:
    """A copy of an array of 64-bit numbers."""
    return np.frombuffer(column, np.int64).copy() if column else np.empty(0, np.int64)


def uint16s(column: array[int]) -> npt.NDArray[np.uint16]:
    """A copy of an array of 16-bit numbers."""
    return np.frombuffer(column, np.uint16).copy() if column else np.empty(0, np.uint16)


Number = TypeVar("Number", bound=np.generic)


class Arena:
    """Memory for copies that was written once: to write to fresh memory costs several times what a copy does."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.ones(size_bytes, np.uint8)
        self._used = 0

    def copy(self, column: array[int], kind: type[Number]) -> npt.NDArray[Number]:
        """A copy of an array of numbers, in fresh memory where the arena is full."""
        source = np.frombuffer(column, kind) if column else np.empty(0, kind)
        first = -(-self._used // source.itemsize) * source.itemsize
        end = first + source.nbytes
        if end > len(self._bytes):
            return source.copy()
        self._used = end
        out = self._bytes[first:end].view(kind)
        out[:] = source
        return out


def states(column: bytearray) -> Bytes:
    """A copy of a column of states."""
    return np.frombuffer(bytes(column), np.uint8)


def place_states(place: Place) -> list[Bytes]:
    """A copy of a place's states, one column a group."""
    return [states(column) for column in place.states]


def live_rows(rows: int, columns: list[list[Bytes]]) -> Mask:
    """Mask of the rows with a copy in any of the places whose states are given: all that the index knows."""
    live = np.zeros(rows, np.bool_)
    for place in columns:
        for column in place:
            live |= column != 0
    return live


def live_now(index: BlockIndex) -> Mask:
    """``live_rows`` of this moment."""
    return live_rows(len(index.keys), [place_states(place) for place in index.places])


class TreeShape:
    """Parents, depths and presence, of one moment; computes subtrees. Everything but the making is pure."""

    def __init__(self, index: BlockIndex) -> None:
        self.parent = int32s(index.parent)
        self.depth = int32s(index.depth)
        self.live = live_now(index)

    def descendants(self) -> Ints:
        """Blocks below each row."""
        below = np.zeros(len(self.parent), np.int64)
        rows = np.flatnonzero(self.live & (self.parent != NO_ROW))
        order = rows[np.argsort(-self.depth[rows], kind="stable")]
        levels = self.depth[order]
        edges = np.flatnonzero(np.diff(levels)) + 1
        for level in np.split(order, edges):  # the deepest first: what is below a level is known by then
            np.add.at(below, self.parent[level], below[level] + 1)
        return below

    def children_of(self) -> ChildLists:
        """Children of any row, by look-up."""
        return ChildLists(self.parent, self.live)


class ChildLists:
    """Rows sorted by parent, so that the children of one are a slice."""

    def __init__(self, parent: Int32s, live: Mask) -> None:
        rows = np.flatnonzero(live)
        self._rows = rows[np.argsort(parent[rows], kind="stable")]
        self._parents = parent[self._rows]

    def of(self, row: int) -> Ints:
        """The children of a row; of NO_ROW: the roots."""
        first, last = np.searchsorted(self._parents, [row, row + 1])
        return self._rows[first:last]
