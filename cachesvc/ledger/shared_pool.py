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
from cachesvc.model.words import PageState

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
