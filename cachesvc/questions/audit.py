"""Conservation of a large ledger, checked while it goes on, in parts that engines do not notice.

A part takes one of two forms. ``capture`` copies the columns that the part compares, in one go, so that all of it is of
one moment; what it returns compares the copies, reads nothing of the ledger, and may run on another thread. Or ``walk``
looks at the ledger itself, a little at a time, and each step holds at its moment. Parts are taken at different moments,
which is sound because each stands by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.flows.core import Core
from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.candidates import ROW_BITS, ROW_MASK, LeafOrder, QueuedLeaves, SortedEntries, head_rank
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.shared_pool import GroupPool
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.words import ABSENT, DRAINING, FILLING, NO_PAGE, READY, CopyState, Direction, PageState
from cachesvc.questions.dump import Bytes, Int32s, Mask, int32s, live_rows, place_states, states, uint16s
from cachesvc.questions.view import Question, View, answer_at_once, off_loop

MOST_TOLD = 256
"""Problems that one part tells; the rest are counted."""
ROWS_A_STEP = 128
"""Rows of a step of some 0.2 ms: a slice of the loop ends behind the step in which its time was up."""


class Check(NamedTuple):
    """One thing to look at: ``look()`` gives what is wrong with it."""

    name: str
    look: Callable[[], Question[list[str]]]


Recount = Callable[[], list[str]]


def captured(name: str, capture: Callable[[], Recount]) -> Check:
    """A part that copies columns in one go; ``capture`` returns what compares the copies, off the loop."""

    def look() -> Question[list[str]]:
        return (yield from off_loop(capture()))

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
        captured(f"{where}: parents, depths, children", partial(capture_tree, where, model)),
    ]
    for place in index.places:
        out.append(captured(f"{where}: closure of {place.name}", partial(capture_closure, model, place)))
        out.append(walked(f"{where}: tables of {place.name}", partial(walk_pieces, model, place)))
        orders: list[tuple[str, LeafOrder, int | None]] = [(place.name, place.leaves, None)]
        orders += [(f"{place.name} group {group}", order, group) for group, order in place.window_leaves.items()]
        for name, order, group in orders:
            capture = partial(capture_candidates, name, model, place, order, group)
            out.append(captured(f"{where}: candidates of {name}", capture))
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


def capture_tree(where: str, model: Model) -> Recount:
    """Parents are there, depths follow, children and chains add up, and every key has a copy, or had one."""
    index: BlockIndex = model.blocks.index
    parents, depth, children = int32s(index.parent), int32s(index.depth), int32s(index.children)
    head, continued = int32s(index.head), states(index.continued)
    has_copy = live_rows(len(index.keys), [place_states(place) for place in index.told])
    live = has_copy | (states(index.bare) != 0)
    known, spare = len(index.rows), len(index.spare_rows)

    def recount() -> list[str]:
        out: list[str] = []
        rows = np.flatnonzero(live)
        if len(rows) != known:
            out.append(f"{where}: {known} keys are known, {len(rows)} rows have a copy")
        if spare != len(live) - len(rows):
            out.append(f"{where}: {spare} rows are spare, {len(live) - len(rows)} have no copy")
        parent = parents[rows]
        rooted = parent == NO_ROW
        above = np.where(rooted, 0, parent)
        gone = ~rooted & ~live[above]
        out += told(rows[gone], lambda row: f"{where} row {row}: its parent {parents[row]} has left the index")
        wrong = depth[rows] != np.where(rooted, 0, depth[above] + 1)
        out += told(rows[wrong], lambda row: f"{where} row {row}: depth {depth[row]} does not follow its parent's")
        counted = np.bincount(parent[~rooted], minlength=len(parents))
        off = rows[counted[rows] != children[rows]]
        out += told(off, lambda row: f"{where} row {row}: {children[row]} children counted, {counted[row]} there")
        # At most one child goes on with its parent's chain, and the others begin one.
        on = rows[head[rows] != rows]
        above = parents[on]
        alien = on[(above == NO_ROW) | (head[on] != head[above])]
        out += told(alien, lambda row: f"{where} row {row}: of chain {head[row]}, but its parent is not")
        follow = np.bincount(above[above != NO_ROW], minlength=len(parents))
        off = rows[follow[rows] != continued[rows]]
        return out + told(off, lambda row: f"{where} row {row}: {follow[row]} children go on with its chain")

    return recount


def capture_closure(model: Model, place: Place) -> Recount:
    """Full groups move together, nothing is here without its block nor on a device without its parent, and operators'
    counts of blocks by state are right."""
    index, name, full, first = model.blocks.index, place.name, place.full_groups, place.lead
    is_host = place is model.blocks.host
    parents, children, of_groups = int32s(index.parent), int32s(place.children), place_states(place)
    by_state = list(place.counts.states)

    def recount() -> list[str]:
        lead = of_groups[first]
        there = np.bincount(lead, minlength=len(by_state))
        out = [
            f"{name}: {there[state]} blocks are {CopyState(state).name}, {by_state[state]} are counted"
            for state in (FILLING, READY, DRAINING)
            if there[state] != by_state[state]
        ]
        present: Mask = live_rows(len(parents), [of_groups])
        for group in full:
            off = np.flatnonzero(of_groups[group] != lead)
            out += told(off, lambda row: f"{name} row {row}: full groups are in different states")
        alone = np.flatnonzero(present & (lead == 0))
        out += told(alone, lambda row: f"{name} row {row}: a windowed copy without its block")
        rows = np.flatnonzero(present & (parents != NO_ROW))
        parent = parents[rows]
        if not is_host:
            out += told(rows[~present[parent]], lambda row: f"{name} row {row}: here without its parent")
        counted = np.bincount(parent, minlength=len(parents))
        off = np.flatnonzero(counted != children)
        return out + told(off, lambda row: f"{name} row {row}: {children[row]} children counted, {counted[row]} there")

    return recount


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


def capture_candidates(name: str, model: Model, place: Place, order: LeafOrder, group: int | None) -> Recount:
    """Exactly the candidates are filed in one order; ``group`` is None for whole blocks."""
    index = model.blocks.index
    filed, counted = states(order.filed), len(order)
    of_rows = states(place.states[place.lead if group is None else group])
    pins = int32s(place.pins if group is None else place.window_pins[group])
    children = int32s(place.children) if group is None else np.zeros(len(of_rows), np.int32)
    is_moving = uint16s(index.flights) != 0
    if group is not None:
        is_moving = np.any([states(each.states[group]) == FILLING for each in index.told], axis=0)

    def recount() -> list[str]:
        idle = (of_rows == READY) & (pins == 0) & (children == 0) & ~is_moving
        out = told(np.flatnonzero(idle & (filed == 0)), lambda row: f"{name} row {row}: may go, but is not filed")
        out += told(np.flatnonzero(~idle & (filed != 0)), lambda row: f"{name} row {row}: filed, but may not go")
        if int(filed.sum()) != counted:
            out.append(f"{name}: {counted} candidates are counted, {int(filed.sum())} are filed")
        return out

    return recount


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


# Verify: recount everything in parts, and report inconsistencies. Each page is in exactly one place, each pin has its
# holder, each count is right.
#
# Which parts there are is decided anew for every model, and a model that was evicted since is passed over.

MOST_PROBLEMS = 1024


class Verified(NamedTuple):
    """Counts of what was checked, and at most ``MOST_PROBLEMS`` problems. ``sound``: those of the ``models`` without a
    problem."""

    problems: list[str]
    checks: list[str]
    pages: int
    blocks: int
    models: list[int]
    sound: list[int]


def verify(view: View, model_id: int) -> Question[Verified]:
    """Recount one model, or (0) every one. Raises NotFound."""
    models = [view.model(model_id)] if model_id else view.models()
    problems: list[str] = []
    checks: list[str] = []
    sound: list[int] = []
    pages = blocks = 0
    for model in models:
        before = len(problems)
        for part in parts(view.ledger_of(model), model) if view.has(model) else ():
            if not view.has(model):
                break
            problems += yield from part.look()
            checks.append(part.name)
        if view.has(model):
            places = model.blocks.index.places
            pages += sum(place.pools[groups[0]].usable for place in places for groups in place.shares)
            blocks += len(model.blocks.index)
        if len(problems) == before:
            sound.append(model.id)
    return Verified(problems[:MOST_PROBLEMS], checks, pages, blocks, [model.id for model in models], sound)


def parts(ledger: Ledger, model: Model) -> list[Check]:
    """Checks of one model. Its places must not change until all are taken."""
    return [*block_parts(model), *page_parts(ledger, model), *hold_parts(ledger, model)]


def verify_at_once(core: Core) -> list[str]:
    """Run all parts in one go and return the problems. For tests and tools that own the ledger."""
    every = [part for model in core.ledger.models.values() for part in parts(core.ledger, model)]
    return [problem for part in every for problem in answer_at_once(part.look())]


def hold_parts(ledger: Ledger, model: Model) -> list[Check]:
    """Checks of a model's sequences and transfers."""
    where = f"model {model.id}"
    return [
        captured(f"{where}: pins and transfers", partial(capture_holds, ledger, model)),
        walked(f"{where}: block tables", partial(walk_sequences, ledger, model)),
        walked(f"{where}: tickets", partial(walk_tickets, ledger, model)),
        walked(f"{where}: keys being computed", partial(walk_computing, ledger, model)),
    ]


