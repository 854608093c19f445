"""Pages that the daemon granted ahead of need, so that a sequence grows by a block without a round trip."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cachesvc.model.answers import GroupCells
from cachesvc.model.columns import NO_POSITIONS, Positions
from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc_client.core.errors import InvalidRequest, StockEmpty


class Stock:
    """Granted pages of each pool, oldest first. ``targets[g]``: how many the daemon is to keep it filled up to, for
    each group; those of groups that share a pool count together, and its pages serve any of them. ``pools``: the groups
    by pool; left out: each has one of its own.

    ``due``: blocks that the daemon is to have there even where it must evict others for them. Used from one thread,
    like the step stream that fills it.
    """

    def __init__(self, targets: Sequence[int], pools: Sequence[Sequence[int]] = ()) -> None:
        if any(target < 0 for target in targets):
            raise InvalidRequest(f"a stock's targets cannot be negative, got {list(targets)}")
        self.due = 0
        self._pools = tuple(map(tuple, pools)) or tuple((group,) for group in range(len(targets)))
        at_of = {group: at for at, groups in enumerate(self._pools) for group in groups}
        self._at = [at_of[group] for group in range(len(targets))]
        self._set(targets)
        self._pages = [array("i") for _ in self._pools]
        self._generations = [array("I") for _ in self._pools]

    @property
    def blocks(self) -> int:
        """Number of blocks with a page in every group that could be taken now: the least of all pools."""
        pages = self._pages
        if len(pages) == len(self.targets):
            return len(pages[0]) if len(pages) == 1 else min(map(len, pages), default=0)
        return min(len(mine) // len(groups) for mine, groups in zip(pages, self._pools, strict=True))

    @property
    def pages(self) -> tuple[int, ...]:
        """Number of pages in the stock of each group's pool."""
        return tuple(map(self.count, range(len(self.targets))))

    def count(self, group: int) -> int:
        """Return the number of pages in the stock of a group's pool."""
        return len(self._pages[self._at[group]])

    def aim(self, targets: Sequence[int]) -> None:
        """Set other targets: steps fill up to them, and give back what is above. Raises InvalidRequest."""
        if len(targets) != len(self.targets) or any(target < 0 for target in targets):
            raise InvalidRequest(f"a stock of {len(self.targets)} groups cannot have the targets {list(targets)}")
        self._set(targets)

    @property
    def is_full(self) -> bool:
        """True where no pool has less than its targets."""
        return all(len(pages) >= target for pages, target in zip(self._pages, self._pool_targets, strict=True))

    @property
    def has_surplus(self) -> bool:
        """True where a pool has more than its targets."""
        return any(len(pages) > target for pages, target in zip(self._pages, self._pool_targets, strict=True))

    def take_surplus(self) -> tuple[GroupCells, ...]:
        """Take what is above the targets, newest first."""
        surplus = []
        pools = zip(self._pools, self._pages, self._generations, self._pool_targets, strict=True)
        for groups, pages, generations, target in pools:
            if len(pages) > target:
                surplus.append(GroupCells(groups[0], 0, tuple(pages[target:]), tuple(generations[target:])))
                del pages[target:], generations[target:]
        return tuple(surplus)

    def _set(self, targets: Sequence[int]) -> None:
        self.targets = tuple(targets)
        self._pool_targets = [sum(targets[group] for group in groups) for groups in self._pools]

    def add(self, granted: Iterable[GroupCells]) -> None:
        """Take in pages that the daemon granted, or that came back unused: generations first, since an abandoned
        sequence may end in another thread than the one that takes."""
        for cells in granted:
            at = self._at[cells.group]
            if NO_PAGE in cells.pages:
                pairs = [pair for pair in zip(cells.pages, cells.generations, strict=True) if pair[0] != NO_PAGE]
                self._generations[at].extend([generation for _, generation in pairs])
                self._pages[at].extend([page for page, _ in pairs])
            else:
                self._generations[at].extend(cells.generations)
                self._pages[at].extend(cells.pages)

    def add_packed(self, group: int, pages: bytes, generations: bytes) -> None:
        """``add`` for packed int32 page ids and uint32 generations."""
        at = self._at[group]
        self._pages[at].frombytes(pages)
        self._generations[at].frombytes(generations)

    def take(self, blocks: int, first_block: int, positions: Positions = NO_POSITIONS) -> tuple[GroupCells, ...]:
        """Pages for ``blocks`` blocks from ``first_block`` on: of every group, or in some at ``positions`` alone.
        Raises StockEmpty, and takes nothing, if a pool is short; InvalidRequest."""
        if blocks < 1:
            raise InvalidRequest(f"take at least 1 block, got {blocks}")
        if positions:
            _check_positions(positions, first_block, first_block + blocks)
        self.require(blocks, positions)
        cells = []
        for group, at in enumerate(self._at):
            mine = positions.get(group) if positions else None
            count = blocks if mine is None else len(mine)
            pages, generations = self._pages[at], self._generations[at]
            taken, told = pages[:count], generations[:count]
            del pages[:count], generations[:count]
            if mine is not None:
                taken, told = _spread(taken, told, blocks, first_block, mine)
            cells.append(GroupCells(group, first_block, tuple(taken), tuple(told)))
        return tuple(cells)

    def require(self, blocks: int, positions: Positions = NO_POSITIONS) -> None:
        """Raises StockEmpty where a pool has fewer pages than ``blocks`` blocks need."""
        for groups, pages in zip(self._pools, self._pages, strict=True):
            needed = blocks * len(groups)
            if positions:
                needed = sum(len(positions[group]) if group in positions else blocks for group in groups)
            if needed > len(pages):
                raise StockEmpty.from_message(
                    f"wanted {blocks} blocks of the stock, which has {list(self.pages)} pages by group (targets "
                    f"{list(self.targets)}); allocate, or go on after the next step"
                )

    def drain(self) -> tuple[GroupCells, ...]:
        """Take all pages; the stock is empty then."""
        drained = []
        for groups, pages, generations in zip(self._pools, self._pages, self._generations, strict=True):
            if pages:
                drained.append(GroupCells(groups[0], 0, tuple(pages), tuple(generations)))
                del pages[:], generations[:]
        return tuple(drained)


def _check_positions(positions: Positions, first_block: int, last: int) -> None:
    for group, named in positions.items():
        if any(not first_block <= position < last for position in named) or len(set(named)) < len(named):
            raise InvalidRequest(
                f"positions of group {group} must be of the new blocks [{first_block}, {last}), each once; got "
                f"{list(named)[:8]}"
            )


def _spread(
    pages: array[int], generations: array[int], blocks: int, first_block: int, positions: Sequence[int]
) -> tuple[array[int], array[int]]:
    """Cells of ``blocks`` blocks, of which those at ``positions`` have the pages."""
    cells, told = array("i", [NO_PAGE]) * blocks, array("I", bytes(4 * blocks))
    for position, page, generation in zip(positions, pages, generations, strict=True):
        cells[position - first_block], told[position - first_block] = page, generation
    return cells, told


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
