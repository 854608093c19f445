"""Failed loads of a sequence, as far as this process can know."""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.model.answers import TicketView
from cachesvc_client.core.errors import AlreadyClosed
from cachesvc_client.memory.pool import AttachedPool, LoadOutcome
from cachesvc_client.records.sequence_record import SequenceRecord

NOTHING = range(0)


def lost_tokens(record: SequenceRecord, pools: Iterable[AttachedPool], is_lost: bool) -> range:
    """Positions of the tokens whose loads failed, or had not ended for all that is known when the lease was lost
    (``is_lost``). Which blocks a ticket brings is not known, because others' loads are joined: one that is lost loses
    all that the sequence loaded. What was swapped out then will never be loaded."""
    known = tuple(pools)
    if is_lost and record.is_swapped_out:
        return range(record.blocks * record.layout.block_tokens)
    if not record.has_failed_load and not any(_is_lost(record, ticket, known, is_lost) for ticket in record.tickets):
        return NOTHING
    block_tokens = record.layout.block_tokens
    return range(record.loading.start * block_tokens, record.loading.stop * block_tokens)


def _is_lost(record: SequenceRecord, ticket: TicketView, pools: tuple[AttachedPool, ...], is_lost: bool) -> bool:
    if ticket.state != "running":
        return ticket.state == "failed"
    came: set[int] = set()
    for pool in pools if ticket.slot is not None else ():
        try:
            outcome = pool.outcome(ticket)
        except AlreadyClosed:  # it knows nothing any more
            continue
        if outcome in (LoadOutcome.FAILED, LoadOutcome.LOST):
            return True
        if outcome is LoadOutcome.CAME:
            came.add(pool.rank)
    return is_lost and len(came) < record.layout.ranks
