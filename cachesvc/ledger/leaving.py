"""Dropping what was planned, whole runs at a time: blocks of one path whose last copies go, from a leaf upwards.

What a run has in common is done once: its pages come back together, its age is told by one stamp, and of all its blocks
only the one above it can become a candidate. Everything else goes block by block, by ``BlockLedger.drop_copy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from cachesvc.ledger.blocks import BlockLedger, Dropped
from cachesvc.ledger.journal import Cause
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.words import READY, Tier

SHORTEST_RUN = 3
"""A shorter one costs as much as its blocks one by one."""
IS_READY = int(READY)


def drop_all(ledger: BlockLedger, place: Place, rows: Sequence[int], cause: Cause) -> None:
    """``drop_copy`` for each of ``rows``, each of which is a leaf of the place by its turn and may go."""
    at = 0
    while at < len(rows):
        end = _run_end(ledger, place, rows, at)
        if end - at >= SHORTEST_RUN:
            _drop_run(ledger, place, rows[at:end], cause)
        else:
            end = at + 1
            ledger.drop_copy(place, rows[at], cause)
        at = end


def _run_end(ledger: BlockLedger, place: Place, rows: Sequence[int], at: int) -> int:
    """The end of the longest run from ``at`` on: each the parent of the one before, its only child anywhere, whole here
    and nowhere else in any state."""
    if place.window_groups:
        return at
    index, lead = ledger.index, place.lead
    parent, children, own = index.parent, index.children, place.states[lead]
    others = [other.states[lead] for other in index.places if other is not place]
    end, expected, left = at, rows[at], 0
    while end < len(rows):
        row = rows[end]
        if row != expected or children[row] != left or own[row] != IS_READY:
            break
        if any(map(itemgetter(row), others)):
            break
        expected, left = parent[row], 1
        end += 1
    return end


def _drop_run(ledger: BlockLedger, place: Place, run: Sequence[int], cause: Cause) -> None:
    index = ledger.index
    above = index.parent[run[-1]]
    passes_use = place is not ledger.host  # a hit used all blocks above it, but loads bring each block by itself
    stamp = _count(ledger, place, run, passes_use=passes_use)
    used = any(map(place.used.__getitem__, run))
    ledger.let_go(place, run)
    place.drop_last(run, cause)
    place.leaves.remove(run[0])
    tier = (Tier.DEVICE if passes_use else Tier.HOST).value
    keys = [index.keys[row] or b"" for row in run]
    ledger.dropped += [Dropped(key, index.reuses[row], tier) for key, row in zip(keys, run, strict=True)]
    ledger.leave_segments(run, keys)
    for row in run:
        place.children[row] = 0
    index.remove_run(run)
    if above != NO_ROW:
        place.children[above] -= 1
        index.inherit(above, stamp)
        if passes_use:
            place.used[above] |= used
        place.leaves.update(above)


def _count(ledger: BlockLedger, place: Place, run: Sequence[int], *, passes_use: bool) -> int:
    """Count how old what goes is, and what was never used; returns the last access to any of it."""
    stamps, counts = [ledger.index.stamp[row] for row in run], place.counts
    last = max(stamps)
    used = bytes([place.used[row] for row in run])
    if stamps[0] == last:
        unused = (used.find(1) if 1 in used else len(run)) if passes_use else used.count(0)
        counts.leave(ledger.ages.age(last), len(run), unused)
        return last
    stamp, has_use = -1, 0
    for each, use in zip(stamps, used, strict=True):
        stamp = max(stamp, each)
        has_use = use | (has_use if passes_use else 0)
        counts.leave(ledger.ages.age(stamp), 1, not has_use)
    return last
