"""The blocks of one model: match, pin, seal, fill, drain and drop, on top of the index and its places.

Invariants, held between any two calls (``questions/verify.py`` checks them):
what a replica has on its device is prefix-closed; so is the union of all places; nothing pinned, in flight, or with a
child on the same place leaves that place; whatever may leave is filed as a candidate, under its rank, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.ages import Ages
from cachesvc.ledger.clock import Clock
from cachesvc.ledger.index import BlockIndex
from cachesvc.ledger.journal import KEEP_EVENTS, Cause, Dropped, Journal, Moment
from cachesvc.ledger.leaves import LeafOrder
from cachesvc.ledger.orders import RankRule, leaf_order, window_order, window_rank
from cachesvc.ledger.pages import AT_ONCE, PagePool
from cachesvc.ledger.pieces import TablePieces
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.ledger.protected import Protected
from cachesvc.ledger.queues import NO_SEGMENT, Chooser, QueuedLeaves
from cachesvc.ledger.windows import (
    Prefix,
    WindowSearch,
    hit_window_blocks,
    require_chained,
    window_needs,
    window_positions,
)
from cachesvc.model.errors import InvalidRequest, LedgerBroken
from cachesvc.model.int32s import array_of, column, union_of
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, READY, Tier

__all__ = ["Dropped", "RankRule", "hit_window_blocks", "window_positions", "window_rank"]

HOST_PLACE = 0
IS_READY = int(READY)  # an enum takes thrice as long to compare


class Hit(NamedTuple):
    """Longest prefix found: ``device_blocks`` in place, ``blocks`` in all; rows are NO_ROW where the count is 0."""

    device_blocks: int
    device_row: int
    blocks: int
    row: int


class Filling(NamedTuple):
    """Copies that have begun to come: of group g, ``rows[g]`` to the pages ``pages[g]``."""

    rows: Sequence[array[int]]
    pages: list[array[int]]


class BlockLedger:
    """One model's index and places. ``places[0]`` is the host; ``add_replica`` adds a device place.

    ``computing``: keys that sequences have declared to be computing, with how many do.
    """

    def __init__(
        self,
        layout: Layout,
        host_pools: tuple[PagePool, ...],
        rank: RankRule,
        ages: Ages | None = None,
        moment: Moment | None = None,
        keep_events: int = KEEP_EVENTS,
        chooser: Chooser | None = None,
    ) -> None:
        self.layout = layout
        self._window_needs = window_needs(layout)
        self.ages = ages or Ages()
        self.index = BlockIndex()
        moment = moment or Moment()
        self.clock = Clock(moment)
        self.journal = Journal(self.index.keys, self.index.parent, moment, keep_events)
        self.chooser = chooser
        if chooser is not None:
            self.index.follows_requests = True
            chooser.on_moved = self._requeue
        self.rank = rank
        self.dropped: list[Dropped] = []
        self.evicted_blocks = 0
        self.computing: dict[bytes, int] = {}
        self.host = self._add_place("host", host_pools)

    def add_replica(self, name: str, pools: tuple[PagePool, ...]) -> Place:
        """A further device place with one pool for each group."""
        return self._add_place(name, pools)

    def _add_place(self, name: str, pools: tuple[PagePool, ...]) -> Place:
        place = Place(name, self.layout, pools, self.journal, self.index.places)
        place.pieces = TablePieces(self.index.parent, [place.pages[group] for group in place.full_groups])
        place.protected = Protected(self.index.parent, self.index.depth, self.index.head)
        place.leaves = leaf_order(self.index, place, self.rank, self.chooser)
        place.window_leaves = {
            group: window_order(self.index, place, group, self.layout.sink_blocks(group))
            for group in place.window_groups
        }
        self.index.add_place(place, (place.leaves, *place.window_leaves.values()))
        return place

    def follow(self, chooser: Chooser) -> None:
        """A policy that follows requests chooses from now on, where one by the order of last access did."""
        self.chooser = chooser
        chooser.on_moved = self._requeue

        def made(place: Place) -> LeafOrder:
            order = leaf_order(self.index, place, self.rank, chooser)
            assert isinstance(order, QueuedLeaves)
            order.adopt(place.leaves)
            return order

        self.index.follow_requests(made)

    def _requeue(self, segment: int) -> None:
        """The policy has another class for a segment."""
        for place in self.index.places:
            assert isinstance(place.leaves, QueuedLeaves)
            place.leaves.requeue(segment)

    # -- match -------------------------------------------------------------------------------------------------

    def find(self, keys: bytes, place: Place, limit: int = 0) -> Hit:
        """Longest hit of packed ``keys`` for ``place``, by bisection; at most ``limit`` blocks unless 0.

        Raises InvalidRequest where what it looks at shows that the keys are not chained.
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
        hit = Hit(device_blocks, device_row, blocks, row)
        if blocks and place.window_groups:
            hit = self._with_windows(keys, hit, place)
        if hit.device_row not in (NO_ROW, hit.row) and not self.index.is_above(hit.device_row, hit.row):
            raise InvalidRequest(f"block {hit.blocks - 1}: it is known below another prefix; chain the keys")
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
            if row >= 0 and (states is None or states[row] >= IS_READY):
                low, low_row = middle, row
            else:
                high = middle - 1
            middle = (low + high + 1) >> 1
        return low, low_row if low == given else require_chained(low - 1, low_row, self.index.depth)

    def _host_reach(self, device_blocks: int, device_row: int, blocks: int, row: int) -> tuple[int, int]:
        """Cut a union hit back to what this replica can really load: a block may lie on another replica alone.

        Looks at every block that is to be loaded.
        """
        rows = self.index.last_rows(row, blocks - device_blocks)
        lacking = np.flatnonzero(self.host.states_of(self.host.lead, rows) != IS_READY)
        if not len(lacking):
            return blocks, row
        first = int(lacking[0])
        return (blocks - len(rows) + first, rows[first - 1]) if first else (device_blocks, device_row)

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
        return Hit(device, prefix.row(device - 1) if device else NO_ROW, blocks, row)

    # -- pins --------------------------------------------------------------------------------------------------

    def pin(self, place: Place, row: int) -> None:
        """Protect ``row`` and, because of the closure, all its ancestors on ``place``."""
        place.pins[row] += 1
        place.counts.pinned += self.index.depth[row] + 1
        if place.pins[row] == 1:
            place.protected.keep(row)
            place.leaves.remove(row)

    def unpin(self, place: Place, row: int) -> None:
        """Take one pin back. Raises LedgerBroken where there is none."""
        if place.pins[row] <= 0:
            raise LedgerBroken(f"row {row} is not pinned on {place.name}")
        place.pins[row] -= 1
        place.counts.pinned -= self.index.depth[row] + 1
        if not place.pins[row]:
            place.protected.leave(row)
            self.offer(place, row)

    def pin_windows(self, place: Place, group: int, rows: Collection[int]) -> None:
        """Keep windowed copies; their blocks are protected by pins of their own."""
        pins = place.window_pins[group]
        for row in rows:
            pins[row] += 1
        place.window_leaves[group].remove_all(rows)

    def use_windows(self, rows: Iterable[int], tip: int) -> None:
        """A hit of everything down to ``tip`` looks back to the windowed copies of ``rows``."""
        self.index.reach(rows, self.index.stamp[tip])

    def unpin_windows(self, place: Place, group: int, rows: Collection[int]) -> None:
        """Take a window pin of each of ``rows`` back. Raises LedgerBroken where there is none."""
        pins = place.window_pins[group]
        for row in rows:
            if pins[row] <= 0:
                raise LedgerBroken(f"row {row} has no window pin in group {group} of {place.name}")
            pins[row] -= 1
        place.window_leaves[group].add_all({row for row in rows if not pins[row]})

    def offer(self, place: Place, row: int) -> None:
        """File a row and its windowed copies as candidates for eviction where they may go now, and only there."""
        place.leaves.update(row)
        for order in place.window_leaves.values():
            order.update(row)

    # -- copies ------------------------------------------------------------------------------------------------

    def seal(self, place: Place, row: int, pages: Sequence[int]) -> None:
        """Private pages become the copy of ``row`` on ``place``; ``pages[g]`` is NO_PAGE for groups that have none."""
        for group, page in enumerate(pages):
            if page != NO_PAGE:
                place.seal(group, row, page)
        self.come(place, row)

    def come(self, place: Place, row: int) -> None:
        """A row has its first copy on a place; nothing else of the ledger has changed with it yet."""
        place.used[row] = 0
        parent = self.index.parent[row]
        if parent != NO_ROW:
            place.children[parent] += 1
            place.leaves.remove(parent)

    def _come_all(self, place: Place, rows: array[int]) -> None:
        """``come`` for each of the distinct ``rows``."""
        if len(rows) < AT_ONCE:
            for row in rows:
                self.come(place, row)
            return
        coming = column(rows)
        np.frombuffer(place.used, np.uint8)[coming] = 0
        parents = column(self.index.parent)[coming]
        is_path = np.array_equal(parents[1:], coming[:-1])  # then no two have one parent
        parents = parents[parents != NO_ROW]
        if is_path:
            column(place.children)[parents] += 1
        else:
            np.add.at(column(place.children), parents, 1)
        for row in parents[np.frombuffer(place.leaves.filed, np.bool_)[parents]].tolist():
            place.leaves.remove(row)

    def drop_copy(self, place: Place, row: int, cause: Cause | None = None) -> None:
        """Take a row's copies on ``place`` away and free their pages; forget the row when it was the last place.

        The parent inherits the stamp, so that leaf-first order stays the order of last access.
        """
        place.counts.leave(self.ages.age(self.index.stamp[row]), 1, not place.used[row])
        self.let_go(place, (row,))
        for group in range(len(place.pools)):
            if place.states[group][row] != ABSENT:
                place.drop(group, row, cause)
        place.leaves.remove(row)
        for order in place.window_leaves.values():
            order.remove(row)
        self._after_leaving(place, row)

    def drop_window(self, place: Place, group: int, row: int) -> None:
        """Take one windowed copy away by itself and free its page."""
        place.drop(group, row, Cause.WINDOW_EVICTED)
        place.window_leaves[group].update(row)
        place.counts.windows_left += 1

    def _after_leaving(self, place: Place, row: int) -> None:
        index = self.index
        parent = index.parent[row]
        if parent != NO_ROW:
            place.children[parent] -= 1
            index.inherit(parent, index.stamp[row])
            if place is not self.host:  # a hit used all blocks above it, but loads bring each block by itself
                place.used[parent] |= place.used[row]
        if not index.has_copy(row):
            key = index.keys[row]
            assert key is not None
            tier = Tier.HOST if place is self.host else Tier.DEVICE
            self.dropped.append(Dropped(key, index.reuses[row], tier.value))
            self.leave_segments((row,), (key,))
            index.remove(row)
        if parent != NO_ROW:
            place.leaves.update(parent)

    def let_go(self, place: Place, rows: Sequence[int]) -> None:
        """The copies of ``rows``, each the parent of the one before, go from a place: a policy that follows requests is
        told."""
        if self.chooser is not None:
            for segment, first, end in self.index.by_segment(rows):
                self.chooser.let_go(segment, end - first, self.clock.seconds, is_host=place is self.host)

    def leave_segments(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """Rows, each the parent of the one before, and of which ``keys`` were the keys, leave the index: a policy that
        follows requests is told."""
        if self.chooser is not None:
            for segment, first, end in self.index.by_segment(rows):
                if segment != NO_SEGMENT:
                    self.chooser.left(segment, self.index.depth[rows[first]] + 1, keys[first:end])
                    self.index.belong_to(NO_SEGMENT, rows[first:end])

    def begin_flight(self, row: int) -> None:
        """A transfer reads or writes this row's copies."""
        self.index.begin_flight(row)

    def start_drain(self, place: Place, row: int, ticket: int) -> None:
        """The block's copy lingers until its ticket ends; the row is in flight already."""
        for group in place.full_groups:
            place.drain(group, row)
        place.draining[row] = ticket

    def end_drain(self, place: Place, row: int, *, needed: bool) -> None:
        """The ticket has ended. What is ``needed`` is READY again; the rest is to be dropped. Raises LedgerBroken."""
        if place.draining.pop(row, None) is None:
            raise LedgerBroken(f"row {row} is drained on {place.name} by no ticket")
        if needed:
            for group in place.full_groups:
                place.keep(group, row)

    def end_flight(self, row: int) -> None:
        """The transfer is over; the row may be a candidate again."""
        self.index.end_flight(row)

    def start_fill(self, place: Place, rows_of: Sequence[array[int]], ticket: int) -> Filling:
        """A transfer towards ``place`` begins: of group g it brings the rows ``rows_of[g]``. They are in flight.

        There is room. A block that is not there yet is named in all groups without a window; of one that is there
        already only windowed copies can come. One transfer at a time fills copies of a row on one place.
        """
        rows = array_of(union_of(rows_of))
        if others := place.fillers(rows):
            raise LedgerBroken(f"{place.name}: rows of ticket {ticket} are filled by tickets {others} already")
        np.frombuffer(place.filling, np.int64)[column(rows)] = ticket
        self._come_all(place, array_of(column(rows)[place.states_of(place.lead, rows) == ABSENT]))
        self.index.begin_flights(rows)
        filled = Filling(rows_of, [place.fill(group, each) for group, each in enumerate(rows_of)])
        for group in place.window_groups:
            for each in self.index.places:
                each.window_leaves[group].remove_all(rows_of[group])
        return filled

    def finish_fill(self, place: Place, row: int, *, arrived: bool, may_write: bool = False) -> None:
        """The transfer has ended: FILLING copies become READY, or go. ``may_write``: though they go, their bytes may
        still come. Raises LedgerBroken where none brings them."""
        if not place.filling[row]:
            raise LedgerBroken(f"row {row} is filled on {place.name} by no ticket")
        place.filling[row] = 0
        for group, states in enumerate(place.states):
            if states[row] == FILLING:
                if arrived:
                    place.arrive(group, row)
                else:
                    place.fail(group, row, may_write=may_write)
                if group in place.window_leaves:
                    for each in self.index.places:
                        each.window_leaves[group].update(row)
        self.index.end_flight(row)
        if place.states[place.lead][row] == ABSENT:
            self._after_leaving(place, row)
