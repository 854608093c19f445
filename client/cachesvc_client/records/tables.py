"""One group's block table: the page of each block by its position in the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachesvc.model.words import NO_PAGE

Pages = npt.NDArray[np.int32]
_LEAST_CAPACITY = 64
_NO_CELLS: Pages = np.empty(0, np.int32)


class BlockTable:
    """Grows at its end; cells change in place when a page is swapped for a sealed one, or recycled."""

    def __init__(self) -> None:
        self._cells = _NO_CELLS
        self.blocks = 0

    @property
    def pages(self) -> Pages:
        """``[blocks]``, -1 where there is no page; read-only, good until the next call for the sequence."""
        view = self._cells[: self.blocks]
        view.flags.writeable = False
        return view

    def put(self, first_block: int, pages: Sequence[int]) -> None:
        """Write cells from ``first_block`` on; the table grows to hold them."""
        end = first_block + len(pages)
        if self.blocks or first_block:
            self._reserve(end)
            self._cells[first_block:end] = pages
        else:
            self._cells = np.array(pages, np.int32)
        self.blocks = max(self.blocks, end)

    def put_at(self, positions: Sequence[int], pages: Sequence[int]) -> None:
        """Write cells at given positions, which are in the table."""
        assert not positions or max(positions) < self.blocks
        self._cells[list(positions)] = pages

    def clear(self, first_block: int, end_block: int) -> None:
        """Forget the pages of ``[first_block, end_block)``."""
        self._cells[first_block : min(end_block, self.blocks)] = NO_PAGE

    def forget(self, pages: Sequence[int]) -> None:
        """Forget some pages, wherever they are."""
        mine = self._cells[: self.blocks]
        mine[np.isin(mine, pages)] = NO_PAGE

    def _reserve(self, blocks: int) -> None:
        if blocks <= len(self._cells):
            return
        grown = np.empty(max(blocks, 2 * len(self._cells), _LEAST_CAPACITY), np.int32)
        grown[: self.blocks] = self._cells[: self.blocks]
        grown[self.blocks :] = NO_PAGE
        self._cells = grown
