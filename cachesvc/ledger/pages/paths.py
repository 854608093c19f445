"""Ways up the tree of blocks: paths, runs and ancestors, read from the index's columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from cachesvc.ledger.pages.change_log import NO_ROW
from cachesvc.model.numbers.int32s import Column, array_of

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
FEW_ROWS, RUN_ROWS = 32, 2048
"""Number of a path's rows that are read one by one, and number read at a time after those, while they lie in a row."""


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
        left = max(count, 0)
        runs: list[Column] = [np.empty(0, np.int32)]
        for first, last in self._runs(row):
            if not left:
                break
            length = min(last - first, left)
            runs.append(np.arange(last - length, last, dtype=np.int32))
            left -= length
        runs.reverse()
        return array_of(np.concatenate(runs))

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

    def _runs(self, tip: int) -> Iterator[tuple[int, int]]:
        """The rows from ``tip`` up to the root as ranges, in each of which every row is the parent of the next: rows
        that came together mostly are."""
        parent = self.parent
        row = tip
        while row != NO_ROW:
            first, few = row, max(row - FEW_ROWS, 0)
            while first > few and parent[first] == first - 1:
                first -= 1
            if first and first == few:
                low = max(first - RUN_ROWS, 0)
                above = np.frombuffer(parent, np.int32, first - low + 1, 4 * low)
                ends = np.flatnonzero(above != np.arange(low - 1, first, dtype=np.int32))
                first = low + int(ends[-1]) if len(ends) else low
            yield first, row + 1
            row = parent[first]
