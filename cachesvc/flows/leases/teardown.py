"""Incremental teardown of a lease, or of one process of a shared lease.

Pages that a process may still write go to quarantine, and are free once none can.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import LEASES_ENDED, Count
from cachesvc.flows.context.turns import begin
from cachesvc.ledger.leases import Lease, LeaseEnd, LeaseState, member_of
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pages.page_pool import PagePool
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.words import PageState

MOST_QUARANTINED = 0.5
"""Pages in quarantine of a lease that lives on, as a part of its replica's largest pool."""


def lose(core: Core, lease: Lease, why: str, cause: LeaseEnd = LeaseEnd.OTHER, *, at_once: bool = True) -> None:
    """End a live lease: sealed blocks stay, sequences end, private pages go to quarantine. ``cause``: for counting.

    It is lost at once, and what it holds in turns, the first of them ``at_once``: a flow that ends many leases has one
    such turn. Where the ledger breaks meanwhile, the model is out of service, and other leases are lost as ever.
    """
    lease.state = LeaseState.QUARANTINED
    lease.why = why
    lease.members.clear()
    core.count(LEASES_ENDED[cause])
    if cause is not LeaseEnd.CLOSED:
        core.count(Count.LEASES_LOST)
    lease.is_quiet = not lease.processes
    if lease.room is not None:
        lease.room.release()
    _end_holds(core, lease, at_once=at_once)


def free_quarantine(core: Core, lease: Lease, *, at_once: bool = True) -> None:
    """Free the quarantined pages of a lost lease that no process can write any more; of the lease only its name
    stays."""
    lease.is_quiet = True
    _end_holds(core, lease, at_once=at_once)


def end_member(core: Core, lease: Lease, number: int, *, at_once: bool = True) -> None:
    """A process has left a lease that lives on with others: its sequences end, and its stock goes back."""
    mine = [sequence for sequence in lease.sequences if member_of(sequence) == number]
    go_on = partial(_end_left, core, lease, number, mine)
    begin(core.chores, lease.model, go_on, at_once=at_once, party=lease.party)


def free_unwritten(core: Core, lease: Lease, *, at_once: bool = True) -> None:
    """A process has unmapped the pools of a live lease, or is gone: where it was the last that had, pages in quarantine
    come back."""
    if lease.state is LeaseState.LIVE and lease.quarantine and not lease.attached:
        begin(core.chores, lease.model, partial(_free_some, core, lease), at_once=at_once, party=lease.party)


def unbind(core: Core, lease: Lease, token: bytes) -> None:
    """Remove a process from the lease."""
    lease.processes.discard(token)
    process = core.ledger.processes.get(token)
    if process is not None:
        process.leases.discard(lease.id)


def _end_holds(core: Core, lease: Lease, *, at_once: bool) -> None:
    if not lease.is_ending:
        lease.is_ending = True
        begin(core.chores, lease.model, partial(_end_some, core, lease), at_once=at_once, party=lease.party)


def _end_some(core: Core, lease: Lease) -> bool:
    """A turn of ending what a lost lease has; True when it has no more to give back."""
    model = core.ledger.models[lease.model]
    is_over = None
    while is_over is None:
        try:
            is_over = _end_part(core, lease, model)
        except LedgerBroken as broken:  # a broken sequence stays: it is not served again
            model.distrust(str(broken))
    if is_over:
        lease.is_ending = False
        if lease.is_quiet:
            _forget(core, lease)
    return is_over


def _end_left(core: Core, lease: Lease, number: int, mine: list[int]) -> bool:
    """A turn of ending what a process had that has left; True when that is done, or the lease ends whole."""
    if lease.state is not LeaseState.LIVE:
        return True
    model = core.ledger.models[lease.model]
    while True:
        try:
            left = _end_sequences(core, lease, model, core.turns.pages, mine)
            if left > 0 and not mine and lease.stocked_by == number:
                left = _end_stock(lease, model, left)
            if left > 0:
                free_unwritten(core, lease)
                _bound_quarantine(core, lease, model)
            return left > 0
        except LedgerBroken as broken:
            model.distrust(str(broken))


def _bound_quarantine(core: Core, lease: Lease, model: Model) -> None:
    """End an instance whose processes come and go while others have its pools mapped, once what they left takes too
    much of a pool: its engines open a lease anew, and their pages come back when they have stopped writing."""
    largest = max(pool.capacity for pool in _pools(lease, model))
    if len(lease.quarantine) > largest * MOST_QUARANTINED:
        lose(
            core,
            lease,
            f"processes that have left it kept {len(lease.quarantine)} pages from use; open it anew",
            at_once=False,
        )


def _end_part(core: Core, lease: Lease, model: Model) -> bool:
    """End a part of the lease. Pages that it may still write are quarantined, unless it is quiet by now; True when all
    has ended. A part that broke has left the lease by then, so the next turn goes on behind it."""
    left = core.turns.pages
    while left > 0 and lease.prefetches:
        left -= core.turns.pages // core.turns.holds
        held = next(iter(lease.prefetches))
        lease.prefetches.pop(held)
        held.let_go()
    left = _end_sequences(core, lease, model, left, None)
    left = _end_stock(lease, model, left)
    if left <= 0:
        return False
    return not lease.is_quiet or lease.free_quarantine(_pools(lease, model), left)


def _end_sequences(core: Core, lease: Lease, model: Model, left: int, mine: list[int] | None) -> int:
    """End sequences, all or ``mine``, as far as ``left`` pages go; returns what is left of these, 0 or less where more
    are to be ended."""
    while left > 0 and (lease.sequences if mine is None else mine):
        left -= core.turns.pages // core.turns.holds
        number = next(reversed(lease.sequences)) if mine is None else mine.pop()
        sequence = lease.sequences.pop(number, None)
        if sequence is None:
            continue
        before = sequence.freed
        is_over = sequence.end_part(max(1, left), lambda group, pages: _give_up(lease, model, group, pages))
        left -= sequence.freed - before
        if not is_over:
            lease.sequences[number] = sequence
            if mine is not None:
                mine.append(number)
            return 0
    return left


def _end_stock(lease: Lease, model: Model, left: int) -> int:
    """Give the stock up as far as ``left`` pages go; returns what is left of these."""
    if lease.room is not None:
        lease.room.release()
    for group, stock in enumerate(lease.stock):
        some = array("i", [stock.pop() for _ in range(min(len(stock), max(0, left)))])
        _give_up(lease, model, group, some)
        left -= len(some)
    return left


def _give_up(lease: Lease, model: Model, group: int, pages: array[int]) -> None:
    pool = _pools(lease, model)[group]
    if lease.is_unwritten:
        pool.move_all(pages, PageState.FREE)
    else:
        lease.set_aside(group, pool, pages)


def _free_some(core: Core, lease: Lease) -> bool:
    """A turn of freeing what no process of a live lease can write; True when all is."""
    if lease.state is not LeaseState.LIVE:
        return True
    return lease.free_quarantine(_pools(lease, core.ledger.models[lease.model]), core.turns.pages)


def _pools(lease: Lease, model: Model) -> Sequence[PagePool]:
    return model.any_replica(lease.replica).place.pools


def _forget(core: Core, lease: Lease) -> None:
    for token in list(lease.processes):
        unbind(core, lease, token)
    core.ledger.remember_lost(lease.id, lease.why)
    del core.ledger.leases[lease.id]
