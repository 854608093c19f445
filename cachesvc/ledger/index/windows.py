"""Blocks of a prefix that windowed groups need, and the longest prefix of which they have them.

A prefix of n blocks needs, in a windowed group, its last window and the sinks, and nothing between them. So a search
looks at those alone. Only where something is missing does it step back, and then at once to the missing block itself:
all that ends within a window behind it would need it. No position is looked at twice for one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.model.errors import KeyMisplaced
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.numbers.int32s import column
from cachesvc.model.words import READY

FEW_POSITIONS, MANY_POSITIONS = 64, 4096
"""Positions in which a state is looked for at first, and at most at a time."""


def hit_window_blocks(layout: Layout, group: int) -> int:
    """Blocks before a hit's end that a windowed group must have: enough to compute the hit's last token again; 0 of
    scratch."""
    return -(-layout.window_of(group) // layout.block_tokens)


def window_positions(layout: Layout, group: int, blocks: int) -> list[int]:
    """Positions of a table of ``blocks`` cells that a windowed group needs: the sinks and the last window."""
    return _positions(hit_window_blocks(layout, group), layout.sink_blocks(group), blocks)


def _positions(window: int, sinks: int, blocks: int) -> list[int]:
    sinks = min(sinks, blocks)
    return [*range(sinks), *range(max(sinks, blocks - window), blocks)]


class WindowNeed(NamedTuple):
    """A windowed group, and the blocks of its window and of its sinks that a hit must have. ``is_state``: its copies
    are states, of which most blocks have none."""

    group: int
    window: int
    sinks: int
    is_state: bool = False


def window_needs(layout: Layout) -> tuple[WindowNeed, ...]:
    """Needs of each windowed group whose copies a hit needs."""
    return tuple(
        WindowNeed(group, hit_window_blocks(layout, group), layout.sink_blocks(group), layout.groups[group].is_state)
        for group in layout.window_groups
        if group not in layout.scratch_groups
    )


def require_chained(position: int, row: int, depth: Sequence[int]) -> int:
    """The ``row`` of the key at ``position``. Raises KeyMisplaced where no prefix of that length has it."""
    if row == NO_ROW or depth[row] != position:
        raise KeyMisplaced(position)
    return row


class Prefix:
    """The rows of a prompt down to ``tip``, of one of its keys: found by position only where they are asked for."""

    def __init__(self, index: BlockIndex, keys: bytes | bytearray, tip: int) -> None:
        self.index = index
        self._keys = keys
        self._tip = tip
        self._known = {index.depth[tip]: tip}

    def row(self, position: int) -> int:
        """The row at ``position``, not below ``tip``. Raises KeyMisplaced for keys that are not chained: then its key
        is unknown, or that of a block somewhere else."""
        row = self._known.get(position, NO_ROW)
        if row == NO_ROW:
            index = self.index
            row = index.rows.get(bytes(self._keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]), NO_ROW)
            is_above = row != NO_ROW and index.is_above(row, self._tip)
            self._known[position] = require_chained(position, row if is_above else NO_ROW, index.depth)
        return row

    def rows_at(self, positions: Sequence[int]) -> list[int]:
        """The rows at rising positions: those that follow one another cost one look-up."""
        parent, out, row, below = self.index.parent, [], NO_ROW, 0
        for position in reversed(positions):
            row = parent[row] if position + 1 == below else self.row(position)
            below = position
            out.append(row)
        out.reverse()
        return out


class WindowSearch:
    """One look-up of a prompt of which ``blocks`` blocks are a hit in the full groups, ``device_blocks`` in place.

    A windowed copy counts where the device has it, or where ``host`` has it and all blocks from there to the hit's end
    can be loaded.
    """

    def __init__(
        self,
        needs: Sequence[WindowNeed],
        prefix: Prefix,
        place: Place,
        host: Place | None,
        device_blocks: int,
        blocks: int,
    ) -> None:
        self._needs = needs
        self._windows = [need for need in needs if not need.is_state]
        self._states = [need.group for need in needs if need.is_state]
        self._prefix = prefix
        self._index = prefix.index
        self._place = place
        self._host = host
        self._device_blocks = device_blocks
        self._blocks = blocks
        # the host has all blocks from here to the end; the search has not looked further up yet
        self._loadable = blocks
        self._looked_to = blocks
        self._asked_host = False
        self.lost: dict[int, int] = {}

    def longest(self) -> int:
        """The most blocks, up to the hit's, of which each windowed group has what they need."""
        best = self._blocks
        for group, _, sinks, _ in self._needs:
            if sinks:
                best = self._shorter(group, best, self._first_gap(group, 0, min(best, sinks), best))
        whole_from = [best] * len(self._windows)
        steps = len(self._windows) + bool(self._states)
        at = checked = 0
        while checked < steps:
            if at == len(self._windows):
                group, gap = self._states[0], self._last_states(best)
            else:
                group, window, _, _ = self._windows[at]
                first, last = max(0, best - window), min(whole_from[at], best)
                gap = self._first_gap(group, first, last, best)
                whole_from[at] = min(first, last) if gap == best else gap
            checked = checked + 1 if gap == best else 0
            best = self._shorter(group, best, gap)
            at = (at + 1) % steps
        return best

    def in_place(self, blocks: int) -> int:
        """Number of the first ``blocks`` blocks (``longest``) that need nothing from the host, windowed copies too."""
        least = min(blocks, self._device_blocks)
        for group, window, sinks, _ in self._needs if self._asked_host else ():
            states = self._place.states[group]
            for position in _positions(window, sinks, blocks):
                if position >= least:
                    break
                if states[self._prefix.row(position)] != READY:
                    least = position
        return least

    def _shorter(self, group: int, best: int, blocks: int) -> int:
        """Note that a group shortens the hit to ``blocks`` blocks, if it does."""
        if blocks < best:
            self.lost[group] = self.lost.get(group, 0) + best - blocks
        return blocks

    def _last_states(self, blocks: int) -> int:
        """The most blocks, of ``blocks``, at whose end each group of states has one. Most positions have none, so they
        are looked at many at a time, and those of all groups together: one may have them where another has none."""
        index, count, left = self._index, FEW_POSITIONS, blocks
        while left > 0:
            rows = column(index.last_rows(self._prefix.row(left - 1), count))
            position: int
            for position in (left - len(rows) + np.flatnonzero(self._may_have_states(rows))[::-1]).tolist():
                row = int(rows[position - left])
                if all(self._has_state(group, position, row) for group in self._states):
                    return position + 1
            left -= len(rows)
            count = min(2 * count, MANY_POSITIONS)
        return 0

    def _may_have_states(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """True where the device or the host has a state of each group."""
        found = np.ones(len(rows), np.bool_)
        for group in self._states:
            mine = np.frombuffer(self._place.states[group], np.uint8)[rows] == READY
            if self._host is not None:
                mine |= np.frombuffer(self._host.states[group], np.uint8)[rows] == READY
            found &= mine
        return found

    def _has_state(self, group: int, position: int, row: int) -> bool:
        is_here = position < self._device_blocks and self._place.states[group][row] == READY
        return is_here or self._is_loadable(group, position, row)

    def _first_gap(self, group: int, first: int, last: int, otherwise: int) -> int:
        """The first position of ``[first, last)`` whose windowed copy is missing; ``otherwise`` if there is none."""
        states, in_place = self._place.states[group], self._device_blocks
        for position, row in enumerate(self._prefix.rows_at(range(first, last)), start=first):
            if states[row] == READY and position < in_place:
                continue
            if not self._is_loadable(group, position, row):
                return position
        return otherwise

    def _is_loadable(self, group: int, position: int, row: int) -> bool:
        """True where the host has the windowed copy, and all blocks from there to the hit's end."""
        host = self._host
        self._asked_host = True
        if host is None or host.states[group][row] != READY:
            return False
        states = host.states[host.lead]
        while position < self._loadable == self._looked_to:
            self._looked_to -= 1
            if states[self._prefix.row(self._looked_to)] == READY:
                self._loadable -= 1
        return position >= self._loadable
