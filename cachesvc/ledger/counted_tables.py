"""Block tables of shared prefixes on one place, in pieces that are kept: a table is joined, not walked.

    position   0 .. 63    64 .. 127   128 .. 140
               [  a  ]    [   b   ]   walked          a is kept under the row of block 63, b under that of block 127

A piece is made when it is first asked for, and it is right for as long as its last row has a whole copy on the place:
the page of a block in a group without a window changes only where the copy comes or goes, and what a device has is
prefix-closed, so that of all rows of a piece the last one goes first. So a place forgets a piece when its last row
goes, and nothing else can make it wrong. Windowed copies come and go by themselves: they are in no piece.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TypeAlias, TypeVar, overload

import numpy as np

from cachesvc.ledger.change_log import NO_ROW
from cachesvc.model.numbers import column

PIECE_BLOCKS = 64
"""Blocks of a piece: a table takes one look-up for each piece, and a walk of fewer blocks; 8 bytes a block are kept for
it."""

Piece: TypeAlias = tuple[int, tuple[bytes, ...]]
"""The row above it (NO_ROW: none), and for each group without a window its packed int32 pages."""


class TablePieces:
    """``parent`` and ``pages``, of each group without a window, are the ledger's columns by row. ``piece_blocks`` may
    be changed while nothing is kept."""

    def __init__(self, parent: array[int], pages: Sequence[array[int]]) -> None:
        self.piece_blocks = PIECE_BLOCKS
        self._parent = parent
        self._pages = tuple(pages)
        self._kept: dict[int, Piece] = {}

    @property
    def kept(self) -> dict[int, Piece]:
        """Pieces by their last row. Not to be written."""
        return self._kept

    def forget(self, row: int) -> None:
        """Forget the piece that holds ``row``, whose copy goes."""
        self._kept.pop(row, None)

    def forget_all(self, rows: Sequence[int]) -> None:
        kept = self._kept
        if not kept.keys().isdisjoint(rows):
            for row in rows:
                kept.pop(row, None)

    def tables(self, row: int, blocks: int) -> list[array[int]]:
        """Pages of the ``blocks`` blocks down to ``row`` for each group without a window; ``row`` has a whole copy
        here."""
        kept, parent = self._kept, self._parent
        rest, whole = [], []
        for _ in range(blocks % self.piece_blocks):
            rest.append(row)
            row = parent[row]
        while row != NO_ROW:
            above, pages = kept.get(row) or self._make(row)
            whole.append(pages)
            row = above
        rest.reverse()
        whole.reverse()
        tables = []
        for group, page_of in enumerate(self._pages):
            table = array("i", b"".join([pages[group] for pages in whole]))
            table.extend([page_of[each] for each in rest])
            tables.append(table)
        return tables

    def _make(self, last: int) -> Piece:
        first = last - self.piece_blocks + 1
        if first >= 0 and np.array_equal(column(self._parent)[first + 1 : last + 1], np.arange(first, last)):
            pages = tuple([page_of[first : last + 1].tobytes() for page_of in self._pages])
            self._kept[last] = piece = self._parent[first], pages
            return piece
        parent, row, rows = self._parent, last, []
        for _ in range(self.piece_blocks):
            rows.append(row)
            row = parent[row]
        rows.reverse()
        piece = row, tuple([array("i", [page_of[each] for each in rows]).tobytes() for page_of in self._pages])
        self._kept[last] = piece
        return piece


# Number of blocks of a place that its pins protect, each counted once; always up to date.
#
# The tree is cut into chains (``BlockIndex.head``). Of a chain that is kept at all only one thing counts: how deep.
#
#     chain A    0──1──2──3──4──5      pins on A3 and B6: B is kept down to 6, and A down to 4, where B hangs
#                            └─B5──B6


class Protected:
    """``blocks``: pinned rows and all that is above them. ``tips[head]``: the depth down to which a chain is kept.

    What keeps a chain is each of its pinned rows, and of each kept chain that hangs below one of its rows that row. The
    tip is the deepest; ``_others[head]`` are the depths of the rest, rising, where there are any.
    """

    __slots__ = ("_depth", "_head", "_others", "_parent", "blocks", "tips")

    def __init__(self, parent: array[int], depth: array[int], head: array[int]) -> None:
        self._parent = parent
        self._depth = depth
        self._head = head
        self._others: dict[int, list[int]] = {}
        self.blocks = 0
        self.tips: dict[int, int] = {}

    def keep(self, row: int) -> None:
        """Count a row that has its first pin."""
        while row != NO_ROW:
            head, depth = self._head[row], self._depth[row]
            tip = self.tips.get(head)
            if tip is not None:
                self._others.setdefault(head, [])
                insort(self._others[head], min(tip, depth))
                self.tips[head] = max(tip, depth)
                self.blocks += self.tips[head] - tip
                return
            self.tips[head] = depth
            self.blocks += depth - self._depth[head] + 1
            row = self._parent[head]

    def leave(self, row: int) -> None:
        """Count a row that has lost its last pin."""
        while row != NO_ROW:
            head, depth = self._head[row], self._depth[row]
            others = self._others.get(head)
            if others:
                if depth == self.tips[head]:
                    self.tips[head] = others.pop()
                    self.blocks -= depth - self.tips[head]
                else:
                    del others[bisect_left(others, depth)]
                if not others:
                    del self._others[head]
                return
            del self.tips[head]
            self.blocks -= depth - self._depth[head] + 1
            row = self._parent[head]


# A mapping of keys in many small parts, so that no single insertion moves all that is known.
#
# Resizing a dict rehashes every entry at once: with a million keys that is some 60 ms now and then, in the middle of a
# call. In parts it is a quarter of a millisecond.

Value = TypeVar("Value")
Default = TypeVar("Default")
PARTS = 256


class PartedDict(MutableMapping[bytes, Value]):
    """``parts[key[-1]]`` holds a key: keys are hashes, so they spread. Bulk look-ups may read ``parts``."""

    def __init__(self) -> None:
        self.parts: list[dict[bytes, Value]] = [{} for _ in range(PARTS)]

    def __getitem__(self, key: bytes) -> Value:
        return self.parts[key[-1]][key]

    def __setitem__(self, key: bytes, value: Value) -> None:
        self.parts[key[-1]][key] = value

    def __delitem__(self, key: bytes) -> None:
        del self.parts[key[-1]][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.parts[key[-1]]

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def get(self, key: bytes) -> Value | None: ...

    @overload
    def get(self, key: bytes, default: Value | Default) -> Value | Default: ...

    def get(self, key: bytes, default: Value | Default | None = None) -> Value | Default | None:
        return self.parts[key[-1]].get(key, default)


class KeyQueue:
    """Distinct keys, first in first out. A dict whose first keys are deleted rehashes all that is left now and then.
    ``known``: the same keys, read-only."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self.known: PartedDict[None] = PartedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self.known

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._order)

    def extend(self, keys: Iterable[bytes]) -> None:
        """Add keys that are not there, in their order."""
        for key in keys:
            if key not in self.known:
                self.known[key] = None
                self._order.append(key)

    @property
    def first(self) -> bytes:
        """The oldest key. Raises IndexError where there is none."""
        return self._order[0]

    def drop_first(self) -> None:
        """Remove the oldest key. Raises IndexError where there is none."""
        del self.known[self._order.popleft()]
