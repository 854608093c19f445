"""Dropping what was planned, whole runs at a time: blocks of one path, from a leaf upwards, all of whose copies are the
last ones, or none of whose copies is.

What a run has in common is done once: its pages come back together, its age comes from one stamp, and of all its blocks
only the one above it can become a candidate. Everything else goes block by block, by ``BlockLedger.drop_copy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger, Dropped
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.pages.change_log import Cause
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