class _PlaceHolds:
    """Pins of one place as counted by row, and the pinned rows, once for each pin."""

    def __init__(self, place: Place) -> None:
        self.name = place.name
        self.states = place_states(place)
        self.lead = place.lead
        self.pins = int32s(place.pins)
        self.windows = {group: int32s(pins) for group, pins in place.window_pins.items()}
        self.counted = place.counts.pinned
        self.protected = place.protected.blocks
        self.pinned: list[int] = []
        self.windowed: dict[int, list[int]] = {group: [] for group in place.window_pins}


def capture_holds(ledger: Ledger, model: Model) -> Recount:
    """Every pin has its holder and is on a copy that is there, every transfer has its ticket and every filling or
    draining copy a transfer, and operators' counts of pins are right."""
    index, where = model.blocks.index, f"model {model.id}"
    places = {place.number: _PlaceHolds(place) for place in index.told}
    depth, parent = int32s(index.depth), int32s(index.parent)
    flights, known = uint16s(index.flights), np.array(sorted(index.flying), np.int64)
    flying: list[int] = []
    holds = [
        hold.pins()
        for lease in ledger.leases.values()
        if lease.model == model.id
        for hold in (*lease.sequences.values(), *lease.prefetches)
    ]
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id:
            flying += ticket.rows
            flying += [drain.row for drain in ticket.drains]
            if ticket.source is not None:
                places[ticket.source[0] + 1].pinned.append(ticket.source[1])
    holds += [model.stored.pins(), *(lent.pins() for lent in model.lent)]
    holds += [pin.pins() for pin in model.pins.by_key.values()]
    for number, group, row in chain.from_iterable(holds):
        place = places[number]
        (place.pinned if group is None else place.windowed[group]).append(row)

    def recount() -> list[str]:
        rows = len(flights)
        out: list[str] = []
        for place in places.values():
            out += _recount_place(where, place, flights, depth, parent)
        if not np.array_equal(known, np.flatnonzero(flights)):
            out.append(f"{where}: {len(known)} rows are known in flight, {np.count_nonzero(flights)} are")
        return out + _compare(f"{where} row", "transfers", flights, flying, rows)

    return recount


