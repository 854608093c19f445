"""The pools of one place: a group draws its pages from a pool of its own, or from one that it shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.pages.page_pool import AT_ONCE, PagePool
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT


class Kin(NamedTuple):
    """Windowed groups of one shared pool whose copies a hit needs at the same rows. ``window``, ``sinks``: in blocks.
    ``cost``: memory that one position takes, in blocks of the pool's full groups, each of ``full`` pages."""

    groups: tuple[int, ...]
    window: int
    sinks: int
    full: int

    @property
    def lead(self) -> int:
        """The group that tells where there are copies."""
        return self.groups[0]

    @property
    def cost(self) -> float:
        """See the class."""
        return self.window * len(self.groups) / self.full


class PlacePools:
    """``pools[g]``: of each group. ``shares``: the groups by pool, ``full_in`` how many of these have no window.

    ``states[g]``: the state of each row's copy in a group. ``unsealed_groups``: those whose pages stay their sequence's
    own when its blocks are sealed. ``kin``: the windowed groups whose copies a policy values.
    ``spent_by``: those without whose copy a block is of no use. None on the host: what it has comes there by parts, and
    a block whose state is on a device still, or on its way, is no worse than others.
    """

    def __init__(self, layout: Layout, pools: tuple[PagePool, ...], shares: tuple[tuple[int, ...], ...]) -> None:
        self.pools = pools
        self.shares = shares
        self.full_in = tuple(sum(layout.groups[group].is_full for group in groups) for groups in shares)
        self.has_shared_pools = len(shares) < len(pools)
        self.full_groups = layout.full_groups
        self.state_groups = layout.state_groups
        self.unsealed_groups = layout.state_groups + layout.scratch_groups
        self.states = [bytearray() for _ in layout.groups]
        self.kin: tuple[Kin, ...] = ()
        self.spent_by: tuple[Kin, ...] = ()

    def is_spent(self, row: int) -> bool:
        """True where a leaf goes before all others, because no prompt can go on behind it."""
        return any(self.states[kin.lead][row] == ABSENT for kin in self.spent_by)

    def share_names(self, layout: Layout) -> list[str]:
        """The name of each group's pool where it shares that with other groups, else an empty one."""
        names = [""] * len(self.pools)
        for groups in self.shares:
            name = layout.groups[groups[0]].pool
            is_split = sum(layout.groups[each[0]].pool == name for each in self.shares) > 1
            for group in groups if len(groups) > 1 else ():
                names[group] = f"{name}-replicated" if is_split and layout.groups[group].replicated else name
        return names

    def short_of(self, wanted: Sequence[int]) -> list[int]:
        """Pages that each of ``shares`` lacks for ``wanted[g]`` pages of group g; below 0 where it has more."""
        pools = self.pools
        return [sum([wanted[group] for group in groups]) - pools[groups[0]].unreserved for groups in self.shares]

    def lacks(self, wanted: Sequence[int]) -> bool:
        """True where ``wanted[g]`` pages of each group g cannot be taken now."""
        if self.has_shared_pools:
            return max(self.short_of(wanted)) > 0
        return any(count > pool.unreserved for count, pool in zip(wanted, self.pools, strict=True))

    @property
    def free_blocks(self) -> int:
        """Number of blocks of which the full groups' pages can be taken now."""
        pools = self.pools
        if self.has_shared_pools:
            pairs = zip(self.shares, self.full_in, strict=True)
            return min(pools[groups[0]].unreserved // full for groups, full in pairs if full)
        return min(pools[group].unreserved for group in self.full_groups)

    @property
    def usable_blocks(self) -> int:
        """Number of blocks of which the full groups' pages have arrived."""
        pairs = zip(self.shares, self.full_in, strict=True)
        return min(self.pools[groups[0]].usable // full for groups, full in pairs if full)

    def pages_in(self, groups: Sequence[int], rows: Sequence[int]) -> int:
        """Pages of some groups that copies of ``rows`` have here."""
        if len(rows) < AT_ONCE:
            return sum(self.states[group][row] != ABSENT for group in groups for row in rows)
        some = np.asarray(rows)
        return sum(int((np.frombuffer(self.states[group], np.uint8)[some] != ABSENT).sum()) for group in groups)
