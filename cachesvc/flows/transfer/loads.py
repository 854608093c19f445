"""Loads of a path: the copies that must come to a replica's device, the room they take, and their transfer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.transfers import expedite, load_pairs, submit
from cachesvc.ledger.holds import Hold
from cachesvc.ledger.index.block_ledger import window_positions
from cachesvc.ledger.index.pins import Keep, Pin
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tickets import Ticket, TicketBook
from cachesvc.model.numbers.int32s import among, array_of, column
from cachesvc.model.transfer import Direction, PagePairs, Urgency
from cachesvc.model.words import ABSENT, FILLING


class Loads(NamedTuple):
    """A stretch of a hit that is to be on the device.

    ``rows``: its blocks; ``missing[g]``: those whose copy must come from elsewhere, of whole blocks or of a window
    alone; ``needed[g]``: position -> row of all that a window needs. ``keep``: what is there already and must stay.
    ``joined``: tickets that bring the rest. ``blocked``: tickets to wait for first, because they fill other copies of
    the same blocks, or have failed and are being settled: their waiters got the error.
    """

    rows: array[int]
    missing: list[array[int]]
    needed: dict[int, dict[int, int]]
    keep: Keep
    joined: list[int]
    blocked: list[int]

    @property
    def is_transfer(self) -> bool:
        """True where something must come by a transfer of its own."""
        return any(self.missing)

    def pages_wanted(self, fresh: Seq[int] = ()) -> list[int]:
        """Pages of each group for the loads, and ``fresh[g]`` more."""
        counts = list(map(len, self.missing))
        return [count + more for count, more in zip(counts, fresh, strict=True)] if fresh else counts


def loads_of(core: Core, model: Model, replica: Replica, rows: array[int], base: int, hit_blocks: int) -> Loads:
    """Loads that a hit of ``hit_blocks`` needs for ``rows``, which are its positions from ``base`` on."""
    place = replica.place
    if not rows:
        return Loads(rows, [rows] * len(place.pools), {}, Keep(), [], [])
    path, lead = column(rows), place.states_of(place.lead, rows)
    whole = array_of(path[lead == ABSENT])
    awaited = array_of(path[lead == FILLING])
    missing = [whole] * len(place.pools)
    needed: dict[int, dict[int, int]] = {}
    windows: list[tuple[int, int]] = []
    blocked = array("i")
    for group in place.window_groups:
        states = place.states[group]
        positions = window_positions(model.layout, group, hit_blocks)
        needed[group] = {position: rows[position - base] for position in positions if position >= base}
        missing[group] = array("i", [row for row in needed[group].values() if states[row] == ABSENT])
        awaited.extend([row for row in needed[group].values() if states[row] == FILLING])
        windows += [(group, row) for row in needed[group].values() if states[row] != ABSENT]
        blocked.extend(missing[group])
    present = np.flatnonzero(lead != ABSENT)
    deepest = rows[present[-1]] if len(present) else NO_ROW
    joined, running = place.fillers(awaited), core.ledger.tickets.running
    over = [ticket for ticket in joined if running[ticket].is_settling and running[ticket].failing]
    return Loads(
        rows,
        missing,
        needed,
        Keep(deepest, tuple(windows)),
        joined,
        [*place.fillers(blocked), *over],
    )


def bring(
    core: Core, call: Call, hold: Hold, loads: Loads, urgency: Urgency, *, short_suffix: bool = False
) -> list[Ticket]:
    """Fill what is missing from the host and join what is being filled; ``hold`` relies on both from now on.

    There is room, and a transfer can begin. ``urgency``: of a transfer of its own; where it is AWAITED, of those that
    are joined too. ``short_suffix``: as of a ``Transfer``.
    """
    model, book = call.model, core.ledger.tickets
    tickets = [book.running[ticket] for ticket in loads.joined]
    if urgency is Urgency.AWAITED:
        expedite(core, loads.joined)
    if not loads.is_transfer:
        hold.rely_on(loads.rows, loads.needed, tickets)
        return tickets
    ticket, pairs = _begin(call, book, loads, loads.missing, urgency)
    hold.rely_on(loads.rows, loads.needed, [*tickets, ticket])
    submit(core, model, ticket, pairs, layered=True, short_suffix=short_suffix)
    return [*tickets, ticket]


def bring_part(core: Core, call: Call, sequence: Sequence, loads: Loads, *, short_suffix: bool = False) -> list[int]:
    """Begin to load the blocks of a turn by a transfer of their own, where more are missing. Returns the pages that it
    takes of each group, or nothing. The next run of the call joins it. ``short_suffix``: as of a ``Transfer``.

    A load is layered, so parts are large: all layers of one part come before the first layer of the next.
    """
    book, place = core.ledger.tickets, call.replica.place
    whole = loads.missing[place.lead]
    if len(whole) <= core.turns.loaded:
        return []
    if any(book.has_failed(ticket) for ticket in sequence.parts):
        return []  # all of it at once: the call's answer names the ticket, and says how it ends
    part = whole[: core.turns.loaded]
    missing = [part] * len(loads.missing)
    for group in place.window_groups:  # they come with their blocks
        missing[group] = array_of(column(loads.missing[group])[among(column(loads.missing[group]), column(part))])
    ticket, pairs = _begin(call, book, loads, missing, Urgency.AWAITED)
    sequence.parts.append(ticket.id)
    submit(core, call.model, ticket, pairs, layered=True, short_suffix=short_suffix)
    return list(map(len, missing))


def _begin(
    call: Call, book: TicketBook, loads: Loads, missing: list[array[int]], urgency: Urgency
) -> tuple[Ticket, tuple[PagePairs, ...]]:
    """A load of ``missing`` from the host, below those that are joined, and the pages that it is to copy."""
    model, replica, party = call.model, call.replica, call.lease.party
    ticket = book.open(model.id, replica.id, Direction.LOAD, urgency, after=loads.joined, party=party)
    coming = model.blocks.start_fill(replica.place, missing, ticket.id)
    ticket.rows = _moving(loads.rows, missing)
    return ticket, load_pairs(model.blocks.host, coming)


def load_from(core: Core, call: Call, loads: Loads, source: Replica, tip: int, urgency: Urgency) -> Ticket:
    """Fill what is missing from another replica's device, where all is down to ``tip``. It is not followed by layers.

    The pin keeps what drains there; everything else stays because its rows are in flight.
    """
    model, replica, party = call.model, call.replica, call.lease.party
    held = source.id, Pin(model.blocks, source.place, tip)
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.LOAD, urgency, source=held, party=party)
    coming = model.blocks.start_fill(replica.place, loads.missing, ticket.id)
    ticket.rows = _moving(loads.rows, loads.missing)
    submit(core, model, ticket, load_pairs(source.place, coming), layered=False)
    return ticket


def _moving(rows: array[int], missing: Iterable[array[int]]) -> array[int]:
    """Rows of ``rows`` of which any copy comes, in their order."""
    parts = [part for part in missing if part]
    if all(part is parts[0] for part in parts):  # whole blocks, in their order
        return parts[0][:]
    moving = np.concatenate([column(part) for part in parts])
    return array_of(column(rows)[among(column(rows), moving)])
