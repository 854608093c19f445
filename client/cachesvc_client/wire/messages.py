"""Requests built and answers read: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.v1 import cache_pb2, common_pb2, engine_pb2, lease_pb2

from cachesvc.model.answers import (
    NO_POSITIONS,
    Allocated,
    Expected,
    GroupCells,
    Matched,
    Positions,
    Prefetched,
    Published,
    Recycled,
    Swapped,
    TicketView,
)
from cachesvc.model.layout import Layout
from cachesvc.model.words import TimelineSlot
from cachesvc.wire.convert import (
    TICKET_STATES,
    cells_from_proto,
    cells_to_proto,
    expected_to_proto,
    layout_to_proto,
    positions_to_proto,
    unpack_numbers,
)
from cachesvc_client.core.arguments import Retention
from cachesvc_client.core.errors import InvalidRequest, NotSupported, Registration

_STATE_NAMES = {number: name for name, number in TICKET_STATES.items()}

SWAP_OUT = cache_pb2.SWAP_DIRECTION_OUT
SWAP_IN = cache_pb2.SWAP_DIRECTION_IN


def build_register(
    model: str,
    layout: Layout,
    *,
    tenant_salt: bytes = b"",
    devices: Sequence[str] = (),
    device_pages: Sequence[int] | None = None,
    device_share: float | None = None,
    host_pages: Sequence[int] | None = None,
    host_share: float | None = None,
    reserved_pages: int = 0,
    display_name: str = "",
) -> engine_pb2.RegisterRequest:
    """Raises InvalidRequest where a pool is given both as pages and as a share, and for a count that is none."""
    if not 0 <= reserved_pages < 1 << 32:
        raise InvalidRequest(f"{reserved_pages} is not a number of reserved pages")
    return engine_pb2.RegisterRequest(
        model=model,
        layout=layout_to_proto(layout),
        tenant_salt=tenant_salt,
        devices=devices,
        device_pool=_pool_share("device", device_pages, device_share),
        host_pool=_pool_share("host", host_pages, host_share),
        reserved_pages=reserved_pages,
        display_name=display_name,
    )


def _pool_share(pool: str, pages: Sequence[int] | None, share: float | None) -> engine_pb2.PoolShare | None:
    if pages is not None and share is not None:
        raise InvalidRequest(f"give {pool}_pages or {pool}_share, not both")
    if pages is not None:
        return engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=pages))
    return engine_pb2.PoolShare(share=share) if share is not None else None


def parse_registration(response: engine_pb2.RegisterResponse, layout: Layout, reserved_pages: int = 0) -> Registration:
    """Grant of the daemon. Raises NotSupported by one that reserves no pages, and would grant them."""
    if response.reserved_pages != reserved_pages:
        raise NotSupported(f"the daemon reserves {response.reserved_pages} pages, not {reserved_pages}: update it")
    if layout.has_shared_pools and (not response.first_pages or any(response.first_pages)):
        raise NotSupported("the daemon gives each group pages of its own, whatever pool it names: update it")
    return Registration(
        model_id=response.model_id,
        replica=response.replica,
        namespace=response.namespace,
        device_pages=tuple(response.device_pages),
        host_pages=tuple(response.host_pages),
        devices=tuple(response.devices),
        epoch=response.epoch,
        layout=layout,
        existed=response.existed,
        reserved_pages=response.reserved_pages,
        weights_version=response.weights_version,
        peer_address=response.peer_address,
    )


def build_open(
    registration: Registration, engine: str, process_token: bytes, request_id: int, instance: str = ""
) -> lease_pb2.OpenRequest:
    """A lease on the replica that was registered, of one process or of an ``instance``'s."""
    return lease_pb2.OpenRequest(
        model_id=registration.model_id,
        replica=registration.replica,
        engine=engine,
        process_token=process_token,
        request_id=request_id,
        instance_id=instance,
        namespace=registration.namespace,
    )


