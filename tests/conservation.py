"""Does everything add up? The rules of ownership said again, row by row, as plainly as can be: an oracle for tests.

It shares no line with what the daemon itself offers for this (`questions.audit`), which compares columns.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cachesvc.ledger.ledger import LeaseState, Ledger, Model
from cachesvc.ledger.sequences import Hold, OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.words import ABSENT, DRAINING, FILLING, NO_PAGE, READY, CopyState, Direction, PageState
from tests.candidates import candidates, lost, segments
from tests.page_audit import Holding, page_problems

Claim = Callable[[int, int, PageState, str], None]


class Audit(NamedTuple):
    """Problems found (none: conservation holds), and the number of things checked."""

    problems: list[str]
    pages: int
    blocks: int


def audit(ledger: Ledger) -> Audit:
    """Check every model of the ledger. Walks everything."""
    problems: list[str] = []
    pages = blocks = 0
    for model in ledger.models.values():
        for check in (_rows, _chains, _pins, _flights, _computing, _tables, _swapped):
            problems += check(ledger, model)
        problems += segments(model)
        problems += lost(model)
        problems += [problem for place in model.blocks.index.lost for problem in _moving(ledger, model, place)]
        for place in model.blocks.index.places:
            problems += _closure(model, place)
            problems += _pieces(model, place)
            problems += candidates(model, place)
            problems += _counts(model, place)
            problems += _pages(ledger, model, place)
            problems += _moving(ledger, model, place)
            problems += _reserved(ledger, model, place)
            pages += sum(place.pools[groups[0]].usable for groups in place.shares)
        blocks += len(model.blocks.index)
    return Audit(problems + list(_waiters(ledger)), pages, blocks)


def _sequences(ledger: Ledger, model: Model) -> list[OpenSequence]:
    return [s for lease in ledger.leases.values() if lease.model == model.id for s in lease.sequences.values()]


def _holds(ledger: Ledger, model: Model) -> list[Hold]:
    leases = [lease for lease in ledger.leases.values() if lease.model == model.id]
    return [hold for lease in leases for hold in (*lease.sequences.values(), *lease.prefetches)]


def _rows(ledger: Ledger, model: Model) -> Iterator[str]:
    """Check that keys and rows agree, parents are there, and rows without copies have no holder."""
    index = model.blocks.index
    children: Counter[int] = Counter()
    parents = {index.parent[row] for row in index.rows.values()}
    for key, row in index.rows.items():
        where = f"model {model.id} row {row}"
        if index.keys[row] != key:
            yield f"{where}: key and row do not agree"
        has_copy = any(states[row] for place in (*index.places, *index.lost) for states in place.states)
        if not has_copy and (not index.losses or (row not in parents and row not in index.childless)):
            yield f"{where}: no copy anywhere"
        parent = index.parent[row]
        if parent != NO_ROW:
            children[parent] += 1
            if index.keys[parent] is None:
                yield f"{where}: its parent {parent} has left the index"
            if index.depth[row] != index.depth[parent] + 1:
                yield f"{where}: depth {index.depth[row]} below {index.depth[parent]}"
    for row in range(len(index.keys)):
        if index.children[row] != children[row]:
            yield f"model {model.id} row {row}: {index.children[row]} children counted, {children[row]} there"
        if index.keys[row] is None and index.has_copy(row):
            yield f"model {model.id} row {row}: a copy without a key"
    spare = [row for row, key in enumerate(index.keys) if key is None]
    if sorted(index.spare_rows) != spare:
        yield f"model {model.id}: {len(index.spare_rows)} rows are spare, {len(spare)} have no block"


def _chains(ledger: Ledger, model: Model) -> Iterator[str]:
    """At most one child goes on with its parent's chain, and the others begin one."""
    index = model.blocks.index
    on: Counter[int] = Counter()
    for row in index.rows.values():
        parent = index.parent[row]
        if index.head[row] == row:
            continue
        if parent == NO_ROW or index.head[row] != index.head[parent]:
            yield f"model {model.id} row {row}: of chain {index.head[row]}, but its parent {parent} is not"
        on[parent] += 1
    for row in index.rows.values():
        if on[row] != index.continued[row]:
            yield f"model {model.id} row {row}: {on[row]} children go on with its chain"


def _pieces(model: Model, place: Place) -> Iterator[str]:
    """Each piece of a block table ends in a whole copy, at its depth, and has the pages of the blocks down to there."""
    index, length = model.blocks.index, place.pieces.piece_blocks
    for row, piece in place.pieces.kept.items():
        path = index.path(row)[-length:]
        pages = tuple(array("i", [place.pages[group][each] for each in path]).tobytes() for group in place.full_groups)
        if not place.is_hittable(row) or (index.depth[row] + 1) % length or piece != (index.parent[path[0]], pages):
            yield f"{place.name} row {row}: a piece of a table that is not its blocks' pages"