def _recount_place(where: str, place: _PlaceHolds, flights: Any, depth: Any, parent: Any) -> list[str]:
    name, rows = place.name, len(flights)
    out = _compare(f"{name} row", "pins", place.pins, place.pinned, rows)
    absent = np.flatnonzero((place.pins > 0) & (place.states[place.lead] == ABSENT))
    out += told(absent, lambda row: f"{name} row {row}: pinned, but its copy is ABSENT")
    pinned = int((place.pins.astype(np.int64) * (depth + 1)).sum())
    if pinned != place.counted:
        out.append(f"{where} {name}: {pinned} blocks are pinned, {place.counted} are counted")
    protected = _count_above(np.flatnonzero(place.pins > 0), parent)
    if protected != place.protected:
        out.append(f"{where} {name}: pins protect {protected} blocks, {place.protected} are counted")
    for group, pins in place.windows.items():
        at = f"{name} group {group} row"
        out += _compare(at, "window pins", pins, place.windowed[group], rows)
        absent = np.flatnonzero((pins > 0) & (place.states[group] == ABSENT))
        out += told(absent, lambda row, at=at: f"{at} {row}: a window holds it, but its copy is ABSENT")  # type: ignore[misc]
    moving = np.any([(column == FILLING) | (column == DRAINING) for column in place.states], axis=0)
    alone = np.flatnonzero(moving & (flights == 0))
    return out + told(alone, lambda row: f"{name} row {row}: on its way, but no ticket moves it")


