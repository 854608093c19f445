"""A Pin keeps a block and its ancestors resident until it is moved or released.

Flows pin in no other way, so a leaked pin means an owner that was not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.counted_tables import Protected
from cachesvc.ledger.retention import ROWS_LOOKED, hit_window_blocks, window_positions
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.words import READY


class Pin:
    """One pin on one place, on ``row``; NO_ROW while it holds nothing. The closure also keeps all blocks above."""

    __slots__ = ("_blocks", "place", "row")

    def __init__(self, blocks: BlockLedger, place: Place, row: int = NO_ROW) -> None:
        self._blocks = blocks
        self.place = place
        self.row = row
        if row != NO_ROW:
            blocks.pin(place, row)

    def move(self, row: int) -> None:
        """Keep ``row`` instead; what is common to both is held throughout."""
        before = self.row
        if row == before:
            return
        if row != NO_ROW:
            self._blocks.pin(self.place, row)
        self.row = row
        if before != NO_ROW:
            self._blocks.unpin(self.place, before)

    def let_go(self) -> None:
        self.move(NO_ROW)


class WindowPins:
    """Windowed copies that one owner keeps on one place: ``rows[g]`` is position -> row."""

    __slots__ = ("_blocks", "place", "rows")

    def __init__(self, blocks: BlockLedger, place: Place) -> None:
        self._blocks = blocks
        self.place = place
        self.rows: dict[int, dict[int, int]] = {}

    def hold(self, group: int, position: int, row: int) -> None:
        """Keep the copy of ``row``, at a position that holds none yet."""
        self.hold_all(group, {position: row})

    def hold_all(self, group: int, rows: Mapping[int, int]) -> None:
        """Keep the copies of ``rows`` by their positions, which hold none yet."""
        self._blocks.pin_windows(self.place, group, rows.values())
        self.rows.setdefault(group, {}).update(rows)

    def drop(self, group: int, positions: Iterable[int]) -> None:
        """Let go of the copies at some positions, where any are held."""
        held = self.rows.get(group, {})
        self._blocks.unpin_windows(
            self.place, group, [held.pop(position) for position in positions if position in held]
        )

    def leave(self, tip: int) -> None:
        """Let go of everything, as by ``look_back``. Twice is fine."""
        self.look_back(tip)
        self.let_go()

    def look_back(self, tip: int) -> None:
        """The owner ends in row ``tip``: its next turn will look back to its last window."""
        for group in self.rows if tip != NO_ROW else ():
            if rows := self.last_rows(group, tip):
                self._blocks.use_windows(rows, tip)
                self._blocks.end_position(self.place, group, rows[0])

    def last_rows(self, group: int, tip: int) -> list[int]:
        """Rows of the copies that a prompt going on behind ``tip`` looks back to, the deepest first, held or not: an
        owner that computes a part of the next block lets go of its last state, and of the first of its last window."""
        blocks, held, states = self._blocks, self.rows[group], self.place.states[group]
        is_state, window = blocks.layout.groups[group].is_state, hit_window_blocks(blocks.layout, group)
        found, row = list[int](), tip
        for _ in range(ROWS_LOOKED if is_state else window):
            if row == NO_ROW or (is_state and found):
                break
            if states[row] == READY:
                found.append(row)
            row = blocks.index.parent[row]
        sinks = range(min(blocks.layout.sink_blocks(group), blocks.index.depth[tip] + 1 - window))
        return [*found, *(held[position] for position in sinks if position in held)]

    def let_go(self) -> None:
        self.let_go_of(sum(map(len, self.rows.values())))

    def let_go_of(self, most: int) -> bool:
        """Hold ``most`` copies less, the last ones first; True when none is left."""
        for group, held in self.rows.items():
            rows = [held.popitem()[1] for _ in range(min(most, len(held)))]
            most -= len(rows)
            self._blocks.unpin_windows(self.place, group, rows)
        return not any(self.rows.values())


def held_by(pin: Pin, windows: WindowPins) -> Iterator[tuple[int, int | None, int]]:
    """Place, group (None: the block's own) and row of each pin of an owner that holds ``pin.row``. For audits."""
    yield pin.place.number, None, pin.row
    for group, held in windows.rows.items():
        for row in held.values():
            yield windows.place.number, group, row


class Keep(NamedTuple):
    """Rows to keep while room is made: a row of a place with all above it, and windowed copies as (group, row)."""

    row: int = NO_ROW
    windows: tuple[tuple[int, int], ...] = ()


@contextmanager
def kept(blocks: BlockLedger, place: Place, keep: Keep) -> Iterator[None]:
    """Protect the blocks of ``keep`` from eviction within the block."""
    pin, windows = Pin(blocks, place), WindowPins(blocks, place)
    try:
        pin.move(keep.row)
        for number, (group, row) in enumerate(keep.windows):
            windows.hold(group, number, row)
        yield
    finally:
        windows.let_go()
        pin.let_go()


# Pins of operators: prefixes that stay resident until a time, within a quota of each pool.
#
# A pin holds copies that are there when it is made, and by nothing but the pins that sequences use. It belongs to no
# lease. It ends with its time, with an operator's call, with the memory of a place that it holds something on, or where
# a replica's only sequence needs its pages.


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
