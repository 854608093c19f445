"""Number of blocks of a place that its pins protect, each counted once; always up to date.

The tree is cut into chains (``BlockIndex.head``). Of a chain that is kept at all only one thing counts: how deep.

    chain A    0──1──2──3──4──5      pins on A3 and B6: B is kept down to 6, and A down to 4, where B hangs
                           └─B5──B6
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from cachesvc.ledger.pages.change_log import NO_ROW


class Protected:
    """``blocks``: pinned rows and all that is above them. ``tips[head]``: the depth down to which a chain is kept.

    What keeps a chain is each of its pinned rows, and of each kept chain that hangs below one of its rows that row. The
    tip is the deepest; ``_others[head]`` are the depths of the rest, rising, where there are any.
    """

    __slots__ = ("_depth", "_head", "_others", "_parent", "blocks", "tips")

    def __init__(self, parent: array[int], depth: array[int], head: array[int]) -> None:
        self._parent = parent
        self._depth = depth
        self._head = head
        self._others: dict[int, list[int]] = {}
        self.blocks = 0
        self.tips: dict[int, int] = {}

    def keep(self, row: int) -> None:
        """Count a row that has its first pin."""
        while row != NO_ROW:
            head, depth = self._head[row], self._depth[row]
            tip = self.tips.get(head)
            if tip is not None:
                self._others.setdefault(head, [])
                insort(self._others[head], min(tip, depth))
                self.tips[head] = max(tip, depth)
                self.blocks += self.tips[head] - tip
                return
            self.tips[head] = depth
            self.blocks += depth - self._depth[head] + 1
            row = self._parent[head]

    def leave(self, row: int) -> None:
        """Count a row that has lost its last pin."""
        while row != NO_ROW:
            head, depth = self._head[row], self._depth[row]
            others = self._others.get(head)
            if others:
                if depth == self.tips[head]:
                    self.tips[head] = others.pop()
                    self.blocks -= depth - self.tips[head]
                else:
                    del others[bisect_left(others, depth)]
                if not others:
                    del self._others[head]
                return
            del self.tips[head]
            self.blocks -= depth - self._depth[head] + 1
            row = self._parent[head]
