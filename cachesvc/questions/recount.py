"""Conservation of a large ledger, checked while it goes on: the same truths as ``conservation.audit``, in parts.

Each part is two steps. ``capture`` copies what the part compares, in one go, so that all of it is of one moment;
``recount`` compares the copies and may run on another thread. Parts are taken at different moments, which is sound
because each stands by itself: a part that holds at its moment holds whatever the moments of the others are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cachesvc.ledger.index import BlockIndex
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.words import DRAINING, FILLING, READY
from cachesvc.questions.recount_leaves import leaf_parts
from cachesvc.questions.recount_pages import capture_pages, recount_pages
from cachesvc.questions.snapshot import Mask, int32s, live_now, live_rows, place_states, uint16s

MOST_TOLD = 256
"""Problems that one part tells; the rest are counted."""


class Part(NamedTuple):
    """``capture()`` is called where the ledger is changed; ``recount`` of what it returned, anywhere."""

    name: str
    capture: Callable[[], Any]
    recount: Callable[[Any], list[str]]


def parts(ledger: Ledger, model: Model) -> list[Part]:
    """Every part of one model but those that ``walks`` holds. Its places must not change until all are captured."""
    index = model.blocks.index
    where = f"model {model.id}"
    out = [Part(f"{where}: parents, depths, children", partial(_Tree, model), partial(recount_tree, where))]
    out += [
        Part(f"{where}: closure of {place.name}", partial(_Closure, model, place), recount_closure)
        for place in index.places
    ]
    out += [
        Part(f"{where}: pages of {place.name}", partial(capture_pages, ledger, model, place, at), recount_pages)
        for at, place in enumerate(index.places)
    ]
    out.append(Part(f"{where}: pins and transfers", partial(_Holds, ledger, model), recount_holds))
    out += [Part(f"{where}: {name}", capture, recount) for name, capture, recount in leaf_parts(model)]
    return out


class _Tree:
    def __init__(self, model: Model) -> None:
        index: BlockIndex = model.blocks.index
        self.parent, self.depth, self.children = int32s(index.parent), int32s(index.depth), int32s(index.children)
        self.live = live_now(index)
        self.known = len(index.rows)


def recount_tree(where: str, tree: _Tree) -> list[str]:
    """Parents are there, depths follow, children add up, and every key has a copy."""
    out: list[str] = []
    live = int(tree.live.sum())
    if live != tree.known:
        out.append(f"{where}: {tree.known} keys are known, {live} rows have a copy")
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
    return out + told(
        off, lambda row: f"{where} row {row}: {tree.children[row]} children counted, {counted[row]} there"
    )


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
    """Full groups move together, nothing is here without its block, nor on a device without its parent; and operators
    are told as many blocks of each state as there are."""
    there = np.bincount(seen.states[seen.lead], minlength=len(seen.counted))
    out = [
        f"{seen.name}: {there[state]} blocks are {state.name}, {seen.counted[state]} are counted"
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


class _Holds:
    """Pins and transfers as counted by row, and everybody who holds one."""

    def __init__(self, ledger: Ledger, model: Model) -> None:
        index = model.blocks.index
        self.where = f"model {model.id}"
        self.names = [place.name for place in index.places]
        self.pins = [int32s(place.pins) for place in index.places]
        self.windows = [{group: int32s(pins) for group, pins in place.window_pins.items()} for place in index.places]
        self.depth = int32s(index.depth)
        self.counted = [place.counts.pinned for place in index.places]
        self.flights: Any = uint16s(index.flights)
        self.pinned: list[list[int]] = [[] for _ in index.places]
        self.windowed: dict[tuple[int, int], list[int]] = {}
        self.flying: list[int] = []
        for lease in ledger.leases.values():
            at = lease.replica + 1
            for hold in (*lease.sequences.values(), *lease.prefetches) if lease.model == model.id else ():
                if hold.anchor != NO_ROW:
                    self.pinned[at].append(hold.anchor)
                if hold.host_anchor != NO_ROW:
                    self.pinned[0].append(hold.host_anchor)
                for group, held in hold.window_rows.items():
                    self.windowed.setdefault((at, group), []).extend(held.values())
        for ticket in ledger.tickets.running.values():
            if ticket.model == model.id:
                self.flying += ticket.rows
                self.flying += [drain.row for drain in ticket.drains]
                if ticket.source is not None:
                    self.pinned[ticket.source[0] + 1].append(ticket.source[1])


def recount_holds(seen: _Holds) -> list[str]:
    """Every pin has its holder and every transfer its ticket, and operators are told as many pins as there are."""
    out: list[str] = []
    rows = len(seen.flights)
    for at, name in enumerate(seen.names):
        out += _compare(f"{name} row", "pins", seen.pins[at], seen.pinned[at], rows)
        pinned = int((seen.pins[at].astype(np.int64) * (seen.depth + 1)).sum())
        if pinned != seen.counted[at]:
            out.append(f"{seen.where} {name}: {pinned} blocks are pinned, {seen.counted[at]} are counted")
        for group, pins in seen.windows[at].items():
            held = seen.windowed.get((at, group), [])
            out += _compare(f"{name} group {group} row", "window pins", pins, held, rows)
    return out + _compare(f"{seen.where} row", "transfers", seen.flights, seen.flying, rows)


def _compare(where: str, what: str, counted: Any, holders: list[int], rows: int) -> list[str]:
    there = np.bincount(np.array(holders, np.int64), minlength=rows)
    off = np.flatnonzero(there != counted)
    return told(off, lambda row: f"{where} {row}: {counted[row]} {what} counted, {there[row]} holders")


def told(rows: Any, say: Callable[[int], str]) -> list[str]:
    """A line for each row, up to ``MOST_TOLD``, and how many more there are."""
    out = [say(int(row)) for row in rows[:MOST_TOLD]]
    if len(rows) > MOST_TOLD:
        out.append(f"{say(int(rows[MOST_TOLD]))} (and {len(rows) - MOST_TOLD - 1} more like it)")
    return out
