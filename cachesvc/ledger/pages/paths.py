"""Ways up the tree of blocks: paths, runs and ancestors, read from the index's columns."""

from __future__ import annotations

from array import array

import numpy as np

from cachesvc.ledger.pages.change_log import NO_ROW
from cachesvc.model.numbers.int32s import Column, array_of, column

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
FEW_ROWS, RUN_ROWS = 32, 2048
"""Number of a path's rows that are read one by one, and number read at a time after those, while they lie in a row."""
SHORT_RUNS, ROWS_LOOKED_AT = 32, 256
"""Ranges after which a long path counts as scattered, and rows of the index to look at for each row of a path."""


class Paths:
    """``parent``, ``depth`` and ``head`` by row, as in ``BlockIndex``."""

    parent: array[int]
    depth: array[int]
    head: array[int]

    def is_above(self, above: int, row: int) -> bool:
        """True where ``above`` is ``row`` or an ancestor of it; looks at each chain between them, not at each row."""
        depth = self.depth[above]
        while self.head[row] != self.head[above]:
            row = self.parent[self.head[row]]
            if row == NO_ROW or self.depth[row] < depth:
                return False
        return self.depth[row] >= depth

    def path(self, row: int, until: int = NO_ROW) -> array[int]:
        """Rows from just below ``until``, an ancestor of ``row``, down to it, root first."""
        if row == NO_ROW:
            return array("i")
        return self.last_rows(row, self.depth[row] - (self.depth[until] if until != NO_ROW else -1))

    def last_rows(self, row: int, count: int) -> array[int]:
        """The last ``count`` rows (fewer where the root is nearer) of the path down to ``row``, root first."""
        left, runs = max(count, 0), 0
        parts: list[Column] = [np.empty(0, np.int32)]
        while left and row != NO_ROW:
            part = None
            if runs == SHORT_RUNS:  # few of them: one look at all rows costs less than as many again
                part, runs = self._part_of_chain(row, left), 0
            if part is None:
                part, runs = np.arange(max(self._run_start(row), row + 1 - left), row + 1, dtype=np.int32), runs + 1
            parts.append(part)
            left -= len(part)
            row = self.parent[part[0]]
        parts.reverse()
        return array_of(np.concatenate(parts))

    def rows_above(self, tip: int, most: int) -> tuple[Ints, int]:
        """Up to ``most`` rows from ``tip`` up, and the one above them. Rows that came together mostly lie in a row:
        where some do, many are looked at in one go."""
        parent, row = self.parent, tip
        rows: list[int] = []
        while row != NO_ROW and len(rows) < most:
            straight = row - FEW_ROWS
            for _ in range(min(FEW_ROWS, most - len(rows))):
                rows.append(row)
                row = parent[row]
                if row == NO_ROW:
                    break
            left = min(RUN_ROWS, most - len(rows))
            if row == straight and row > 0 and left:
                low = max(row - left + 1, 0)
                above = np.frombuffer(parent, np.int32, row - low + 1, 4 * low)
                ends = np.flatnonzero(above != np.arange(low - 1, row, dtype=np.int32))
                first = low + int(ends[-1]) if len(ends) else low
                rows.extend(range(row, first - 1, -1))
                row = parent[first]
        return np.array(rows, np.int64), row

    def _run_start(self, row: int) -> int:
        """The first row of a range that ends with ``row``, in which every row is the parent of the next: rows that came
        together mostly are."""
        parent, first, few = self.parent, row, max(row - FEW_ROWS, 0)
        while first > few and parent[first] == first - 1:
            first -= 1
        if not first or first != few:
            return first
        low = max(first - RUN_ROWS, 0)
        above = np.frombuffer(parent, np.int32, first - low + 1, 4 * low)
        ends = np.flatnonzero(above != np.arange(low - 1, first, dtype=np.int32))
        return low + int(ends[-1]) if len(ends) else low

    def _part_of_chain(self, row: int, most: int) -> Column | None:
        """Up to ``most`` rows of one chain, down to ``row``, by a look at every row's chain; None where the chain has
        too few for that. It takes the same time wherever the rows lie."""
        head, depth = self.head[row], self.depth[row]
        count = min(most, depth - self.depth[head] + 1)
        if count < max(RUN_ROWS, len(self.head) // ROWS_LOOKED_AT):
            return None
        found = np.flatnonzero(np.frombuffer(self.head, np.uint32) == head)
        above, depths = column(self.parent)[found], column(self.depth)[found]
        is_live = (above != NO_ROW) | (found == head)  # rows that are not in use have a chain and no parent
        wanted = is_live & (depths > depth - count) & (depths <= depth)
        out = np.empty(count, np.int32)
        out[depths[wanted] - (depth - count + 1)] = found[wanted]
        return out
