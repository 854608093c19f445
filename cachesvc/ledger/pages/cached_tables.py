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
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from cachesvc.ledger.pages.change_log import NO_ROW
from cachesvc.model.numbers.int32s import column

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
        """``forget`` for each of ``rows``."""
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