def build_match(
    sequence_id: int,
    keys: bytes,
    max_blocks: int,
    waited_seconds: float = 0,
    clock_seconds: float | None = None,
    expected: Expected | None = None,
    retention: Retention = Retention.DEFAULT,
) -> cache_pb2.MatchRequest:
    """``keys``: packed 32-byte block keys; ``max_blocks`` 0: reuse all that there is. ``clock_seconds``: a replay's."""
    waited_ms = min(max(0, round(waited_seconds * 1000)), 0xFFFFFFFF)
    request = cache_pb2.MatchRequest(
        sequence_id=sequence_id,
        keys=keys,
        max_blocks=max_blocks,
        waited_ms=waited_ms,
        clock_seconds=clock_seconds,
        retention=retention.number,
    )
    if expected is not None:
        request.expected.CopyFrom(expected_to_proto(expected))
    return request


def parse_match(response: cache_pb2.MatchResponse) -> Matched:
    """The hit, and the pages of what is in place."""
    return Matched(
        response.device_blocks,
        response.host_blocks,
        response.computing_blocks,
        cells_from_proto(response.tables),
        response.storage_blocks,
        response.full_blocks,
        response.coming_blocks,
    )


def build_allocate(
    sequence_id: int, blocks: int, short_suffix: bool, positions: Positions = NO_POSITIONS
) -> cache_pb2.AllocateRequest:
    """``blocks``: length of the table that is wanted. ``positions``: by windowed group, the new blocks with a page."""
    return cache_pb2.AllocateRequest(
        sequence_id=sequence_id, blocks=blocks, short_suffix=short_suffix, positions=positions_to_proto(positions)
    )


def parse_allocate(response: cache_pb2.AllocateResponse) -> Allocated:
    """The new cells and the loads to wait for."""
    return Allocated(cells_from_proto(response.tables), parse_tickets(response.tickets), response.loading_blocks)


def build_publish(
    sequence_id: int, first_block: int, blocks: int, keys: bytes, states: Sequence[GroupCells] = ()
) -> cache_pb2.PublishRequest:
    """``keys`` of exactly ``blocks`` blocks, or empty where Match had them. ``states``: pages to seal as states."""
    return cache_pb2.PublishRequest(
        sequence_id=sequence_id, first_block=first_block, blocks=blocks, keys=keys, states=cells_to_proto(states)
    )


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


def build_swap(
    sequence_id: int, direction: cache_pb2.SwapDirection.ValueType, *, short_suffix: bool = False
) -> cache_pb2.SwapRequest:
    return cache_pb2.SwapRequest(sequence_id=sequence_id, direction=direction, short_suffix=short_suffix)


def parse_swap(response: cache_pb2.SwapResponse) -> Swapped:
    """The transfer; after IN also the whole tables."""
    return Swapped(parse_tickets(response.tickets), cells_from_proto(response.tables))


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


def build_release(
    sequence_id: int, output_tokens: int | None = None, clock_seconds: float | None = None
) -> cache_pb2.ReleaseRequest:
    """Release of a sequence whose request has put out ``output_tokens`` tokens (None: unknown)."""
    return cache_pb2.ReleaseRequest(sequence_id=sequence_id, output_tokens=output_tokens, clock_seconds=clock_seconds)


def build_prefetch(keys: bytes) -> cache_pb2.PrefetchRequest:
    """``keys``: packed 32-byte block keys of the prefix."""
    return cache_pb2.PrefetchRequest(keys=keys)


def parse_prefetch(response: cache_pb2.PrefetchResponse) -> Prefetched:
    """Blocks that will be in place once the tickets are done."""
    return Prefetched(response.device_blocks, parse_tickets(response.tickets))


def build_wait_tickets(lease_id: str, tickets: Sequence[int], wait_ms: int) -> cache_pb2.WaitTicketsRequest:
    """Waits up to ``wait_ms`` for all of ``tickets`` to end."""
    return cache_pb2.WaitTicketsRequest(lease_id=lease_id, tickets=tickets, wait_ms=wait_ms)


def parse_tickets(tickets: Iterable[common_pb2.Ticket]) -> tuple[TicketView, ...]:
    return tuple(parse_ticket(ticket) for ticket in tickets)


def parse_ticket(ticket: common_pb2.Ticket) -> TicketView:
    """View of one transfer. A state that this client does not know counts as running: its end is yet to come."""
    slot = ticket.slot
    return TicketView(
        ticket.id,
        _STATE_NAMES.get(ticket.state, "running"),
        ticket.reason,
        TimelineSlot(slot.word, slot.failed_word, slot.base, slot.layers) if ticket.HasField("slot") else None,
        ticket.direction,
        ticket.blocks,
        ticket.size_bytes,
    )