def _count_above(rows: Any, parent: Any) -> int:
    """Number of blocks of the rows and all their ancestors."""
    seen = np.zeros(len(parent), np.bool_)
    while len(rows):
        rows = rows[~seen[rows]]
        seen[rows] = True
        rows = np.unique(parent[rows])
        rows = rows[rows != NO_ROW]
    return int(seen.sum())


def _compare(where: str, what: str, counted: Any, holders: list[int], rows: int) -> list[str]:
    there = np.bincount(np.array(holders, np.int64), minlength=rows)
    off = np.flatnonzero(there != counted)
    return told(off, lambda row: f"{where} {row}: {counted[row]} {what} counted, {there[row]} holders")


def walk_sequences(ledger: Ledger, model: Model) -> Iterator[list[str]]:
    """Tables name the pages that they should, and what is to come from the host is there. A step is one sequence."""
    known = [
        (lease.id, number) for lease in ledger.leases.values() if lease.model == model.id for number in lease.sequences
    ]
    for lease_id, number in known:
        lease = ledger.leases.get(lease_id)
        sequence = lease.sequences.get(number) if lease is not None else None
        if sequence is None or not sequence.is_open:
            continue
        out = _waits(ledger, sequence) + _from_host(model, sequence)
        if not sequence.swapped_out and not sequence.failed and not sequence.place.is_lost:
            out += _tables(model, sequence)
        yield out


def _tables(model: Model, sequence: OpenSequence) -> list[str]:
    """Check that every readable position on the device has the page of its block, or one of the sequence's own."""
    place = model.any_replica(sequence.replica).place
    path = model.blocks.index.path(sequence.anchor)
    if len(path) != sequence.sealed:
        return [f"sequence {sequence.id}: {len(path)} blocks above its anchor, {sequence.sealed} sealed"]
    if sequence.host_anchor != NO_ROW:
        path += model.blocks.index.path(sequence.host_anchor, sequence.anchor)
    out: list[str] = []
    for group, table in enumerate(sequence.tables):
        where = f"sequence {sequence.id} group {group}"
        pages, own = place.pages[group], sequence.own[group]
        if group in place.full_groups:
            shared: Mapping[int, int] = dict(enumerate(path))
            if NO_PAGE in table:
                out.append(f"{where}: no page for block {table.index(NO_PAGE)}")
        else:  # an engine chooses which of its blocks have a page in a windowed group
            shared = sequence.window_rows.get(group, {})
        if any(
            page not in own and (position not in shared or pages[shared[position]] != page)
            for position, page in enumerate(table)
            if page != NO_PAGE
        ):
            out.append(f"{where}: its table is not the pages of its blocks")
    return out


def _waits(ledger: Ledger, sequence: OpenSequence) -> list[str]:
    """Check that its loads know of it, and the ticket that swaps it."""
    running = ledger.tickets.running
    out = [
        f"sequence {sequence.id}: waits for ticket {number}, which does not know it"
        for number in sequence.loads
        if number not in running or sequence not in running[number].waiters
    ]
    swap = running.get(sequence.swap_ticket)
    if sequence.swap_ticket and (swap is None or swap.traveller is not sequence):
        out.append(f"sequence {sequence.id}: no ticket {sequence.swap_ticket} swaps it")
    return out


