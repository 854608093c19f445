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
from collections.abc import Iterable, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.flows.core import TURN, Call, Core, Count
from cachesvc.flows.make_room import make_host_room, make_room
from cachesvc.flows.transfers import expedite, load_pairs, may_submit, store_pairs, submit
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pins import Keep, Pin, kept
from cachesvc.ledger.planner import parts_of, start_backup
from cachesvc.ledger.retention import window_positions
from cachesvc.ledger.sequences import Hold, OpenSequence
from cachesvc.ledger.storage_state import Expectation, Fetch, LentBlocks, filling_of
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Expected, Wait
from cachesvc.model.errors import LimitExceeded, PoolExhausted
from cachesvc.model.numbers import among, array_of, column
from cachesvc.model.words import ABSENT, FILLING, KEY_BYTES, NO_PAGE, READY, Direction, PagePairs, Urgency

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
    filled: list[_Filled] = []
    for source, part in _sources(core, call.model, call.replica, missing):
        tip = NO_ROW if source is None else part[source.place.lead][-1]
        after = [*loads.joined, *(each.ticket.id for each in filled)]
        filled.append(_fill(core, call, loads, source, part, tip, urgency, after))
    return filled


def _fill(
    core: Core,
    call: Call,
    loads: Loads,
    source: Replica | None,
    missing: list[array[int]],
    tip: int,
    urgency: Urgency,
    after: Seq[int] = (),
) -> _Filled:
    """A load of ``missing`` from ``source``, whose path down to ``tip`` is pinned, or from the host (None)."""
    model, replica = call.model, call.replica
    held = None if source is None else (source.id, Pin(model.blocks, source.place, tip))
    ticket = core.ledger.tickets.open(
        model.id, replica.id, Direction.LOAD, urgency, after=after, source=held, party=call.lease.party
    )
    coming = model.blocks.start_fill(replica.place, missing, ticket.id)
    ticket.rows = _moving(loads.rows, missing)
    return _Filled(ticket, load_pairs(model.blocks.host if source is None else source.place, coming))


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
        parts = ((other.place.states_of(group, rows) == READY).all() for group, rows in enumerate(missing) if rows)
        if other is replica or other.gone or not all(parts):
            continue
        rate = core.mover.peer_rate(model.id, other.id, replica.id)
        if rate > best:
            nearest, best = other, rate
    return nearest, best


def load_from(core: Core, call: Call, loads: Loads, source: Replica, tip: int, urgency: Urgency) -> Ticket:
    """Fill what is missing from another replica's device, where all is down to ``tip``. It is not followed by layers.

    The pin keeps what drains there; everything else stays because its rows are in flight.
    """
    filled = _fill(core, call, loads, source, loads.missing, tip, urgency)
    _submit(core, call.model, [filled], short_suffix=False)
    return filled.ticket


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
            self.core.begin(self.model.id, self.follow)

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


# Sharing between replicas: blocks of another replica come device to device, or else through the host.
#
# A call begins one transfer at most and waits a few times at most, each time for a bounded while. Whatever came of it,
# the call then goes on with the hit that there is; so nothing here fails a call.


@dataclass(slots=True)
class Sharing:
    """Progress of one call in reaching more than its replica does; made for the call, handed to each of its runs.

    ``ticket``: the load from another replica that the call began; with it the replica has ``blocks`` blocks in place.
    ``fetch``: what it waits for from storage, since ``fetch_since``; the first one was from block ``fetched_first`` on.
    ``goes_on``: it waits for what lies behind that one. ``in_pieces``: the host cannot hold all that storage has; the
    device has ``passed_on`` blocks of it by then. ``expected``: what the caller expects of another node; ``coming``
    blocks of it are on their way still, and ``arrived`` came; the call waits for them since ``expects_since``.
    ``expectation``: of them; None where nothing is on its way.
    """

    urgency: Urgency = Urgency.AWAITED
    waits: int = 0
    awaited: tuple[int, ...] = ()
    has_begun: bool = False
    ticket: Ticket | None = None
    blocks: int = 0
    fetch: Fetch | None = None
    fetch_since: float = 0.0
    fetched_first: int = 0
    goes_on: bool = False
    in_pieces: bool = False
    passed_on: int = 0
    expected: Expected | None = None
    expects_since: float | None = None
    coming: int = 0
    arrived: int = 0
    expectation: Expectation | None = None


