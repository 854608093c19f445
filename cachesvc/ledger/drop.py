"""Dropping what was planned, whole runs at a time: blocks of one path, from a leaf upwards, all of whose copies are the
last ones, or none of whose copies is.

What a run has in common is done once: its pages come back together, its age comes from one stamp, and of all its blocks
only the one above it can become a candidate. Everything else goes block by block, by ``BlockLedger.drop_copy``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter

import numpy as np

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.candidates import (
    OCTAVES,
    ROW_BITS,
    ROW_MASK,
    CopyQueues,
    LeafOrder,
    QueuedLeaves,
    SortedEntries,
    least_distance,
    queue_number,
)
from cachesvc.ledger.change_log import Cause, Dropped
from cachesvc.ledger.retention import TICKS, Retention
from cachesvc.ledger.shared_pool import Kin
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.words import READY, Tier

SHORTEST_RUN, SHORTEST_BACKED = 3, 5
"""A shorter one, of blocks that leave the index or stay in it, costs as much as its blocks one by one."""


def drop_all(ledger: BlockLedger, place: Place, rows: Sequence[int], cause: Cause) -> None:
    """``drop_copy`` for each of ``rows``, each of which is a leaf of the place by its turn and may go."""
    backed = _backed_runs(ledger, place, rows)
    at = 0
    while at < len(rows):
        if at in backed:
            end = backed[at]
            _drop_backed(ledger, place, rows[at:end], cause)
        elif (end := _run_end(ledger, place, rows, at)) - at >= SHORTEST_RUN:
            _drop_run(ledger, place, rows[at:end], cause)
        else:
            end = at + 1
            ledger.drop_copy(place, rows[at], cause)
        at = end


def _backed_runs(ledger: BlockLedger, place: Place, rows: Sequence[int]) -> dict[int, int]:
    """Beginnings in ``rows`` of runs that stay in the index, with the end of each: rows that are whole here and
    elsewhere, each the parent of the one before and that its only child here."""
    if len(rows) < SHORTEST_BACKED or place.window_groups:
        return {}
    path = np.array(rows, np.int32)
    fits = place.are_ready(path) & place.are_elsewhere(path)
    is_above = (np.asarray(ledger.index.parent)[path[:-1]] == path[1:]) & (np.asarray(place.children)[path[1:]] == 1)
    joined = is_above & fits[:-1] & fits[1:]
    ends = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(rows)]
    return {first: end for first, end in pairwise(ends) if end - first >= SHORTEST_BACKED}


def _run_end(ledger: BlockLedger, place: Place, rows: Sequence[int], at: int) -> int:
    """The end of the longest run from ``at`` on: each the parent of the one before, its only child anywhere, whole here
    and nowhere else in any state."""
    if place.window_groups:
        return at
    index, lead = ledger.index, place.lead
    parent, children, own = index.parent, index.children, place.states[lead]
    others = [other.states[lead] for other in index.told if other is not place]
    end, expected, left = at, rows[at], 0
    while end < len(rows):
        row = rows[end]
        if row != expected or children[row] != left or own[row] != READY:
            break
        if any(map(itemgetter(row), others)):
            break
        expected, left = parent[row], 1
        end += 1
    return end


def _drop_run(ledger: BlockLedger, place: Place, run: Sequence[int], cause: Cause) -> None:
    """Drop a run that leaves the index."""
    index = ledger.index
    above = index.parent[run[-1]]
    stamp, used = _leave(ledger, place, run)
    place.drop_last(run, cause)
    place.leaves.remove(run[0])
    tier = (Tier.HOST if place is ledger.host else Tier.DEVICE).value
    keys = [index.keys[row] or b"" for row in run]
    ledger.dropped += [Dropped(key, index.reuses[row], tier) for key, row in zip(keys, run, strict=True)]
    ledger.leave_segments(run, keys)
    index.remove_run(run)
    _tell_above(ledger, place, above, stamp, used=used)


def _drop_backed(ledger: BlockLedger, place: Place, run: Sequence[int], cause: Cause) -> None:
    """Drop a run that stays in the index."""
    above = ledger.index.parent[run[-1]]
    stamp, used = _leave(ledger, place, run)
    place.drop_backed(run, cause)
    place.leaves.remove(run[0])
    ledger.index.inherit_all(run)
    _tell_above(ledger, place, above, stamp, used=used)


def _leave(ledger: BlockLedger, place: Place, run: Sequence[int]) -> tuple[int, bool]:
    """A run goes from a place: it is counted, and its policy told. Returns the last access to any of it, and whether
    any of it was used."""
    stamp = _count(ledger, place, run, passes_use=place is not ledger.host)
    used = any(map(place.used.__getitem__, run))
    ledger.let_go(place, run)
    for row in run:
        place.children[row] = 0
    return stamp, used


def _tell_above(ledger: BlockLedger, place: Place, above: int, stamp: int, *, used: bool) -> None:
    """A run has gone from below a row, which may be none."""
    if above == NO_ROW:
        return
    place.children[above] -= 1
    ledger.index.inherit(above, stamp)
    if place is not ledger.host:  # a hit used all blocks above it, but loads bring each block by itself
        place.used[above] |= used
    place.leaves.update(above)


def _count(ledger: BlockLedger, place: Place, run: Sequence[int], *, passes_use: bool) -> int:
    """Count how old what goes is, and what was never used; returns the last access to any of it."""
    stamps, counts = [ledger.index.stamp[row] for row in run], place.counts
    last = max(stamps)
    used = bytes([place.used[row] for row in run])
    if stamps[0] == last:
        unused = (used.find(1) if 1 in used else len(run)) if passes_use else used.count(0)
        counts.leave(ledger.ages.age_of_use(last), len(run), unused)
        return last
    stamp, has_use = -1, 0
    for each, use in zip(stamps, used, strict=True):
        stamp = max(stamp, each)
        has_use = use | (has_use if passes_use else 0)
        counts.leave(ledger.ages.age_of_use(stamp), 1, not has_use)
    return last


WORK, WORK_A_PAGE = 8192, 128
"""Rows that a search for cheap copies may climb, in all and for each page; others are left to the next search."""
# Choice of idle copies of windows and recurrent states that go by themselves, by what they are worth beside blocks.
#
# The copies of a position that are worth less than the prompt with the oldest end are cheap: they go first. The end of
# a prompt is never cheap: without its copies its blocks are of no use, so they go together, in the order of the blocks.

LOOK_WORK = 16
"""Work of a look at one copy, in rows, beside those that are climbed for it."""
LEAVES_LOOKED = 64


def cheap_copies(ledger: BlockLedger, place: Place, groups: Sequence[int], most: int) -> list[tuple[int, int]]:
    """``(group, row)`` of ``most`` idle copies of some groups, or of fewer, that are worth less than the prompt with
    the oldest end; copies that are needed together go together."""
    found: list[tuple[int, int]] = []
    retention = ledger.retention
    for kin in place.kin if retention is not None else ():
        if kin.lead in groups and len(found) < most:
            assert retention is not None
            walk = _CheapCopies(ledger, retention, place, kin, worth_of_oldest_end(ledger, place, kin))
            for row in walk.victims(WORK + WORK_A_PAGE * most):
                found += ((group, row) for group in kin.groups if place.window_leaves[group].filed[row])
                if len(found) >= most:
                    break
            walk.settle()
    return found


def worth_of_oldest_end(ledger: BlockLedger, place: Place, kin: Kin) -> float:
    """Worth of the prompt whose end is the oldest leaf, of those that have copies; 0 where there is none.

    A policy that learns may take another leaf next. The choice among leaves needs an order alone; copies are held
    against the worth itself, and that of a leaf chosen for its order is known less well.
    """
    retention, leaves, index = ledger.retention, place.leaves, ledger.index
    assert retention is not None
    row = _oldest(leaves)
    if row < 0:
        return 0.0
    rule, now = retention.rule, retention.now
    end = rule.end_density(index.depth[row], ledger.ages.age(index.stamp[row]))
    branch = retention.branch(place, kin, row)
    requests = [(rule.density(rule.classes[each], now - rule.since[each]), saved) for each, saved in branch.copies]
    requests[:1] = [(max(density, end), saved) for density, saved in requests[:1]]
    return rule.branch_worth(requests, branch.blocks + kin.cost * len(branch.copies) / kin.window)


def _oldest(leaves: LeafOrder) -> int:
    """Row of the leaf with the lowest entry, of those behind which a prompt can go on; -1: none was seen."""
    if isinstance(leaves, QueuedLeaves):
        entries = sorted(entry for queue in leaves.queues for entry in islice(queue.beyond(-1), 1))
    else:
        entries = list(islice(leaves, LEAVES_LOOKED))
    return next((entry & ROW_MASK for entry in entries if entry >= 0), -1)


@dataclass(slots=True, eq=False)
class _Front:
    """Copies of one queue whose ages lie in one bin, oldest first. ``until``: rank of the youngest."""

    queue: int
    number: int
    density: float
    worth: float
    until: int
    entries: Iterator[int]


class _CheapCopies:
    """One search, of copies worth less than ``least``. Changes nothing before ``settle``."""

    def __init__(self, ledger: BlockLedger, retention: Retention, place: Place, kin: Kin, least: float) -> None:
        self._ledger = ledger
        self._retention = retention
        self._place = place
        self._kin = kin
        self._least = least
        self._taken: set[int] = set()
        self._work = 0
        self._farther: list[tuple[int, int]] = []
        order = place.window_leaves[kin.lead]
        assert isinstance(order, CopyQueues)
        self._order = order
        self._rule, self._now = retention.rule, retention.now
        self._heads: list[tuple[float, int, _Front | None]] = []  # None: the entry was looked at

    def victims(self, most_work: int) -> Iterator[int]:
        """Rows, those of the least worth first; distances to the copies above count by octaves."""
        kin, heads = self._kin, self._heads
        for queue, entries in self._order.queues.items():
            if entries.first is not None and not self._rule.is_end(queue // OCTAVES):
                self._open(queue, entries)
        while heads and self._work < most_work:
            worth, entry, front = heapq.heappop(heads)
            self._work += LOOK_WORK
            row = entry & ROW_MASK
            if front is not None:
                self._advance(front)
                saved = self._saved(row)
                queue = queue_number(front.number, saved)
                if queue != front.queue:
                    self._farther.append((row, saved))
                    worth = self._rule.copy_worth(front.density, least_distance(queue), kin.cost)
                    if worth < self._least:
                        heapq.heappush(heads, (worth, entry, None))
                    continue
            if not self._is_kept(row):
                self._taken.add(row)
                yield row

    def _open(self, queue: int, entries: SortedEntries) -> None:
        """Look at a queue where copies of some age may be cheap: those of each bin of ages are worth the same."""
        number, last = queue // OCTAVES, entries.last
        assert entries.first is not None
        assert last is not None
        oldest, newest = (self._age(entry) for entry in (entries.first, last))
        for first_age, last_age, density in self._rule.densities(number, newest, oldest):
            worth = self._rule.copy_worth(density, least_distance(queue), self._kin.cost)
            if worth < self._least:
                since, until = (int((self._now - age) * TICKS) for age in (last_age, first_age))
                entries_there = entries.beyond(since << ROW_BITS | ROW_MASK)
                self._advance(_Front(queue, number, density, worth, until, entries_there))

    def _advance(self, front: _Front) -> None:
        entry = next(front.entries, None)
        if entry is not None and entry >> ROW_BITS <= front.until:
            heapq.heappush(self._heads, (front.worth, entry, front))

    def _age(self, entry: int) -> float:
        return max(0.0, self._now - (entry >> ROW_BITS) / TICKS)

    def settle(self) -> None:
        """Note how far the copies that were looked at are from others."""
        for row, distance in self._farther:
            self._order.put_farther(row, distance)

    def _is_kept(self, row: int) -> bool:
        """True for sinks, ends, and where the copies are what will be left of a prompt whose end goes."""
        place, kin, retention = self._place, self._kin, self._retention
        if not place.children[row] or self._ledger.index.depth[row] < kin.sinks:
            return True
        below = retention.saved_below(place, kin, row)
        if not below:
            return False
        capacity = place.pools[kin.lead].capacity // kin.full
        self._work += below
        saved = self._saved(row)
        return retention.rule.fallback(saved, below, kin.cost, capacity) >= 1

    def _saved(self, row: int) -> int:
        saved = self._retention.saved(self._place, self._kin, row, self._taken)
        self._work += saved
        return saved
