"""Choice of victims: all or nothing, leaf first, and never a block whose descendants need it.

A plan is made without changing anything, then carried out whole. What it costs grows with what it evicts, not with what
there is. What a victim of a device place becomes:

    another whole copy exists                -> drop: its page is free at once
    last copy, host wanted and has room      -> drain: its page is free when the bytes are on the host
    last copy, no child anywhere             -> drop: the block leaves the index
    otherwise                                -> passed over
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.block_ledger import BlockLedger, Filling
from cachesvc.ledger.candidates import NO_SEGMENT, ROW_BITS, ROW_MASK, CopyQueues, QueuedLeaves
from cachesvc.ledger.change_log import Cause
from cachesvc.ledger.drop import cheap_copies, drop_all
from cachesvc.ledger.retention import SPENT, hit_window_blocks
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.numbers import Column, among, array_of, column
from cachesvc.model.words import ABSENT, READY, STAMP_BITS

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


class BlockDemand:
    """Blocks that have to go where each group has a pool of its own: every one of them frees a page in each."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def take(self, rows: Sequence[int]) -> None:
        self.left -= len(rows)

    def copy(self) -> BlockDemand:
        return BlockDemand(self.left)

    def go_back(self, before: BlockDemand) -> None:
        """Count again from what was copied ``before``."""
        self.left = before.left


