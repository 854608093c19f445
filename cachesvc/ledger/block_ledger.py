"""The blocks of one model: match, pin, seal, fill, drain and drop, on top of the index and its places.

Invariants, held between any two calls (``questions/audit.py`` checks them):
what a replica has on its device is prefix-closed; so is the union of all places; nothing pinned, in flight, or with a
child on the same place leaves that place; whatever may leave is filed as a candidate, under its rank, and nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.candidates import (
    NO_LEAVES,
    NO_SEGMENT,
    Ages,
    Clock,
    EvictionPolicy,
    LeafOrder,
    PositionRule,
    QueuedLeaves,
)
from cachesvc.ledger.change_log import KEEP_EVENTS, Cause, Dropped, Journal, Moment
from cachesvc.ledger.counted_tables import Protected, TablePieces
from cachesvc.ledger.page_pool import AT_ONCE, PagePool, PlaceCounts
from cachesvc.ledger.retention import (
    Prefix,
    RankRule,
    Retention,
    WindowSearch,
    kin_of,
    leaf_order,
    require_chained,
    window_needs,
    window_order,
)
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.errors import KeyMisplaced, LedgerBroken
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import Column, array_of, column, union_of
from cachesvc.model.words import ABSENT, FILLING, KEY_BYTES, NO_PAGE, READY, Tier


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


MOST_GIVEN_UP = 4096
GIVEN_UP_SECONDS = 10.0
"""Time for which a block that a request has given up is remembered, seconds: as long as callers are patient."""


class Filling(NamedTuple):
    """Copies that have begun to come: of group g, ``rows[g]`` to the pages ``pages[g]``."""

    rows: Sequence[array[int]]
    pages: list[array[int]]


class BlockLedger:
    """One model's index and places. ``places[0]`` is the host; ``add_replica`` adds a device place.

    ``computing``: keys that sequences have declared to be computing, with how many do. ``given_up``: the first block
    that each of the sequences that ended lately was to compute and has not, with its time, the oldest first.
    ``places_made``: the next one's number. ``misplaced``: how often keys were asked for that the index has below others
    than the caller says.

    A hit's last block, in place and in all, has the key that was asked for there: what is published or fetched below it
    comes below the block that the caller's own chain names. The blocks between are not compared one by one.
    """

    def __init__(
        self,
        layout: Layout,
        host_pools: tuple[PagePool, ...],
        rank: RankRule,
        ages: Ages | None = None,
        moment: Moment | None = None,
        keep_events: int = KEEP_EVENTS,
        chooser: EvictionPolicy | None = None,
        new_positions: Callable[[], PositionRule] | None = None,
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
        self.retention: Retention | None = None
        if new_positions is not None and (kin_of(layout, layout.pools) or kin_of(layout, layout.host_pools)):
            self.retention = Retention(self.index, new_positions(), self.clock)
        self.dropped: list[Dropped] = []
        self.evicted_blocks = 0
        self.computing: dict[bytes, int] = {}
        self.given_up: OrderedDict[bytes, float] = OrderedDict()
        self._moment = moment
        self.places_made = 0
        self.misplaced = 0
        self.past = PlaceCounts()  # what had left places before these were lost
        self.host = self._add_place("host", host_pools, self.next_place())

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

    def give_up(self, key: bytes) -> None:
        """Note that a sequence ends before it has computed a block."""
        self.given_up[key] = self._moment.seconds
        self.given_up.move_to_end(key)
        if len(self.given_up) > MOST_GIVEN_UP:
            self.given_up.popitem(last=False)

    def given_up_at(self, key: bytes) -> float | None:
        """Time at which the last request that was to compute a block ended; None where that is long ago, or another
        one computes it."""
        since = self.given_up.get(key)
        is_over = since is None or key in self.computing or self._moment.seconds - since > GIVEN_UP_SECONDS
        return None if is_over else since

    def next_place(self) -> int:
        """Number of a place that will be added; it is no other one's."""
        self.places_made += 1
        return self.places_made - 1

    def add_replica(self, name: str, pools: tuple[PagePool, ...], number: int | None = None) -> Place:
        """A further device place with one pool for each group. ``number``: from ``next_place``, where it was called
        before."""
        return self._add_place(name, pools, self.next_place() if number is None else number)

    def _add_place(self, name: str, pools: tuple[PagePool, ...], number: int) -> Place:
        index = self.index
        place = Place(name, self.layout, pools, self.journal, number, index.places, index.told)
        place.pieces = TablePieces(self.index.parent, [place.pages[group] for group in place.full_groups])
        place.protected = Protected(self.index.parent, self.index.depth, self.index.head)
        if self.retention is not None:
            place.kin = kin_of(self.layout, place.shares)
            place.spent_by = place.kin if index.places else ()  # the first place is the host
        place.leaves = leaf_order(self.index, place, self.rank, self.chooser)
        place.window_leaves = {
            group: window_order(self.index, place, group, self.layout.sink_blocks(group))
            for group in place.window_groups
        }
        if self.retention is not None:
            place.window_leaves |= {kin.lead: self.retention.queues(place, kin) for kin in place.kin}
        self.index.add_place(place, (place.leaves, *place.window_leaves.values()))
        return place

    def lose_place(self, place: Place) -> None:
        """The memory of a device place is gone: no flow sees it from now on. Those who hold something there, and its
        transfers, end as ever; ``LostCopies`` forgets what it had."""
        self.index.lose_place(place)
        self.past.add_left(place.counts)
        place.is_lost = True
        place.leaves = NO_LEAVES
        place.window_leaves = dict.fromkeys(place.window_leaves, NO_LEAVES)

    def follow(self, chooser: EvictionPolicy) -> None:
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
        """Move a segment to another class of the policy."""
        for place in self.index.places:
            assert isinstance(place.leaves, QueuedLeaves)
            place.leaves.requeue(segment)

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

    def end_position(self, place: Place, group: int, row: int) -> None:
        """A request has ended, and ``row`` is the last one of which it holds the copy in a windowed group."""
        if self.retention is not None and any(group == kin.lead for kin in place.kin):
            self.retention.ended(row)

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

    def seal_alone(self, place: Place, group: int, row: int, page: int) -> None:
        """A private page becomes a windowed copy of a block that is there already."""
        is_leaf = bool(place.spent_by) and place.leaves.remove(row)  # its copies are part of a leaf's rank
        place.seal(group, row, page)
        if is_leaf:
            place.leaves.update(row)

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
        place.counts.leave(self.ages.age_of_use(self.index.stamp[row]), 1, not place.used[row])
        self.let_go(place, (row,))
        if place.spent_by:  # its copies are part of a leaf's rank
            place.leaves.remove(row)
        for group in range(len(place.pools)):
            if place.states[group][row] != ABSENT:
                place.drop(group, row, cause)
        place.leaves.remove(row)
        for order in place.window_leaves.values():
            order.remove(row)
        self._after_leaving(place, row)

    def drop_window(self, place: Place, group: int, row: int) -> None:
        """Take one windowed copy away by itself and free its page."""
        is_leaf = bool(place.spent_by) and place.leaves.remove(row)
        place.drop(group, row, Cause.WINDOW_EVICTED)
        place.window_leaves[group].update(row)
        if is_leaf:
            place.leaves.update(row)
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
            self.leave_index(row, Tier.HOST if place is self.host else Tier.DEVICE)
        if parent != NO_ROW:
            place.leaves.update(parent)

    def leave_index(self, row: int, tier: Tier) -> None:
        """Forget a row whose last copy has gone, from ``tier``. A row that a lost place has leaves with that. A row
        above blocks whose copies outlived its own stays bare until they have gone."""
        index = self.index
        if index.lost and index.is_on_lost(row):
            return
        key = index.keys[row]
        assert key is not None
        self.dropped.append(Dropped(key, index.reuses[row], tier.value))
        if index.losses and index.children[row]:
            index.bare[row] = 1
            return
        self.leave_segments((row,), (key,))
        index.remove(row)

    def let_go(self, place: Place, rows: Sequence[int]) -> None:
        """Drop the copies of ``rows``, each the parent of the one before, from a place, and report it to a policy that
        follows requests."""
        if self.chooser is not None:
            for segment, first, end in self.index.by_segment(rows):
                self.chooser.let_go(segment, end - first, self.clock.seconds, is_host=place is self.host)

    def leave_segments(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """Report to a policy that follows requests that rows, each the parent of the one before, with these ``keys``,
        leave the index."""
        if self.retention is not None:
            for row, key in zip(rows, keys, strict=True):
                self.retention.left(row, key)
        if self.chooser is not None:
            for segment, first, end in self.index.by_segment(rows):
                if segment != NO_SEGMENT:
                    self.chooser.left(segment, self.index.depth[rows[first]] + 1, keys[first:end])
                    self.index.belong_to(NO_SEGMENT, rows[first:end])

    def begin_flight(self, row: int) -> None:
        """Count a transfer that reads or writes this row's copies."""
        self.index.begin_flight(row)

    def start_drain(self, place: Place, row: int, ticket: int) -> None:
        """The block's copy lingers until its ticket ends; the row is in flight already."""
        for group in place.full_groups:
            place.drain(group, row)
        place.draining[row] = ticket

    def end_drain(self, place: Place, row: int, *, needed: bool) -> None:
        """End a drain. A ``needed`` copy is READY again; any other must be dropped next. Raises LedgerBroken."""
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

    def use(self, place: Place, rows: array[int]) -> None:
        """Note that each of ``rows`` was used from its copies on ``place``."""
        np.frombuffer(place.used, np.uint8)[column(rows)] = 1

    def finish_fills(self, place: Place, rows: array[int], *, arrived: bool, may_write: bool = False) -> None:
        """``finish_fill`` for each of the distinct ``rows``: whole columns at a time where their bytes have come."""
        if not arrived or len(rows) < AT_ONCE:
            for row in rows:
                self.finish_fill(place, row, arrived=arrived, may_write=may_write)
            return
        landing, filling = column(rows), np.frombuffer(place.filling, np.int64)
        if not filling[landing].all():
            row = rows[int(np.argmin(filling[landing]))]
            raise LedgerBroken(f"row {row} is filled on {place.name} by no ticket")
        filling[landing] = 0
        for group in range(len(place.states)):
            came = landing[place.states_of(group, rows) == FILLING]
            place.arrive_all(group, came)
            if group in place.window_leaves:
                for each in self.index.places:  # ``start_fill`` has filed them nowhere
                    each.window_leaves[group].add_all(came.tolist())
        self.index.end_flights(rows)

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


# Contents of a place whose memory is gone: forgotten in slices, and hidden from all flows from the moment of the loss.
#
# The place is none of ``BlockIndex.places`` any more, so nothing copies from it, counts it or trusts it. Followers of
# the journal still know of its copies, and get an event for each that goes. A row leaves the index with its last copy,
# unless others hang below it: then it stays bare, so that what the host has below it is a hit again once it is
# recomputed.

LOOKED_AT = 4096
"""Rows that are looked at in one go, some 10 us."""
LOOKS_A_TURN = 16


class LostCopies:
    """A pass over the rows of a lost place, from the last one up: mostly children before their parents."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self._ledger = ledger
        self._place = place
        self._end = len(ledger.index.keys)

    def forget_some(self, most: int) -> bool:
        """Forget up to ``most`` copies that nothing moves or holds. True when the pass is over; what is moved or held
        now is for another one."""
        for _ in range(LOOKS_A_TURN):
            if most <= 0 or not self._end:
                break
            first = max(0, self._end - LOOKED_AT)
            rows = self._idle(first, self._end)[-most:]
            self._end = int(rows[0]) if len(rows) == most else first
            most -= len(rows)
            self._forget(rows[::-1])
        return not self._end

    def _idle(self, first: int, end: int) -> Column:
        """Rows from ``first`` to ``end`` that the place has, and of which nothing moves or holds a copy there."""
        place, index = self._place, self._ledger.index
        here = np.frombuffer(place.states[place.lead], np.uint8)[first:end]
        rows = (first + np.flatnonzero(here)).astype(np.int32)
        is_busy = (column(place.pins)[rows] != 0) | (np.frombuffer(index.flights, np.uint16)[rows] != 0)
        for pins in place.window_pins.values():
            is_busy |= column(pins)[rows] != 0
        idle: Column = rows[~is_busy]
        return idle

    def _forget(self, rows: Column) -> None:
        ledger, place = self._ledger, self._place
        index, parents = ledger.index, ledger.index.parent
        is_there = np.zeros(len(rows), np.bool_)
        for each in index.told:
            if each is not place:
                for states in each.states:
                    is_there |= np.frombuffer(states, np.uint8)[rows] != ABSENT
        for group in range(len(place.states)):
            place.lose(group, rows)
        for row, stays in zip(rows.tolist(), is_there.tolist(), strict=True):
            parent, stamp = parents[row], index.stamp[row]
            ledger.let_go(place, (row,))
            if not stays:
                ledger.leave_index(row, Tier.DEVICE)
            if parent != NO_ROW:
                index.inherit(parent, stamp)


def is_empty(place: Place) -> bool:
    """True where a lost place has no copies any more, and nothing holds any there."""
    return not place.residents and not place.counts.pinned


def forget_bare(ledger: BlockLedger, most: int) -> bool:
    """Forget up to ``most`` bare rows below which nothing hangs any more, and in turn those above them. True when none
    is left."""
    index = ledger.index
    while index.childless and most > 0:
        row = index.childless.pop()
        most -= 1
        if not index.bare[row] or index.children[row]:
            continue
        if index.has_copy(row):
            index.bare[row] = 0  # it was computed again
        elif not index.is_on_lost(row):
            ledger.leave_segments((row,), (index.keys[row] or b"",))
            index.remove(row)
    return not index.childless