def _closure(model: Model, place: Place) -> Iterator[str]:
    index = model.blocks.index
    is_host = place is model.blocks.host
    children: Counter[int] = Counter()
    for row in index.rows.values():
        states = {place.states[group][row] for group in place.full_groups}
        if len(states) > 1:
            yield f"{place.name} row {row}: full groups are in different states {states}"
        parent = index.parent[row]
        present = place.is_present(row)
        if present and not place.states[place.lead][row]:
            yield f"{place.name} row {row}: a windowed copy without its block"
        if present and parent != NO_ROW:
            children[parent] += 1
            if not is_host and not place.is_present(parent):
                yield f"{place.name} row {row}: here without its parent {parent}"
    for row in index.rows.values():
        if place.children[row] != children[row]:
            yield f"{place.name} row {row}: {place.children[row]} children counted, {children[row]} there"


def _pins(ledger: Ledger, model: Model) -> Iterator[str]:
    """Every pin has its holder, and is on a copy that is there."""
    pins: Counter[tuple[int, int]] = Counter()
    windows: Counter[tuple[int, int, int]] = Counter()
    for hold in _holds(ledger, model):
        for number, group, row in hold.pins():
            if group is None:
                pins[number, row] += 1
            else:
                windows[number, group, row] += 1
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id and ticket.source is not None:
            pins[ticket.source[0] + 1, ticket.source[1]] += 1
    for fetch in model.stored.fetches.values():
        if fetch.pin.row != NO_ROW:
            pins[fetch.pin.place.number, fetch.pin.row] += 1
    for key, keep in model.stored.keeping.items():
        row = model.blocks.index.rows.get(key, NO_ROW)
        pins[0, row] += 1
        windows.update((0, group, row) for group in model.blocks.host.window_groups if keep.pages[group] != NO_PAGE)
        if row == NO_ROW or any(
            page not in (NO_PAGE, model.blocks.host.pages[group][row]) for group, page in enumerate(keep.pages)
        ):
            yield f"model {model.id} row {row}: it is being written from pages that are not its own any more"
    for pinned in [*(lent.pins() for lent in model.lent), *(each.pins() for each in model.pins.by_key.values())]:
        for number, group, row in pinned:
            if group is None:
                pins[number, row] += 1
            else:
                windows[number, group, row] += 1
    for place in (*model.blocks.index.places, *model.blocks.index.lost):
        for row, count in enumerate(place.pins):
            if count != pins[place.number, row]:
                yield f"{place.name} row {row}: {count} pins, {pins[place.number, row]} holders"
            if count and place.states[place.lead][row] == ABSENT:
                yield f"{place.name} row {row}: pinned, but its copy is ABSENT"
        for group, counts in place.window_pins.items():
            for row, count in enumerate(counts):
                if count != windows[place.number, group, row]:
                    yield f"{place.name} row {row} group {group}: {count} window pins do not add up"
                if count and place.states[group][row] == ABSENT:
                    yield f"{place.name} row {row} group {group}: a window holds it, but its copy is ABSENT"


def _flights(ledger: Ledger, model: Model) -> Iterator[str]:
    """Every transfer has its ticket, and whatever fills or drains is moved by one."""
    flights: Counter[int] = Counter()
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id:
            flights.update(ticket.rows)
            flights.update(drain.row for drain in ticket.drains)
    index = model.blocks.index
    for row, count in enumerate(index.flights):
        if count != flights[row]:
            yield f"model {model.id} row {row}: {count} transfers counted, {flights[row]} running"
        for place in (*index.places, *index.lost):
            if not flights[row] and any(states[row] in (FILLING, DRAINING) for states in place.states):
                yield f"{place.name} row {row}: on its way, but no ticket moves it"
    if set(index.flying) != {row for row, count in enumerate(index.flights) if count}:
        yield f"model {model.id}: {len(index.flying)} rows are known to be in flight, but others are"


def _moving(ledger: Ledger, model: Model, place: Place) -> Iterator[str]:
    """Check that the tickets that fill or drain a row here are known of exactly those rows."""
    filling: dict[int, int] = {}
    draining: dict[int, int] = {}
    for ticket in ledger.tickets.running.values():
        if ticket.model != model.id:
            continue
        is_load = ticket.direction is Direction.LOAD
        if place.number == (ticket.replica + 1 if is_load else 0):
            copied = [*ticket.rows, *(drain.row for drain in ticket.drains if drain.copied)]
            filling |= dict.fromkeys(copied, ticket.id)
        if place.number == ticket.replica + 1:
            draining |= dict.fromkeys([drain.row for drain in ticket.drains], ticket.id)
    known = {row: ticket for row, ticket in enumerate(place.filling) if ticket}
    if known != filling or place.draining != draining:
        yield f"{place.name}: the tickets that fill and drain are {known}, {place.draining}"
    for row, lead in enumerate(place.states[place.lead]):
        if (lead == DRAINING) != (row in draining):
            yield f"{place.name} row {row}: {CopyState(lead).name}, with ticket {draining.get(row)}"
        if any(states[row] == FILLING for states in place.states) != (row in filling):
            yield f"{place.name} row {row}: filled by ticket {filling.get(row)}, but its states say otherwise"