class _Source(NamedTuple):
    """A replica that has all of ``path`` on its device, windows too."""

    replica: Replica
    path: array[int]


def share(core: Core, call: Call, keys: bytes, max_blocks: int, hit: Hit, sharing: Sharing) -> Wait | None:
    """Begin (or go on) to bring what another replica has beyond ``hit``; None: the hit is all that there will be."""
    model, replica = call.model, call.replica
    wanted = len(keys) // KEY_BYTES
    wanted = min(wanted, max_blocks) if max_blocks else wanted
    least = hit.blocks + core.limits.peer_blocks_min
    if len(model.replicas) < 2 or wanted < least or _is_over(core, sharing):
        return None
    source = _longest(core, model, replica, keys[: wanted * KEY_BYTES], least)
    if source is None or (hit.blocks and source.path[hit.blocks - 1] != hit.row):  # the keys are not chained
        return None
    if core.mover.can_reach(model.id, source.replica.id, replica.id):
        return _load(core, call, source, sharing)
    return _relay(core, call, source, hit, sharing)


def _is_over(core: Core, sharing: Sharing) -> bool:
    """True after the last wait, and where a wait was cut short: the call has been held up for long enough."""
    book = core.ledger.tickets
    too_slow = bool(sharing.awaited) and all(book.is_running(ticket) for ticket in sharing.awaited)
    return too_slow or sharing.waits >= core.limits.peer_waits


def _longest(core: Core, model: Model, replica: Replica, keys: bytes, least: int) -> _Source | None:
    """The replica with the longest prefix of ``least`` blocks or more; of equal ones, one that can be reached."""
    blocks = model.blocks
    best: tuple[int, bool, Replica, int] | None = None
    for other in model.replicas:
        if other is replica:
            continue
        count, row = blocks.find_in_place(keys, other.place)
        if count >= least and (best is None or count >= best[0]):
            near = core.mover.can_reach(model.id, other.id, replica.id)
            if best is None or (count, near) > best[:2]:
                best = count, near, other, row
    return None if best is None else _Source(best[2], blocks.index.path(best[3]))


def _load(core: Core, call: Call, source: _Source, sharing: Sharing) -> Wait | None:
    """Copy all that the replica lacks of the path from device to device. It is not followed layer by layer."""
    model, replica = call.model, call.replica
    loads = loads_of(core, model, replica, source.path, 0, len(source.path))
    if loads.joined or loads.blocked:
        return _wait(core, sharing, {*loads.joined, *loads.blocked})
    draining = replica.place.draining
    leaving = {draining[row] for row in source.path if row in draining} if draining else set()
    if leaving and not loads.missing[replica.place.lead]:  # windows alone would hang below nothing that stays
        return _wait(core, sharing, leaving)
    if sharing.has_begun or not loads.is_transfer or not may_submit(core, model, replica, call.lease.party):
        return None
    try:
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
    except (PoolExhausted, LimitExceeded):
        return None
    if wait is not None:
        return _wait(core, sharing, wait.tickets) if wait.tickets else wait
    ticket = load_from(core, call, loads, source.replica, source.path[-1], sharing.urgency)
    sharing.has_begun, sharing.ticket, sharing.blocks = True, ticket, len(source.path)
    return _wait(core, sharing, (ticket.id,))


