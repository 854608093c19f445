"""Retention of windows and recurrent states that share a pool with blocks: facts for a policy about
positions, and the distances between copies by which it values them.

A position is a row at whose end a request can continue. For a window it takes the copies of the window's blocks, for a
state that of the row alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.block_index import BlockIndex, Taking
from cachesvc.ledger.candidates import (
    NO_SEGMENT,
    Clock,
    CopyQueues,
    EvictionPolicy,
    LeafOrder,
    PositionRule,
    QueuedLeaves,
    Rank,
)
from cachesvc.ledger.shared_pool import Kin
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Ended
from cachesvc.model.errors import KeyMisplaced
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import column
from cachesvc.model.words import ABSENT, FILLING, KEY_BYTES, READY, STAMP_BITS

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


DEPTH_BITS = 32
SPENT = 1 << 100
"""Leaves behind which no prompt can go on have ranks that are lower by this: they go before all others."""
RankRule = Callable[[int, int, int], Rank]
"""``(stamp, hits, depth) -> rank``: the eviction policy; the lowest rank goes first."""


def leaf_order(index: BlockIndex, place: Place, rule: RankRule, chooser: EvictionPolicy | None) -> LeafOrder:
    """Leaves of a place that are unpinned and not in flight, in the order of the eviction policy."""
    states, pins, children = place.states[place.lead], place.pins, place.children
    flights, stamp, hits, depth = index.flights, index.stamp, index.hits, index.depth

    def may_go(row: int) -> bool:
        return states[row] == READY and not (pins[row] or children[row] or flights[row])

    def by_rule(row: int) -> Rank:
        return rule(stamp[row], hits[row], depth[row])

    def spent_first(row: int) -> Rank:
        return by_rule(row) - SPENT if place.is_spent(row) else by_rule(row)

    rank = spent_first if place.spent_by else by_rule
    if chooser is not None:
        return QueuedLeaves(may_go, rank, chooser, index.segments, depth)
    return LeafOrder(may_go, rank)


def window_order(index: BlockIndex, place: Place, group: int, sinks: int) -> LeafOrder:
    """Windowed copies of a place that no window holds and no transfer reads: they may go by themselves, whatever other
    groups' copies of their block do. ``sinks``: first blocks of a prompt that count as such."""
    states, pins, places = place.states[group], place.window_pins[group], index.told
    reached, stamp, depth = index.reached, index.stamp, index.depth

    def may_go(row: int) -> bool:
        if states[row] != READY or pins[row]:
            return False
        return all(other.states[group][row] != FILLING for other in places)  # from this copy, perhaps

    def rank(row: int) -> Rank:
        return window_rank(reached[row], stamp[row], depth[row], depth[row] < sinks)

    return LeafOrder(may_go, rank)


def window_rank(reached: int, stamp: int, depth: int, is_sink: bool) -> Rank:
    """The order in which windowed copies go by themselves.

    First those that no hit has looked back to and no sequence has ended on, then by when that was; of equal rank
    oldest first and a prompt's front before its end, but its sinks last: without them no window is worth anything.
    """
    return ((reached << 1 | is_sink) << STAMP_BITS | stamp) << DEPTH_BITS | depth


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
        return self._keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def row(self, position: int) -> int:
        index = self._index
        row = index.rows.get(self.key(position), NO_ROW)
        if row != NO_ROW and index.depth[row] == position and index.is_above(row, self._tip):
            return row
        self._walked = self._walked or index.path(self._tip)
        return self._walked[position]

    def segment(self, position: int) -> int:
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


FEW_POSITIONS, MANY_POSITIONS = 64, 4096
"""Ends of a prefix that are looked at first, and at most at a time."""


# Blocks of a prefix that windowed groups need, and the longest prefix of which they have them.
#
# A prefix of n blocks needs, in a windowed group, its last window and the sinks, and nothing between them; of states it
# needs that at its end, a window of one block. So a search looks at the last positions first, and only where something
# is missing at more of them before, many at a time, and those of all groups together: one may have them where another
# has none. No position is looked at twice for one group, but for the windows that lie across two looks.


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
        if best <= self._device_blocks and self._is_in_place(best):
            return best
        for group, _, sinks, _ in self._needs:
            if sinks:
                best = self._shorter(group, best, self._first_gap(group, min(best, sinks), best))
        return self._last_end(best) if self._needs else best

    def _is_in_place(self, blocks: int) -> bool:
        """True where the device has all windowed copies that ``blocks`` blocks need: the usual hit, at the cost of a
        few rows where a search of many positions makes a dozen arrays."""
        for group, window, sinks, is_state in self._needs:
            states = self._place.states[group]
            rows = self._prefix.rows_at(_positions(1 if is_state else window, sinks, blocks))
            if any(states[row] != READY for row in rows):
                return False
        return True

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
