"""Loads of a path: the copies that must come to a replica's device, the room they take, and their transfer.

The host has what a hit counts on. Where another replica's device has it too, and copies to this one, it is nearer: the
bytes come from there, and the link to the host is left to others. Of many blocks the last ones come from the host
meanwhile, as many as take that link as long:

    path    A B C D E F G H
    peer    ──────────────      rate r
    host                  ──    rate 1: one in r + 1
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cachesvc.flows.core import Call, Core, Count, begin
from cachesvc.flows.make_room import make_host_room
from cachesvc.flows.transfers import expedite, load_pairs, may_submit, store_pairs, submit
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pins import Keep, Pin
from cachesvc.ledger.retention import window_positions
from cachesvc.ledger.sequences import Hold, OpenSequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.numbers import among, array_of, column
from cachesvc.model.words import ABSENT, FILLING, READY, Direction, PagePairs, Urgency

LEAST_FROM_HOST = 8
"""Blocks of a load from another device that are worth a transfer of their own from the host."""


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
    book = core.ledger.tickets
    tickets = [book.running[ticket] for ticket in loads.joined]
    if urgency is Urgency.AWAITED:
        expedite(core, loads.joined)
    if not loads.is_transfer:
        hold.rely_on(loads.rows, loads.needed, tickets)
        return tickets
    filled = _begin(core, call, loads, loads.missing, urgency)
    tickets += [each.ticket for each in filled]
    hold.rely_on(loads.rows, loads.needed, tickets)
    _submit(core, call.model, filled, short_suffix=short_suffix)
    return tickets


def bring_part(
    core: Core, call: Call, sequence: OpenSequence, loads: Loads, *, short_suffix: bool = False
) -> list[int]:
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
    filled = _begin(core, call, loads, missing, Urgency.AWAITED)
    sequence.parts.update((each.ticket.id, each.ticket.blocks) for each in filled)
    _submit(core, call.model, filled, short_suffix=short_suffix)
    return list(map(len, missing))


class _Filled(NamedTuple):
    """A ticket that is to be submitted."""

    ticket: Ticket
    pairs: tuple[PagePairs, ...]


def _begin(core: Core, call: Call, loads: Loads, missing: list[array[int]], urgency: Urgency) -> list[_Filled]:
    """Loads of ``missing``, below those that are joined and each below the one before, and the pages to copy."""
    model, replica, party = call.model, call.replica, call.lease.party
    filled: list[_Filled] = []
    for source, part in _sources(core, model, replica, missing):
        place, held = model.blocks.host, None
        if source is not None:
            place = source.place
            held = source.id, Pin(model.blocks, place, part[place.lead][-1])
        after = [*loads.joined, *(each.ticket.id for each in filled)]
        ticket = core.ledger.tickets.open(
            model.id, replica.id, Direction.LOAD, urgency, after=after, source=held, party=party
        )
        coming = model.blocks.start_fill(replica.place, part, ticket.id)
        ticket.rows = _moving(loads.rows, part)
        filled.append(_Filled(ticket, load_pairs(place, coming)))
    return filled


def _submit(core: Core, model: Model, filled: Iterable[_Filled], *, short_suffix: bool) -> None:
    """Hand loads to the mover. Those from another device are not followed by layers."""
    for ticket, pairs in filled:
        if is_from_peer := ticket.source is not None:
            core.count(Count.PEER_LOADS)
        submit(core, model, ticket, pairs, layered=not is_from_peer, short_suffix=short_suffix)


def _sources(
    core: Core, model: Model, replica: Replica, missing: list[array[int]]
) -> list[tuple[Replica | None, list[array[int]]]]:
    """Sources of what is missing, root first: the nearest replica that has all of it, and the host (None)."""
    source, rate = _nearest(core, model, replica, missing)
    if source is None:
        return [(None, missing)]
    rows = missing[0]
    count = int(len(rows) / (rate + 1))
    is_whole = all(part is rows for part in missing)
    if not is_whole or count < LEAST_FROM_HOST or core.mover.free_slots(model.id, replica.id) < 2:
        return [(source, missing)]
    parts = rows[:-count], rows[-count:]
    return [(source, [parts[0]] * len(missing)), (None, [parts[1]] * len(missing))]


def _nearest(core: Core, model: Model, replica: Replica, missing: list[array[int]]) -> tuple[Replica | None, float]:
    """The replica from whose device what is missing comes in least time, and its rate in units of the host's; None
    where the host's is higher, or windows alone are missing, which would hang below nothing that stays."""
    nearest, best = None, 1.0
    if not missing[replica.place.lead]:
        return nearest, best
    for other in model.replicas:
        if other is replica or other.gone or not _has_all(other.place, missing):
            continue
        rate = core.mover.peer_rate(model.id, other.id, replica.id)
        if rate > best:
            nearest, best = other, rate
    return nearest, best


def _has_all(place: Place, missing: Seq[array[int]]) -> bool:
    return all(bool((place.states_of(group, rows) == READY).all()) for group, rows in enumerate(missing) if rows)


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


# Windows and states that prompts need after their blocks were copied to the host: they follow these there.
#
# A state may be published after its block. And room is made on the host for those copies of a block alone that a prompt
# is known to need; a later hit, or a sequence that ends, makes others needed.


@dataclass(slots=True, eq=False)
class LateCopy:
    """A windowed copy whose block is on its way to the host: it follows when that has come."""

    core: Core
    model: Model
    replica: Replica
    group: int
    key: bytes

    def load_ended(self, ticket: int, reason: str) -> None:
        """The block has come to the host, or failed to."""
        del ticket
        if not reason:
            begin(self.core.chores, self.model.id, self.follow)

    def follow(self) -> bool:
        """Copy it, unless its block is gone."""
        row = self.model.blocks.index.rows.get(self.key, NO_ROW)
        if row != NO_ROW and not self.replica.gone:
            back_up_copies(self.core, self.model, self.replica, [(self.group, row)])
        return True


def back_up_copies(core: Core, model: Model, replica: Replica, copies: Iterable[tuple[int, int]]) -> None:
    """Copy windowed copies, ``(group, row)``, to the host where their blocks are there, or follow them there. Best
    effort, as of ``back_up``: a copy that finds no room stays on the device alone."""
    blocks, place, host = model.blocks, replica.place, model.blocks.host
    if not host.usable_blocks:
        return
    due = [array("i") for _ in place.pools]
    for group, row in copies:
        is_here = place.states[place.lead][row] == READY == place.states[group][row]  # a drain frees both
        if not is_here or host.states[group][row] != ABSENT:
            continue
        if host.filling[row]:
            key = blocks.index.key_of(row)
            core.ledger.tickets.running[host.filling[row]].waiters.append(LateCopy(core, model, replica, group, key))
        elif host.states[host.lead][row] == READY:
            due[group].append(row)
    if not any(due) or not may_submit(core, model, replica):
        return
    own = frozenset(row for each in due for row in each)
    make_host_room(core, model, list(map(len, due)), own.__contains__)
    for groups in host.shares:
        left = host.pools[groups[0]].unreserved
        for group in groups:
            due[group] = due[group][max(0, len(due[group]) - left) :]
            left -= len(due[group])
    rows = array("i", dict.fromkeys(row for each in due for row in each))
    if rows:
        ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, Urgency.BACKGROUND)
        ticket.rows = rows
        submit(core, model, ticket, store_pairs(place, blocks.start_fill(host, due, ticket.id)), layered=False)
