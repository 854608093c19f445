"""Recycle: give back what fell out of every window, and spare or stock pages. Growth out of the stock (Extend).

A block j of a window W is dead for the next query position T once (j + 1) * block_tokens <= T - W + 1, the window
counting the query itself; only computed and verified tokens count. Where steps overlap, T counts those whose step has
ended: a step in flight looks back from there on, so its pages stay.
"""

from __future__ import annotations

from cachesvc.flows.allocate import declare_computing
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core, require_on_device
from cachesvc.flows.room import make_room
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.answers import GroupCells, Recycled, Wait
from cachesvc.model.errors import InvalidRequest, LimitExceeded, NotOwned, PoolExhausted
from cachesvc.model.words import NO_PAGE, PageState


def recycle(core: Core, call: Call, sequence_id: int, computed_tokens: int, pages: tuple[GroupCells, ...]) -> Recycled:
    """Free dead window blocks of the sequence below ``computed_tokens``, and the ``pages`` named.

    ``sequence_id`` 0 with no such sequence is an error only when ``computed_tokens`` is set; pages alone may be stock.
    Raises NotOwned (nothing is freed then), InvalidRequest (a page that is still in the table), NotFound.
    """
    lease, model, replica = call.lease, call.model, call.replica
    sequence = lease.sequences.get(sequence_id)
    if sequence is None and (computed_tokens or not pages):
        sequence = call.known_sequence(sequence_id)
    found = [_owner(lease, sequence, group, page) for group, _, group_pages, _ in pages for page in group_pages]
    if len({(group, page) for group, page, _ in found}) != len(found):
        raise InvalidRequest("a page is named twice in one recycle; name each once")
    if sequence is not None and computed_tokens:
        require_on_device(sequence)
        _check_computed(model, sequence, computed_tokens)
    freed = 0
    for group, page, owner in found:
        owner.remove(page)
        replica.place.pools[group].move(page, PageState.FREE)
        freed += 1
    if sequence is not None and computed_tokens:
        freed += _recycle_windows(model, replica, sequence, computed_tokens)
    cursors = tuple(sequence.cursors.values()) if sequence is not None else ()
    return Recycled(freed, cursors)


def _owner(lease: Lease, sequence: Sequence | None, group: int, page: int) -> tuple[int, int, set[int]]:
    if not 0 <= group < len(lease.stock):
        raise InvalidRequest(f"there is no group {group}")
    if page in lease.stock[group]:
        return group, page, lease.stock[group]
    if sequence is None or page not in sequence.own[group]:
        raise NotOwned(f"page {page} of group {group} is neither in the lease's stock nor a sequence's own")
    if sequence.swap_ticket or page in sequence.tables[group]:
        raise InvalidRequest(f"page {page} of group {group} is still in the block table; release the sequence instead")
    return group, page, sequence.own[group]


def _check_computed(model: Model, sequence: Sequence, computed_tokens: int) -> None:
    if computed_tokens > sequence.blocks * model.layout.block_tokens:
        raise InvalidRequest(
            f"computed_tokens {computed_tokens} is beyond the {sequence.blocks} blocks of sequence {sequence.id}"
        )


def _recycle_windows(model: Model, replica: Replica, sequence: Sequence, computed_tokens: int) -> int:
    layout, place = model.layout, replica.place
    freed = 0
    for group in place.window_groups:
        window = layout.groups[group].window_tokens
        assert window is not None
        dead = max(0, computed_tokens - window + 1) // layout.block_tokens
        table, held = sequence.tables[group], sequence.window_rows.get(group, {})
        for position in range(sequence.cursors[group], dead):
            page = table[position]
            if page == NO_PAGE:
                continue
            table[position] = NO_PAGE
            if page in sequence.own[group]:
                sequence.own[group].remove(page)
                place.pools[group].move(page, PageState.FREE)
                freed += 1
            elif position in held:
                model.blocks.unpin_window(place, group, held.pop(position))
        sequence.cursors[group] = max(sequence.cursors[group], dead)
    return freed


def extend(core: Core, call: Call, sequence_id: int, pages: tuple[GroupCells, ...]) -> int:
    """Put stock pages at the end of the sequence's tables, the same number in each group; returns the new length.

    Raises InvalidRequest, NotOwned (not in the stock, or of an older generation), Conflict, LoadFailed.
    """
    sequence = call.sequence(sequence_id)
    require_on_device(sequence)
    lease, model, replica = call.lease, call.model, call.replica
    counts = {len(cells.pages) for cells in pages}
    if sorted(cells.group for cells in pages) != list(range(len(model.layout.groups))) or len(counts) != 1:
        raise InvalidRequest("extend takes the same number of pages for every group")
    blocks = sequence.blocks + counts.pop()
    if blocks > core.limits.blocks_per_sequence:
        raise LimitExceeded("blocks of a sequence", blocks, core.limits.blocks_per_sequence)
    if sequence.blocks < sequence.hit_blocks:
        raise InvalidRequest(f"allocate the {sequence.hit_blocks} blocks that were hit before growing")
    for cells in pages:
        pool = replica.place.pools[cells.group]
        if len(set(cells.pages)) != len(cells.pages) or len(cells.generations) != len(cells.pages):
            raise InvalidRequest("extend needs distinct pages, each with its generation")
        for page, generation in zip(cells.pages, cells.generations, strict=True):
            if page not in lease.stock[cells.group] or not pool.owns(page, generation):
                raise NotOwned(f"page {page} (generation {generation}) of group {cells.group} is not in the stock")
    for cells in pages:
        lease.stock[cells.group].difference_update(cells.pages)
        sequence.own[cells.group].update(cells.pages)
        sequence.tables[cells.group].extend(cells.pages)
    declare_computing(model, sequence)
    return sequence.blocks


def check_stock(core: Core, lease: Lease, targets: tuple[int, ...]) -> None:
    """Raises InvalidRequest or LimitExceeded for stock targets that cannot be."""
    if len(targets) != lease.groups:
        raise InvalidRequest(f"stock_pages needs {lease.groups} numbers, one a group, got {len(targets)}")
    if sum(targets) > core.limits.stock_pages_per_lease:
        raise LimitExceeded("stock pages of a lease", sum(targets), core.limits.stock_pages_per_lease)


def refill_stock(core: Core, call: Call, targets: tuple[int, ...]) -> tuple[GroupCells, ...]:
    """Grant pages until the lease's stock has ``targets[g]`` of each group, as far as can be had at once."""
    lease, model, replica = call.lease, call.model, call.replica
    place = replica.place
    check_stock(core, lease, targets)
    wanted = [max(0, target - len(lease.stock[group])) for group, target in enumerate(targets)]
    if not any(wanted):
        return ()
    try:
        wait: Wait | None = make_room(core, model, replica, wanted)
    except PoolExhausted:
        wait = None
    granted: list[GroupCells] = []
    for group, count in enumerate(wanted):
        pool = place.pools[group]
        pages = pool.take(min(count, pool.free), PageState.PRIVATE)
        lease.stock[group].update(pages)
        if pages:
            granted.append(GroupCells(group, 0, tuple(pages), tuple(pool.generations[page] for page in pages)))
    if wait is not None:
        core.count("stock_short")
    return tuple(granted)
