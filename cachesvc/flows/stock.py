"""The stock: pages granted ahead, so that a sequence grows by a block with no round trip; and growth out of it.

A stock is refilled with each Step, from what is free. A cache that has been running for a while has nothing free, and
then what is coldest goes for the stock; but never more than the lease has grown by since. So growth is replaced, block
for block, and an engine that does not grow evicts nothing. One that begins on a full cache has its first growth by
Allocate, and finds as much in its stock afterwards; each growth that found the stock empty makes it larger by one, up
to the target, so the stock settles at what the engine's steps use.

What a refill costs grows with the pages wanted. Where nothing can go, nothing is walked, counted or refused: the stock
stays short, and growth takes the way of Allocate, which waits or is refused with the numbers.
"""

from __future__ import annotations

from cachesvc.flows.call import Call, require_on_device
from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.flows.room import free_some
from cachesvc.ledger.leases import Lease
from cachesvc.model.answers import GroupCells
from cachesvc.model.errors import InvalidRequest, LimitExceeded, NotOwned


def extend(core: Core, call: Call, sequence_id: int, pages: tuple[GroupCells, ...]) -> int:
    """Put stock pages at the end of the sequence's tables, the same number in each group; returns the new length.

    Raises InvalidRequest, NotOwned (not in the stock, or of an older generation), Conflict, LoadFailed.
    """
    sequence = call.sequence(sequence_id)
    require_on_device(sequence)
    lease, place = call.lease, call.replica.place
    counts = {len(cells.pages) for cells in pages}
    if sorted(cells.group for cells in pages) != list(range(len(place.pools))) or len(counts) != 1:
        raise InvalidRequest("extend takes the same number of pages for every group")
    more = counts.pop()
    blocks = sequence.blocks + more
    if blocks > core.limits.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", blocks, core.limits.blocks_per_sequence)
    if sequence.blocks < sequence.hit_blocks:
        raise InvalidRequest(f"allocate the {sequence.hit_blocks} blocks that were hit before growing")
    for cells in pages:
        _check_stock_pages(call, cells)
    in_order = sorted(pages, key=lambda cells: cells.group)
    for cells in in_order:
        lease.stock[cells.group].difference_update(cells.pages)
    sequence.grow([cells.pages for cells in in_order])
    lease.grown += more
    return blocks


def _check_stock_pages(call: Call, cells: GroupCells) -> None:
    stock, pool = call.lease.stock[cells.group], call.replica.place.pools[cells.group]
    if len(set(cells.pages)) != len(cells.pages) or len(cells.generations) != len(cells.pages):
        raise InvalidRequest("extend needs distinct pages, each with its generation")
    for page, generation in zip(cells.pages, cells.generations, strict=True):
        if page not in stock or not pool.owns(page, generation):
            raise NotOwned(f"page {page} (generation {generation}) of group {cells.group} is not in the stock")


def check_stock(core: Core, lease: Lease, targets: tuple[int, ...]) -> None:
    """Raises InvalidRequest or LimitExceeded for stock targets that cannot be."""
    if len(targets) != lease.groups:
        raise InvalidRequest(f"stock_pages needs {lease.groups} numbers, one a group, got {len(targets)}")
    if sum(targets) > core.limits.stock_pages_per_lease:
        raise LimitExceeded("stock pages of a lease", sum(targets), core.limits.stock_pages_per_lease)


def refill_stock(core: Core, call: Call, targets: tuple[int, ...]) -> tuple[GroupCells, ...]:
    """Grant pages until the lease's stock has ``targets[g]`` of each group, as far as can be had at once.

    Raises InvalidRequest, LimitExceeded.
    """
    lease, pools = call.lease, call.replica.place.pools
    check_stock(core, lease, targets)
    wanted = [max(0, target - len(lease.stock[group])) for group, target in enumerate(targets)]
    if not any(wanted):
        lease.grown = 0
        return ()
    grown = min(lease.grown, max(wanted))
    if grown and any(min(count, grown) > pool.unreserved for count, pool in zip(wanted, pools, strict=True)):
        lease.grown = grown - free_some(core, call, [min(count, grown) for count in wanted])
    granted: list[GroupCells] = []
    is_short = False
    for group, (count, pool) in enumerate(zip(wanted, pools, strict=True)):
        is_short |= count > pool.unreserved
        pages = lease.grant(group, pool, min(count, pool.unreserved))
        if pages:
            granted.append(GroupCells(group, 0, tuple(pages), tuple(pool.generations[page] for page in pages)))
    if is_short:
        core.count(Count.STOCK_SHORT)
    else:
        lease.grown = 0
    return tuple(granted)
