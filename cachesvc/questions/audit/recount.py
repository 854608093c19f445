"""Conservation of a large ledger, checked while it goes on, in parts that engines do not notice.

A part takes one of two forms. ``capture`` copies the columns that the part compares, in one go, so that all of it is of
one moment; ``recount`` compares the copies and may run on another thread. Or ``walk`` looks at the ledger itself, a
little at a time, and each step holds at its moment. Parts are taken at different moments, which is sound because each
stands by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.order.candidates import ROW_BITS, ROW_MASK, LeafOrder, SortedEntries
from cachesvc.ledger.order.class_queues import QueuedLeaves, head_rank
from cachesvc.model.words import DRAINING, FILLING, READY, CopyState
from cachesvc.questions.snapshot import Mask, int32s, live_rows, place_states, states, uint16s
from cachesvc.questions.steps import Question, off_loop

MOST_TOLD = 256
"""Problems that one part tells; the rest are counted."""
ROWS_A_STEP = 128
"""Rows of a step of some 0.2 ms: a slice of the loop ends behind the step in which its time was up."""


class Check(NamedTuple):
    """One thing to look at: ``look()`` gives what is wrong with it."""

    name: str
    look: Callable[[], Question[list[str]]]


def captured(name: str, capture: Callable[[], Any], recount: Callable[[Any], list[str]]) -> Check:
    """A part that copies columns in one go, and compares the copies off the loop."""

    def look() -> Question[list[str]]:
        return (yield from off_loop(partial(recount, capture())))

    return Check(name, look)


def walked(name: str, walk: Callable[[], Iterator[list[str]]]) -> Check:
    """A part that looks at the ledger itself, a little at a time."""

    def look() -> Question[list[str]]:
        out: list[str] = []
        for problems in walk():
            out += problems
            yield None
        return out

    return Check(name, look)


def block_parts(model: Model) -> list[Check]:
    """Checks of blocks alone: keys, tree, closures, and candidates for eviction."""
    index = model.blocks.index
    where = f"model {model.id}"
    out = [
        walked(f"{where}: keys", partial(walk_keys, model)),
        captured(f"{where}: parents, depths, children", partial(_Tree, model), partial(recount_tree, where)),
    ]
    for place in index.places:
        out.append(captured(f"{where}: closure of {place.name}", partial(_Closure, model, place), recount_closure))
        out.append(walked(f"{where}: tables of {place.name}", partial(walk_pieces, model, place)))
        orders: list[tuple[str, LeafOrder, int | None]] = [(place.name, place.leaves, None)]
        orders += [(f"{place.name} group {group}", order, group) for group, order in place.window_leaves.items()]
        for name, order, group in orders:
            capture = partial(_Candidates, name, model, place, order, group)
            out.append(captured(f"{where}: candidates of {name}", capture, recount_candidates))
            out.append(walked(f"{where}: order of {name}", partial(walk_orders, name, order)))
    return out


def told(rows: Any, say: Callable[[int], str]) -> list[str]:
    """A line for each row, up to ``MOST_TOLD``, and how many more there are."""
    out = [say(int(row)) for row in rows[:MOST_TOLD]]
    if len(rows) > MOST_TOLD:
        out.append(f"{say(int(rows[MOST_TOLD]))} (and {len(rows) - MOST_TOLD - 1} more like it)")
    return out


def walk_keys(model: Model) -> Iterator[list[str]]:
    """Every key's row has that key and a copy, or had one when others hung below it and is forgotten with these; and
    every row without a key has none. A step looks at 128 rows."""
    index = model.blocks.index
    keys, rows = index.keys, index.rows
    first = 0
    while first < len(keys):
        out: list[str] = []
        for row in range(first, min(first + ROWS_A_STEP, len(keys))):
            key = keys[row]
            if key is None:
                if index.has_copy(row) or index.is_on_lost(row) or index.bare[row]:
                    out.append(f"model {model.id} row {row}: a copy without a key")
            elif rows.get(key) != row:
                out.append(f"model {model.id} row {row}: key and row do not agree")
            elif not (index.has_copy(row) or index.is_on_lost(row)):
                if not index.bare[row]:
                    out.append(f"model {model.id} row {row}: no copy anywhere")
                elif not index.children[row] and row not in index.childless:
                    out.append(f"model {model.id} row {row}: no copy anywhere, nothing below, and it stays")
        first += ROWS_A_STEP
        yield out


class _Tree:
    def __init__(self, model: Model) -> None:
        index: BlockIndex = model.blocks.index
        self.parent, self.depth, self.children = int32s(index.parent), int32s(index.depth), int32s(index.children)
        self.head, self.continued = int32s(index.head), states(index.continued)
        has_copy = live_rows(len(index.keys), [place_states(place) for place in index.told])
        self.live = has_copy | (states(index.bare) != 0)
        self.known = len(index.rows)
        self.spare = len(index.spare_rows)


def recount_tree(where: str, tree: _Tree) -> list[str]:
    """Parents are there, depths follow, children and chains add up, and every key has a copy, or had one."""
    out: list[str] = []
    live = int(tree.live.sum())
    if live != tree.known:
        out.append(f"{where}: {tree.known} keys are known, {live} rows have a copy")
    if tree.spare != len(tree.live) - live:
        out.append(f"{where}: {tree.spare} rows are spare, {len(tree.live) - live} have no copy")
    rows = np.flatnonzero(tree.live)
    parent = tree.parent[rows]
    rooted = parent == NO_ROW
    above = np.where(rooted, 0, parent)
    gone = ~rooted & ~tree.live[above]
    out += told(rows[gone], lambda row: f"{where} row {row}: its parent {tree.parent[row]} has left the index")
    wrong = tree.depth[rows] != np.where(rooted, 0, tree.depth[above] + 1)
    out += told(rows[wrong], lambda row: f"{where} row {row}: depth {tree.depth[row]} does not follow its parent's")
    counted = np.bincount(parent[~rooted], minlength=len(tree.parent))
    off = rows[counted[rows] != tree.children[rows]]
    out += told(off, lambda row: f"{where} row {row}: {tree.children[row]} children counted, {counted[row]} there")
    return out + _chains(where, tree, rows)


def _chains(where: str, tree: _Tree, rows: Any) -> list[str]:
    """Check that at most one child goes on with its parent's chain, and that the others begin one."""
    on = rows[tree.head[rows] != rows]
    above = tree.parent[on]
    alien = on[(above == NO_ROW) | (tree.head[on] != tree.head[above])]
    out = told(alien, lambda row: f"{where} row {row}: of chain {tree.head[row]}, but its parent is not")
    counted = np.bincount(above[above != NO_ROW], minlength=len(tree.parent))
    off = rows[counted[rows] != tree.continued[rows]]
    return out + told(off, lambda row: f"{where} row {row}: {counted[row]} children go on with its chain")


