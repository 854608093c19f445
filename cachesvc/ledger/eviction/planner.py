"""Choice of victims: all or nothing, leaf first, and never a block whose descendants need it.

A plan is made without changing anything, then carried out whole. What it costs grows with what it evicts, not with what
there is. What a victim of a device place becomes:

    another whole copy exists                -> drop: its page is free at once
    last copy, host wanted and has room      -> drain: its page is free when the bytes are on the host
    last copy, no child anywhere             -> drop: the block leaves the index
    otherwise                                -> passed over
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.eviction.demand import BlockDemand, demand_of
from cachesvc.ledger.eviction.drop import drop_all
from cachesvc.ledger.eviction.idle_copies import drop_idle_copies, idle_copies
from cachesvc.ledger.eviction.victim_walk import walk_of
from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.block_ledger import BlockLedger, Filling, hit_window_blocks
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.pages.change_log import Cause
from cachesvc.model.numbers.int32s import Column, among, array_of, column
from cachesvc.model.words import ABSENT, READY

WORK_OF_RUN, BLOCKS_OF_WORK = 8, 12
"""Work of a run that stays on the host: as much as this number of blocks that go by themselves, and one more for this
number of its own."""
DRAINS_LOOKED_AT = 256
Spares = Callable[[int], bool]


def no_row(_: int) -> bool:
    """Predicate that is false for each row."""
    return False


class Drain(NamedTuple):
    """A device copy that lingers until its ticket ends; ``copied`` is False where only its child's bytes move."""

    row: int
    copied: bool


@dataclass
class EvictionPlan:
    """Victims in the order to do it, leaves first. ``host_drops`` make room on the host for the drains.

    A parent never leaves before its child: where the child drains, so does the parent, bytes to copy or not.
    ``window_drops``: ``(group, row)`` of windowed copies that go by themselves.
    """

    place: Place
    drops: list[int] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    host_drops: list[int] = field(default_factory=list)
    window_drops: list[tuple[int, int]] = field(default_factory=list)
    cause: Cause = Cause.EVICTED

    @property
    def found(self) -> int:
        """Pages that the plan frees, now or when its ticket ends."""
        return len(self.drops) + len(self.drains)

    def freed(self, group: int) -> int:
        """Number of pages of one group that the drops free."""
        states = self.place.states[group]
        alone = sum(dropped == group for dropped, _ in self.window_drops)
        return alone + sum(states[row] != ABSENT for row in self.drops)


