"""Retention of windows and recurrent states that share a pool with blocks: facts for a policy about
positions, and the distances between copies by which it values them.

A position is a row at whose end a request can continue. For a window it takes the copies of the window's blocks, for a
state that of the row alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.index.windows import hit_window_blocks
from cachesvc.ledger.order.clock import Clock
from cachesvc.ledger.order.copy_queues import CopyQueues, PositionRule
from cachesvc.ledger.pages.place_pools import Kin
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, FILLING, READY

ROWS_LOOKED = 512
"""Rows that are climbed to find other copies or positions. What is farther away counts as this far, or as not there."""
TICKS = 1000
"""Order of positions in a queue, to the millisecond."""


def kin_of(layout: Layout, shares: Sequence[Sequence[int]]) -> tuple[Kin, ...]:
    """The windowed groups with copies that draw from pools of full groups, those with the same needs together."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for at, groups in enumerate(shares):
        full = sum(group in layout.full_groups for group in groups)
        for group in groups if full else ():
            if group in layout.window_groups and group not in layout.scratch_groups:
                found.setdefault((at, hit_window_blocks(layout, group), layout.sink_blocks(group)), []).append(group)
    return tuple(
        Kin(tuple(groups), window, sinks, sum(group in layout.full_groups for group in shares[at]))
        for (at, window, sinks), groups in found.items()
    )


class Branch(NamedTuple):
    """``blocks`` of one path that go one after another. ``copies``: rows with copies, each with the blocks that a
    request which continues there has to compute again once all have gone."""

    copies: list[tuple[int, int]]
    blocks: int


