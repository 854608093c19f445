"""Place on the timeline at which a ticket is awaited."""

from __future__ import annotations

from cachesvc.model.answers import TicketView
from cachesvc.model.transfer import TimelineSlot
from cachesvc_client.core.errors import InvalidRequest, LoadFailed


def layer_target(slot: TimelineSlot, layer: int) -> int:
    """The value that a load's word reaches with a layer. Raises InvalidRequest."""
    if not 0 <= layer < max(slot.layers, 1):
        raise InvalidRequest(f"layer {layer} of a load of {slot.layers} layers")
    return (slot.base + layer + 1) & 0xFFFFFFFF


def slot_of(ticket: TicketView) -> TimelineSlot | None:
    """Slot to wait on; None when the ticket has ended well. Raises LoadFailed, InvalidRequest."""
    if not isinstance(ticket, TicketView):
        raise InvalidRequest(f"a wait takes a ticket, such as those of Sequence.tickets, not {ticket!r:.60}")
    if ticket.state == "failed":
        raise LoadFailed(f"load {ticket.id} failed: {ticket.reason}; release its sequence, match again and recompute")
    if ticket.state == "done":
        return None
    if ticket.slot is None:
        raise InvalidRequest(f"ticket {ticket.id} has no place on the timeline; wait for it with lease.wait_tickets")
    return ticket.slot
