"""Does everything add up? Every page in exactly one place, every count equal to what it counts, closures whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.words import ABSENT, DRAINING, FILLING, NO_PAGE, READY, PageState

Hold = Callable[[int, int, PageState, str], None]
Holding = dict[tuple[int, int], tuple[PageState, str]]


class Audit(NamedTuple):
    """What was found wrong (nothing: conservation holds), and how much was looked at."""

    problems: list[str]
    pages: int
    blocks: int


def audit(ledger: Ledger) -> Audit:
    """Check every model of the ledger. Walks everything: for tests, operators and idle moments."""
    problems: list[str] = []
    pages = blocks = 0
    for model in ledger.models.values():
        problems += _tree(model)
        problems += _pins(ledger, model)
        problems += _flights(ledger, model)
        problems += _computing(ledger, model)
        problems += _tables(ledger, model)
        problems += _leaves(model)
        problems += _counts(model)
        for position, place in enumerate(model.blocks.index.places):
            problems += _pages(ledger, model, place, position)
            pages += sum(pool.usable for pool in place.pools)
        blocks += len(model.blocks.index)
    return Audit(problems, pages, blocks)


def _tree(model: Model) -> list[str]:
    index = model.blocks.index
    out: list[str] = []
    children: Counter[int] = Counter()
    for key, row in index.rows.items():
        where = f"model {model.id} row {row}"
        if index.keys[row] != key:
            out.append(f"{where}: key and row do not agree")
        if not index.has_copy(row):
            out.append(f"{where}: no copy anywhere")
        parent = index.parent[row]
        if parent != NO_ROW:
            children[parent] += 1
            if index.keys[parent] is None:
                out.append(f"{where}: its parent {parent} has left the index")
            if index.depth[row] != index.depth[parent] + 1:
                out.append(f"{where}: depth {index.depth[row]} below {index.depth[parent]}")
    out += [
        f"model {model.id} row {row}: {index.children[row]} children counted, {children[row]} there"
        for row in index.rows.values()
        if index.children[row] != children[row]
    ]
    for place in index.places:
        out += _closure(model, place)
    return out


def _closure(model: Model, place: Place) -> list[str]:
    index = model.blocks.index
    is_host = place is model.blocks.host
    out: list[str] = []
    children: Counter[int] = Counter()
    for row in index.rows.values():
        states = {place.states[group][row] for group in place.full_groups}
        if len(states) > 1:
            out.append(f"{place.name} row {row}: full groups are in different states {states}")
        parent = index.parent[row]
        present = place.is_present(row)
        if present and not place.states[place.lead][row]:
            out.append(f"{place.name} row {row}: a windowed copy without its block")
        if present and parent != NO_ROW:
            children[parent] += 1
            if not is_host and not place.is_present(parent):
                out.append(f"{place.name} row {row}: here without its parent {parent}")
    out += [
        f"{place.name} row {row}: {place.children[row]} children counted, {children[row]} there"
        for row in index.rows.values()
        if place.children[row] != children[row]
    ]
    return out


def _pins(ledger: Ledger, model: Model) -> list[str]:
    pins: Counter[tuple[int, int]] = Counter()
    windows: Counter[tuple[int, int, int]] = Counter()
    for lease in ledger.leases.values():
        if lease.model != model.id:
            continue
        position = lease.replica + 1
        for hold in (*lease.sequences.values(), *lease.prefetches):
            if hold.anchor != NO_ROW:
                pins[position, hold.anchor] += 1
            if hold.host_anchor != NO_ROW:
                pins[0, hold.host_anchor] += 1
            for group, held in hold.window_rows.items():
                for row in held.values():
                    windows[position, group, row] += 1
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id and ticket.source is not None:
            pins[ticket.source[0] + 1, ticket.source[1]] += 1
    out: list[str] = []
    for position, place in enumerate(model.blocks.index.places):
        for row in model.blocks.index.rows.values():
            if place.pins[row] != pins[position, row]:
                out.append(f"{place.name} row {row}: {place.pins[row]} pins, {pins[position, row]} holders")
            for group, counts in place.window_pins.items():
                if counts[row] != windows[position, group, row]:
                    out.append(f"{place.name} row {row} group {group}: {counts[row]} window pins do not add up")
    return out


def _flights(ledger: Ledger, model: Model) -> list[str]:
    flights: Counter[int] = Counter()
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id:
            flights.update(ticket.rows)
            flights.update(drain.row for drain in ticket.drains)
    index = model.blocks.index
    return [
        f"model {model.id} row {row}: {index.flights[row]} transfers counted, {flights[row]} running"
        for row in index.rows.values()
        if index.flights[row] != flights[row]
    ]


def _pages(ledger: Ledger, model: Model, place: Place, position: int) -> list[str]:
    out: list[str] = []
    held: Holding = {}

    def hold(group: int, page: int, state: PageState, by: str) -> None:
        if (group, page) in held:
            out.append(f"{place.name} group {group} page {page}: held by {held[group, page][1]} and by {by}")
        held[group, page] = (state, by)

    for row in model.blocks.index.rows.values():
        for group, states in enumerate(place.states):
            if states[row] == ABSENT:
                if place.pages[group][row] != NO_PAGE:
                    out.append(f"{place.name} row {row}: absent, yet it names a page")
                continue
            settled = states[row] == READY
            hold(
                group,
                place.pages[group][row],
                PageState.SEALED if settled else PageState.IN_FLIGHT,
                f"row {row}",
            )
    if position == 0:
        _host_holders(ledger, model, hold)
    else:
        _device_holders(ledger, model, position - 1, hold)
    for group, pool in enumerate(place.pools):
        out += pool.problems()
        for page, state in enumerate(pool.states):
            expected = held.get((group, page), (PageState.FREE, "nobody"))
            if state != expected[0]:
                out.append(f"{pool.name} page {page}: {PageState(state).name}, but held by {expected[1]}")
    return out


def _tables(ledger: Ledger, model: Model) -> list[str]:
    """A sequence on the device has, at every sealed position, the page of its block there."""
    out: list[str] = []
    sequences = [s for lease in ledger.leases.values() if lease.model == model.id for s in lease.sequences.values()]
    for sequence in sequences:
        if sequence.swapped_out or sequence.failed:
            continue
        place = model.replicas[sequence.replica].place
        path = model.blocks.index.path(sequence.anchor)
        if len(path) != sequence.sealed:
            out.append(f"sequence {sequence.id}: {len(path)} blocks above its anchor, {sequence.sealed} sealed")
        for group in place.full_groups:
            for position, row in enumerate(path[: sequence.blocks]):
                if sequence.tables[group][position] != place.pages[group][row]:
                    out.append(f"sequence {sequence.id} group {group}: not the page of block {position}")
        for group, held in sequence.window_rows.items():
            for position, row in held.items():
                if sequence.tables[group][position] != place.pages[group][row]:
                    out.append(f"sequence {sequence.id} group {group}: not the windowed page of block {position}")
    return out


def _counts(model: Model) -> list[str]:
    """What operators are told of blocks and pins is what there is."""
    out: list[str] = []
    depth = model.blocks.index.depth
    for place in model.blocks.index.places:
        states = place.states[place.lead]
        out += [
            f"model {model.id} {place.name}: {seen} blocks are {state.name}, {told} are counted"
            for state in (FILLING, READY, DRAINING)
            if (seen := states.count(state)) != (told := place.counts.states[state])
        ]
        pinned = sum(pins * (depth[row] + 1) for row, pins in enumerate(place.pins) if pins)
        if pinned != place.counts.pinned:
            out.append(f"model {model.id} {place.name}: {pinned} blocks are pinned, {place.counts.pinned} are counted")
    return out


def _leaves(model: Model) -> list[str]:
    """Whoever may be evicted has an entry in its heap that comes up in time."""
    blocks = model.blocks
    out: list[str] = []
    for place in blocks.index.places:
        heaps = [(place.leaves, blocks.rank_now(place))]
        if place is not blocks.host:
            heaps += [(place.window_leaves[g], blocks.window_rank_now(place, g)) for g in place.window_groups]
        for heap, rank_now in heaps:
            lowest = heap.lowest()
            for row in blocks.index.rows.values():
                rank = rank_now(row)
                if rank is not None and (row not in lowest or lowest[row] > rank):
                    out.append(f"{place.name} row {row}: may be evicted, but no candidate of rank {rank} says so")
    return out


def _computing(ledger: Ledger, model: Model) -> list[str]:
    declared: Counter[bytes] = Counter()
    for lease in ledger.leases.values():
        for sequence in lease.sequences.values() if lease.model == model.id else ():
            for position in range(max(sequence.sealed, sequence.hit_blocks), sequence.declared):
                declared[sequence.key(position)] += 1
    return [] if declared == model.computing else [f"model {model.id}: keys being computed do not add up"]


def _host_holders(ledger: Ledger, model: Model, hold: Hold) -> None:
    for lease in ledger.leases.values():
        if lease.model == model.id:
            for sequence in lease.sequences.values():
                for group, _, page in sequence.swapped:
                    if not sequence.swap_ticket:
                        hold(group, page, PageState.PRIVATE, f"sequence {sequence.id}")
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id:
            for move in ticket.moves:
                hold(move.group, move.host_page, PageState.IN_FLIGHT, f"ticket {ticket.id}")


def _device_holders(ledger: Ledger, model: Model, replica: int, hold: Hold) -> None:
    flying = {
        (move.group, move.device_page)
        for ticket in ledger.tickets.running.values()
        if ticket.model == model.id and ticket.replica == replica
        for move in ticket.moves
        if move.is_own
    }
    for group, page in flying:
        hold(group, page, PageState.IN_FLIGHT, "a swap")
    for lease in ledger.leases.values():
        if lease.model != model.id or lease.replica != replica:
            continue
        for group, page in lease.quarantine:
            hold(group, page, PageState.QUARANTINED, f"lease {lease.id}")
        for group, pages in enumerate(lease.stock):
            for page in pages:
                hold(group, page, PageState.PRIVATE, f"stock of {lease.id}")
        for sequence in lease.sequences.values():
            for group, page in sequence.own_pages():
                if (group, page) not in flying:
                    hold(group, page, PageState.PRIVATE, f"sequence {sequence.id}")