class Retention:
    """The part of a ``BlockLedger`` that a policy for copies needs. ``below[row]``: of a position, the next one towards
    the end of the request that ended behind it last."""

    def __init__(self, index: BlockIndex, rule: PositionRule, clock: Clock) -> None:
        self.rule = rule
        self.below = array("i")
        self._index = index
        self._clock = clock

    @property
    def now(self) -> float:
        """Seconds by which positions age."""
        return self._clock.seconds

    def queues(self, place: Place, kin: Kin) -> CopyQueues:
        """The order of the idle copies of a kin's lead on a place."""
        index, rule, group = self._index, self.rule, kin.lead
        states, pins, places = place.states[group], place.window_pins[group], index.told
        depth, serves = index.depth, array("i")

        def position(row: int) -> int:
            served = serves[row] if kin.window > 1 else row
            if served == NO_ROW or not rule.classes[served]:
                return row
            return served if 0 <= depth[served] - depth[row] < kin.window else row

        def may_go(row: int) -> bool:
            if states[row] != READY or pins[row]:
                return False
            return all(other.states[group][row] != FILLING for other in places)  # from this copy, perhaps

        def rank(row: int) -> int:
            rule.opened(row, depth[row], self.now)
            return int(rule.since[position(row)] * TICKS)

        def class_of(row: int) -> int:
            return rule.classes[position(row)]

        return CopyQueues(may_go, rank, class_of, serves, self.grow, rule.is_middle)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""
        self.rule.grow(rows)
        if rows > len(self.below):
            self.below.frombytes(b"\xff" * (4 * (rows - len(self.below))))

    def is_middle(self, place: Place, kin: Kin, row: int) -> bool:
        """True where a row's copy on a place is of a position where no request has ended or continued."""
        order = place.window_leaves[kin.lead]
        return not isinstance(order, CopyQueues) or order.is_of_middle(row)

    # -- what happens ------------------------------------------------------------------------------------------

    def arrived(self, tip: int, blocks: int, beyond: Iterable[bytes]) -> None:
        """A request of ``blocks`` blocks has come, of which the full groups have those down to row ``tip``. ``beyond``:
        keys of further blocks that had been there, the deepest first."""
        self.rule.request(self.now)
        if any(self.rule.missed(key, self.now) for key in beyond):
            return
        row = self._position_above(tip)
        if row != NO_ROW:
            goes_on = self._index.depth[row] + 1 < blocks
            self._change(row, lambda: self._continued(row, goes_on=goes_on))

    def ended(self, row: int) -> None:
        """A request has ended; ``row`` is the last one with a copy."""
        self._change(row, lambda: self.rule.ended(row, self._index.depth[row], self.now))
        self._link(row)

    def left(self, row: int, key: bytes) -> None:
        """The row of ``key`` leaves the index."""
        self.rule.left(row, key, self.now)
        self.below[row] = NO_ROW

    def _continued(self, row: int, *, goes_on: bool) -> None:
        self.rule.continued(row, self._index.depth[row], self.now, goes_on=goes_on)

    def _position_above(self, row: int) -> int:
        parent, classes = self._index.parent, self.rule.classes
        for _ in range(ROWS_LOOKED):
            if row == NO_ROW or classes[row]:
                return row
            row = parent[row]
        return NO_ROW

    def _change(self, row: int, change: Callable[[], None]) -> None:
        """Change a position, and with it the queues of the copies that it needs."""
        parent, moved = self._index.parent, []
        for place in self._index.places:
            for kin in place.kin:
                order = place.window_leaves[kin.lead]
                at, rows = row, list[int]()
                while at != NO_ROW and len(rows) < kin.window:
                    rows.append(at)
                    at = parent[at]
                moved.append((order, rows, [each for each in rows if order.remove(each)]))
        change()
        for order, rows, filed in moved:
            if isinstance(order, CopyQueues):
                order.serve(rows, row)
            for each in filed:
                order.update(each)

    def _link(self, row: int) -> None:
        """Link the positions from ``row`` up, to where those above are linked already, or too far away."""
        parent, classes, below = self._index.parent, self.rule.classes, self.below
        last, at, climbed = row, parent[row], 0
        while at != NO_ROW and climbed < ROWS_LOOKED:
            climbed += 1
            if classes[at]:
                is_linked = below[at] == last
                below[at] = last
                if is_linked:
                    return
                last, climbed = at, 0
            at = parent[at]

    # -- distances ---------------------------------------------------------------------------------------------

    def saved(self, place: Place, kin: Kin, row: int, taken: frozenset[int] | set[int]) -> int:
        """Blocks that a request has to compute again where the copies that ``row`` is part of are not there: the
        distance to the copies above them; ``taken``: rows whose copies count as gone. 0 where a window has gaps."""
        parent, states = self._index.parent, place.states[kin.lead]
        run, at = 1, parent[row]
        while at != NO_ROW and run <= kin.window and states[at] != ABSENT and at not in taken and kin.window > 1:
            run, at = run + 1, parent[at]
        if run > kin.window:
            return 1
        distance = 1
        while at != NO_ROW and distance < ROWS_LOOKED and (states[at] == ABSENT or at in taken):
            distance, at = distance + 1, parent[at]
        return distance

    def saved_below(self, place: Place, kin: Kin, row: int) -> int:
        """Distance to the next copies towards the end of the request that ended behind ``row`` last; 0: none."""
        below, depth, states = self.below, self._index.depth, place.states[kin.lead]
        at, looks = below[row], 0
        while at != NO_ROW and depth[at] > depth[row] and looks < ROWS_LOOKED:
            if states[at] != ABSENT:
                return depth[at] - depth[row]
            at, looks = below[at], looks + 1
        return 0

    def branch(self, place: Place, kin: Kin, row: int) -> Branch:
        """The blocks of a place that hang from a leaf's path alone, from that leaf up, with their copies."""
        parent, children, states = self._index.parent, place.children, place.states[kin.lead]
        found: list[tuple[int, int]] = []
        blocks, at = 0, row
        while at != NO_ROW and blocks < ROWS_LOOKED and (at == row or children[at] == 1):
            if states[at] != ABSENT:
                found.append((at, blocks))
            blocks, at = blocks + 1, parent[at]
        above = 0
        while at != NO_ROW and above < ROWS_LOOKED and states[at] == ABSENT:
            above, at = above + 1, parent[at]
        return Branch([(each, blocks - below + above) for each, below in found], blocks)