class _Closure:
    def __init__(self, model: Model, place: Place) -> None:
        index = model.blocks.index
        self.name = place.name
        self.is_host = place is model.blocks.host
        self.full, self.lead = place.full_groups, place.lead
        self.parent = int32s(index.parent)
        self.children = int32s(place.children)
        self.states = place_states(place)
        self.counted = list(place.counts.states)


def recount_closure(seen: _Closure) -> list[str]:
    """Check that full groups move together, that nothing is here without its block nor on a device without its parent,
    and that operators' counts of blocks by state are right."""
    there = np.bincount(seen.states[seen.lead], minlength=len(seen.counted))
    out = [
        f"{seen.name}: {there[state]} blocks are {CopyState(state).name}, {seen.counted[state]} are counted"
        for state in (FILLING, READY, DRAINING)
        if there[state] != seen.counted[state]
    ]
    present: Mask = live_rows(len(seen.parent), [seen.states])
    lead = seen.states[seen.lead]
    for group in seen.full:
        off = np.flatnonzero(seen.states[group] != lead)
        out += told(off, lambda row: f"{seen.name} row {row}: full groups are in different states")
    alone = np.flatnonzero(present & (lead == 0))
    out += told(alone, lambda row: f"{seen.name} row {row}: a windowed copy without its block")
    rows = np.flatnonzero(present & (seen.parent != NO_ROW))
    parent = seen.parent[rows]
    if not seen.is_host:
        out += told(rows[~present[parent]], lambda row: f"{seen.name} row {row}: here without its parent")
    counted = np.bincount(parent, minlength=len(seen.parent))
    off = np.flatnonzero(counted != seen.children)
    return out + told(
        off, lambda row: f"{seen.name} row {row}: {seen.children[row]} children counted, {counted[row]} there"
    )