class Evictor:
    """Plans and carries out evictions on one model's places."""

    def __init__(self, ledger: BlockLedger) -> None:
        self.ledger = ledger

    def plan_device(
        self,
        place: Place,
        demand: BlockDemand | int,
        *,
        to_host: bool,
        share: float = 0.0,
        most_looks: int = sys.maxsize,
        most_work: int = sys.maxsize,
        saves: bool = True,
        spent_only: bool = False,
    ) -> tuple[EvictionPlan, bool]:
        """Victims that meet the ``demand``, which counts them, or a number of blocks; and whether as many can go.
        ``to_host``: last copies are stored rather than dropped while the host can take them; with a ``share`` those
        whose like is used from the host at least ``share`` times as often as the mean. ``most_looks``: candidates after
        which the search is given up. ``most_work``: this number of blocks, or many more in runs that the host has, is
        enough. Without ``saves`` nothing goes to the host, and what has to stays: it counts. See ``walk_of``."""
        demand = demand if isinstance(demand, BlockDemand) else BlockDemand(demand)
        index, walk = self.ledger.index, walk_of(self.ledger, place, spent_only=spent_only)
        host = _HostRoom(self.ledger, walk.taken.__contains__)
        plan = EvictionPlan(place, host_drops=host.victims)
        others = [each.states[each.lead] for each in index.places if each is not place]
        gone, lingering, looks, work = Counter[int](), set[int](), 0, 0.0
        while demand.left > 0 and looks < most_looks and work < most_work and (row := walk.next()) is not None:
            looks += 1
            lasting_children = index.children[row] - gone[row]
            is_elsewhere = READY in map(itemgetter(row), others)
            left, run = most_work - int(work), [row]
            if is_elsewhere and row not in lingering:
                run = walk.backed_run(row, min(demand.left, _longest_run(place, left)))
            elif not (to_host or lasting_children or any(map(itemgetter(row), others))):
                run = walk.run(row, min(demand.left, left))
            if len(run) > 1 and host.walk.taken.isdisjoint(run):
                plan.drops += run
                walk.take_run(run)
                gone[index.parent[run[-1]]] += not is_elsewhere
                demand.take(run)
                work += _work_of(place, run) if is_elsewhere else len(run)
                continue
            if not saves and (row in lingering or (lasting_children and not is_elsewhere)):
                lingering.add(index.parent[row])  # it counts, and stays
            elif is_elsewhere and row not in host.walk.taken:
                if row in lingering:
                    plan.drains.append(Drain(row, copied=False))
                    lingering.add(index.parent[row])
                else:
                    plan.drops.append(row)
            elif (lasting_children > 0 or (to_host and self._is_worth_saving(row, share))) and host.reserve(place, row):
                plan.drains.append(Drain(row, copied=True))
                lingering.add(index.parent[row])
            elif lasting_children == 0:
                plan.drops.append(row)
                gone[index.parent[row]] += 1
            else:
                continue
            walk.take(row)
            demand.take((row,))
            work += 1
        return plan, demand.left <= 0 or work >= most_work

    def plan_backed(self, place: Place, count: int, most_work: int) -> EvictionPlan:
        """Next victims of a device place, as far as the host has all of them: up to ``count`` blocks, and as
        ``most_work`` of ``plan_device``. Nothing is changed yet."""
        plan, walk, work = EvictionPlan(place), walk_of(self.ledger, place), 0.0
        on_host = self.ledger.host.states[self.ledger.host.lead]
        while plan.found < count and work < most_work and (row := walk.next()) is not None:
            run = walk.backed_run(row, min(count - plan.found, _longest_run(place, most_work - int(work))))
            backed = list(takewhile(lambda each: on_host[each] == READY, run))
            plan.drops += backed
            work += _work_of(place, backed)
            if len(backed) < len(run):
                break
            walk.take_run(run)
        return plan

    def plan_host(self, count: int, spares: Spares = no_row) -> tuple[EvictionPlan, bool]:
        """Victims that free ``count`` host pages: backups whose device copy stays, and blocks without children.

        ``spares``: says of a row whether it stays.
        """
        room = _HostRoom(self.ledger, spares)
        plan = EvictionPlan(self.ledger.host)
        met = all(room.evict_one() for _ in range(count))
        plan.drops = room.victims
        return plan, met

    def plan_host_room(self, wanted: Sequence[int], spares: Spares = no_row) -> tuple[EvictionPlan, int | None]:
        """Victims after which host group g has ``wanted[g]`` free pages; and a group that they do not suffice for.

        Whole blocks go for the full groups, each freeing its windowed copies too. If windowed groups are still short,
        unheld windowed copies go by themselves, and their blocks stay. ``spares``: says of a row whether all of it
        stays.
        """
        host = self.ledger.host
        demand, room = demand_of(host, wanted), _HostRoom(self.ledger, spares)
        plan = EvictionPlan(host)
        met = True
        while met and demand.left > 0:
            met = room.evict_one()
            demand.take(room.victims[-1:] if met else ())
        plan.drops = room.victims
        lacking = None
        if not met and not host.has_shared_pools:
            lacking = max(host.full_groups, key=lambda group: wanted[group] - host.pools[group].free)
        going = set(plan.drops)
        for groups, short in zip(host.shares, host.short_of(wanted), strict=True):
            need = short - host.pages_in(groups, plan.drops) if short > 0 else 0
            left = ((group, row) for group, row in idle_copies(host, groups) if row not in going and not spares(row))
            found = list(islice(left, max(0, need)))
            plan.window_drops += found
            if len(found) < need and lacking is None:
                lacking = groups[0]
        return plan, lacking

    def _is_worth_saving(self, row: int, share: float) -> bool:
        chooser = self.ledger.chooser
        return not share or chooser is None or chooser.is_worth_saving(self.ledger.index.segments[row], share)

    def carry_out(self, plan: EvictionPlan, ticket: int = 0) -> Filling:
        """Drop what is to be dropped and start draining the rest; returns the host copies that come.

        ``ticket``: of the drains, where there are any.
        """
        ledger = self.ledger
        place = plan.place
        with ledger.host.leaves.filing_later():
            drop_all(ledger, ledger.host, plan.host_drops, plan.cause)
        copied = array("i", [drain.row for drain in plan.drains if drain.copied])
        coming = start_backup(ledger, place, copied, ticket)
        for row, is_copied in plan.drains:
            if not is_copied:
                ledger.begin_flight(row)
            ledger.start_drain(place, row, ticket)
        with place.leaves.filing_later():
            drop_all(ledger, place, plan.drops, plan.cause)
        for group, row in plan.window_drops:
            ledger.drop_window(place, group, row)
        ledger.evicted_blocks += len(plan.drops)
        return coming

    def finish_drain(self, place: Place, drain: Drain, *, arrived: bool, may_write: bool = False) -> bool:
        """The ticket has ended: a copied block's host copy is READY or gone; the device copy goes unless needed.
        ``may_write``: as of ``finish_fill``.

        True when it went.
        """
        ledger = self.ledger
        row = drain.row
        needed = place.is_lost or place.pins[row] > 0 or place.children[row] > 0 or not arrived
        ledger.end_drain(place, row, needed=needed)
        if drain.copied:
            ledger.finish_fill(ledger.host, row, arrived=arrived, may_write=may_write)
        else:
            ledger.end_flight(row)
        if not needed:
            ledger.evicted_blocks += 1
            ledger.drop_copy(place, row)
        return not needed


