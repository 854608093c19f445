"""Choice of idle copies of windows and recurrent states that go by themselves, by what they are worth beside blocks.

The copies of a position that are worth less than the next block to go are cheap: they go first. The end of a prompt is
never cheap: without its copies its blocks are of no use, so they go together, in the order of the blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.retention import TICKS, Retention
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK, SortedEntries
from cachesvc.ledger.order.class_queues import QueuedLeaves
from cachesvc.ledger.order.copy_queues import OCTAVES, CopyQueues, least_distance, queue_number
from cachesvc.ledger.pages.place_pools import Kin

WORK, WORK_A_PAGE = 8192, 128
"""Rows that a search for cheap copies may climb, in all and for each page; others are left to the next search."""
LOOK_WORK = 16
"""Work of a look at one copy, in rows, beside those that are climbed for it."""
LEAVES_LOOKED = 64


def cheap_copies(ledger: BlockLedger, place: Place, groups: Sequence[int], most: int) -> list[tuple[int, int]]:
    """``(group, row)`` of ``most`` idle copies of some groups that are worth less than the next block to go, or of
    fewer; copies that are needed together go together."""
    found: list[tuple[int, int]] = []
    retention = ledger.retention
    for kin in place.kin if retention is not None else ():
        if kin.lead in groups and len(found) < most:
            assert retention is not None
            walk = _CheapCopies(ledger, retention, place, kin, worth_of_next_block(ledger, place, kin))
            for row in walk.victims(WORK + WORK_A_PAGE * most):
                found += ((group, row) for group in kin.groups if place.window_leaves[group].filed[row])
                if len(found) >= most:
                    break
            walk.settle()
    return found


def worth_of_next_block(ledger: BlockLedger, place: Place, kin: Kin) -> float:
    """Worth of the prompt whose end is the next block to go, of those that have copies; 0 where there is none."""
    retention, leaves, index = ledger.retention, place.leaves, ledger.index
    assert retention is not None
    if isinstance(leaves, QueuedLeaves):
        number = leaves.chooser.pick(leaves.heads, ledger.clock.seconds)
        entries = [entry] if number >= 0 and (entry := leaves.queues[number].first) is not None else []
    else:
        entries = list(islice(leaves, LEAVES_LOOKED))
    row = next((entry & ROW_MASK for entry in entries if entry >= 0), -1)
    if row < 0:
        return 0.0
    rule, now = retention.rule, retention.now
    known = ledger.chooser.worth(index.segments[row], now) if ledger.chooser is not None else None
    end = known.density if known else rule.end_density(index.depth[row], ledger.ages.age(index.stamp[row]))
    branch = retention.branch(place, kin, row)
    requests = [(rule.density(rule.classes[each], now - rule.since[each]), saved) for each, saved in branch.copies]
    requests[:1] = [(max(density, end), saved) for density, saved in requests[:1]]
    return rule.branch_worth(requests, branch.blocks + kin.cost * len(branch.copies) / kin.window)


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
