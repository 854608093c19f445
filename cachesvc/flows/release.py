"""Release: end a sequence. What it shares is unpinned, what is its own goes back to the pool."""

from __future__ import annotations

from cachesvc.flows.allocate import withdraw_computing
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core
from cachesvc.ledger.blocks import window_positions
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.words import PageState


def release(core: Core, call: Call, sequence_id: int) -> int:
    """End a sequence; returns how many device pages came back. Raises NotFound (also the second time)."""
    return let_go(core, call.lease, call.known_sequence(sequence_id))


def let_go(core: Core, lease: Lease, sequence: Sequence, *, to_quarantine: bool = False) -> int:
    """``release`` for a sequence at hand. Pages of a running swap are settled when it lands."""
    model = core.ledger.models[sequence.model]
    replica = model.replicas[sequence.replica]
    unpin_all(model, replica, sequence)
    withdraw_computing(model, sequence, max(sequence.sealed, sequence.hit_blocks), sequence.declared)
    freed = 0
    for group, page in sequence.own_pages():
        pool = replica.place.pools[group]
        if pool.states[page] != PageState.PRIVATE:
            continue
        pool.move(page, PageState.QUARANTINED if to_quarantine else PageState.FREE)
        freed += 1
        if to_quarantine:
            lease.quarantine.append((group, page))
    if not sequence.swap_ticket:
        free_swapped(model, sequence)
    del lease.sequences[sequence.id]
    return freed


def unpin_all(model: Model, replica: Replica, sequence: Sequence) -> None:
    """Take back every pin of a sequence."""
    blocks = model.blocks
    place = replica.place
    unpin_windows(model, replica, sequence, 0)
    if sequence.anchor != NO_ROW and (not sequence.swapped_out or sequence.swap_ticket):
        blocks.unpin(place, sequence.anchor)  # on its way in, it is pinned on both
    if sequence.host_anchor != NO_ROW:
        blocks.unpin(blocks.host, sequence.host_anchor)


def unpin_windows(model: Model, replica: Replica, sequence: Sequence, first: int) -> None:
    """Take back the window pins of positions from ``first`` on. The next turn will look back to the last window."""
    for group, held in sequence.window_rows.items():
        last = set(window_positions(model.layout, group, sequence.sealed))
        for position in [position for position in held if position >= first]:
            row = held.pop(position)
            if position in last and sequence.anchor != NO_ROW:
                model.blocks.use_window(row, sequence.anchor)
            model.blocks.unpin_window(replica.place, group, row)


def free_swapped(model: Model, sequence: Sequence) -> None:
    """Give back the host pages of a swapped-out sequence."""
    for group, _, page in sequence.swapped:
        model.blocks.host.pools[group].move(page, PageState.FREE)
    sequence.swapped.clear()