def _from_host(model: Model, sequence: OpenSequence) -> list[str]:
    """Check that all shared blocks of a sequence that is swapped out, or that a load will bring, are whole on the
    host."""
    host_blocks = len(model.blocks.index.path(sequence.host_anchor))
    if sequence.swapped_out and host_blocks != sequence.sealed:
        return [f"sequence {sequence.id}: swapped out, but the host keeps {host_blocks} of {sequence.sealed} blocks"]
    if sequence.swap_ticket or sequence.host_anchor == NO_ROW:
        return []
    host = model.blocks.host
    until = NO_ROW if sequence.swapped_out else sequence.anchor
    return [
        f"sequence {sequence.id}: row {row} is to come from the host, but it is not there"
        for row in model.blocks.index.path(sequence.host_anchor, until)
        if host.states[host.lead][row] != READY
    ]


def walk_computing(ledger: Ledger, model: Model) -> Iterator[list[str]]:
    """Keys that sequences have declared to be computing are counted. One step: a count is of one moment or of none."""
    declared: Counter[bytes] = Counter()
    for lease in ledger.leases.values():
        for sequence in lease.sequences.values() if lease.model == model.id else ():
            for position in range(max(sequence.sealed, sequence.hit_blocks), sequence.declared):
                declared[sequence.key(position)] += 1
    yield [] if declared == model.computing else [f"model {model.id}: keys being computed do not add up"]


def walk_tickets(ledger: Ledger, model: Model) -> Iterator[list[str]]:
    """A copy on its way is known to be moved by its ticket, and by no other. A step is one ticket."""
    host = model.blocks.host
    for number in list(ledger.tickets.running):
        ticket = ledger.tickets.running.get(number)
        if ticket is None or ticket.model != model.id:
            continue
        device = model.any_replica(ticket.replica).place
        target = device if ticket.direction is Direction.LOAD else host
        copied = [*ticket.rows, *(drain.row for drain in ticket.drains if drain.copied)]
        moved: list[tuple[int | None, str]]
        moved = [(target.filling[row], f"{target.name} row {row}: comes") for row in copied]
        moved += [(device.draining.get(row), f"{device.name} row {row}: drains") for row, _ in ticket.drains]
        yield [f"{what} with ticket {number}, but {known or None} is known" for known, what in moved if known != number]


@dataclass
class PoolColumns:
    """One pool of one moment. ``groups``: those that draw from it; ``owners``: the mark of each page's group, where
    that is more than one, with the ``own_counts`` of each. ``kept``: pages that reservations have there."""

    name: str
    groups: tuple[int, ...]
    owners: Bytes | None
    marks: list[int]
    own_counts: list[list[int]]
    pages: int
    first: int
    usable: int
    reserved: int
    kept: int
    counts: list[int]
    states: Bytes
    added: Bytes
    run_starts: Int32s
    run_counts: Int32s


@dataclass
class Held:
    """Pages that something other than a block holds, all in one state."""

    group: int
    state: PageState
    by: str
    pages: npt.NDArray[np.int64]


@dataclass
class PlacePages:
    """A place's copies and pools of one moment, and the other holders of pages there."""

    name: str
    copies: list[Bytes]
    pages: list[Int32s]
    pools: list[PoolColumns]
    held: list[Held] = field(default_factory=list)


def page_parts(ledger: Ledger, model: Model) -> list[Check]:
    return [
        captured(f"model {model.id}: pages of {place.name}", partial(capture_pages, ledger, model, place))
        for place in model.blocks.index.places
    ]


def capture_pages(ledger: Ledger, model: Model, place: Place) -> Recount:
    """Every page has one holder, of its group and in its state; counts and runs of free pages are right."""
    seen = PlacePages(
        place.name,
        place_states(place),
        [int32s(pages) for pages in place.pages],
        [_pool(place, groups) for groups in place.shares],
    )
    if place is model.blocks.host:
        _host_holders(ledger, model, seen)
    else:
        _device_holders(ledger, model, place.number - 1, seen)
    for group, pool in enumerate(place.pools):
        _hold(seen, group, PageState.QUARANTINED, "copies that never ended", pool.stuck)
    return partial(recount_pages, seen)


