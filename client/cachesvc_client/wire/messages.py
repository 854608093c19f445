"""Requests built and answers read: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.answers import (
    GroupCells,
    Published,
    Recycled,
    TicketView,
)
from cachesvc.model.words import TimelineSlot
from cachesvc.wire.convert import (
    TICKET_STATES,
    cells_from_proto,
    cells_to_proto,
    unpack_numbers,
)

_STATE_NAMES = {number: name for name, number in TICKET_STATES.items()}


def parse_publish(response: cache_pb2.PublishResponse) -> Published:
    """Number of sealed blocks of the sequence, and the pages that were there before."""
    return Published(
        response.sealed_blocks,
        tuple(unpack_numbers(response.duplicate_positions)),
        cells_from_proto(response.duplicates),
        cells_from_proto(response.spares),
        response.pending,
        cells_from_proto(response.kept),
    )


def build_recycle(
    sequence_id: int, computed_tokens: int, pages: Sequence[GroupCells] = (), dead_blocks: Sequence[int] = ()
) -> cache_pb2.RecycleRequest:
    """``pages``: spare or stock pages to give back; a sequence_id of 0 gives back stock alone. ``dead_blocks``: of each
    windowed group, how many blocks are dead at the engine's word."""
    return cache_pb2.RecycleRequest(
        sequence_id=sequence_id, computed_tokens=computed_tokens, pages=cells_to_proto(pages), dead_blocks=dead_blocks
    )


def parse_recycle(response: cache_pb2.RecycleResponse) -> Recycled:
    """Pages that came back, and the cursor of each windowed group."""
    return Recycled(response.recycled_pages, tuple(response.cursors))


def parse_tickets(tickets: Iterable[common_pb2.Ticket]) -> tuple[TicketView, ...]:
    """Views of transfers. A state that this client does not know counts as running: its end is yet to come."""
    return tuple(
        [
            TicketView(
                ticket.id,
                _STATE_NAMES.get(ticket.state, "running"),
                ticket.reason,
                TimelineSlot(ticket.slot.word, ticket.slot.failed_word, ticket.slot.base, ticket.slot.layers)
                if ticket.HasField("slot")
                else None,
                ticket.direction,
                ticket.blocks,
                ticket.size_bytes,
            )
            for ticket in tickets
        ]
    )