class PoolDemand(BlockDemand):
    """Pages that have to go where groups share pools: ``short``, with the groups of each pool. ``left``: the number of
    blocks that it takes at least."""

    def __init__(self, place: Place, short: Sequence[int]) -> None:
        """``short``: pages by pool, in the order of ``place.shares``."""
        self._place = place
        pairs = zip(place.shares, place.full_in, short, strict=False)
        self.short = [(pages, groups) for groups, full, pages in pairs if full and pages > 0]
        super().__init__(0)
        self._count()

    def take(self, rows: Sequence[int]) -> None:
        place = self._place
        self.short = [(pages - place.pages_in(groups, rows), groups) for pages, groups in self.short]
        self._count()

    def copy(self) -> PoolDemand:
        made = PoolDemand(self._place, ())
        made.go_back(self)
        return made

    def go_back(self, before: BlockDemand) -> None:
        assert isinstance(before, PoolDemand)
        self.short = before.short[:]
        self.left = before.left

    def _count(self) -> None:
        self.left = max((-(-pages // len(groups)) for pages, groups in self.short), default=0)


def demand_of(place: Place, wanted: Sequence[int]) -> BlockDemand:
    """Demand for blocks that have to go so that ``wanted[g]`` pages of each group can be taken."""
    if place.has_shared_pools:
        return PoolDemand(place, place.short_of(wanted))
    pools = place.pools
    return BlockDemand(max(wanted[group] - pools[group].unreserved for group in place.full_groups))


FEW = 8
"""Longest run whose rows are read one by one: columns cost as much as some twenty rows, and most paths that hang from a
shared prompt are short."""


class Front:
    """Filed rows, and candidates that have appeared since, lowest entry first."""

    def __init__(self, filed: Iterable[int]) -> None:
        self._filed = iter(filed)
        self._next = next(self._filed, None)
        self._exposed: list[int] = []

    @property
    def first(self) -> int | None:
        if self._exposed and (self._next is None or self._exposed[0] < self._next):
            return self._exposed[0]
        return self._next

    def pop(self) -> int | None:
        """Take the lowest entry out and return it."""
        entry = self._next
        if self._exposed and (entry is None or self._exposed[0] < entry):
            return heapq.heappop(self._exposed)
        if entry is not None:
            self._next = next(self._filed, None)
        return entry

    def push(self, entry: int) -> None:
        heapq.heappush(self._exposed, entry)


class Walk:
    """Walk over candidates in the order of their ranks."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self.ledger = ledger
        self.place = place
        self.taken: set[int] = set()
        self._front = Front(place.leaves)
        self._children: dict[int, int] = {}
        self._stamps: dict[int, int] = {}
        self.spent_only = False
        self._goes_by_use = ledger.rank(1, 0, 0) == ledger.rank(1, 1, 1)

    def next(self) -> int | None:
        row = self._next()
        return None if row is None or (self.spent_only and not self.place.is_spent(row)) else row

    def _next(self) -> int | None:
        entry = self._front.pop()
        return None if entry is None else entry & ROW_MASK

    def take(self, row: int) -> None:
        """Count ``row`` as gone from the place; its parent may become a candidate."""
        index, place = self.ledger.index, self.place
        self.taken.add(row)
        parent = index.parent[row]
        if parent == NO_ROW:
            return
        left = self._children.get(parent, place.children[parent]) - 1
        self._children[parent] = left
        stamp = max(self._stamp(row), self._stamp(parent))
        self._stamps[parent] = stamp
        if left == 0 and self._is_free(parent):
            rank = self.ledger.rank(stamp, index.hits[parent], index.depth[parent])
            if place.is_spent(parent):
                rank -= SPENT
            self._expose(rank << ROW_BITS | parent)

    def run(self, row: int, most: int) -> list[int]:
        """Up to ``most`` rows that come one after another, from ``row`` on, which has come last and can be dropped:
        each the parent of the one before, its only child anywhere, and with no copy anywhere else."""
        return self._climb(row, most, self.ledger.index.children, ABSENT)

    def backed_run(self, row: int, most: int) -> list[int]:
        """Run like ``run``, of rows that another place has whole, so that they stay in the index whatever hangs below
        them there: each is the parent of the one before, and that its only child on this place."""
        index, place = self.ledger.index, self.place
        run = self._climb(row, min(most, FEW), place.children, READY)
        if len(run) < FEW or most == FEW:
            return run
        family, least, most_there = self._family(row)
        path = column(index.last_rows(run.pop(), most - len(run)))[::-1]
        above = path[1:]
        theirs = np.asarray(family)[above]
        fits = (theirs >= least) & (theirs <= most_there) & (np.asarray(place.children)[above] == 1)
        fits &= (np.asarray(place.pins)[above] == 0) & (np.asarray(index.flights)[above] == 0)
        fits &= place.are_ready(above) & place.are_elsewhere(above)
        run += path[: 1 + (len(above) if fits.all() else int(np.argmin(fits)))].tolist()
        return list(takewhile(place.is_spent, run)) if self._goes_first(row) else run

    def _climb(self, row: int, most: int, children: Sequence[int], elsewhere: int) -> list[int]:
        """Up to ``most`` rows from ``row`` on, each the parent of the one before and, by ``children``, of no other; and
        ``elsewhere`` is the state of their copies on other places."""
        index, place = self.ledger.index, self.place
        parent, flights, pins, states = index.parent, index.flights, place.pins, place.states[place.lead]
        others = [
            each.states[each.lead] for each in index.places if each is not place and each.pools[each.lead].capacity
        ]
        column, least, most_there = self._family(row)
        goes_first, run = self._goes_first(row), [row]
        while len(run) < most:
            row = parent[row]
            if row == NO_ROW or children[row] != 1 or pins[row] or flights[row] or states[row] != READY:
                break
            if goes_first and not place.is_spent(row):
                break
            if not least <= column[row] <= most_there or max(map(itemgetter(row), others), default=0) != elsewhere:
                break
            run.append(row)
        return run

    def take_run(self, run: list[int]) -> None:
        """``take`` for each row of a ``run`` or a ``backed_run``."""
        top = run[-1]
        self._stamps[top] = max(map(self._stamp, run))
        self.taken.update(run)
        self.take(top)

    def _goes_first(self, _: int) -> bool:
        """True where a run from a row ends with the blocks that no prompt can go on behind."""
        return self.spent_only

    def _family(self, row: int) -> tuple[Sequence[int], int, int]:
        """A column and the bounds of its values for the next blocks above: none of them is younger than ``row``."""
        stamp, following = self._stamp(row), self._front.first
        is_alone = following is None or following >> ROW_BITS > self.ledger.rank(stamp, 0, 0)
        return self.ledger.index.stamp, 0, stamp if self._goes_by_use and is_alone else -1

    def _expose(self, entry: int) -> None:
        self._front.push(entry)

    def _stamp(self, row: int) -> int:
        return self._stamps.get(row, self.ledger.index.stamp[row])

    def _is_free(self, row: int) -> bool:
        place = self.place
        ready = place.states[place.lead][row] == READY
        return ready and not place.pins[row] and not self.ledger.index.flights[row]


class QueueWalk(Walk):
    """Head by head of the queues, as their policy chooses. What is chosen goes on with the block above it while that is
    free and of the same segment, and no prompt can go on behind it where none can behind what was chosen: all such
    blocks go before others."""

    def __init__(self, ledger: BlockLedger, place: Place, leaves: QueuedLeaves) -> None:
        super().__init__(ledger, place)
        self._leaves = leaves
        self._chooser = leaves.chooser
        self._now = ledger.clock.seconds
        self._heads = leaves.heads.copy()
        self._fronts: dict[int, Front] = {}
        self._above = NO_ROW
        self._segment = NO_SEGMENT
        self._took_spent = False

    def _next(self) -> int | None:
        if self._above != NO_ROW:
            row, self._above = self._above, NO_ROW
            return row
        number = self._chooser.pick(self._heads, self._now)
        if number < 0:
            return None
        front = self._front_of(number)
        entry = front.pop()
        assert entry is not None, f"queue {number} has a head and no candidate"
        self._leaves.show(self._heads, number, front.first)
        return entry & ROW_MASK

    def take(self, row: int) -> None:
        self._segment, self._took_spent = self._leaves.segments[row], self._goes_first(row)
        super().take(row)

    def _goes_first(self, row: int) -> bool:
        return self.spent_only or self.place.is_spent(row)

    def _family(self, row: int) -> tuple[Sequence[int], int, int]:
        segments = self._leaves.segments
        return segments, segments[row], segments[row]

    def _expose(self, entry: int) -> None:
        row = entry & ROW_MASK
        segment = self._leaves.segments[row]
        if segment == self._segment and not (self._took_spent and not self.place.is_spent(row)):
            self._above = row
            return
        number = self._chooser.queue_of(segment)
        if number >= len(self._heads.segments):
            self._heads.grow(2 * number)
        front = self._front_of(number)
        front.push(entry)
        self._leaves.show(self._heads, number, front.first)

    def _front_of(self, number: int) -> Front:
        front = self._fronts.get(number)
        if front is None:
            queues = self._leaves.queues
            front = self._fronts[number] = Front(queues[number] if number < len(queues) else ())
        return front


def walk_of(ledger: BlockLedger, place: Place, *, spent_only: bool = False) -> Walk:
    """The candidates of a place, in the order of its policy. ``spent_only``: as long as no prompt can go on behind
    them, because windowed groups have no copies there; these come first."""
    leaves = place.leaves
    walk = QueueWalk(ledger, place, leaves) if isinstance(leaves, QueuedLeaves) else Walk(ledger, place)
    walk.spent_only = spent_only
    return walk


DEPTH_BITS = 32
CHEAP = 1 << (STAMP_BITS + DEPTH_BITS + ROW_BITS)
"""Entries of windowed copies, but for sinks, that no hit looked back to and no sequence ended on, are below this."""


def idle_copies(place: Place, groups: Sequence[int], *, cheap: bool = False) -> Iterator[tuple[int, int]]:
    """``(group, row)`` of windowed copies of some groups that may go by themselves, in their order. ``cheap``: only
    those that no hit has looked back to and on which no sequence has ended."""

    def entries(group: int) -> Iterator[tuple[int, int]]:
        found = iter(place.window_leaves[group])
        if cheap:
            found = takewhile(lambda entry: entry < CHEAP, found)
        return ((entry, group) for entry in found)

    windowed = [group for group in groups if group in place.window_leaves]
    if place.kin:
        return _by_kin(place, windowed, cheap=cheap)
    return ((group, entry & ROW_MASK) for entry, group in merge(*map(entries, windowed)))


def _by_kin(place: Place, groups: Sequence[int], *, cheap: bool) -> Iterator[tuple[int, int]]:
    """Copies that are needed together go together, the oldest positions first."""

    def entries(number: int) -> Iterator[tuple[int, int]]:
        lead = place.window_leaves[place.kin[number].lead]
        found = lead.middles() if cheap and isinstance(lead, CopyQueues) else iter(lead)
        return ((entry, number) for entry in found)

    numbers = [number for number, kin in enumerate(place.kin) if kin.lead in groups]
    for entry, number in merge(*map(entries, numbers)):
        row = entry & ROW_MASK
        yield from ((group, row) for group in place.kin[number].groups if place.window_leaves[group].filed[row])
    led = {group: place.window_leaves[kin.lead].filed for kin in place.kin for group in kin.groups}
    for group in groups if not cheap else ():
        rows = (entry & ROW_MASK for entry in place.window_leaves[group])
        yield from ((group, row) for row in rows if group not in led or not led[group][row])


def idle_windows(ledger: BlockLedger, place: Place, group: int, *, after_flights: bool = False) -> int:
    """Number of windowed copies that no window holds; ``after_flights``: once all transfers are over."""
    count = len(place.window_leaves[group])
    if after_flights:
        flying = ledger.index.flying.column()
        here = np.frombuffer(place.states[group], np.uint8)[flying] != ABSENT
        filed = np.frombuffer(place.window_leaves[group].filed, np.bool_)[flying]
        count += int((here & ~filed & (column(place.window_pins[group])[flying] == 0)).sum())
    return count


def drop_idle_copies(
    ledger: BlockLedger, place: Place, wanted: Sequence[int], most: int, *, cheap: bool = False
) -> int:
    """Drop windowed copies that no window holds, by their order, towards ``wanted[g]`` pages of group g, ``most`` in
    each pool; returns how many of a pool. ``cheap``: only copies that no hit has used and no sequence has ended on, or
    that a policy finds worth less than the next block of the pool to go."""
    found = 0
    for groups, full, short in zip(place.shares, place.full_in, place.short_of(wanted), strict=True):
        if short > 0 and full < len(groups):
            has_learned = ledger.retention is not None and ledger.retention.rule.has_learned
            if cheap and has_learned and any(kin.lead in groups for kin in place.kin):
                victims = cheap_copies(ledger, place, groups, min(short, most))
            else:
                victims = list(islice(idle_copies(place, groups, cheap=cheap), min(short, most)))
            for group, row in victims:
                ledger.drop_window(place, group, row)
            found = max(found, len(victims))
    return found
