"""The radix index of one model: a row for each block that has a copy anywhere, in arrays instead of objects.

Keys are chained, so a row's key stands for its whole prefix and rows form a forest under the namespace. Rows are
numbers that are used again; a million blocks cost no object that the garbage collector would have to walk.
"""

from __future__ import annotations

from array import array

from cachesvc.ledger.place import NO_ROW, Place

HITS_MAX = (1 << 31) - 1


class BlockIndex:
    """Keys to rows, the tree, and the per-place copies. ``places[0]`` is the host; replicas follow.

    ``stamp``: a row's last access. ``reached``: that of the deepest block whose window or sinks it was part of.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes | None] = []
        self.parent = array("i")
        self.depth = array("i")
        self.children = array("i")
        self.stamp = array("q")
        self.reached = array("q")
        self.hits = array("i")
        self.reuses = array("H")
        self.flights = array("H")
        self.places: list[Place] = []
        self._spare_rows: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add_place(self, place: Place) -> int:
        """Add a place (host or replica); returns its position in ``places``."""
        place.grow(len(self.keys))
        self.places.append(place)
        return len(self.places) - 1

    def insert(self, key: bytes, parent: int, stamp: int, reuses: int = 0) -> int:
        """A new row under ``parent`` (NO_ROW: the root) with no copy yet; the caller gives it one at once."""
        if self._spare_rows:
            row = self._spare_rows.pop()
            self.keys[row] = key
            self.parent[row] = parent
            self.stamp[row] = stamp
            self.reached[row] = 0
            self.hits[row] = 0
            self.reuses[row] = reuses
        else:
            row = len(self.keys)
            self.keys.append(key)
            self.parent.append(parent)
            self.depth.append(0)
            self.children.append(0)
            self.stamp.append(stamp)
            self.reached.append(0)
            self.hits.append(0)
            self.reuses.append(reuses)
            self.flights.append(0)
            for place in self.places:
                place.grow(row + 1)
        self.depth[row] = 0 if parent == NO_ROW else self.depth[parent] + 1
        if parent != NO_ROW:
            self.children[parent] += 1
        self.rows[key] = row
        return row

    def remove(self, row: int) -> None:
        """Forget a row that has no copy, no child and no pin left."""
        assert self.children[row] == 0, f"row {row} still has children"
        assert self.flights[row] == 0, f"row {row} is in flight"
        key = self.keys[row]
        assert key is not None
        del self.rows[key]
        self.keys[row] = None
        parent = self.parent[row]
        if parent != NO_ROW:
            self.children[parent] -= 1
        self.parent[row] = NO_ROW
        self._spare_rows.append(row)

    def touch(self, row: int, stamp: int) -> None:
        """Stamp an access. Only the deepest block of an access is stamped; a parent inherits when a child goes."""
        self.stamp[row] = stamp
        if self.hits[row] < HITS_MAX:
            self.hits[row] += 1

    def has_copy(self, row: int) -> bool:
        """True while any place holds a copy in any state but ABSENT."""
        return any(place.is_present(row) for place in self.places)

    def path(self, row: int, until: int = NO_ROW) -> list[int]:
        """Rows from just below ``until`` down to ``row``, root first."""
        parent = self.parent
        out: list[int] = []
        while row != until and row >= 0:
            out.append(row)
            row = parent[row]
        out.reverse()
        return out
