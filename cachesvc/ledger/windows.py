"""What windowed groups need of a prefix, and the longest prefix of which they have it.

A prefix of n blocks needs, in a windowed group, its last window and the sinks, and nothing between them. So a search
looks at those alone. Only where something is missing does it step back, and then at once to the missing block itself:
all that ends within a window behind it would need it. No position is looked at twice for one group.
"""

from __future__ import annotations

from cachesvc.ledger.index import BlockIndex
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.words import READY

IS_READY = int(READY)  # an enum takes thrice as long to compare


def hit_window_blocks(layout: Layout, group: int) -> int:
    """Blocks before a hit's end that a windowed group must have: enough to compute the hit's last token again."""
    window = layout.groups[group].window_tokens
    assert window is not None, f"group {group} has no window"
    return -(-window // layout.block_tokens)


def window_positions(layout: Layout, group: int, blocks: int) -> list[int]:
    """Positions of a table of ``blocks`` cells that a windowed group needs: the sinks and the last window."""
    sinks = min(layout.sink_blocks(group), blocks)
    first = max(sinks, blocks - hit_window_blocks(layout, group))
    return [*range(sinks), *range(first, blocks)]


class Prefix:
    """The rows of a prompt that the index has, found by position only where they are asked for."""

    def __init__(self, index: BlockIndex, keys: bytes) -> None:
        self._parent = index.parent
        self._parts = index.rows.parts
        self._keys = keys
        self._known: dict[int, int] = {}

    def row(self, position: int) -> int:
        """The row at ``position``, which the index has."""
        row = self._known.get(position, NO_ROW)
        if row == NO_ROW:
            key = self._keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            row = self._known[position] = self._parts[key[-1]][key]
        return row

    def rows(self, first: int, last: int) -> list[int]:
        """The rows of ``[first, last)``."""
        if first >= last:
            return []
        parent, known = self._parent, self._known
        row = self.row(last - 1)
        out = [row]
        for position in range(last - 2, first - 1, -1):
            row = parent[row]
            known[position] = row
            out.append(row)
        out.reverse()
        return out


class WindowSearch:
    """One look-up of a prompt of which ``blocks`` blocks are a hit in the full groups, ``device_blocks`` in place.

    A windowed copy counts where the device has it, or where ``host`` has it and all blocks from there to the hit's end
    can be loaded.
    """

    def __init__(
        self, layout: Layout, prefix: Prefix, place: Place, host: Place | None, device_blocks: int, blocks: int
    ) -> None:
        self._layout = layout
        self._prefix = prefix
        self._place = place
        self._host = host
        self._device_blocks = device_blocks
        self._blocks = blocks
        self._loadable = blocks  # the host has all blocks from here to the end; further up nobody has looked yet
        self._looked_to = blocks

    def longest(self) -> int:
        """The most blocks, up to the hit's, of which each windowed group has what they need."""
        best = self._blocks
        for group in self._place.window_groups:
            best = self._first_gap(group, 0, min(best, self._layout.sink_blocks(group)), best)
        windows = [(group, hit_window_blocks(self._layout, group)) for group in self._place.window_groups]
        whole_from = dict.fromkeys(self._place.window_groups, best)
        at = 0
        checked = 0
        while checked < len(windows):
            group, window = windows[at]
            first, last = max(0, best - window), min(whole_from[group], best)
            gap = self._first_gap(group, first, last, best)
            whole_from[group] = min(first, last) if gap == best else gap
            checked = checked + 1 if gap == best else 0
            best = gap
            at = (at + 1) % len(windows)
        return best

    def in_place(self, blocks: int) -> int:
        """How many of the first ``blocks`` blocks need nothing from the host, windowed copies included."""
        least = min(blocks, self._device_blocks)
        for group in self._place.window_groups:
            states = self._place.states[group]
            for position in window_positions(self._layout, group, blocks):
                if position >= least:
                    break
                if states[self._prefix.row(position)] != IS_READY:
                    least = position
        return least

    def _first_gap(self, group: int, first: int, last: int, otherwise: int) -> int:
        """The first position of ``[first, last)`` whose windowed copy is missing; ``otherwise`` if there is none."""
        states = self._place.states[group]
        for position, row in enumerate(self._prefix.rows(first, last), start=first):
            on_device = position < self._device_blocks and states[row] == IS_READY
            if not on_device and not self._is_loadable(group, position, row):
                return position
        return otherwise

    def _is_loadable(self, group: int, position: int, row: int) -> bool:
        """True where the host has the windowed copy, and all blocks from there to the hit's end."""
        host = self._host
        if host is None or host.states[group][row] != IS_READY:
            return False
        states = host.states[host.lead]
        while position < self._loadable == self._looked_to:
            self._looked_to -= 1
            if states[self._prefix.row(self._looked_to)] == IS_READY:
                self._loadable -= 1
        return position >= self._loadable
