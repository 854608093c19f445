"""The stock: pages granted ahead, so that a sequence grows by a block with no round trip; and growth out of it.

A stock is refilled with each Step from free pages, but for room ahead (``transfers.py``). A cache that has been
running for a while has nothing else free, and then what is coldest goes for the stock; but never more than the lease
has grown by since. So growth is replaced, block for block, whatever others take meanwhile, and an engine that does not
grow evicts nothing. One that begins on a full cache has its first growth by Allocate, and finds as much in its stock
afterwards; each growth that found the stock empty makes it larger by one, up to the target, so the stock settles at
what the engine's steps use. An engine that knows what it is about to take says so (``due``), and finds that there.

What a refill costs grows with the pages wanted, and no more is evicted in it than in a turn: the rest of what the lease
has grown by goes once the step is answered, and is kept for the next refill. Where nothing can go, nothing is
walked, counted or refused: the stock stays short, and growth takes the way of Allocate, which waits or is refused with
the numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from operator import gt

from cachesvc.flows.core import Call, Chore, Core, Count, no_sequence, refusal_of
from cachesvc.flows.make_room import free_some
from cachesvc.flows.transfers import look_ahead, pages_ahead
from cachesvc.ledger.ledger import Lease, LeaseState
from cachesvc.ledger.page_pool import PagePool, Reservation, expire
from cachesvc.ledger.sealing import grow_by
from cachesvc.ledger.sequence_state import ON_DEVICE
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.shared_pool import change_group
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.answers import GroupCells, Growth, before_repeated
from cachesvc.model.errors import CacheError, InvalidRequest, LimitExceeded, NotOwned
from cachesvc.model.numbers import most_of
from cachesvc.model.words import NO_PAGE

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
    grown, stop = _grow(call, Growth((sequence_id,), (0, more), *columns), range(1), ())
    if stop is not None:
        raise stop
    return grown[0]


def extend_many(
    core: Core,
    call: Call,
    growth: Growth,
    entries: range,
    told: list[int],
    held: Collection[int] = (),
) -> None:
    """``extend`` for ``entries``, in order. ``told`` gets the new length of each; it is short where an entry is
    refused, or its sequence was named before or is among ``held``. Those behind it are not looked at."""
    told += _grow(call, growth, entries, held)[0]


def _grow(call: Call, growth: Growth, entries: range, held: Collection[int]) -> tuple[list[int], CacheError | None]:
    """Grow the first of ``entries`` that may. Returns the new length of each, and why the next one is refused, where
    it is."""
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
    return lengths, stop


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
        if going and not lease.is_replacing:
            lease.is_replacing = True
            go_on, party = partial(_replace_more, core, call, room), call.lease.party
            core.chores.append(Chore(call.model.id, go_on, gives_back=False, party=party))


def _replace_more(core: Core, call: Call, room: Reservation) -> bool:
    """A turn of evicting what the lease is owed; True when that is done, or no more can go."""
    lease = call.lease
    lease.is_replacing = False  # first: a defect in what follows ends it, and not for good
    going = 0
    if lease.state is LeaseState.LIVE and not call.model.suspect and room.is_open:
        room.top_up()
        going = free_some(core, call, [many - held for many, held in zip(room.wanted, room.held, strict=True)], room)
        room.top_up()
    lease.is_replacing = going > 0
    return not lease.is_replacing