def _reserved(ledger: Ledger, model: Model, place: Place) -> Iterator[str]:
    """Reserved pages are free, counted, and kept for a sequence that is open, or a lease's stock, and wants as many."""
    owners = {id(sequence.room) for sequence in _sequences(ledger, model) if sequence.place is place}
    for lease in ledger.leases.values():
        if lease.model == model.id and place.number == lease.replica + 1 and lease.state is LeaseState.LIVE:
            owners.add(id(lease.room))
    for reservation in place.reservations:
        if id(reservation) not in owners:
            yield f"{place.name}: pages are kept for a sequence or a lease that has ended"
        if any(held > wanted for held, wanted in zip(reservation.held, reservation.wanted, strict=True)):
            yield f"{place.name}: {reservation.held} pages are kept for a call that wants {reservation.wanted}"
    for groups in place.shares:
        pool = place.pools[groups[0]]
        held = sum(reservation.held[group] for reservation in place.reservations for group in groups)
        if held != pool.reserved or not 0 <= held <= pool.free:
            yield f"{pool.name}: {pool.reserved} pages are reserved, {held} for calls, {pool.free} are free"


def _pages(ledger: Ledger, model: Model, place: Place) -> Iterator[str]:
    out: list[str] = []
    held: Holding = {}

    def claim(group: int, page: int, state: PageState, by: str) -> None:
        if (group, page) in held:
            out.append(f"{place.name} group {group} page {page}: held by {held[group, page][1]} and by {by}")
        held[group, page] = (state, by)

    for row in range(len(model.blocks.index.keys)):
        for group, states in enumerate(place.states):
            if states[row] == ABSENT:
                if place.pages[group][row] != NO_PAGE:
                    out.append(f"{place.name} row {row}: absent, yet it names a page")
                continue
            settled = states[row] == READY
            page_state = PageState.SEALED if settled else PageState.IN_FLIGHT
            claim(group, place.pages[group][row], page_state, f"row {row}")
    if place is model.blocks.host:
        _host_holders(ledger, model, claim)
    else:
        _device_holders(ledger, model, place.number - 1, claim)
    for group, page in ((group, page) for group, pool in enumerate(place.pools) for page in pool.stuck):
        claim(group, page, PageState.QUARANTINED, "copies that never ended")
    yield from out
    yield from page_problems(place, held)


def _tables(ledger: Ledger, model: Model) -> Iterator[str]:
    """A sequence on the device has, at every position that it may read, the page of its block or one of its own."""
    index = model.blocks.index
    for sequence in _sequences(ledger, model):
        if sequence.swapped_out or sequence.failed or not sequence.is_open or sequence.place.is_lost:
            continue
        place = model.any_replica(sequence.replica).place
        path = index.path(sequence.anchor)
        if len(path) != sequence.sealed:
            yield f"sequence {sequence.id}: {len(path)} blocks above its anchor, {sequence.sealed} sealed"
        if sequence.host_anchor != NO_ROW:
            path += index.path(sequence.host_anchor, sequence.anchor)
        for group, table in enumerate(sequence.tables):
            where = f"sequence {sequence.id} group {group}"
            rows = dict(enumerate(path)) if group in place.full_groups else sequence.window_rows.get(group, {})
            for position, page in enumerate(table):
                if page == NO_PAGE:
                    if group in place.full_groups:  # in the others an engine chooses
                        yield f"{where}: no page for block {position}"
                    continue
                row = rows.get(position, NO_ROW)
                if page not in sequence.own[group] and (row == NO_ROW or page != place.pages[group][row]):
                    yield f"{where}: not the page of block {position}"


def _swapped(ledger: Ledger, model: Model) -> Iterator[str]:
    """All shared blocks of a sequence that is swapped out, or that a load will bring, are whole on the host."""
    blocks = model.blocks
    for sequence in _sequences(ledger, model):
        if not sequence.is_open:
            continue
        on_host = len(blocks.index.path(sequence.host_anchor))
        if sequence.swapped_out and on_host != sequence.sealed:
            yield f"sequence {sequence.id}: swapped out, but the host keeps {on_host} of {sequence.sealed} blocks"
        if sequence.swap_ticket or sequence.host_anchor == NO_ROW:
            continue
        until = NO_ROW if sequence.swapped_out else sequence.anchor
        for row in blocks.index.path(sequence.host_anchor, until):
            if blocks.host.states[blocks.host.lead][row] != READY:
                yield f"sequence {sequence.id}: row {row} is to come from the host, but it is not there"


