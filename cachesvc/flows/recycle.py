"""Recycle: give back what fell out of every window, and spare or stock pages.

A block j of a window W is dead for the next query position T once (j + 1) * block_tokens <= T - W + 1, the window
counting the query itself; only computed and verified tokens count. Where steps overlap, T counts those whose step has
ended: a step in flight looks back from there on, so its pages stay.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from cachesvc.flows.call import Call, require_on_device
from cachesvc.flows.core import Core
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.answers import GroupCells, Recycled
from cachesvc.model.errors import InvalidRequest, NotOwned


def recycle(_: Core, call: Call, sequence_id: int, computed_tokens: int, pages: tuple[GroupCells, ...]) -> Recycled:
    """Free dead window blocks of the sequence below ``computed_tokens``, and the ``pages`` named.

    ``sequence_id`` 0 with no such sequence is an error only when ``computed_tokens`` is set; pages alone may be stock.
    Raises NotOwned (nothing is freed then), InvalidRequest (a page that is still in the table), NotFound.
    """
    lease, model = call.lease, call.model
    sequence = lease.sequences.get(sequence_id)
    if sequence is None and (computed_tokens or not pages):
        sequence = call.known_sequence(sequence_id)
    named = [(group, page) for group, _, group_pages, _ in pages for page in group_pages]
    if len(set(named)) != len(named):
        raise InvalidRequest("a page is named twice in one recycle; name each once")
    for group, page in named:
        _check_owned(lease, sequence, group, page)
    if sequence is not None and computed_tokens:
        require_on_device(sequence)
        _check_computed(model, sequence, computed_tokens)
    for group, page in named:
        if page in lease.stock[group]:
            lease.give_back(group, call.replica.place.pools[group], page)
        elif sequence is not None:
            sequence.give_back(group, page)
    freed = len(named)
    if sequence is not None and computed_tokens:
        for group in call.replica.place.window_groups:
            freed += sequence.recycle(group, _dead_blocks(model, group, computed_tokens))
    return Recycled(freed, tuple(sequence.cursors.values()) if sequence is not None else ())


def recycle_many(
    core: Core,
    call: Call,
    recycles: tuple[Seq[int], Seq[int]],
    entries: range,
    told: list[int],
    held: Container[int] = (),
) -> None:
    """``recycle`` without pages for ``entries`` of sequences and their computed tokens, in order. ``told`` gets the
    pages of each; it is short where an entry is refused, or its sequence is among ``held``."""
    for entry in entries:
        number, tokens = recycles[0][entry], recycles[1][entry]
        sequence = call.lease.sequences.get(number)
        if sequence is None or number in held:
            return
        if tokens and (sequence.is_away or tokens > sequence.blocks * call.model.layout.block_tokens):
            return
        told.append(recycle(core, call, number, tokens, ()).pages)


def _check_owned(lease: Lease, sequence: Sequence | None, group: int, page: int) -> None:
    if not 0 <= group < len(lease.stock):
        raise InvalidRequest(f"there is no group {group}")
    if page in lease.stock[group]:
        return
    if sequence is None or sequence.pages_ahead or page not in sequence.own[group]:
        raise NotOwned(f"page {page} of group {group} is neither in the lease's stock nor a sequence's own")
    if sequence.swap_ticket or page in sequence.tables[group]:
        raise InvalidRequest(f"page {page} of group {group} is still in the block table; release the sequence instead")


def _check_computed(model: Model, sequence: Sequence, computed_tokens: int) -> None:
    if computed_tokens > sequence.blocks * model.layout.block_tokens:
        raise InvalidRequest(
            f"computed_tokens {computed_tokens} is beyond the {sequence.blocks} blocks of sequence {sequence.id}"
        )


def _dead_blocks(model: Model, group: int, computed_tokens: int) -> int:
    """How many blocks of a sequence no query from ``computed_tokens`` on looks back to, but for sinks."""
    window = model.layout.groups[group].window_tokens
    assert window is not None
    return max(0, computed_tokens - window + 1) // model.layout.block_tokens