def _pool(place: Place, groups: tuple[int, ...]) -> PoolColumns:
    pool = place.pools[groups[0]]
    starts, counts = pool.free_runs()
    shared = [each for group in groups if isinstance(each := place.pools[group], GroupPool)]
    return PoolColumns(
        shared[0].common.name if shared else pool.name,
        groups,
        states(shared[0].owners) if shared else None,
        [each.mark for each in shared],
        [each.own_counts for each in shared],
        pool.pages,
        pool.first,
        pool.usable,
        pool.reserved,
        sum(reservation.held[group] for reservation in place.reservations for group in groups),
        list(pool.counts),
        states(pool.states),
        states(pool.added),
        np.array(starts, np.int32),
        np.array(counts, np.int32),
    )


def _hold(seen: PlacePages, group: int, state: PageState, by: str, pages: Collection[int]) -> None:
    if pages:
        seen.held.append(Held(group, state, by, np.fromiter(pages, np.int64, len(pages))))


def _host_holders(ledger: Ledger, model: Model, seen: PlacePages) -> None:
    for lease in ledger.leases.values():
        for sequence in lease.sequences.values() if lease.model == model.id else ():
            for group, (_, pages) in enumerate(() if sequence.swap_ticket else sequence.swapped):
                _hold(seen, group, PageState.PRIVATE, f"sequence {sequence.id}", pages)
    for ticket in ledger.tickets.running.values():
        for moved in ticket.moves if ticket.model == model.id else ():
            _hold(seen, moved.group, PageState.IN_FLIGHT, f"ticket {ticket.id}", moved.host_pages)
    for fetch in model.stored.fetches.values():
        for held in fetch.held():
            _hold(seen, held.group, held.state, f"fetch {fetch.ticket}", held.pages)


def _device_holders(ledger: Ledger, model: Model, replica: int, seen: PlacePages) -> None:
    flying: dict[int, set[int]] = {}
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id and ticket.replica == replica:
            for moved in ticket.moves:
                flying.setdefault(moved.group, set()).update(moved.own)
    for group, pages in flying.items():
        _hold(seen, group, PageState.IN_FLIGHT, "a swap", pages)
    for lease in ledger.leases.values():
        if lease.model != model.id or lease.replica != replica:
            continue
        for group in range(len(seen.copies)):
            lost = [page for g, page in lease.quarantine if g == group]
            _hold(seen, group, PageState.QUARANTINED, f"lease {lease.id}", lost)
            _hold(seen, group, PageState.PRIVATE, f"stock of {lease.id}", lease.stock[group])
        for sequence in lease.sequences.values():
            for group, own in enumerate(sequence.own):
                mine = own - flying[group] if group in flying else own
                _hold(seen, group, PageState.PRIVATE, f"sequence {sequence.id}", mine)


def recount_pages(seen: PlacePages) -> list[str]:
    out: list[str] = []
    for pool in seen.pools:
        for group in pool.groups:
            out += _absent(seen, group)
        out += _holders(seen, pool)
        out += _counts(pool)
        out += _runs(pool)
    return out


def _absent(seen: PlacePages, group: int) -> list[str]:
    rows = np.flatnonzero((seen.copies[group] == ABSENT) & (seen.pages[group] != NO_PAGE))
    return [f"{seen.name} row {row}: absent, yet it names a page" for row in rows[:MOST_TOLD].tolist()]