def _waiters(ledger: Ledger) -> Iterator[str]:
    """Check that a load knows all its waiters, and that processes and leases know each other."""
    for model in ledger.models.values():
        holds = [hold for hold in _holds(ledger, model) if not isinstance(hold, OpenSequence) or hold.is_open]
        waiting = [(id(hold), ticket) for hold in holds for ticket in hold.loads]
        running = [ticket for ticket in ledger.tickets.running.values() if ticket.model == model.id]
        known = {id(hold) for hold in holds}
        told = [(id(waiter), ticket.id) for ticket in running for waiter in ticket.waiters if id(waiter) in known]
        for _, ticket_id in set(waiting) ^ set(told):
            yield f"model {model.id}: ticket {ticket_id} is waited for or told, not both"
    for lease in ledger.leases.values():
        if not lease.processes.issuperset(lease.members) or (not lease.members and lease.state is LeaseState.LIVE):
            yield f"lease {lease.id}: its members are {lease.members}, of processes {lease.processes}"
        for token in lease.processes:
            if token not in ledger.processes or lease.id not in ledger.processes[token].leases:
                yield f"lease {lease.id}: a process of it does not know it"
        for sequence in lease.sequences.values():
            ticket = ledger.tickets.running.get(sequence.swap_ticket)
            if sequence.swap_ticket and (ticket is None or ticket.traveller is not sequence):
                yield f"sequence {sequence.id}: no ticket {sequence.swap_ticket} swaps it"


def _counts(model: Model, place: Place) -> Iterator[str]:
    """Check the counts of blocks and pins that operators see."""
    depth, states = model.blocks.index.depth, place.states[place.lead]
    for state in (FILLING, READY, DRAINING):
        if (seen := states.count(state)) != (told := place.counts.states[state]):
            yield f"model {model.id} {place.name}: {seen} blocks are {CopyState(state).name}, {told} are counted"
    pinned = sum(pins * (depth[row] + 1) for row, pins in enumerate(place.pins) if pins)
    if pinned != place.counts.pinned:
        yield f"model {model.id} {place.name}: {pinned} blocks are pinned, {place.counts.pinned} are counted"
    protected = {above for row, pins in enumerate(place.pins) if pins for above in model.blocks.index.path(row)}
    if len(protected) != place.protected.blocks:
        yield f"{place.name}: pins protect {len(protected)} blocks, {place.protected.blocks} are counted"


def _computing(ledger: Ledger, model: Model) -> list[str]:
    declared: Counter[bytes] = Counter()
    for sequence in _sequences(ledger, model):
        for position in range(max(sequence.sealed, sequence.hit_blocks), sequence.declared):
            declared[sequence.key(position)] += 1
    return [] if declared == model.computing else [f"model {model.id}: keys being computed do not add up"]


def _host_holders(ledger: Ledger, model: Model, claim: Claim) -> None:
    for sequence in _sequences(ledger, model):
        for group, (_, pages) in enumerate(sequence.swapped):
            for page in () if sequence.swap_ticket else pages:
                claim(group, page, PageState.PRIVATE, f"sequence {sequence.id}")
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id:
            for moved in ticket.moves:
                for page in moved.host_pages:
                    claim(moved.group, page, PageState.IN_FLIGHT, f"ticket {ticket.id}")
    for fetch in model.stored.fetches.values():
        for held in fetch.held():
            for page in held.pages:
                claim(held.group, page, held.state, f"fetch {fetch.ticket}")


def _device_holders(ledger: Ledger, model: Model, replica: int, claim: Claim) -> None:
    flying = {
        (moved.group, page)
        for ticket in ledger.tickets.running.values()
        if ticket.model == model.id and ticket.replica == replica
        for moved in ticket.moves
        for page in moved.own
    }
    for group, page in flying:
        claim(group, page, PageState.IN_FLIGHT, "a swap")
    for lease in ledger.leases.values():
        if lease.model != model.id or lease.replica != replica:
            continue
        for group, page in lease.quarantine:
            claim(group, page, PageState.QUARANTINED, f"lease {lease.id}")
        for group, pages in enumerate(lease.stock):
            for page in pages:
                claim(group, page, PageState.PRIVATE, f"stock of {lease.id}")
        for sequence in lease.sequences.values():
            for group, page in sequence.own_pages():
                if (group, page) not in flying:
                    claim(group, page, PageState.PRIVATE, f"sequence {sequence.id}")
