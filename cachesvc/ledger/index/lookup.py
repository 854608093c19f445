"""The longest hit of a prompt's keys, by bisection: blocks in place on a replica, and the host's blocks beyond them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.index.windows import Prefix, WindowNeed, WindowSearch, require_chained
from cachesvc.model.errors import KeyMisplaced
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import READY


class Hit(NamedTuple):
    """Longest prefix found: ``device_blocks`` in place, ``blocks`` in all; rows are NO_ROW where the count is 0.
    ``lost``: (group, blocks) by which missing copies of windowed groups have shortened it."""

    device_blocks: int
    device_row: int
    blocks: int
    row: int
    lost: tuple[tuple[int, int], ...] = ()

    @property
    def full_blocks(self) -> int:
        """Blocks that groups without a window have."""
        return self.blocks + sum(blocks for _, blocks in self.lost)


class Lookup:
    """The part of a ``BlockLedger`` that finds, and changes nothing. ``misplaced``: how often keys were asked for that
    the index has below others than the caller says.

    A hit's last block, in place and in all, has the key that was asked for there: what is published or fetched below it
    comes below the block that the caller's own chain names. The blocks between are not compared one by one.
    """

    index: BlockIndex
    host: Place
    misplaced: int
    _window_needs: tuple[WindowNeed, ...]

    def find(self, keys: bytes, place: Place, limit: int = 0) -> Hit:
        """Longest hit of packed ``keys`` for ``place``, by bisection; at most ``limit`` blocks unless 0.

        Keys that the index has below others end it. Raises KeyMisplaced where what it looks at shows that they are
        not chained at all.
        """
        total = len(keys) // KEY_BYTES
        if limit:
            total = min(total, limit)
        device_blocks, device_row = self._bisect(keys, 0, total, NO_ROW, place)
        blocks, row = device_blocks, device_row
        if blocks < total:
            blocks, row = self._bisect(keys, device_blocks, total, device_row, None)
        if blocks > device_blocks:
            blocks, row = self._host_reach(device_blocks, device_row, blocks, row)
        if blocks > device_blocks and self.index.keys[row] != keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]:
            blocks, row = self._as_asked(keys, device_blocks, device_row, blocks, row)
        hit = Hit(device_blocks, device_row, blocks, row)
        if blocks and place.window_groups:
            hit = self._with_windows(keys, hit, place)
        if hit.device_row not in (NO_ROW, hit.row) and not self.index.is_above(hit.device_row, hit.row):
            raise KeyMisplaced(hit.blocks - 1)
        return hit

    def find_in_place(self, keys: bytes, place: Place) -> tuple[int, int]:
        """Longest prefix of packed ``keys`` that ``place`` holds by itself, windows too: its blocks, its last row."""
        blocks, row = self._bisect(keys, 0, len(keys) // KEY_BYTES, NO_ROW, place)
        if not blocks or not place.window_groups:
            return blocks, row
        prefix = Prefix(self.index, keys, row)
        whole = WindowSearch(self._window_needs, prefix, place, None, blocks, blocks).longest()
        return whole, prefix.row(whole - 1) if whole else NO_ROW

    def _bisect(self, keys: bytes, low: int, high: int, low_row: int, place: Place | None) -> tuple[int, int]:
        parts = self.index.rows.parts
        states = place.states[place.lead] if place is not None else None
        given = low
        middle = high  # first: a prompt that is there whole is found at once
        while low < high:
            key = keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]
            row = parts[key[-1]].get(key, NO_ROW)
            if row >= 0 and (states is None or states[row] >= READY):
                low, low_row = middle, row
            else:
                high = middle - 1
            middle = (low + high + 1) >> 1
        is_chained = low == given or self.index.depth[low_row] == low - 1
        return low, low_row if is_chained else require_chained(low - 1, low_row, self.index.depth)

    def _host_reach(self, device_blocks: int, device_row: int, blocks: int, row: int) -> tuple[int, int]:
        """Cut a union hit back to the blocks that this replica can load: a block may lie on another replica alone.

        It checks each block to load.
        """
        rows = self.index.last_rows(row, blocks - device_blocks)
        lacking = np.flatnonzero(self.host.states_of(self.host.lead, rows) != READY)
        if not len(lacking):
            return blocks, row
        first = int(lacking[0])
        return (blocks - len(rows) + first, rows[first - 1]) if first else (device_blocks, device_row)

    def _as_asked(self, keys: bytes, device_blocks: int, device_row: int, blocks: int, row: int) -> tuple[int, int]:
        """Cut a hit beyond what is in place where the blocks above ``row`` are others than those asked for."""
        self.misplaced += 1
        rows = self.index.last_rows(row, blocks - device_blocks)
        same = self.index.matching(rows, keys[device_blocks * KEY_BYTES : blocks * KEY_BYTES])
        return (device_blocks + same, rows[same - 1]) if same else (device_blocks, device_row)

    def _with_windows(self, keys: bytes, hit: Hit, place: Place) -> Hit:
        """Shorten a hit until every windowed group has the blocks that cover its window and its sinks.

        Windowed copies come from the device, or from the host where all blocks from there on can be loaded: those
        blocks then count as to be loaded, though only the windowed copies of some of them may have to be.
        """
        prefix = Prefix(self.index, keys, hit.row)
        search = WindowSearch(self._window_needs, prefix, place, self.host, hit.device_blocks, hit.blocks)
        blocks = search.longest()
        device = search.in_place(blocks)
        row = prefix.row(blocks - 1) if blocks else NO_ROW
        return Hit(device, prefix.row(device - 1) if device else NO_ROW, blocks, row, tuple(search.lost.items()))
