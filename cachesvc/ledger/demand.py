"""Pages that are short in the pools of a place, and what victims free of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import takewhile

from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK
from cachesvc.model.words import STAMP_BITS

DEPTH_BITS = 32
CHEAP = 1 << (STAMP_BITS + DEPTH_BITS + ROW_BITS)
"""Entries of windowed copies, but for sinks, that no hit looked back to and no sequence ended on, are below this."""


class BlockDemand:
    """Blocks that have to go where each group has a pool of its own: every one of them frees a page in each."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def take(self, rows: Sequence[int]) -> None:
        """Count blocks that go."""
        self.left -= len(rows)

    def copy(self) -> BlockDemand:
        """The demand as it is now."""
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
    """What blocks have to free so that ``wanted[g]`` pages of each group can be taken."""
    if place.has_shared_pools:
        return PoolDemand(place, place.short_of(wanted))
    pools = place.pools
    return BlockDemand(max(wanted[group] - pools[group].unreserved for group in place.full_groups))


def idle_copies(place: Place, groups: Sequence[int], *, cheap: bool = False) -> Iterator[tuple[int, int]]:
    """``(group, row)`` of windowed copies of some groups that may go by themselves, in their order. ``cheap``: only
    those that no hit has looked back to and on which no sequence has ended."""

    def entries(group: int) -> Iterator[tuple[int, int]]:
        found = iter(place.window_leaves[group])
        if cheap:
            found = takewhile(lambda entry: entry < CHEAP, found)
        return ((entry, group) for entry in found)

    windowed = [group for group in groups if group in place.window_leaves]
    if place.kin and not cheap:
        return _by_kin(place, windowed)
    return ((group, entry & ROW_MASK) for entry, group in merge(*map(entries, windowed)))


def _by_kin(place: Place, groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Copies that are needed together go together, the oldest positions first."""
    for kin in place.kin:
        leaves = [(group, place.window_leaves[group]) for group in kin.groups if group in groups]
        for entry in place.window_leaves[kin.lead] if leaves else ():
            row = entry & ROW_MASK
            yield from ((group, row) for group, order in leaves if order.filed[row])
        is_led = place.window_leaves[kin.lead].filed
        for group, order in leaves:
            yield from ((group, entry & ROW_MASK) for entry in order if not is_led[entry & ROW_MASK])
