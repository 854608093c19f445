"""Candidates for eviction, recounted: whoever may go has an entry in its heap that comes up in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cachesvc.ledger.blocks import BlockLedger
from cachesvc.ledger.leaves import LeafHeap, Rank
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.place import Place
from cachesvc.model.words import READY
from cachesvc.questions.snapshot import int32s, int64s, states, uint16s

MOST_TOLD = 256


class Leaves:
    """One heap with the columns that say who may go; ``group`` is None for whole blocks."""

    def __init__(self, blocks: BlockLedger, place: Place, heap: LeafHeap, group: int | None) -> None:
        index = blocks.index
        self.name = place.name
        self.rule = blocks.rank
        self.entries = heap.entries()
        self.states = states(place.states[place.lead if group is None else group])
        self.pins = int32s(place.pins if group is None else place.window_pins[group])
        self.children = int32s(place.children) if group is None else np.zeros(len(self.states), np.int32)
        self.flights = uint16s(index.flights)
        self.stamp, self.hits, self.depth = int64s(index.stamp), int32s(index.hits), int32s(index.depth)
        self.reached = int64s(index.reached) if group is not None else self.stamp
        self.sinks = 0 if group is None else blocks.layout.sink_blocks(group)
        self.is_windowed = group is not None


def leaf_parts(model: Model) -> list[tuple[str, Callable[[], Leaves], Callable[[Leaves], list[str]]]]:
    """A part for each heap."""
    blocks = model.blocks
    out: list[tuple[str, Callable[[], Leaves], Callable[[Leaves], list[str]]]] = []
    for place in blocks.index.places:
        heaps: list[tuple[LeafHeap, int | None]] = [(place.leaves, None)]
        if place is not blocks.host:
            heaps += [(place.window_leaves[group], group) for group in place.window_groups]
        for heap, group in heaps:
            name = f"candidates of {place.name}" + ("" if group is None else f", group {group}")
            out.append((name, partial(Leaves, blocks, place, heap, group), recount_leaves))
    return out


def recount_leaves(seen: Leaves) -> list[str]:
    """Rows that may go, but of which no entry says so in time."""
    lowest: dict[int, Rank] = {}
    for rank, row in seen.entries:
        if row not in lowest or rank < lowest[row]:
            lowest[row] = rank
    idle = (seen.states == READY) & (seen.pins == 0) & (seen.children == 0) & (seen.flights == 0)
    out: list[str] = []
    for row in np.flatnonzero(idle).tolist():
        now = _rank(seen, row)
        if row not in lowest or lowest[row] > now:
            out.append(f"{seen.name} row {row}: may be evicted, but no candidate of rank {now} says so")
            if len(out) == MOST_TOLD:
                break
    return out


def _rank(seen: Leaves, row: int) -> Rank:
    stamp, hits, depth = int(seen.stamp[row]), int(seen.hits[row]), int(seen.depth[row])
    if seen.is_windowed:
        return (int(seen.reached[row]), depth < seen.sinks, stamp, depth)
    return seen.rule(stamp, hits, depth)
