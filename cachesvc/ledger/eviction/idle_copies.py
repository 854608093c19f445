"""Windowed copies that no window holds: they may go by themselves, in their order, while their blocks stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice, takewhile

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK
from cachesvc.model.numbers.int32s import column
from cachesvc.model.words import ABSENT, STAMP_BITS

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
    return ((group, entry & ROW_MASK) for entry, group in merge(*map(entries, windowed)))


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
    each pool; returns how many of a pool. ``cheap``: only copies that no hit has used and no sequence has ended on."""
    found = 0
    for groups, full, short in zip(place.shares, place.full_in, place.short_of(wanted), strict=True):
        if short > 0 and full < len(groups):
            victims = list(islice(idle_copies(place, groups, cheap=cheap), min(short, most)))
            for group, row in victims:
                ledger.drop_window(place, group, row)
            found = max(found, len(victims))
    return found
