"""Tree of the blocks on disk, in arrays by row: their objects, parents, last uses. Not locked.

A row without objects is known only as the parent of others (``NO_PART``). A use is noted at the deepest block alone; a
parent inherits it when a block below it goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from cachesvc.storage.file.blocks.leaves import Group

NO_ROW = -1
SCOPE_BYTES = 4
NO_PART = (1 << 48) - 1
"""Part of a row without objects: no object has this one."""
MOST_USES = (1 << 31) - 1


class BlockTree:
    """``rows``: by scope and key (``key_of``); ``keys``: the same, by row. ``unlinked``: blocks with objects
    whose parent is not known yet.
    ``unsaved``: rows whose last use (``used``, ms) has changed since the set was emptied. ``parts``: one object of each
    row; ``more``: the others, with their bytes."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.scope, self.queue = array("I"), array("H")
        self.parent, self.children = array("i"), array("I")
        self.used, self.uses = array("q"), array("I")
        self.parts, self.sizes = array("q"), array("q")
        self.more: dict[int, dict[int, int]] = {}
        self.unlinked = 0
        self.unsaved: set[int] = set()
        self._is_linked = bytearray()
        self._free: list[int] = []

    def has(self, row: int, part: int) -> bool:
        """True where the row has an object of that part."""
        return self.parts[row] == part or part in self.more.get(row, ())

    def key(self, row: int) -> bytes:
        """Key of a row's block."""
        return self.keys[row][SCOPE_BYTES:]

    def is_linked(self, row: int) -> bool:
        """True where the row's parent is known, or that it has none."""
        return bool(self._is_linked[row])

    def objects(self, row: int) -> list[tuple[int, int]]:
        """Part and bytes of each object of a row."""
        if self.parts[row] == NO_PART:
            return []
        return [(self.parts[row], self.sizes[row]), *self.more.get(row, {}).items()]

    def group(self, row: int) -> Group:
        """Group of leaves that the row is of."""
        return Group(self.scope[row], self.queue[row])

    def depth(self, row: int) -> int:
        """Number of known blocks above a row."""
        depth = 0
        while (row := self.parent[row]) != NO_ROW:
            depth += 1
        return depth

    def put(self, row: int, part: int, size_bytes: int, used: int) -> None:
        """Add an object that the row does not have."""
        if self.parts[row] == NO_PART:
            self.parts[row], self.sizes[row] = part, size_bytes
            self.unlinked += not self._is_linked[row]
        else:
            self.more.setdefault(row, {})[part] = size_bytes
        self.used[row] = max(used, self.used[row])

    def drop(self, row: int, part: int) -> int:
        """Forget an object; returns its bytes."""
        more = self.more.get(row, {})
        if part in more:
            size_bytes = more.pop(part)
        else:
            size_bytes, self.parts[row] = self.sizes[row], NO_PART
            if more:
                self.parts[row], self.sizes[row] = more.popitem()
            else:
                self.unlinked -= not self._is_linked[row]
        if not more:
            self.more.pop(row, None)
        return size_bytes

    def link(self, row: int, scope: int, parent: bytes) -> None:
        """The key of the block above is known; empty for none. No-op where it was."""
        if self._is_linked[row]:
            return
        self._is_linked[row] = 1
        self.unlinked -= self.parts[row] != NO_PART
        if parent and parent != self.key(row):
            above = self.row(scope, parent)
            self.parent[row] = above
            self.children[above] += 1

    def touch(self, row: int, now: int) -> None:
        """Note a use."""
        self.used[row] = max(now, self.used[row])
        self.uses[row] = min(self.uses[row] + 1, MOST_USES)
        self.unsaved.add(row)

    def row(self, scope: int, key: bytes) -> int:
        """The row of a key; a new one has no object."""
        whole = key_of(scope, key)
        row = self.rows.get(whole, NO_ROW)
        if row != NO_ROW:
            return row
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.keys[row], self.scope[row] = whole, scope
        self.rows[whole] = row
        return row

    def tidy(self, row: int) -> Iterator[int]:
        """Remove a row without objects and children, and those above it that are left so. Yields each; the last one
        stays, where there is any above."""
        while row != NO_ROW and self.parts[row] == NO_PART and not self.children[row]:
            above, used = self.parent[row], self.used[row]
            if above != NO_ROW:
                self.children[above] -= 1
                if used > self.used[above]:
                    self.used[above], self.queue[above] = used, self.queue[row]
                    self.unsaved.add(above)
            del self.rows[self.keys[row]]
            self.keys[row], self.parent[row] = b"", NO_ROW
            self.used[row] = self.uses[row] = self.queue[row] = self._is_linked[row] = 0
            self.unsaved.discard(row)
            self._free.append(row)
            yield row
            row = above
        if row != NO_ROW:
            yield row

    def detached(self) -> list[int]:
        """Rows with objects below a block that is known by name alone: no hit reaches them."""
        unknown, reached, cut_off = 0, 1, 2
        state = bytearray(len(self.keys))
        for tip in self.rows.values():
            path, row = [], tip
            while row != NO_ROW and state[row] == unknown:
                path.append(row)
                row = self.parent[row]
            verdict = reached if row == NO_ROW else state[row]
            for each in reversed(path):
                verdict = state[each] = cut_off if self.parts[each] == NO_PART else verdict
        return [row for row in self.rows.values() if state[row] == cut_off and self.parts[row] != NO_PART]

    def unlinked_rows(self) -> array[int]:
        """Rows with objects whose parent is not known, the longest unused first."""
        is_linked = np.frombuffer(bytes(self._is_linked), np.uint8)
        rows = np.flatnonzero((is_linked == 0) & (np.array(self.parts) != NO_PART))
        return array("q", rows[np.argsort(np.array(self.used)[rows], kind="stable")].astype(np.int64).tobytes())

    def unused_since(self, before: int) -> list[int]:
        """Rows without children that were not used since ``before``, the longest unused last."""
        used = np.array(self.used)
        rows = np.flatnonzero((used < before) & (np.array(self.children) == 0))
        found: list[int] = rows[np.argsort(-used[rows], kind="stable")].tolist()
        return found

    def span(self, scope: int) -> tuple[int, int] | None:
        """The oldest and the newest use of a scope's blocks."""
        used = np.array(self.used)[(np.array(self.scope) == scope) & (np.array(self.parts) != NO_PART)]
        return (int(used.min()), int(used.max())) if len(used) else None

    def _grow(self) -> None:
        """Room for a further row. Columns only grow: ``expects`` reads them without a lock."""
        self._free.append(len(self.keys))
        self.keys.append(b"")
        self._is_linked.append(0)
        for column in (self.scope, self.queue, self.children, self.used, self.uses, self.sizes):
            column.append(0)
        self.parent.append(NO_ROW)
        self.parts.append(NO_PART)


def key_of(scope: int, key: bytes) -> bytes:
    """A block's key in ``rows``."""
    return scope.to_bytes(SCOPE_BYTES, "big") + key