def _longest_run(place: Place, work: int) -> int:
    """Number of blocks of a run with this much work; a few at least."""
    return work if place.window_groups else max(work - WORK_OF_RUN, 1) * BLOCKS_OF_WORK


def _work_of(place: Place, run: Sequence[int]) -> float:
    """Work of a run of blocks that the host has. Where there are windows they leave one by one (``drop.py``)."""
    return len(run) if place.window_groups else min(len(run), WORK_OF_RUN + len(run) / BLOCKS_OF_WORK)


class _HostRoom:
    """Room on the host, reserved block by block while a plan is made."""

    def __init__(self, ledger: BlockLedger, spares: Spares) -> None:
        self.ledger = ledger
        self._spares = spares
        self.walk = walk_of(ledger, ledger.host)
        self.victims: list[int] = []
        host = ledger.host
        self._free = [host.pools[groups[0]].unreserved for groups in host.shares]
        self._gone: dict[int, int] = {}

    def reserve(self, source: Place, row: int) -> bool:
        """Reserve host pages for a block of ``source``, and for those of its copies in the same pools without which no
        prompt could go on behind it, evicting if need be; False where there are none for the block."""
        host = self.ledger.host
        taken = [0] * len(self._free)
        for at, (groups, full) in enumerate(zip(host.shares, host.full_in, strict=True)):
            if full:
                windowed = [group for group in groups if group in host.window_leaves] if full < len(groups) else ()
                taken[at] = full + sum(is_needed(self.ledger, source, group, row) for group in windowed)
                while self._free[at] < taken[at] and self.evict_one():
                    pass
                if self._free[at] < full:
                    return False
        self._free = [max(0, free - pages) for free, pages in zip(self._free, taken, strict=True)]
        return True

    def evict_one(self) -> bool:
        """Take the next host victim; False when none is left."""
        index, host = self.ledger.index, self.ledger.host
        while (row := self.walk.next()) is not None:
            if self._spares(row):
                continue
            elsewhere = any(p is not host and p.state(row) == READY for p in index.places)
            if not elsewhere:
                if index.children[row] > self._gone.get(row, 0):
                    continue
                parent = index.parent[row]
                self._gone[parent] = self._gone.get(parent, 0) + 1
            self.walk.take(row)
            self.victims.append(row)
            for at, groups in enumerate(host.shares):
                self._free[at] += host.pages_in(groups, (row,))
            return True
        return False


