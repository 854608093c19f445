"""One group's block table: the page of each block by its position in the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from cachesvc.model.answers import GroupCells
from cachesvc.model.columns import Positions
from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc_client.core.errors import InvalidRequest

Pages = npt.NDArray[np.int32]
States = Mapping[int, Mapping[int, int]]
"""Pages to publish as states, by group and position."""
NO_STATES: States = MappingProxyType({})
NO_DEAD: Mapping[int, int] = MappingProxyType({})
_LEAST_CAPACITY = 64
_NO_CELLS: Pages = np.empty(0, np.int32)


class BlockTable:
    """Grows at its end; cells change in place when a page is swapped for a sealed one, or recycled. ``cells``: with
    those that are reserved."""

    __slots__ = ("blocks", "cells")

    def __init__(self) -> None:
        self.cells = _NO_CELLS
        self.blocks = 0

    @property
    def pages(self) -> Pages:
        """``[blocks]``, -1 where there is no page; read-only, good until the next call for the sequence."""
        view = self.cells[: self.blocks]
        view.flags.writeable = False
        return view

    def put(self, first_block: int, pages: Sequence[int]) -> None:
        """Write cells from ``first_block`` on; the table grows to hold them."""
        end = first_block + len(pages)
        if self.blocks or first_block:
            if end > len(self.cells):
                self.reserve(end)
            if len(pages) == 1:
                self.cells[first_block] = pages[0]
            else:
                self.cells[first_block:end] = pages
        else:
            self.cells = np.array(pages, np.int32)
        self.blocks = max(self.blocks, end)

    def put_at(self, positions: Sequence[int], pages: Sequence[int]) -> None:
        """Write cells at given positions, which are in the table."""
        assert not positions or max(positions) < self.blocks
        self.cells[list(positions)] = pages

    def clear(self, first_block: int, end_block: int) -> None:
        """Forget the pages of ``[first_block, end_block)``."""
        self.cells[first_block : min(end_block, self.blocks)] = NO_PAGE

    def forget(self, pages: Sequence[int]) -> None:
        """Forget some pages, wherever they are."""
        mine = self.cells[: self.blocks]
        mine[np.isin(mine, pages)] = NO_PAGE

    def reserve(self, blocks: int) -> None:
        """Make room for a table of ``blocks`` blocks."""
        if blocks <= len(self.cells):
            return
        grown = np.empty(max(blocks, 2 * len(self.cells), _LEAST_CAPACITY), np.int32)
        grown[: self.blocks] = self.cells[: self.blocks]
        grown[self.blocks :] = NO_PAGE
        self.cells = grown


def append_each(tables: Iterable[BlockTable], positions: Iterable[int], pages: Iterable[int]) -> None:
    """Write a page at the end of each table or behind it: one loop, for a call for each costs as much again."""
    for table, at, page in zip(tables, positions, pages, strict=True):
        if at >= len(table.cells):
            table.reserve(at + 1)
        table.cells[at] = page
        table.blocks = at + 1


def named_states(states: States) -> list[GroupCells]:
    """Cells of the states to publish, one each."""
    return [GroupCells(group, position, (page,)) for group, mine in states.items() for position, page in mine.items()]


def put_states(
    tables: Sequence[BlockTable], cursors: Mapping[int, int], named: Sequence[GroupCells], kept: Sequence[GroupCells]
) -> None:
    """Put states that were sealed where they are in the tables now; those ``kept`` stay where they are. ``cursors``: by
    group, the first block that was not given back."""
    own = {(cells.group, page) for cells in kept for page in cells.pages}
    for group, position, pages, _ in named:
        if (group, pages[0]) not in own:
            tables[group].forget(pages)
            if position >= cursors.get(group, 0):
                tables[group].put_at((position,), pages)


def dead_blocks(layout: Layout, dead: Mapping[int, int]) -> tuple[int, ...]:
    """The first block that is needed still in each windowed group, 0 where ``dead`` does not say; none at all where it
    is empty. Raises InvalidRequest for a group without a window."""
    if unknown := dead.keys() - set(layout.window_groups):
        raise InvalidRequest(f"group {min(unknown)} has no window: its blocks are never dead")
    return tuple([dead.get(group, 0) for group in layout.window_groups]) if dead else ()


def growth_positions(layout: Layout, positions: Positions) -> Positions:
    """Positions that get a page of the stock, with none for states that are not named. Raises InvalidRequest."""
    if not positions and not layout.state_groups:
        return positions
    if full := positions.keys() & set(layout.full_groups):
        raise InvalidRequest(f"group {min(full)} has no window: each of its new blocks gets a page")
    return {**dict.fromkeys(layout.state_groups, ()), **positions}


def as_cells(pages: list[tuple[int, int]]) -> list[GroupCells]:
    """Cells of ``(group, page)`` pairs, those of a group together."""
    return [
        GroupCells(group, 0, tuple(page for _, page in mine))
        for group, mine in groupby(sorted(pages), key=lambda pair: pair[0])
    ]