def walk_pieces(model: Model, place: Place) -> Iterator[list[str]]:
    """Compare what is kept of block tables with a walk. A step looks at some 128 blocks."""
    pieces, index = place.pieces, model.blocks.index
    rows, many = list(pieces.kept), max(1, ROWS_A_STEP // pieces.piece_blocks)
    for first in range(0, len(rows), many):
        out: list[str] = []
        for row in rows[first : first + many]:
            if row not in pieces.kept:
                continue  # it has gone meanwhile
            above, pages = pieces.kept[row]
            path = index.path(row, above)
            walked_to = [[place.pages[group][each] for each in path] for group in place.full_groups]
            if (
                len(path) != pieces.piece_blocks
                or [np.frombuffer(each, np.int32).tolist() for each in pages] != walked_to
            ):
                out.append(f"{place.name} row {row}: the piece of table that is kept is not its blocks' pages")
        yield out


class _Candidates:
    """Candidates filed in one order, and the columns that decide; ``group`` is None for whole blocks."""

    def __init__(self, name: str, model: Model, place: Place, order: LeafOrder, group: int | None) -> None:
        index = model.blocks.index
        self.name = name
        self.filed = states(order.filed)
        self.counted = len(order)
        self.states = states(place.states[place.lead if group is None else group])
        self.pins = int32s(place.pins if group is None else place.window_pins[group])
        self.children = int32s(place.children) if group is None else np.zeros(len(self.states), np.int32)
        self.is_moving = uint16s(index.flights) != 0
        if group is not None:
            self.is_moving = np.any([states(each.states[group]) == FILLING for each in index.told], axis=0)


def recount_candidates(seen: _Candidates) -> list[str]:
    """Check that exactly the candidates are filed."""
    idle = (seen.states == READY) & (seen.pins == 0) & (seen.children == 0) & ~seen.is_moving
    out = told(np.flatnonzero(idle & (seen.filed == 0)), lambda row: f"{seen.name} row {row}: may go, but is not filed")
    out += told(np.flatnonzero(~idle & (seen.filed != 0)), lambda row: f"{seen.name} row {row}: filed, but may not go")
    if int(seen.filed.sum()) != seen.counted:
        out.append(f"{seen.name}: {seen.counted} candidates are counted, {int(seen.filed.sum())} are filed")
    return out


def walk_orders(name: str, order: LeafOrder) -> Iterator[list[str]]:
    """Candidates stand in the order of the ranks that they have now, each queue by itself."""
    if not isinstance(order, QueuedLeaves):
        yield from walk_order(name, order, order)
        return
    for number, queue in enumerate(order.queues):
        if order.heads.ranks[number] != head_rank(queue.first):
            yield [f"{name}: the head of queue {number} is not its first candidate"]
        yield from walk_order(f"{name} queue {number}", order, queue)


def walk_order(name: str, order: LeafOrder, entries_of: SortedEntries) -> Iterator[list[str]]:
    """Entries stand in the order of the ranks that their rows have now. A step looks at a few hundred."""
    last: int | None = None
    while entries := entries_of.entries_after(last):
        out = [
            f"{name} row {entry & ROW_MASK}: stands under rank {entry >> ROW_BITS}, which is not its own"
            for entry in entries
            if not order.filed[entry & ROW_MASK] or order.rank(entry & ROW_MASK) != entry >> ROW_BITS
        ]
        if entries != sorted(entries) or (last is not None and entries[0] <= last):
            yield [*out, f"{name}: candidates from row {entries[0] & ROW_MASK} on are not in their order"]
            return
        last = entries[-1]
        yield out