def is_needed(ledger: BlockLedger, source: Place, group: int, row: int) -> bool:
    """True for a windowed copy of ``source`` that goes to the host with its block whatever goes for it there: a hit has
    looked back to it, a sequence has ended on it, or it is a sink."""
    index = ledger.index
    if source.states[group][row] != READY or ledger.host.states[group][row] != ABSENT:
        return False
    is_known = index.reached[row] or index.depth[row] < ledger.layout.sink_blocks(group)
    return bool(is_known) or any(
        group in kin.groups and ledger.retention is not None and not ledger.retention.is_middle(source, kin, row)
        for kin in source.kin
    )


def parts_of(ledger: BlockLedger, source: Place, rows: array[int]) -> list[array[int]]:
    """Copies of ``source`` that go to the host together when ``rows`` do, by group: of the full groups all, of windowed
    ones those that a prompt needs to go on behind one of the rows where prompts are known to (``is_needed``), or behind
    the deepest of its path. Without them the blocks would be of no use there."""
    host = ledger.host
    parts = [rows] * len(host.pools)
    ends = _ends(ledger, source, rows) if source.window_groups else {}
    for group in source.window_groups:
        front = ends.get(group, set())
        parts[group] = array("i", [row for row in rows if row in front or is_needed(ledger, source, group, row)])
    return parts


def _ends(ledger: BlockLedger, source: Place, rows: array[int]) -> dict[int, set[int]]:
    """Rows, by windowed group, that a prompt going on behind the deepest of ``rows`` on each path looks back to: its
    last window, or its last state."""
    index, layout, given = ledger.index, ledger.layout, set(rows)
    found: dict[int, set[int]] = {group: set() for group in source.window_groups}
    for tip in rows:
        if source.children[tip]:
            continue
        for group, front in found.items():
            states, on_host = source.states[group], ledger.host.states[group]
            left, is_state, row = hit_window_blocks(layout, group), layout.groups[group].is_state, tip
            while left > 0 and row in given:
                if states[row] == READY and on_host[row] == ABSENT:
                    front.add(row)
                    left -= is_state
                left -= not is_state
                row = index.parent[row]
    return found


def start_backup(ledger: BlockLedger, source: Place, rows: array[int], ticket: int) -> Filling:
    """Start to store on the host what ``source`` holds of ``rows``: their ``parts_of`` first, and other windowed copies
    while there is room.

    The caller has made sure that the full groups have room. Idle windowed copies of pools without full groups go.
    """
    host = ledger.host
    parts = parts_of(ledger, source, rows)
    if source.window_groups:
        wanted = [len(part) if group in source.window_groups else 0 for group, part in enumerate(parts)]
        for groups, full in zip(host.shares, host.full_in, strict=True):
            if not full:
                alone = [count if group in groups else 0 for group, count in enumerate(wanted)]
                drop_idle_copies(ledger, host, alone, sum(alone))
    coming = list(parts)
    for groups, full in zip(host.shares, host.full_in, strict=True):
        left = host.pools[groups[0]].free - full * len(rows)
        windowed = [group for group in groups if group in host.window_leaves] if full < len(groups) else []
        for group in windowed:
            coming[group] = parts[group][max(0, len(parts[group]) - max(0, left)) :]
            left -= len(coming[group])
        for group in windowed if left > 0 else ():
            is_there = (source.states_of(group, rows) == READY) & (host.states_of(group, rows) == ABSENT)
            others = is_there & ~among(column(rows), column(coming[group]))
            coming[group].extend(array_of(column(rows)[others][:left]))
            left = max(0, left - int(others.sum()))
    return ledger.start_fill(host, coming, ticket)


