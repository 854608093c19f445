"""The blocks of one model: match, pin, seal, fill, drain and drop, on top of the index and its places.

Invariants, held between any two calls (``questions/audit/verify.py`` checks them):
what a replica has on its device is prefix-closed; so is the union of all places; nothing pinned, in flight, or with a
child on the same place leaves that place; whatever may leave is filed as a candidate, under its rank, and nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.lookup import Hit, Lookup
from cachesvc.ledger.index.orders import RankRule, leaf_order, window_order, window_rank
from cachesvc.ledger.index.retention import Retention, kin_of
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.index.windows import hit_window_blocks, window_needs, window_positions
from cachesvc.ledger.order.ages import Ages
from cachesvc.ledger.order.candidates import NO_LEAVES, LeafOrder
from cachesvc.ledger.order.class_queues import NO_SEGMENT, EvictionPolicy, QueuedLeaves
from cachesvc.ledger.order.clock import Clock
from cachesvc.ledger.order.copy_queues import PositionRule
from cachesvc.ledger.pages.cached_tables import TablePieces
from cachesvc.ledger.pages.change_log import KEEP_EVENTS, Cause, Dropped, Journal, Moment
from cachesvc.ledger.pages.page_pool import AT_ONCE, PagePool
from cachesvc.ledger.pages.pinned_counts import Protected
from cachesvc.ledger.pages.place_counts import PlaceCounts
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.layout import Layout
from cachesvc.model.numbers.int32s import array_of, column, union_of
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, Tier

__all__ = ["Dropped", "Hit", "RankRule", "hit_window_blocks", "window_positions", "window_rank"]


MOST_GIVEN_UP = 4096
GIVEN_UP_SECONDS = 10.0
"""Time for which a block that a request has given up is remembered, seconds: as long as callers are patient."""


class Filling(NamedTuple):
    """Copies that have begun to come: of group g, ``rows[g]`` to the pages ``pages[g]``."""

    rows: Sequence[array[int]]
    pages: list[array[int]]


class BlockLedger(Lookup):
    """One model's index and places. ``places[0]`` is the host; ``add_replica`` adds a device place.

    ``computing``: keys that sequences have declared to be computing, with how many do. ``given_up``: the first block
    that each of the sequences that ended lately was to compute and has not, with its time, the oldest first.
    ``places_made``: the next one's number.
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
        transfers, end as ever; ``lost.py`` forgets what it had."""
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
