"""The stock: pages granted ahead, so that a sequence grows by a block with no round trip; and growth out of it.

A stock is refilled with each Step from free pages, but for room ahead (``low_watermark.py``). A cache that has been
running for a while has nothing else free, and then what is coldest goes for the stock; but never more than the lease
has grown by since. So growth is replaced, block for block, whatever others take meanwhile, and an engine that does not
grow evicts nothing. One that begins on a full cache has its first growth by Allocate, and finds as much in its stock
afterwards; each growth that found the stock empty makes it larger by one, up to the target, so the stock settles at
what the engine's steps use.

What a refill costs grows with the pages wanted, and no more is evicted in it than in a turn: the rest of what the lease
has grown by goes once the step is answered, and is kept for the next refill. Where nothing can go, nothing is
walked, counted or refused: the stock stays short, and growth takes the way of Allocate, which waits or is refused with
the numbers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from operator import gt
from typing import NoReturn

from cachesvc.flows.context.call import Call, require_on_device
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import Chore
from cachesvc.flows.transfer.low_watermark import look_ahead, pages_ahead
from cachesvc.flows.transfer.make_room import free_some
from cachesvc.ledger.growing import grow_by
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.leases import Lease, LeaseState
from cachesvc.ledger.pages.page_pool import PagePool
from cachesvc.ledger.pages.reservations import Reservation
from cachesvc.ledger.sequences import Sequence as OpenSequence
from cachesvc.ledger.shared_pages import change_group
from cachesvc.model.answers import GroupCells
from cachesvc.model.columns import Growth
from cachesvc.model.errors import InvalidRequest, LedgerBroken, LimitExceeded, NotOwned
from cachesvc.model.words import NO_PAGE


def extend(core: Core, call: Call, sequence_id: int, pages: tuple[GroupCells, ...]) -> int:
    """Put stock pages at the end of the sequence's tables, the same number in each group; returns the new length.

    Raises InvalidRequest, NotOwned (not in the stock, or of an older generation), Conflict, LoadFailed.
    """
    counts = {len(cells.pages) for cells in pages}
    if sorted(cells.group for cells in pages) != list(range(len(call.replica.place.pools))) or len(counts) != 1:
        raise InvalidRequest("extend takes the same number of pages for every group")
    more = counts.pop()
    in_order = sorted(pages, key=lambda cells: cells.group)
    grown: list[int] = []
    if all(len(cells.generations) == more for cells in pages):
        columns = [cells.pages for cells in in_order], [cells.generations for cells in in_order]
        extend_many(core, call, Growth((sequence_id,), (0, more), *columns), range(1), grown)
    if not grown:
        _refuse_growth(core, call, sequence_id, in_order, more)
    return grown[0]


def extend_many(
    core: Core,
    call: Call,
    growth: Growth,
    entries: range,
    told: list[int],
    held: Container[int] = (),
) -> None:
    """``extend`` for ``entries``, in order. ``told`` gets the new length of each; it is short where an entry is left to
    ``extend``, because it may be refused, or its sequence is among ``held``. Those behind it are not looked at."""
    lease, place, limit = call.lease, call.replica.place, call.lease.blocks_per_sequence
    numbers, starts, columns, _ = growth
    if not _fit(lease, place, growth, entries):
        entries = entries[:1]
        if not _fit(lease, place, growth, entries):
            return
    named = numbers[entries.start : entries.stop]
    if len(set(named)) < len(named):
        _extend_in_turn(core, call, growth, entries, told, held)
        return
    sequences = lease.sequences
    bounds = starts[entries.start : entries.stop + 1]
    growing: list[OpenSequence] = []
    lengths: list[int] = []
    for number, first, last in zip(named, bounds, bounds[1:], strict=False):
        sequence = sequences.get(number)
        if sequence is None or number in held or sequence.failed or sequence.swap_ticket or sequence.swapped_out:
            break
        before = len(sequence.tables[0])
        blocks = before + last - first
        if blocks > limit or before < sequence.hit_blocks:
            break
        growing.append(sequence)
        lengths.append(blocks)
    bounds = bounds[: len(growing) + 1]
    grow_by(growing, bounds, columns)
    leads = call.model.layout.pool_leads
    for group, (lead, pages) in enumerate(zip(leads, columns, strict=True)):
        taken = pages[bounds[0] : bounds[-1]]
        lease.stock[lead].difference_update(taken)
        if group != lead:
            change_group(place.pools[lead], place.pools[group], [page for page in taken if page != NO_PAGE])
    lease.grown += bounds[-1] - bounds[0]
    told += lengths


def _extend_in_turn(
    core: Core, call: Call, growth: Growth, entries: range, told: list[int], held: Container[int]
) -> None:
    """``extend_many`` where a sequence is named twice: one entry after another."""
    for entry in entries:
        done = len(told)
        extend_many(core, call, growth, range(entry, entry + 1), told, held)
        if len(told) == done:
            return


def _fit(lease: Lease, place: Place, growth: Growth, entries: range) -> bool:
    """True where all pages of the entries are in the stock, each once, and of the generation that was granted."""
    part = slice(growth.starts[entries.start], growth.starts[entries.stop])
    for groups in place.shares:
        stock, granted = lease.stock[groups[0]], place.pools[groups[0]].generations
        wanted, generations = growth.pages[groups[0]][part], growth.generations[groups[0]][part]
        for group in groups[1:]:
            wanted, generations = (
                [*wanted, *growth.pages[group][part]],
                [*generations, *growth.generations[group][part]],
            )
        named = set(wanted)
        if NO_PAGE in named:
            if any(NO_PAGE in growth.pages[group][part] for group in groups if group in place.full_groups):
                return False
            pairs = [pair for pair in zip(wanted, generations, strict=True) if pair[0] != NO_PAGE]
            wanted, generations = [page for page, _ in pairs], [each for _, each in pairs]
            named.discard(NO_PAGE)
        if not named <= stock or len(named) != len(wanted):
            return False
        if [granted[page] for page in wanted] != list(generations):
            return False
    return True


def _refuse_growth(core: Core, call: Call, sequence_id: int, pages: list[GroupCells], more: int) -> NoReturn:
    """Say why a sequence cannot grow by these pages, in the order of their groups."""
    sequence = call.sequence(sequence_id)
    require_on_device(sequence)
    if sequence.blocks + more > call.lease.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", sequence.blocks + more, call.lease.blocks_per_sequence)
    if sequence.blocks < sequence.hit_blocks:
        raise InvalidRequest(f"allocate the {sequence.hit_blocks} blocks that were hit before growing")
    place = call.replica.place
    for groups in place.shares:
        mine = [cells for cells in pages if cells.group in groups]
        named = [page for cells in mine for page in cells.pages if page != NO_PAGE]
        if len(set(named)) != len(named) or any(len(cells.generations) != more for cells in mine):
            raise InvalidRequest("extend needs distinct pages, each with its generation")
        for cells in mine:
            _refuse_cells(call.lease.stock[groups[0]], place, cells)
    raise LedgerBroken(f"sequence {sequence_id} could not grow by {more} blocks, and nothing is in its way")


def _refuse_cells(stock: set[int], place: Place, cells: GroupCells) -> None:
    """Raises InvalidRequest for a cell without a page in a full group, NotOwned for a page that is not in the stock."""
    granted = place.pools[cells.group].generations
    for page, generation in zip(cells.pages, cells.generations, strict=True):
        if page == NO_PAGE and cells.group in place.full_groups:
            raise InvalidRequest(f"each new block needs a page of group {cells.group}, which has no window")
        if page != NO_PAGE and (page not in stock or granted[page] != generation):
            raise NotOwned(f"page {page} (generation {generation}) of group {cells.group} is not in the stock")


def check_stock(core: Core, lease: Lease, targets: tuple[int, ...]) -> None:
    """Raises InvalidRequest or LimitExceeded for stock targets that cannot be."""
    if len(targets) != lease.groups:
        raise InvalidRequest(f"stock_pages needs {lease.groups} numbers, one a group, got {len(targets)}")
    if sum(targets) > core.limits.stock_pages_per_lease:
        raise LimitExceeded("stock pages of a lease", sum(targets), core.limits.stock_pages_per_lease)


def refill_stock(core: Core, call: Call, targets: tuple[int, ...], member: int = 0) -> tuple[GroupCells, ...]:
    """Grant pages until the lease's stock has ``targets[g]`` of each group, as far as can be had at once. It is the
    stock of process ``member`` from then on.

    Raises InvalidRequest, LimitExceeded.
    """
    lease, place = call.lease, call.replica.place
    check_stock(core, lease, targets)
    targets, widths = _by_pool(place, targets)
    lease.stocked_by = member
    wanted = [max(0, target - len(stock)) for target, stock in zip(targets, lease.stock, strict=True)]
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
            core.chores.append(Chore(call.model.id, partial(_replace_more, core, call, room), gives_back=False))


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
