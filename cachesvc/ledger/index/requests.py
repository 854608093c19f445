"""Reports on requests to a policy that follows them: their paths, what they seal, and their ends."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.ledger.index.block_index import BlockIndex, Taking
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.order.class_queues import NO_SEGMENT, EvictionPolicy
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.requests import Ended


class PromptPath:
    """A prompt of packed ``keys``: ``known`` blocks of it are in the index or remembered, ``resident`` in the index.

    Its resident blocks are those above the last of them, whatever keys a caller has named there.
    """

    def __init__(self, index: BlockIndex, keys: bytes, known: int, resident: int) -> None:
        self.blocks = len(keys) // KEY_BYTES
        self.known = known
        self.resident = resident
        self._keys = keys
        self._index = index
        self._tip = index.rows.get(self.key(resident - 1), NO_ROW) if resident else NO_ROW
        self._walked: Sequence[int] = ()

    def key(self, position: int) -> bytes:
        """Key of a block."""
        return self._keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def row(self, position: int) -> int:
        """Row of a resident block."""
        index = self._index
        row = index.rows.get(self.key(position), NO_ROW)
        if row != NO_ROW and index.depth[row] == position and index.is_above(row, self._tip):
            return row
        self._walked = self._walked or index.path(self._tip)
        return self._walked[position]

    def segment(self, position: int) -> int:
        """Segment of a resident block."""
        return self._index.segments[self.row(position)]


class Request:
    """One request, from its Match to its end."""

    __slots__ = ("_chooser", "_index", "ended", "parts")

    def __init__(self, chooser: EvictionPolicy, index: BlockIndex, path: PromptPath, now: float, waited: float) -> None:
        self._chooser = chooser
        self._index = index
        self.ended = Ended()
        while not index.take_over():
            """Flows let the request before have its turns first."""
        self.parts = chooser.arrived(path, now, waited)
        if path.resident:
            index.taking = Taking(chooser.taken, path.row(path.resident - 1), self.parts)
            index.take_over()

    def sealed(self, first: int, path: Sequence[int]) -> None:
        """Note that its blocks from ``first`` on are the rows ``path``: new ones, or ones that others sealed before
        it."""
        segments, parts, chooser = self._index.segments, self.parts, self._chooser
        new_from = end = first + len(path)
        for position, row in enumerate(path, start=first):
            before = segments[row]
            mine = parts.shared if position < parts.shared_blocks else parts.own
            if before == NO_SEGMENT:
                new_from = min(new_from, position)
                segments[row] = mine
            elif before == mine or chooser.takes(mine, before, position):
                segments[row] = mine
        chooser.grew(parts, new_from, end)

    def end(self, blocks: int, key: bytes, now: float) -> None:
        """End the request; ``blocks`` blocks were sealed, the last under ``key``."""
        self._chooser.ended(self.parts, blocks, key, self.ended, now)
