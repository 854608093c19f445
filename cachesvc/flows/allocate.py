"""Growth of a sequence: Allocate (what lies on the host is loaded, the rest is fresh and private), swap, the stock."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import gt

from cachesvc.flows.core import TURN, Call, Core, Count, no_sequence, refusal_of, require_active
from cachesvc.flows.loads import bring, bring_part, loads_of
from cachesvc.flows.make_room import exhausted, free_some, keep_room, make_room, within_turn
from cachesvc.flows.transfers import (
    carry_out,
    load_pairs,
    look_ahead,
    may_submit,
    note_load,
    pages_ahead,
    require_transfer,
    store_pairs,
    submit,
    ticket_view,
    wait_for,
)
from cachesvc.ledger.ledger import Lease, LeaseState, Model
from cachesvc.ledger.page_pool import PagePool, Reservation, expire
from cachesvc.ledger.pins import Keep
from cachesvc.ledger.planner import drop_idle_copies, no_row, start_backup
from cachesvc.ledger.sealing import grow_by
from cachesvc.ledger.sequence_state import AWAY, ON_DEVICE
from cachesvc.ledger.sequences import Fresh, OpenSequence
from cachesvc.ledger.shared_pool import change_group
from cachesvc.ledger.tickets import MovedPages
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import (
    NO_POSITIONS,
    Allocated,
    GroupCells,
    Growth,
    Positions,
    Swapped,
    Wait,
    before_repeated,
)
from cachesvc.model.errors import CacheError, Conflict, InvalidRequest, LimitExceeded, NotOwned
from cachesvc.model.numbers import array_of, column, most_of
from cachesvc.model.words import ABSENT, NO_PAGE, Direction, PagePairs, Urgency


def allocate(
    core: Core,
    call: Call,
    sequence_id: int,
    blocks: int,
    *,
    short_suffix: bool = False,
    positions: Positions = NO_POSITIONS,
) -> Allocated | Wait:
    """Make the sequence's tables ``blocks`` long, all or nothing. ``short_suffix``: as of a ``Transfer``.

    ``positions[g]``: the new blocks that get a page in a windowed group; not named: all of a window, and the last one
    of a state. Raises InvalidRequest (shorter than the tables or than the hit, positions), LimitExceeded (blocks,
    transfers), PoolExhausted, LoadFailed, Conflict (swapped out).
    """
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_active(sequence)
    first = sequence.blocks
    if blocks > call.lease.blocks_per_sequence:
        most, setting = call.lease.blocks_per_sequence, "blocks_per_sequence"
        raise LimitExceeded.of_setting("blocks of a sequence", blocks, most, setting, "ask for fewer")
    if blocks < max(first, sequence.hit_blocks):
        raise InvalidRequest(
            f"sequence {sequence_id} has {first} blocks and a hit of {sequence.hit_blocks}; allocate at least as many"
        )
    loads = loads_of(core, call.model, call.replica, sequence.rest(), first, sequence.hit_blocks)
    if loads.blocked:
        return wait_for(core, loads.blocked)
    if loads.is_transfer and not may_submit(core, call.model, call.replica, call.lease.party):
        begun = list(filter(core.ledger.tickets.is_running, sequence.parts))
        if begun:  # its own parts have its share
            return wait_for(core, begun)
        require_transfer(core, call.model, call.replica, call.lease.party)
    fresh = _fresh(call, first + len(loads.rows), blocks, positions)
    counts = fresh.counts(len(sequence.tables))
    wait = make_room(core, call, loads.pages_wanted(sequence.missing(counts)), loads.keep, sequence)
    if wait is not None:
        return wait
    if not sequence.prepare(blocks, counts, core.turns.pages):
        return keep_room(core, call, loads.pages_wanted(sequence.missing(counts)), sequence)
    if part := bring_part(core, call, sequence, loads, short_suffix=short_suffix):
        left = [most - taken for most, taken in zip(loads.pages_wanted(), part, strict=True)]
        return keep_room(core, call, left, sequence)
    tickets = bring(core, call, sequence, loads, Urgency.AWAITED, short_suffix=short_suffix) if loads.rows else []
    in_parts = sum(sequence.parts.values())
    sequence.parts.clear()
    sequence.grow(sequence.fresh_pages(counts), fresh)
    call.lease.grown += fresh.blocks
    note_load(call.replica.place, in_parts + len(loads.missing[call.replica.place.lead]))
    look_ahead(core, call.model, call.replica)
    tables = tuple(GroupCells(group, first, table[first:]) for group, table in enumerate(sequence.tables))
    return Allocated(tables, tuple(map(ticket_view, tickets)), len(loads.rows))


def _fresh(call: Call, first: int, blocks: int, positions: Positions) -> Fresh:
    """The new blocks from ``first`` on, with the positions that get a page where not all do. Raises InvalidRequest."""
    place, states = call.replica.place, call.model.layout.state_groups
    if not positions and not states:
        return Fresh(first, blocks - first, NO_POSITIONS)
    found: dict[int, Sequence[int]] = {group: range(max(first, blocks - 1), blocks) for group in states}
    for group, named in positions.items():
        if group not in place.window_groups:
            raise InvalidRequest(f"group {group} has no window: each of its new blocks gets a page")
        rising = sorted(set(named))
        if rising != list(named) or (rising and not first <= rising[0] <= rising[-1] < blocks):
            raise InvalidRequest(
                f"positions of group {group} must rise within the new blocks [{first}, {blocks}), got {list(named)[:8]}"
            )
        found[group] = rising
    return Fresh(first, blocks - first, found)


# Swap: take a sequence off the device (preemption) and bring it back, own pages and shared prefix alike.
#
# Out: sealed blocks get host copies where they have none, own pages are copied to host pages of the sequence; when all
# has arrived the device pages are free and the pin moves to the host. In is the way back. A failed swap leaves the
# sequence where it was.


def swap_out(core: Core, call: Call, sequence_id: int) -> Swapped | Wait:
    """Start to take a sequence off the device.

    Raises PoolExhausted when the host cannot hold it, LimitExceeded (transfers), Conflict.
    """
    sequence = call.sequence(sequence_id)
    model, place = call.model, call.replica.place
    require_active(sequence)
    if sequence.blocks < sequence.hit_blocks:
        raise Conflict(f"sequence {sequence_id} has not allocated its hit yet; release it instead")
    path = model.blocks.index.path(sequence.anchor)
    host = model.blocks.host
    running = [*sequence.loads, *host.fillers(path)]
    if running:
        return wait_for(core, running)
    rows = _absent(host, path)
    wanted = [count + (len(rows) if group in host.full_groups else 0) for group, count in enumerate(sequence.moving())]
    if any(wanted):
        require_transfer(core, model, call.replica, call.lease.party)
    if (wait := _make_host_room(core, model, sequence.anchor, wanted)) is not None:
        return wait
    moves = sequence.own_moves()
    ticket = core.ledger.tickets.open(model.id, call.replica.id, Direction.STORE, party=call.lease.party)
    sequence.leave(ticket, moves)
    coming = start_backup(model.blocks, place, rows, ticket.id)
    ticket.rows = rows[:]
    sequence.keep_on_host()
    submit(core, model, ticket, _joined(moves, store_pairs(place, coming)), layered=False)
    return Swapped((ticket_view(ticket),), ())


def swap_in(core: Core, call: Call, sequence_id: int, *, short_suffix: bool = False) -> Swapped | Wait:
    """Start to bring a sequence back; the answer has its new tables. ``short_suffix``: as of a ``Transfer``.

    After a swap in that failed, asking again says that no launch that was to use it runs any more.

    Raises PoolExhausted, LimitExceeded (transfers), Conflict.
    """
    sequence = call.sequence(sequence_id)
    model, replica, place = call.model, call.replica, call.replica.place
    if sequence.state is not AWAY:
        raise refusal_of(sequence)
    path = model.blocks.index.path(sequence.host_anchor)
    filling = place.fillers(path)
    if filling:
        return wait_for(core, filling)
    absent = _absent(place, path)
    wanted = [len(absent) if group in place.full_groups else 0 for group in range(len(place.pools))]
    for group, own in enumerate(sequence.swapped):
        wanted[group] += len(own.positions)
    if any(wanted):
        require_transfer(core, model, replica, call.lease.party)
    sequence.free_spares()
    present = len(path) - len(absent)
    keep = Keep(path[present - 1] if present else NO_ROW)  # what a device has is prefix-closed
    wait = make_room(core, call, wanted, keep, sequence)
    if wait is not None:
        return wait
    ticket = core.ledger.tickets.open(model.id, replica.id, Direction.LOAD, party=call.lease.party)
    missing = [absent if group in place.full_groups else array("i") for group in range(len(place.pools))]
    coming = model.blocks.start_fill(place, missing, ticket.id)
    ticket.rows = absent[:]
    sequence.come_back(ticket)
    pairs = _joined(ticket.moves, load_pairs(model.blocks.host, coming))
    submit(core, model, ticket, pairs, layered=True, short_suffix=short_suffix)
    tables = tuple(GroupCells(group, 0, table[:]) for group, table in enumerate(sequence.tables))
    return Swapped((ticket_view(ticket),), tables)


def _absent(place: Place, rows: array[int]) -> array[int]:
    """Rows of ``rows`` that have no copy on the place."""
    return array_of(column(rows)[place.states_of(place.lead, rows) == ABSENT])


def _joined(moves: list[MovedPages], shared: Iterable[PagePairs]) -> tuple[PagePairs, ...]:
    """Own pages and shared blocks as one transfer: the pages of a group together."""
    of_group = {each.group: (array("i", each.device_pages), array("i", each.host_pages)) for each in shared}
    for moved in moves:
        if moved.positions:
            device, host = of_group.get(moved.group, (array("i"), array("i")))
            of_group[moved.group] = moved.device_pages + device, moved.host_pages + host
    return tuple(PagePairs(group, *of_group[group]) for group in sorted(of_group))


def _make_host_room(core: Core, model: Model, tip: int, wanted: list[int]) -> Wait | None:
    """Free ``wanted[g]`` host pages of group g, at the cost of no block from the root down to ``tip``; None when they
    are there. Where it takes several turns, other calls may take the pages freed so far. Raises PoolExhausted, with
    nothing evicted in this turn."""
    host, index = model.blocks.host, model.blocks.index
    if host.has_shared_pools:
        drop_idle_copies(model.blocks, host, wanted, core.turns.evicted, cheap=True)
    now = within_turn(core, host, wanted)
    spares = (lambda row: index.is_above(row, tip)) if tip != NO_ROW else no_row
    plan, short = model.evictor.plan_host_room(now, spares)
    if short is not None:
        groups = next(groups for groups in host.shares if short in groups)
        raise exhausted(host.pools[short], sum(wanted[g] for g in groups), sum(map(plan.freed, groups)))
    carry_out(core, model, plan)
    return None if now == wanted else TURN


# The stock: pages granted ahead, so that a sequence grows by a block with no round trip; and growth out of it.
#
# A stock is refilled with each Step from free pages, but for room ahead (``transfers.py``). A cache that has been
# running for a while has nothing else free, and then what is coldest goes for the stock; but never more than the
# lease has grown by since. So growth is replaced, block for block, whatever others take meanwhile, and an engine that
# does not grow evicts nothing. One that begins on a full cache has its first growth by Allocate, and finds as much in
# its stock afterwards; each growth that found the stock empty makes it larger by one, up to the target, so the stock
# settles at what the engine's steps use. An engine that knows what it is about to take says so (``due``), and finds
# that there.
#
# What a refill costs grows with the pages wanted, and no more is evicted in it than in a turn: the rest of what the
# lease has grown by goes once the step is answered, and is kept for the next refill. Where nothing can go, nothing is
# walked, counted or refused: the stock stays short, and growth takes the path of Allocate, which waits or is refused
# with the numbers.

STOCK_PART = 16
"""Largest part of a pool in all stocks together whose engines say what they take next, a 16th: cached blocks go for
it."""


def extend(core: Core, call: Call, sequence_id: int, pages: tuple[GroupCells, ...]) -> int:
    """Put stock pages at the end of the sequence's tables, the same number in each group; returns the new length.

    Raises InvalidRequest, NotOwned (not in the stock, or of an older generation), Conflict, LoadFailed.
    """
    counts = {len(cells.pages) for cells in pages}
    if sorted(cells.group for cells in pages) != list(range(len(call.replica.place.pools))) or len(counts) != 1:
        raise InvalidRequest("extend takes the same number of pages for every group")
    more = counts.pop()
    if any(len(cells.generations) != more for cells in pages):
        raise InvalidRequest("extend needs a generation for each page")
    in_order = sorted(pages, key=lambda cells: cells.group)
    columns = [cells.pages for cells in in_order], [cells.generations for cells in in_order]
    grown: list[int] = []
    stop = extend_many(core, call, Growth((sequence_id,), (0, more), *columns), range(1), grown)
    if stop is not None:
        raise stop
    return grown[0]


def extend_many(
    core: Core,
    call: Call,
    growth: Growth,
    entries: range,
    answers: list[int],
    held: Collection[int] = (),
) -> CacheError | None:
    """Grow the first of ``entries`` that may, in order. ``answers`` gets the new length of each; it is short where an
    entry is refused (returns why), or its sequence was named before or is among ``held``. Those behind it are not
    looked at."""
    del core
    lease, place, limit = call.lease, call.replica.place, call.lease.blocks_per_sequence
    # The pages of all entries are compared with the stock at once, which is what most Steps pass. Where they do not,
    # a page may be named by two entries: the second must find it gone, so then one entry is looked at.
    unfit = _unfit(lease, place, growth, entries)
    if unfit is not None and len(entries) > 1:
        entries = entries[:1]
        unfit = _unfit(lease, place, growth, entries)
    starts, columns = growth.starts[entries.start : entries.stop + 1], growth.pages
    numbers = before_repeated(growth.sequences[entries.start : entries.stop], held)
    growing: list[OpenSequence] = []
    lengths: list[int] = []
    stop: CacheError | None = None
    for number, first, last in zip(numbers, starts, starts[1:], strict=False):
        sequence = lease.sequences.get(number)
        if sequence is None or sequence.state not in ON_DEVICE:
            stop = no_sequence(number) if sequence is None else refusal_of(sequence)
            break
        before = len(sequence.tables[0])
        blocks = before + last - first
        if blocks > limit:
            setting = "blocks_per_sequence"
            stop = LimitExceeded.of_setting("blocks of a sequence", blocks, limit, setting, "end the request")
            break
        if before < sequence.hit_blocks:
            stop = InvalidRequest(f"allocate the {sequence.hit_blocks} blocks that were hit before growing")
            break
        if unfit is not None:
            stop = unfit
            break
        growing.append(sequence)
        lengths.append(blocks)
    bounds = starts[: len(growing) + 1]
    grow_by(growing, bounds, columns)
    leads = call.model.layout.pool_leads
    for group, (lead, pages) in enumerate(zip(leads, columns, strict=True)):
        taken = pages[bounds[0] : bounds[-1]]
        lease.stock[lead].difference_update(taken)
        if group != lead:
            change_group(place.pools[lead], place.pools[group], [page for page in taken if page != NO_PAGE])
    lease.grown += bounds[-1] - bounds[0]
    answers += lengths
    return stop


def _unfit(lease: Lease, place: Place, growth: Growth, entries: range) -> CacheError | None:
    """Reason why the pages of the entries cannot be taken: each is in the stock, once, of the granted generation."""
    part = slice(growth.starts[entries.start], growth.starts[entries.stop])
    for groups in place.shares:
        stock, granted = lease.stock[groups[0]], place.pools[groups[0]].generations
        wanted, asked = growth.pages[groups[0]][part], growth.generations[groups[0]][part]
        for group in groups[1:]:
            wanted, asked = [*wanted, *growth.pages[group][part]], [*asked, *growth.generations[group][part]]
        named = set(wanted)
        if NO_PAGE in named:
            full = [group for group in groups if group in place.full_groups and NO_PAGE in growth.pages[group][part]]
            if full:
                return InvalidRequest(f"each new block needs a page of group {full[0]}, which has no window")
            pairs = [pair for pair in zip(wanted, asked, strict=True) if pair[0] != NO_PAGE]
            wanted, asked = [page for page, _ in pairs], [generation for _, generation in pairs]
            named.discard(NO_PAGE)
        if len(named) != len(wanted):
            return InvalidRequest("extend needs distinct pages, each with its generation")
        if not named <= stock or [granted[page] for page in wanted] != list(asked):
            both = zip(wanted, asked, strict=True)
            page, generation = next(one for one in both if one[0] not in stock or granted[one[0]] != one[1])
            return NotOwned(f"page {page} (generation {generation}) of group {groups[0]} is not in the stock")
    return None


def check_stock(core: Core, lease: Lease, targets: tuple[int, ...]) -> None:
    """Raises InvalidRequest or LimitExceeded for stock targets that cannot be."""
    if len(targets) != lease.groups:
        raise InvalidRequest(f"stock_pages needs {lease.groups} numbers, one a group, got {len(targets)}")
    if sum(targets) > core.limits.stock_pages_per_lease:
        raise LimitExceeded("stock pages of a lease", sum(targets), core.limits.stock_pages_per_lease)


def refill_stock(
    core: Core, call: Call, targets: tuple[int, ...], member: int = 0, due: int = 0
) -> tuple[GroupCells, ...]:
    """Grant pages until the lease's stock has ``targets[g]`` of each group, as far as can be had at once. It is the
    stock of process ``member`` from then on. ``due``: blocks of it that are about to be taken, so blocks are evicted
    for them.

    Raises InvalidRequest, LimitExceeded.
    """
    lease, place = call.lease, call.replica.place
    check_stock(core, lease, targets)
    expire(place.reservations, call.now)
    targets, widths = _by_pool(place, targets)
    if due:
        targets = _in_share(core, call, targets)
    lease.stocked_by = member
    wanted = [max(0, target - len(stock)) for target, stock in zip(targets, lease.stock, strict=True)]
    if due:
        missing = max(map(blocks_of, wanted, widths))
        lease.grown = max(lease.grown, min(due, missing))
    if lease.room is not None:
        lease.room.give_back()
    pools = place.pools
    free = [pool.unreserved for pool in pools]
    most = max(map(blocks_of, wanted, widths))
    has_enough = lease.room is None and not any(map(gt, wanted, free))
    if has_enough and (most <= lease.grown or min(free) - most >= pages_ahead(core, place)):
        lease.grown, granted = 0, _grant(lease, pools, wanted)
        look_ahead(core, call.model, call.replica)
        return granted
    grown = min(lease.grown, most)
    needed = [min(count, grown * width) for count, width in zip(wanted, widths, strict=True)]
    going = 0
    if any(map(gt, needed, free)):
        if lease.room is None:
            lease.room = Reservation(place.reservations, pools)
        going = free_some(core, call, needed, lease.room)
    free = [pool.unreserved for pool in pools]
    owed = [max(0, count - has) for count, has in zip(needed, free, strict=True)]
    kept = pages_ahead(core, place)
    counts = [min(want, has, max(need, has - kept)) for want, has, need in zip(wanted, free, needed, strict=True)]
    if any(map(gt, wanted, counts)):
        core.count(Count.STOCK_SHORT)
    granted = _grant(lease, pools, counts)
    lease.grown = max(map(blocks_of, owed, widths))
    if lease.room is not None:
        _keep_room(core, call, lease.room, owed, going)
    look_ahead(core, call.model, call.replica)
    return granted


def _in_share(core: Core, call: Call, targets: tuple[int, ...]) -> tuple[int, ...]:
    """Targets that are no more than the lease's share of what stocks may have of each pool."""
    lease, shared = call.lease, list[int]()
    beside = [
        each for each in core.ledger.leases.values() if (each.model, each.replica) == (lease.model, lease.replica)
    ]
    for group, (target, pool) in enumerate(zip(targets, call.replica.place.pools, strict=True)):
        held = {each.id: len(each.stock[group]) for each in beside}
        shared.append(min(target, most_of(lease.id, held, pool.capacity // STOCK_PART)))
    return tuple(shared)


def _by_pool(place: Place, targets: tuple[int, ...]) -> tuple[tuple[int, ...], Sequence[int]]:
    """Targets of the groups that stand for their pools, 0 for the others; and pages of each for a block."""
    if not place.has_shared_pools:
        return targets, [1] * len(targets)
    sums, widths = [0] * len(targets), [1] * len(targets)
    for groups in place.shares:
        sums[groups[0]], widths[groups[0]] = sum(targets[group] for group in groups), len(groups)
    return tuple(sums), widths


def blocks_of(pages: int, width: int) -> int:
    """Blocks that need as many pages of a pool, of which each needs ``width``."""
    return -(-pages // width)


def _grant(lease: Lease, pools: Sequence[PagePool], counts: Sequence[int]) -> tuple[GroupCells, ...]:
    """Pages for the stock, of each group as many as there are."""
    granted: list[GroupCells] = []
    for group, (count, pool) in enumerate(zip(counts, pools, strict=True)):
        if count:
            pages, generations = lease.grant(group, pool, count), pool.generations
            granted.append(GroupCells(group, 0, pages, tuple([generations[page] for page in pages])))
    return tuple(granted)


def _keep_room(core: Core, call: Call, room: Reservation, owed: Sequence[int], going: int) -> None:
    """Reserve evicted pages for the lease until its next refill, and go on evicting once this one is answered."""
    lease = call.lease
    if not any(owed):
        room.release()
    elif going or room.is_open:
        room.keep(owed, call.now + core.limits.reservation_seconds)
        if going:
            replace = partial(_replace_more, core, call, room)
            core.later_once((_replace_more, lease.id), call.model.id, replace, party=call.lease.party)


def _replace_more(core: Core, call: Call, room: Reservation) -> bool:
    """A turn of evicting what the lease is owed; True when that is done, or no more can go."""
    lease = call.lease
    going = 0
    if lease.state is LeaseState.LIVE and not call.model.suspect and room.is_open:
        room.top_up()
        going = free_some(core, call, [many - held for many, held in zip(room.wanted, room.held, strict=True)], room)
        room.top_up()
    return going <= 0
