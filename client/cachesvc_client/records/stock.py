"""Pages that the daemon granted ahead of need, so that a sequence grows by a block without a round trip."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cachesvc.model.answers import GroupCells
from cachesvc.model.layout import Layout
from cachesvc_client.core.errors import InvalidRequest, StockEmpty


class Stock:
    """Granted pages of each group, oldest first. ``targets[g]``: how many the daemon is to keep it filled up to.

    Used from one thread, like the step stream that fills it.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        if any(target < 0 for target in targets):
            raise InvalidRequest(f"a stock's targets cannot be negative, got {list(targets)}")
        self.targets = tuple(targets)
        self._pages = [array("i") for _ in targets]
        self._generations = [array("I") for _ in targets]

    @property
    def blocks(self) -> int:
        """Number of blocks that could be taken now: the least of all groups."""
        pages = self._pages
        return len(pages[0]) if len(pages) == 1 else min(map(len, pages), default=0)

    @property
    def pages(self) -> tuple[int, ...]:
        """Number of pages of each group in the stock."""
        return tuple(map(len, self._pages))

    def add(self, granted: Iterable[GroupCells]) -> None:
        """Take in pages that the daemon granted, or that came back unused."""
        for cells in granted:
            self._pages[cells.group].extend(cells.pages)
            self._generations[cells.group].extend(cells.generations)

    def add_packed(self, group: int, pages: bytes, generations: bytes) -> None:
        """``add`` for packed int32 page ids and uint32 generations."""
        self._pages[group].frombytes(pages)
        self._generations[group].frombytes(generations)

    def take(self, blocks: int, first_block: int) -> tuple[GroupCells, ...]:
        """Pages of every group for ``blocks`` blocks. Raises StockEmpty, and takes nothing, if a group is short."""
        if blocks < 1:
            raise InvalidRequest(f"take at least 1 block, got {blocks}")
        taken = self.take_packed(blocks)
        cells = [GroupCells(group, first_block, tuple(its[0]), tuple(its[1])) for group, its in enumerate(taken)]
        return tuple(cells)

    def take_packed(self, blocks: int) -> list[tuple[array[int], array[int]]]:
        """Take page ids (int32) and generations (uint32) of ``blocks`` blocks for each group. Raises as ``take``."""
        self.require(blocks)
        taken = []
        for pages, generations in zip(self._pages, self._generations, strict=True):
            taken.append((pages[:blocks], generations[:blocks]))
            del pages[:blocks], generations[:blocks]
        return taken

    def require(self, blocks: int) -> None:
        """Raises StockEmpty where a group has fewer than ``blocks`` pages."""
        if self.blocks < blocks:
            raise StockEmpty.from_message(
                f"wanted {blocks} blocks of the stock, which has {list(self.pages)} pages by group (targets "
                f"{list(self.targets)}); allocate, or go on after the next step"
            )

    def drain(self) -> tuple[GroupCells, ...]:
        """Take all pages; the stock is empty then."""
        drained = []
        for group, (pages, generations) in enumerate(zip(self._pages, self._generations, strict=True)):
            if pages:
                drained.append(GroupCells(group, 0, tuple(pages), tuple(generations)))
                del pages[:], generations[:]
        return tuple(drained)


def stock_targets(stock_pages: int | Sequence[int], layout: Layout) -> list[int]:
    """Targets of all groups, from one number for all or one for each; that of a layout's markers, of which a block
    takes one too, may be left out. Raises InvalidRequest."""
    groups, own = len(layout.groups), len(layout.own_groups)
    targets = [stock_pages] * groups if isinstance(stock_pages, int) else list(stock_pages)
    if len(targets) == own:
        targets += [max(targets)] * (groups - own)
    if len(targets) != groups:
        raise InvalidRequest(f"stock_pages needs one number for each of {own} groups, got {len(targets)}")
    return targets
