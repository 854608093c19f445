"""Blocks of a prefix that windowed groups need, and the longest prefix of which they have them.

A prefix of n blocks needs, in a windowed group, its last window and the sinks, and nothing between them; of states it
needs that at its end, a window of one block. So a search looks at the last positions first, and only where something is
missing at more of them before, many at a time, and those of all groups together: one may have them where another has
none. No position is looked at twice for one group, but for the windows that lie across two looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Ends of a prefix that are looked at first, and at most at a time."""


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
                best = self._shorter(group, best, self._first_gap(group, min(best, sinks), best))
        return self._last_end(best) if self._needs else best

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

    def _last_end(self, blocks: int) -> int:
        """The most blocks, of ``blocks``, before whose end each group has its window."""
        windows = [1 if need.is_state else need.window for need in self._needs]
        reach, count, left = max(windows), FEW_POSITIONS, blocks
        own: dict[int, int] = {}
        best = 0
        while left > 0 and not best:
            ends = np.arange(max(1, left - count + 1), left + 1)
            first = max(0, int(ends[0]) - reach)
            rows = column(self._index.last_rows(self._prefix.row(left - 1), left - first))
            whole = np.ones(len(ends), np.bool_)
            for (group, _, _, _), window in zip(self._needs, windows, strict=True):
                missing = np.concatenate(([0], np.cumsum(~self._have(group, first, rows))))
                mine = missing[ends - first] == missing[np.maximum(ends - window, 0) - first]
                if group not in own and mine.any():
                    own[group] = int(ends[mine][-1])
                whole &= mine
            best = int(ends[whole][-1]) if whole.any() else 0
            left -= len(ends)
            count = min(2 * count, MANY_POSITIONS)
        if best < blocks:
            self._tell_lost(blocks, best, own)
        return best

    def _tell_lost(self, blocks: int, best: int, own: Mapping[int, int]) -> None:
        """Note by which groups a hit of ``blocks`` is shortened to ``best``: each down to its own last window, ``own``,
        and the first of them by what only all together have."""
        shortest, first = blocks, -1
        for group, _, _, _ in self._needs:
            end = max(best, own.get(group, 0))
            if end < shortest:
                first = group if first < 0 else first
                shortest = self._shorter(group, shortest, end)
        self._shorter(first, shortest, best)

    def _have(self, group: int, first: int, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """True for each of ``rows``, at positions from ``first`` on, whose windowed copy is in place or loadable."""
        have: npt.NDArray[np.bool_] = np.frombuffer(self._place.states[group], np.uint8)[rows] == READY
        have[max(0, self._device_blocks - first) :] = False
        host = self._host
        if host is None or have.all():
            return have
        on_host = np.frombuffer(host.states[group], np.uint8)[rows] == READY
        on_host[: max(0, self._loadable_from(first) - first)] = False
        self._asked_host = True
        have |= on_host
        return have

    def _first_gap(self, group: int, last: int, otherwise: int) -> int:
        """The first position below ``last`` whose windowed copy is missing; ``otherwise`` if there is none."""
        rows = np.array(self._prefix.rows_at(range(last)), np.int32)
        gaps = np.flatnonzero(~self._have(group, 0, rows))
        return int(gaps[0]) if len(gaps) else otherwise

    def _loadable_from(self, first: int) -> int:
        """The position from which on the host has all blocks to the hit's end; ``first`` where it is no later."""
        host, count = self._host, FEW_POSITIONS
        assert host is not None
        states = np.frombuffer(host.states[host.lead], np.uint8)
        while first < self._loadable == self._looked_to:
            rows = column(
                self._index.last_rows(self._prefix.row(self._loadable - 1), min(count, self._loadable - first))
            )
            gaps = np.flatnonzero(states[rows] != READY)
            self._looked_to -= len(rows)
            self._loadable = self._looked_to + (int(gaps[-1]) + 1 if len(gaps) else 0)
            count = min(2 * count, MANY_POSITIONS)
        return max(first, self._loadable)
