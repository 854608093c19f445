"""Pages that the pools of a place are short of, counted down by the victims that free them."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.ledger.index.tier_copies import Place


class BlockDemand:
    """Blocks that have to go where each group has a pool of its own: every one of them frees a page in each."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def take(self, rows: Sequence[int]) -> None:
        """Count blocks that go."""
        self.left -= len(rows)

    def copy(self) -> BlockDemand:
        """Copy of the demand."""
        return BlockDemand(self.left)

    def go_back(self, before: BlockDemand) -> None:
        """Count again from what was copied ``before``."""
        self.left = before.left


class PoolDemand(BlockDemand):
    """Pages that have to go where groups share pools: ``short``, with the groups of each pool. ``left``: the number of
    blocks that it takes at least."""

    def __init__(self, place: Place, short: Sequence[int]) -> None:
        """``short``: pages by pool, in the order of ``place.shares``."""
        self._place = place
        pairs = zip(place.shares, place.full_in, short, strict=False)
        self.short = [(pages, groups) for groups, full, pages in pairs if full and pages > 0]
        super().__init__(0)
        self._count()

    def take(self, rows: Sequence[int]) -> None:
        """See ``BlockDemand``."""
        place = self._place
        self.short = [(pages - place.pages_in(groups, rows), groups) for pages, groups in self.short]
        self._count()

    def copy(self) -> PoolDemand:
        """See ``BlockDemand``."""
        made = PoolDemand(self._place, ())
        made.go_back(self)
        return made

    def go_back(self, before: BlockDemand) -> None:
        """See ``BlockDemand``."""
        assert isinstance(before, PoolDemand)
        self.short = before.short[:]
        self.left = before.left

    def _count(self) -> None:
        self.left = max((-(-pages // len(groups)) for pages, groups in self.short), default=0)


def demand_of(place: Place, wanted: Sequence[int]) -> BlockDemand:
    """Demand for blocks that have to go so that ``wanted[g]`` pages of each group can be taken."""
    if place.has_shared_pools:
        return PoolDemand(place, place.short_of(wanted))
    pools = place.pools
    return BlockDemand(max(wanted[group] - pools[group].unreserved for group in place.full_groups))
