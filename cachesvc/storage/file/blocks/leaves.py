"""Leaf blocks in the order of eviction: blocks of which no descendant is on disk.

A use costs nothing here. Ranks only rise, so an entry that is out of date comes up too early and is filed anew then.
Every leaf has one valid entry: the one in ``_filed``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.storage.seam import Chooser

ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


class Group(NamedTuple):
    """Leaves that go in one order: those of a scope, by the class that the policy has put them in."""

    scope: int
    queue: int


class Leaves:
    """``is_leaf``, ``rank`` and ``group`` read the catalogue's columns by row; ``used`` gives the last use, ms."""

    def __init__(
        self,
        is_leaf: Callable[[int], bool],
        rank: Callable[[int], int],
        group: Callable[[int], Group],
        used: Callable[[int], int],
    ) -> None:
        self._is_leaf = is_leaf
        self._rank = rank
        self._group = group
        self._used = used
        self._heaps: dict[Group, list[int]] = {}
        self._filed: dict[int, int] = {}

    def file(self, row: int) -> None:
        """A row may be a leaf now. No-op where it is none, or is filed under its rank or a lower one."""
        if not self._is_leaf(row):
            return
        entry = self._rank(row) << ROW_BITS | row
        if self._filed.get(row, entry + 1) <= entry:
            return
        self._filed[row] = entry
        heapq.heappush(self._heaps.setdefault(self._group(row), []), entry)

    def forget(self, row: int) -> None:
        """A row changes its meaning, or is no leaf. Idempotent."""
        self._filed.pop(row, None)

    def next(self, choosers: dict[int, Chooser], now: int) -> int | None:
        """Take out the leaf that goes next; None where there is none. ``choosers``: by scope. ``now``: ms."""
        heads: dict[int, list[tuple[int, Group]]] = {}
        for group in list(self._heaps):
            head = self._head(group)
            if head is None:
                del self._heaps[group]
            else:
                heads.setdefault(group.scope, []).append((head, group))
        if not heads:
            return None
        scope = min(heads, key=lambda each: min(heads[each]))
        of_scope = sorted(heads[scope])
        at = 0
        if len(of_scope) > 1 and (chooser := choosers.get(scope)) is not None:
            ages = [max(0, now - self._used(head & ROW_MASK)) / 1000 for head, _ in of_scope]
            at = chooser.choose([group.queue for _, group in of_scope], ages)
        head, group = of_scope[at]
        heapq.heappop(self._heaps[group])
        row = head & ROW_MASK
        del self._filed[row]
        return row

    def _head(self, group: Group) -> int | None:
        """The lowest valid entry of a group, its rank up to date."""
        heap = self._heaps[group]
        while heap:
            entry = heap[0]
            row = entry & ROW_MASK
            if self._filed.get(row) == entry:
                if not self._is_leaf(row):
                    del self._filed[row]
                elif entry == (self._rank(row) << ROW_BITS | row) and self._group(row) == group:
                    return entry
                else:
                    del self._filed[row]
                    heapq.heappop(heap)
                    self.file(row)
                    continue
            heapq.heappop(heap)
        return None
