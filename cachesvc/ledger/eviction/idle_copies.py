"""Windowed copies that no window holds: they may go by themselves, in their order, while their blocks stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice, takewhile

import numpy as np

from cachesvc.ledger.eviction.copy_choice import cheap_copies
from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK
from cachesvc.ledger.order.copy_queues import CopyQueues
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
