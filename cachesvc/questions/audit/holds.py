"""Holds of sequences and transfers, recounted: pins, flights, block tables, keys that are being computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.transfer import Direction
from cachesvc.model.words import ABSENT, DRAINING, FILLING, NO_PAGE, READY
from cachesvc.questions.audit.recount import Check, captured, told, walked
from cachesvc.questions.snapshot import int32s, place_states, uint16s


def hold_parts(ledger: Ledger, model: Model) -> list[Check]:
    """Checks of a model's sequences and transfers."""
    where = f"model {model.id}"
    return [
        captured(f"{where}: pins and transfers", partial(_Holds, ledger, model), recount_holds),
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


class _Holds:
    """Pins and transfers as counted by row, and all their holders."""

    def __init__(self, ledger: Ledger, model: Model) -> None:
        index = model.blocks.index
        self.where = f"model {model.id}"
        self.places = {place.number: _PlaceHolds(place) for place in index.told}
        self.depth, self.parent = int32s(index.depth), int32s(index.parent)
        self.flights: Any = uint16s(index.flights)
        self.known = np.array(sorted(index.flying), np.int64)
        self.flying: list[int] = []
        for lease in ledger.leases.values():
            for hold in (*lease.sequences.values(), *lease.prefetches) if lease.model == model.id else ():
                for number, group, row in hold.pins():
                    place = self.places[number]
                    (place.pinned if group is None else place.windowed[group]).append(row)
        for ticket in ledger.tickets.running.values():
            if ticket.model == model.id:
                self.flying += ticket.rows
                self.flying += [drain.row for drain in ticket.drains]
                if ticket.source is not None:
                    self.places[ticket.source[0] + 1].pinned.append(ticket.source[1])
        pins = [*(lent.pins() for lent in model.lent), *(each.pins() for each in model.pins.by_key.values())]
        for number, group, row in chain(model.stored.pins(), *pins):
            place = self.places[number]
            (place.pinned if group is None else place.windowed[group]).append(row)


def recount_holds(seen: _Holds) -> list[str]:
    """Check that every pin has its holder and is on a copy that is there, that every transfer has its ticket and every
    filling or draining copy a transfer, and that operators' counts of pins are right."""
    rows = len(seen.flights)
    out: list[str] = []
    for place in seen.places.values():
        out += _compare(f"{place.name} row", "pins", place.pins, place.pinned, rows)
        absent = np.flatnonzero((place.pins > 0) & (place.states[place.lead] == ABSENT))
        out += told(absent, lambda row, at=place.name: f"{at} row {row}: pinned, but its copy is ABSENT")  # type: ignore[misc]
        pinned = int((place.pins.astype(np.int64) * (seen.depth + 1)).sum())
        if pinned != place.counted:
            out.append(f"{seen.where} {place.name}: {pinned} blocks are pinned, {place.counted} are counted")
        protected = _count_above(np.flatnonzero(place.pins > 0), seen.parent)
        if protected != place.protected:
            out.append(f"{seen.where} {place.name}: pins protect {protected} blocks, {place.protected} are counted")
        for group, pins in place.windows.items():
            where = f"{place.name} group {group} row"
            out += _compare(where, "window pins", pins, place.windowed[group], rows)
            absent = np.flatnonzero((pins > 0) & (place.states[group] == ABSENT))
            out += told(absent, lambda row, at=where: f"{at} {row}: a window holds it, but its copy is ABSENT")  # type: ignore[misc]
        moving = np.zeros(rows, np.bool_)
        for column in place.states:
            moving |= (column == FILLING) | (column == DRAINING)
        alone = np.flatnonzero(moving & (seen.flights == 0))
        out += told(alone, lambda row, at=place.name: f"{at} row {row}: on its way, but no ticket moves it")  # type: ignore[misc]
    if not np.array_equal(seen.known, np.flatnonzero(seen.flights)):
        out.append(f"{seen.where}: {len(seen.known)} rows are known in flight, {np.count_nonzero(seen.flights)} are")
    return out + _compare(f"{seen.where} row", "transfers", seen.flights, seen.flying, rows)


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