def evictable_pages(
    ledger: BlockLedger, place: Place, *, after_flights: bool = False, unpinned: Sequence[int] = ()
) -> int:
    """Number of blocks of a device place that could be dropped one after another; ``after_flights``: once all transfers
    are over, and with them one pin of each of the rows ``unpinned``.

    What pins keep is counted all the time; beside that only chains of blocks in flight are looked at. So it does not
    grow with the pool, nor with what others hold.
    """
    index, protected = ledger.index, place.protected
    ending = [row for row, count in Counter(unpinned).items() if 0 < place.pins[row] <= count]
    for row in ending:
        protected.leave(row)
    try:
        kept = protected.blocks
        if not after_flights and index.flying:
            kept += _blocks_beyond(index, protected.tips, _deepest(index, place))
    finally:
        for row in ending:
            protected.keep(row)
    return place.residents - kept


def _deepest(index: BlockIndex, place: Place) -> Column:
    """Deepest row of each chain in flight that has a copy on the place."""
    flying = _flying_here(index, place)
    heads, depths = column(index.head)[flying], column(index.depth)[flying]
    ends = np.append((heads[1:] != heads[:-1]) | (depths[1:] < depths[:-1]), True) if len(flying) else np.empty(0, bool)
    flying, heads, depths = flying[ends], heads[ends], depths[ends]  # what takes off together is mostly in its order
    order = np.lexsort((depths, heads))
    last = np.append(np.diff(heads[order]) != 0, True) if len(order) else order
    found: Column = flying[order[last]]
    return found


def _flying_here(index: BlockIndex, place: Place) -> Column:
    """The rows in flight that have a copy on the place."""
    flying = index.flying.column()
    found: Column = flying[np.frombuffer(place.states[place.lead], np.uint8)[flying] != ABSENT]
    return found


def transfers_here(ledger: BlockLedger, place: Place) -> list[int]:
    """The tickets of any replica that move copies of blocks which have one on the place: these stay until then. Looks
    at rows in flight as a column, and not at each ticket; of what drains elsewhere it finds some at least."""
    rows = array_of(_flying_here(ledger.index, place))
    found = dict.fromkeys(ticket for each in ledger.index.told for ticket in each.fillers(rows))
    for each in ledger.index.told:
        if each.draining:
            found |= dict.fromkeys(each.draining[row] for row in rows[:DRAINS_LOOKED_AT] if row in each.draining)
    return list(found)


def _blocks_beyond(index: BlockIndex, tips: Mapping[int, int], rows: Column) -> int:
    """Number of the rows, one of a chain each, and all their ancestors, without those down to the ``tips`` of chains.
    Chains that hang below none and have no tip are counted as a column: thousands of short prompts may be in flight."""
    heads, depths = column(index.head)[rows], column(index.depth)[rows]
    has_tip = np.fromiter(map(tips.__contains__, heads.tolist()), np.bool_, len(rows))
    is_alone = (column(index.parent)[heads] == NO_ROW) & ~has_tip
    count = int(depths[is_alone].sum()) + int(is_alone.sum())
    if is_alone.all():
        return count
    # of each chain that was looked at, the depth down to which it is counted
    reach = dict(zip(heads[is_alone].tolist(), depths[is_alone].tolist(), strict=True))
    for start in rows[~is_alone].tolist():
        row = start
        while row != NO_ROW:
            head, depth = index.head[row], index.depth[row]
            above = index.depth[head] - 1
            counted = reach.get(head, tips.get(head, above))
            if depth > counted:
                count += depth - counted
                reach[head] = depth
            if counted > above:
                break
            row = index.parent[head]
    return count
