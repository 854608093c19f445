"""A Pin keeps a block and its ancestors resident until it is moved or released.

Flows pin in no other way, so a leaked pin means an owner that was not ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from cachesvc.ledger.index.block_ledger import BlockLedger, hit_window_blocks
from cachesvc.ledger.index.retention import ROWS_LOOKED
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
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
        """Release the pin. Idempotent."""
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
        """Release all pins. Idempotent."""
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
