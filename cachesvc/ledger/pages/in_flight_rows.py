"""Set of rows with transfers in flight, stored as an array."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from cachesvc.model.numbers.int32s import Column, column


class FlyingRows:
    """``_at[row]``: where in ``_rows`` it is, while it is there."""

    __slots__ = ("_at", "_rows")

    def __init__(self) -> None:
        self._rows = array("i")
        self._at = array("i")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def grow(self, more: int) -> None:
        """Make room for further rows."""
        self._at.frombytes(bytes(4 * more))

    def column(self) -> Column:
        """Column of all rows. See ``int32s.column``."""
        return column(self._rows)

    def add(self, row: int) -> None:
        """Add a row that is not there."""
        self._at[row] = len(self._rows)
        self._rows.append(row)

    def add_all(self, rows: Column) -> None:
        """Add distinct rows, none of which is there."""
        first = len(self._rows)
        self._rows.frombytes(rows.tobytes())
        column(self._at)[rows] = np.arange(first, len(self._rows), dtype=np.int32)

    def remove(self, row: int) -> None:
        """Remove a row that is there."""
        self.remove_all((row,))

    def remove_all(self, rows: Iterable[int]) -> None:
        """Remove distinct rows, all of which are there."""
        kept, places = self._rows, self._at
        for row in rows:
            last = kept.pop()
            if last != row:
                at = places[row]
                kept[at] = last
                places[last] = at