def _relay(core: Core, call: Call, source: _Source, hit: Hit, sharing: Sharing) -> Wait | None:
    """Have the other replica store what the host lacks of the path; it is loaded from there as usual."""
    blocks, host = call.model.blocks, call.model.blocks.host
    rows = source.path[_first_from_host(call.model, call.replica, source.path, hit) :]
    filling = host.fillers(rows)
    if filling:
        return _wait(core, sharing, filling)
    if sharing.has_begun:
        return None
    on_host = hit.row if hit.blocks > hit.device_blocks else NO_ROW
    with kept(blocks, host, Keep(on_host)):  # room for the end of the path is not made at the cost of its middle
        if not has_backup_room(core, call.model, source.replica, rows):
            return TURN
        ticket = back_up(core, call.model, source.replica, rows, sharing.urgency)
    if ticket is None:
        return None
    sharing.has_begun = True
    core.count(Count.RELAYED_BLOCKS, ticket.blocks)
    return _wait(core, sharing, (ticket.id,))


def _first_from_host(model: Model, replica: Replica, path: array[int], hit: Hit) -> int:
    """The first position of the path that cannot be used in place: from there on the host must have everything."""
    place = replica.place
    gone = [
        position
        for group in place.window_groups
        for position in window_positions(model.layout, group, len(path))
        if place.states[group][path[position]] != READY
    ]
    return min([hit.device_blocks, *gone])


def _wait(core: Core, sharing: Sharing, tickets: Iterable[int]) -> Wait:
    sharing.waits += 1
    sharing.awaited = tuple(sorted(tickets))
    if sharing.urgency is Urgency.AWAITED:
        expedite(core, sharing.awaited)
    return Wait(sharing.awaited, core.limits.peer_wait_seconds)


def back_up(
    core: Core, model: Model, replica: Replica, rows: Sequence[int], urgency: Urgency = Urgency.BACKGROUND
) -> Ticket | None:
    """Store the rows (root first) that have a READY device copy and no host copy; as many as the host can take, where
    no more than a turn's worth is evicted for them: a caller with more makes room before, by ``has_backup_room``.

    Best effort: a host pool without room, or a mover without, ends it silently, because the device copies are still
    there. By default it has no waiter yet.
    """
    blocks, place = model.blocks, replica.place
    wanted = _unsaved(blocks.host, place, rows)
    if not wanted or not may_submit(core, model, replica):
        return None
    make_host_room(core, model, list(map(len, parts_of(blocks, place, wanted))))
    wanted = wanted[: blocks.host.free_blocks]
    if not wanted:
        return None
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, urgency)
    ticket.rows = wanted[:]
    coming = start_backup(blocks, place, wanted, ticket.id)
    submit(core, model, ticket, store_pairs(place, coming), layered=False)
    return ticket


def back_up_reused(core: Core, model: Model, replica: Replica, row: int) -> None:
    """Count a reuse for every block of the path down to ``row`` that has no host copy yet, and back up those due; where
    there are windows all of them, for it is behind ``row`` that a prompt can go on.

    The walk ends at the first block with a host copy, so each block is counted ``threshold`` times at most.
    """
    blocks = model.blocks
    index = blocks.index
    due, path = list[int](), list[int]()
    if not any(pool.capacity for pool in blocks.host.pools):
        return
    while row != NO_ROW and not blocks.host.is_present(row):
        index.reuses[row] = min(index.reuses[row] + 1, 0xFFFF)
        path.append(row)
        if core.writing.is_due(index.reuses[row]):
            due.append(row)
        row = index.parent[row]
    if due and blocks.host.window_groups:
        due = path
    back_up(core, model, replica, due[::-1])


def has_backup_room(core: Core, model: Model, replica: Replica, rows: Sequence[int]) -> bool:
    """True where ``back_up`` finds as much room on the host for ``rows`` as there can be. Else a turn's worth was
    evicted: ask again in another turn."""
    blocks, place = model.blocks, replica.place
    wanted = list(map(len, parts_of(blocks, place, _unsaved(blocks.host, place, rows))))
    return not wanted[blocks.host.lead] or make_host_room(core, model, wanted)


