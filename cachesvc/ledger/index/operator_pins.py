"""Pins of operators: prefixes that stay resident until a time, within a quota of each pool.

A pin holds copies that are there when it is made, and by nothing but the pins that sequences use. It belongs to no
lease. It ends with its time, with an operator's call, with the memory of a place that it holds something on, or where a
replica's only sequence needs its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger, window_positions
from cachesvc.ledger.index.pins import Pin, WindowPins, held_by
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.pages.pinned_counts import Protected
from cachesvc.model.words import READY


class KeptCopies(NamedTuple):
    """Copies of a prefix on one place: all blocks down to row ``tip`` (NO_ROW: none), and ``windows[g]``, position ->
    row, of windowed groups."""

    place: Place
    tip: int
    windows: dict[int, dict[int, int]]


class PinnedPages:
    """Pages of one place that operators' pins keep, each counted once."""

    def __init__(self, blocks: BlockLedger, place: Place) -> None:
        index = blocks.index
        self._place = place
        self._blocks = Protected(index.parent, index.depth, index.head)
        self._tips: Counter[int] = Counter()
        self._windows: Counter[tuple[int, int]] = Counter()

    def add(self, kept: KeptCopies) -> None:
        """Count what one more pin keeps."""
        if kept.tip != NO_ROW:
            self._tips[kept.tip] += 1
            if self._tips[kept.tip] == 1:
                self._blocks.keep(kept.tip)
        self._windows.update((group, row) for group, rows in kept.windows.items() for row in rows.values())

    def remove(self, kept: KeptCopies) -> None:
        """Count what one pin has kept no more."""
        if kept.tip != NO_ROW:
            self._tips[kept.tip] -= 1
            if not self._tips[kept.tip]:
                del self._tips[kept.tip]
                self._blocks.leave(kept.tip)
        self._windows.subtract((group, row) for group, rows in kept.windows.items() for row in rows.values())
        self._windows = +self._windows

    def by_pool(self) -> list[int]:
        """Pages by pool, in the order of the place's ``shares``."""
        windowed = Counter(group for group, _ in self._windows)
        pairs = zip(self._place.shares, self._place.full_in, strict=True)
        return [full * self._blocks.blocks + sum(windowed[group] for group in groups) for groups, full in pairs]


class OperatorPin:
    """The prefix that ends at ``row``, the block of ``key``, kept until ``until`` (seconds, monotonic)."""

    def __init__(self, blocks: BlockLedger, row: int, kept: list[KeptCopies], until: float) -> None:
        self.key = blocks.index.key_of(row)
        self.row = row
        self.blocks = blocks.index.depth[row] + 1
        self.kept = kept
        self.until = until
        self._pins = [(Pin(blocks, each.place, each.tip), WindowPins(blocks, each.place)) for each in kept]
        for each, (_, windows) in zip(kept, self._pins, strict=True):
            for group, rows in each.windows.items():
                windows.hold_all(group, rows)

    @property
    def places(self) -> list[str]:
        """Names of the places on which it keeps something."""
        return [each.place.name for each in self.kept]

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        for pin, windows in self._pins:
            yield from (each for each in held_by(pin, windows) if each[2] != NO_ROW)

    def let_go(self) -> None:
        """Keep nothing any more. Idempotent."""
        for pin, windows in self._pins:
            windows.let_go()
            pin.let_go()


class OperatorPins:
    """Pins of operators on one model's prefixes, by key, and the pages that they keep."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, OperatorPin] = {}
        self._pages: dict[int, PinnedPages] = {}

    def pages(self, blocks: BlockLedger, place: Place) -> PinnedPages:
        """Pages that pins keep on a place."""
        if place.number not in self._pages:
            self._pages[place.number] = PinnedPages(blocks, place)
        return self._pages[place.number]

    def count(self, blocks: BlockLedger, kept: list[KeptCopies]) -> None:
        """Count the pages that one more pin keeps."""
        for each in kept:
            self.pages(blocks, each.place).add(each)

    def discount(self, kept: list[KeptCopies]) -> None:
        """Count them no more."""
        for each in kept:
            self._pages[each.place.number].remove(each)

    def put(self, pin: OperatorPin) -> None:
        """Enter a pin whose pages are counted, in place of one on the same prefix."""
        self.end(pin.key)
        self.by_key[pin.key] = pin

    def end(self, key: bytes) -> OperatorPin | None:
        """End the pin on a prefix; returns it, or None where there is none."""
        pin = self.by_key.pop(key, None)
        if pin is not None:
            self.discount(pin.kept)
            pin.let_go()
        return pin

    def expire(self, now: float) -> list[OperatorPin]:
        """End the pins whose time is over."""
        over = [key for key, pin in self.by_key.items() if pin.until <= now]
        return [pin for key in over if (pin := self.end(key)) is not None]

    def leave(self, place: Place) -> list[OperatorPin]:
        """End the pins that keep something on a place: its memory is gone, or an engine cannot go on otherwise."""
        lost = [key for key, pin in self.by_key.items() if any(each.place is place for each in pin.kept)]
        ended = [pin for key in lost if (pin := self.end(key)) is not None]
        self._pages.pop(place.number, None)
        return ended


def keepable(blocks: BlockLedger, row: int, device: Place) -> list[KeptCopies] | None:
    """Copies that make the prefix down to ``row`` a hit for a replica, in place or by a load; None where some are
    missing. Its time grows with the prefix, some 20 ns a block."""
    index, host = blocks.index, blocks.host
    rows = index.path(row)
    there = device.states_of(device.lead, rows) >= READY
    in_place = len(rows) if there.all() else int(np.argmin(there))
    here: dict[int, dict[int, int]] = {}
    away: dict[int, dict[int, int]] = {}
    first_load = in_place
    for group, position in _windowed(blocks, len(rows)):
        at = rows[position]
        if position < in_place and device.states[group][at] == READY:
            here.setdefault(group, {})[position] = at
        elif host.states[group][at] == READY:
            away.setdefault(group, {})[position] = at
            first_load = min(first_load, position)
        else:
            return None
    kept = [KeptCopies(device, rows[in_place - 1], here)] if in_place else []
    if first_load == len(rows):
        return kept
    if (host.states_of(host.lead, rows[first_load:]) != READY).any():
        return None
    return [*kept, KeptCopies(host, row, away)]


def _windowed(blocks: BlockLedger, count: int) -> Iterator[tuple[int, int]]:
    """Group and position of each windowed copy that a hit of ``count`` blocks needs."""
    layout = blocks.layout
    for group in layout.window_groups:
        if group not in layout.scratch_groups:
            is_state = layout.groups[group].is_state
            for position in (count - 1,) if is_state else window_positions(layout, group, count):
                yield group, position