def _holders(seen: PlacePages, pool: PoolColumns) -> list[str]:
    """Compare every page with its holders, and its group with theirs."""
    pages, expected, marks = [np.empty(0, np.int64)], [np.empty(0, np.uint8)], [np.empty(0, np.uint8)]
    for number, group in enumerate(pool.groups):
        mark = pool.marks[number] if pool.marks else 1
        rows = np.flatnonzero(seen.copies[group] != ABSENT)
        settled = seen.copies[group][rows] == READY
        pages.append(seen.pages[group][rows].astype(np.int64))
        expected.append(np.where(settled, PageState.SEALED, PageState.IN_FLIGHT).astype(np.uint8))
        for held in seen.held:
            if held.group == group:
                pages.append(held.pages)
                expected.append(np.full(len(held.pages), held.state, np.uint8))
        marks.append(np.full(sum(map(len, pages)) - sum(map(len, marks)), mark, np.uint8))
    every, states_of, mark_of = np.concatenate(pages), np.concatenate(expected), np.concatenate(marks)
    inside = (every >= 0) & (every < pool.pages)
    out = [f"{pool.name}: page {page} is held, but not of this pool" for page in every[~inside][:MOST_TOLD].tolist()]
    every, states_of, mark_of = every[inside], states_of[inside], mark_of[inside]
    holders = np.bincount(every, minlength=pool.pages)
    twice = np.flatnonzero(holders > 1)[:MOST_TOLD].tolist()
    out += [f"{pool.name} page {page}: held by {_names(seen, pool, page)}" for page in twice]
    wanted, owners = np.zeros(pool.pages, np.uint8), np.zeros(pool.pages, np.uint8)
    wanted[every], owners[every] = states_of, mark_of
    wrong = np.flatnonzero(wanted != pool.states)[:MOST_TOLD].tolist()
    out += [
        f"{pool.name} page {page}: {PageState(int(pool.states[page])).name}, but held by {_names(seen, pool, page)}"
        for page in wrong
    ]
    if pool.owners is not None:
        strange = np.flatnonzero(owners != pool.owners)[:MOST_TOLD].tolist()
        out += [
            f"{pool.name} page {page}: of group mark {pool.owners[page]}, but held by {_names(seen, pool, page)}"
            for page in strange
        ]
    return out


def _names(seen: PlacePages, pool: PoolColumns, page: int) -> str:
    names: list[str] = []
    for group in pool.groups:
        rows = np.flatnonzero((seen.pages[group] == page) & (seen.copies[group] != ABSENT)).tolist()
        names += [f"row {row}" for row in rows]
        names += [held.by for held in seen.held if held.group == group and page in held.pages]
    return " and by ".join(names) or "no holder"


def _counts(pool: PoolColumns) -> list[str]:
    out: list[str] = []
    if sum(pool.counts) != pool.usable or int(pool.added.sum()) != pool.usable:
        out.append(f"{pool.name}: counts {pool.counts} do not add up to {pool.usable}")
    if pool.added[: pool.first].any():
        out.append(f"{pool.name}: pages are usable that are the engines' own")
    if pool.reserved != pool.kept or not 0 <= pool.reserved <= pool.counts[PageState.FREE]:
        out.append(f"{pool.name}: {pool.reserved} pages are counted reserved, {pool.kept} are, of the free ones")
    seen = np.bincount(pool.states, minlength=len(PageState))
    for state in PageState:
        expected = pool.counts[state] + (pool.pages - pool.usable if state is PageState.FREE else 0)
        if seen[state] != expected:
            out.append(f"{pool.name}: {seen[state]} pages are {state.name}, {expected} are counted")
    for mark, counts in zip(pool.marks, pool.own_counts, strict=True):
        mine = np.bincount(pool.states[pool.owners == mark], minlength=len(PageState))
        out += [
            f"{pool.name}: {mine[state]} pages of group mark {mark} are {state.name}, {counts[state]} are counted"
            for state in PageState
            if state is not PageState.FREE and mine[state] != counts[state]
        ]
    return out


def _runs(pool: PoolColumns) -> list[str]:
    """Free runs cover the free pages exactly once, and neighbours are joined."""
    cover = np.zeros(pool.pages + 1, np.int64)
    np.add.at(cover, pool.run_starts, 1)
    np.add.at(cover, pool.run_starts + pool.run_counts, -1)
    inside = np.cumsum(cover)[:-1]
    free = (pool.states == PageState.FREE) & (pool.added == 1)
    off = np.flatnonzero(inside != free)[:MOST_TOLD].tolist()
    out = [f"{pool.name} page {page}: free runs hold it {inside[page]} times, free is {free[page]}" for page in off]
    joined = np.intersect1d(pool.run_starts, pool.run_starts + pool.run_counts)[:MOST_TOLD].tolist()
    return out + [f"{pool.name}: the run from {page} on is not joined with its neighbour" for page in joined]