def _unsaved(host: Place, place: Place, rows: Sequence[int]) -> array[int]:
    """Those of ``rows`` that a place has whole and the host has not."""
    given = array("i", rows)
    is_new = (host.states_of(host.lead, given) == ABSENT) & (place.states_of(place.lead, given) == READY)
    return array_of(column(given)[is_new])


# Lend: another node wants to read host blocks. What lies on a device alone is saved first, urgently.
#
# A loan waits for no copy: blocks that are on their way to the host are lent too, and sent once they are there. So the
# borrower hears of a sealed block, opens its streams and asks for it while the block is copied.


def lend(core: Core, model: Model, keys: bytes) -> LentBlocks | Wait | None:
    """Keep on the host what is there, or on its way there, of packed, chained ``keys``, from the first on; None:
    nothing is. What it answers names the blocks by the index's own keys, and the block above them."""
    rows = _known(core, model, keys)
    if not _save(core, model, rows):
        return TURN
    running, host = core.ledger.tickets.running, model.blocks.host
    rows = rows[: _leading(_is_here(host, host.lead, rows))]
    tickets = host.fillers(rows)
    over = [ticket for ticket in tickets if running[ticket].is_settling and running[ticket].failing]
    if over:  # evict their blocks; their users were notified
        rows = rows[: _leading(~np.isin(filling_of(host, rows), over))]
        tickets = host.fillers(rows)
    if not rows:
        return None
    expedite(core, tickets)
    pages = [_pages(host, group, rows) for group in range(len(host.pools))]
    lent = LentBlocks(model.blocks, rows, pages, tickets)
    for ticket in tickets:
        running[ticket].waiters.append(lent)
    model.lent.append(lent)
    core.count(Count.LENT_BLOCKS, len(rows))
    return lent


def end_lending(core: Core, model: Model, lent: LentBlocks) -> None:
    """Unpin lent blocks: no stream sends from them any more."""
    core.count(Count.LENT_BLOCKS_BACK, len(lent.rows))
    model.lent.remove(lent)
    lent.let_go()


def _known(core: Core, model: Model, keys: bytes) -> array[int]:
    """Rows of the longest run from the first key on that the index has, each below the one before."""
    index = model.blocks.index
    low, high, tip = 0, len(keys) // KEY_BYTES, NO_ROW
    while low < high:
        middle = (low + high + 1) >> 1
        row = index.rows.get(keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES], NO_ROW)
        if row == NO_ROW:
            high = middle - 1
        else:
            low, tip = middle, row
    if tip == NO_ROW or index.depth[tip] + 1 < low:
        return array("i")
    rows = index.last_rows(tip, low)
    same = index.matching(rows, keys[: low * KEY_BYTES])
    if same < low:
        core.count(Count.KEYS_MISPLACED)
    return rows[:same]


def _save(core: Core, model: Model, rows: array[int]) -> bool:
    """Begin to copy what is on a device alone to the host, as far as there is room; False: it takes another turn."""
    host = model.blocks.host
    present = _leading(_is_here(host, host.lead, rows))
    absent = rows[present:]
    if not absent:
        return True
    with kept(model.blocks, host, Keep(rows[present - 1] if present else NO_ROW)):
        for replica in model.replicas:
            if not has_backup_room(core, model, replica, absent):
                return False
            back_up(core, model, replica, absent, Urgency.AWAITED)
    return True


def _is_here(host: Place, group: int, rows: array[int]) -> npt.NDArray[np.bool_]:
    """Mask of the rows that the host has a copy of, or gets one."""
    return np.isin(host.states_of(group, rows), (READY, FILLING))


def _leading(mask: npt.NDArray[np.bool_]) -> int:
    """Number of leading elements that are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def _pages(host: Place, group: int, rows: array[int]) -> array[int]:
    pages = column(host.pages_of(group, rows)).copy()
    pages[~_is_here(host, group, rows)] = NO_PAGE
    return array_of(pages)
