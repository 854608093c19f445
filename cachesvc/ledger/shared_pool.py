"""Pages of a pool that several groups share: one free list, and the group of each page from its grant until it is free.

The groups' pools are views of the same columns, so what one of them takes the others cannot. What is kept for each page
beside these is its owner, and for each group how many pages it has in each state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.page_pool import AT_ONCE, PagePool
from cachesvc.model.errors import IllegalMove
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, PageState

FREE, PRIVATE = PageState.FREE, PageState.PRIVATE
NO_OWNER = 0
"""Owner of a page that is free."""


class GroupPool(PagePool):
    """One group's view of a shared pool. ``counts``, ``free`` and ``reserved`` are the pool's; ``mine`` counts this
    group's pages by state, but for free ones. ``mark``: its number among the ``owners``, which are by page; a page of
    another group cannot be moved here."""

    def __init__(self, name: str, common: PagePool, owners: bytearray, mark: int) -> None:
        vars(self).update(vars(common))  # the same columns, counts and hints; two counters are properties here
        self.name = name
        self.common = common
        self.owners = owners
        self.mark = mark
        self.mine = [0] * len(PageState)
        self.stuck = array("i")
        self._owner_column = np.frombuffer(owners, np.uint8)

    @property
    def usable(self) -> int:
        """Pages of the pool that were added."""
        return self.common.usable

    @usable.setter
    def usable(self, pages: int) -> None:
        self.common.usable = pages

    @property
    def reserved(self) -> int:
        """Free pages of the pool that are kept for waiting calls, of all its groups."""
        return self.common.reserved

    @reserved.setter
    def reserved(self, pages: int) -> None:
        self.common.reserved = pages

    @property
    def own_counts(self) -> list[int]:
        """Pages of this group by state; the free ones are any group's."""
        return [self.counts[FREE], *self.mine[1:]]

    def take(self, count: int, state: PageState) -> array[int]:
        """See ``PagePool``; the pages are this group's."""
        pages = super().take(count, state)
        if count < AT_ONCE:
            for page in pages:
                self.owners[page] = self.mark
        else:
            self._owner_column[np.asarray(pages)] = self.mark
        self.mine[state] += count
        return pages

    def shift(self, page: int, source: PageState, target: PageState) -> None:
        """See ``PagePool``. Raises IllegalMove for a page of another group, too."""
        if not 0 <= page < self.pages or self.owners[page] != self.mark:
            raise IllegalMove(f"{self.name} page {page}, which is not of this group", source, target)
        super().shift(page, source, target)
        self.mine[source] -= 1
        if target == FREE:
            self.owners[page] = NO_OWNER
        else:
            self.mine[target] += 1

    def shift_all(self, pages: Sequence[int], source: PageState, target: PageState) -> None:
        self.require_own(pages, target)
        super().shift_all(pages, source, target)
        self.mine[source] -= len(pages)
        self.mine[target] += len(pages)

    def move_all(self, pages: Iterable[int], target: PageState) -> None:
        pages = pages if isinstance(pages, array) else sorted(pages)
        self.require_own(pages, target)
        before = self.counts[:]
        super().move_all(pages, target)
        for state in range(1, len(PageState)):
            self.mine[state] += self.counts[state] - before[state]
        if target == FREE and pages:
            self._owner_column[np.asarray(pages)] = NO_OWNER

    def owns(self, page: int, generation: int) -> bool:
        return super().owns(page, generation) and self.owners[page] == self.mark

    def problems(self) -> list[str]:
        """See ``PagePool``; the counts of this group too."""
        out = super().problems()
        mine = self._owner_column == self.mark
        for state in PageState:
            seen = int((mine & (self._state_column == state)).sum())
            if seen != self.mine[state]:
                out.append(f"{self.name}: {seen} pages of this group are {state.name}, {self.mine[state]} are counted")
        lone = int(((self._owner_column == NO_OWNER) != (self._state_column == FREE)).sum())
        if lone:
            out.append(f"{self.name}: {lone} pages are free and some group's, or neither")
        return out

    def require_own(self, pages: Sequence[int], target: PageState) -> None:
        """Raises IllegalMove where one of the pages is not this group's."""
        if len(pages) < AT_ONCE:
            wrong = [page for page in pages if not 0 <= page < self.pages or self.owners[page] != self.mark]
        else:
            every = np.asarray(pages)
            inside = (every >= 0) & (every < self.pages)
            wrong = every[~inside | (self._owner_column[np.where(inside, every, 0)] != self.mark)].tolist()
        if wrong:
            raise IllegalMove(f"{self.name} page {wrong[0]}", "a page of another group, or of none", target)


def change_group(before: PagePool, after: PagePool, pages: Sequence[int]) -> None:
    """Private pages of one group of a shared pool are another's from now on. Raises IllegalMove."""
    assert isinstance(before, GroupPool)
    assert isinstance(after, GroupPool)
    before.require_own(pages, PRIVATE)
    for page in pages:
        before.owners[page] = after.mark
    before.mine[PRIVATE] -= len(pages)
    after.mine[PRIVATE] += len(pages)


def group_pools(where: str, names: Sequence[str], count: int, withheld: int = 0) -> tuple[PagePool, ...]:
    """The pools of the groups ``names`` that share ``count`` pages; one alone has a plain one."""
    called = [f"{where}, group {name}" for name in names]
    if len(names) == 1:
        return (PagePool(called[0], count, withheld),)
    common = PagePool(where, count, withheld)
    owners = bytearray(common.pages)
    return tuple(GroupPool(name, common, owners, number + 1) for number, name in enumerate(called))


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
