"""Messages to the model's words and back. Nothing here decides anything."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from kvcache.v1 import cache_pb2, common_pb2, engine_pb2

from cachesvc.model.answers import (
    Allocated,
    Expected,
    GroupCells,
    Matched,
    Prefetched,
    Published,
    Recycled,
    Swapped,
    TicketView,
)
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Geometry, Layout, Plane, PlaneGroup

MOST_COUNT = (1 << 32) - 1
"""Largest count that a message takes."""

TICKET_STATES = {
    "running": common_pb2.TICKET_STATE_RUNNING,
    "done": common_pb2.TICKET_STATE_DONE,
    "failed": common_pb2.TICKET_STATE_FAILED,
}


def pack_pages(pages: Iterable[int]) -> bytes:
    return (pages if isinstance(pages, array) else array("i", pages)).tobytes()


def unpack_pages(raw: bytes) -> array[int]:
    """Page ids of a packed field. Raises InvalidRequest for a ragged length."""
    return _unpack("i", raw)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return array("I", numbers).tobytes() if numbers else b""


def unpack_numbers(raw: bytes) -> list[int]:
    """Numbers of a packed uint32 field. Raises InvalidRequest for a ragged length."""
    return _unpack("I", raw).tolist() if raw else []


def _unpack(code: str, raw: bytes) -> array[int]:
    if len(raw) % 4:
        raise InvalidRequest(f"a packed list of 32-bit numbers has {len(raw)} bytes, which is no multiple of 4")
    numbers = array(code)
    numbers.frombytes(raw)
    return numbers


def layout_to_proto(layout: Layout) -> common_pb2.Layout:
    groups = [
        common_pb2.PlaneGroup(
            name=group.name,
            window_tokens=group.window_tokens,
            sink_tokens=group.sink_tokens,
            replicated=group.replicated,
            pool=group.pool,
            state=group.is_state,
        )
        for group in layout.groups
    ]
    planes = [
        common_pb2.Plane(
            name=plane.name, layer=plane.layer, group=plane.group, page_shape=plane.page_shape, dtype=plane.dtype
        )
        for plane in layout.planes
    ]
    return common_pb2.Layout(block_tokens=layout.block_tokens, ranks=layout.ranks, groups=groups, planes=planes)


def layout_from_proto(message: common_pb2.Layout) -> Layout:
    """A message as a checked layout. Raises LayoutRejected."""
    groups = tuple(
        PlaneGroup(
            group.name,
            group.window_tokens if group.HasField("window_tokens") else None,
            group.sink_tokens,
            group.replicated,
            group.pool,
            group.state,
        )
        for group in message.groups
    )
    planes = tuple(
        Plane(plane.name, plane.layer, plane.group, tuple(plane.page_shape), plane.dtype) for plane in message.planes
    )
    return Layout(message.block_tokens, message.ranks, groups, planes)


def cells_to_proto(tables: Sequence[GroupCells]) -> list[common_pb2.GroupPages]:
    return [
        common_pb2.GroupPages(
            group=cells.group,
            first_block=cells.first_block,
            pages=pack_pages(cells.pages),
            generations=pack_numbers(cells.generations),
        )
        for cells in tables
    ]


def cells_from_proto(messages: Iterable[common_pb2.GroupPages]) -> tuple[GroupCells, ...]:
    """Messages as table cells. Raises InvalidRequest for ragged bytes."""
    return tuple([_cells_of(message) for message in messages])


def _cells_of(message: common_pb2.GroupPages) -> GroupCells:
    pages, generations = unpack_pages(message.pages), message.generations
    return GroupCells(
        message.group, message.first_block, pages, tuple(unpack_numbers(generations)) if generations else ()
    )


def positions_from_proto(messages: Iterable[common_pb2.GroupPositions]) -> dict[int, list[int]]:
    """Positions by group. Raises InvalidRequest for ragged bytes, and for a group that is named twice."""
    found: dict[int, list[int]] = {}
    for message in messages:
        if message.group in found:
            raise InvalidRequest(f"positions of group {message.group} are named twice")
        found[message.group] = list(unpack_numbers(message.positions))
    return found


def positions_to_proto(positions: Mapping[int, Sequence[int]]) -> list[common_pb2.GroupPositions]:
    return [common_pb2.GroupPositions(group=group, positions=pack_numbers(mine)) for group, mine in positions.items()]


def ticket_to_proto(ticket: TicketView) -> common_pb2.Ticket:
    fields = ticket._asdict() | {"state": TICKET_STATES[ticket.state], "slot": None}
    if (slot := ticket.slot) is not None:
        fields["slot"] = common_pb2.TimelineSlot(
            word=slot.word, failed_word=slot.failed_word, base=slot.base, layers=slot.layers
        )
    return common_pb2.Ticket(**fields)


def placements_to_proto(geometry: Geometry) -> list[engine_pb2.PlanePlacement]:
    return [
        engine_pb2.PlanePlacement(
            name=span.plane.name,
            layer=span.plane.layer,
            group=span.plane.group,
            offset=span.offset,
            page_stride=span.page_stride,
        )
        for span in geometry.spans
    ]


def expected_from_proto(message: cache_pb2.Expected) -> Expected:
    patience = message.patience_ms / 1000 if message.patience_ms else Expected("").patience
    return Expected(message.peer, message.blocks, patience, message.is_computed, not message.no_wait, message.is_over)


def expected_to_proto(expected: Expected) -> cache_pb2.Expected:
    """Message of an expectation. Raises InvalidRequest for what no message takes."""
    if not 0 <= expected.blocks <= MOST_COUNT:
        raise InvalidRequest(f"expected.blocks is {expected.blocks}; it counts from 0 (all of them) to {MOST_COUNT}")
    if not expected.patience >= 0:
        raise InvalidRequest(f"expected.patience is {expected.patience}; it counts seconds, from 0")
    return cache_pb2.Expected(
        peer=expected.peer,
        blocks=expected.blocks,
        patience_ms=max(1, round(min(expected.patience * 1000, MOST_COUNT))),
        is_computed=expected.is_computed,
        no_wait=not expected.waits,
        is_over=expected.is_over,
    )


def matched_to_proto(answer: Matched) -> cache_pb2.MatchResponse:
    message = cache_pb2.MatchResponse(
        device_blocks=answer.device_blocks,
        host_blocks=answer.host_blocks,
        storage_blocks=answer.storage_blocks,
        computing_blocks=answer.computing_blocks,
        full_blocks=answer.full_blocks,
        coming_blocks=answer.coming_blocks,
    )
    for cells in answer.tables:  # made where they belong: a table of 128k tokens is 8 KiB, and would be copied there
        message.tables.add(group=cells.group, pages=pack_pages(cells.pages))
    return message


def allocated_to_proto(answer: Allocated) -> cache_pb2.AllocateResponse:
    return cache_pb2.AllocateResponse(
        tables=cells_to_proto(answer.tables),
        tickets=[ticket_to_proto(ticket) for ticket in answer.tickets],
        loading_blocks=answer.loading_blocks,
    )


def published_to_proto(answer: Published) -> cache_pb2.PublishResponse:
    return cache_pb2.PublishResponse(
        sealed_blocks=answer.sealed_blocks,
        duplicate_positions=pack_numbers(answer.duplicate_positions),
        duplicates=cells_to_proto(answer.duplicates),
        spares=cells_to_proto(answer.spares),
        pending=answer.pending,
        kept=cells_to_proto(answer.kept),
    )


def swapped_to_proto(answer: Swapped) -> cache_pb2.SwapResponse:
    return cache_pb2.SwapResponse(
        tickets=[ticket_to_proto(ticket) for ticket in answer.tickets], tables=cells_to_proto(answer.tables)
    )


def recycled_to_proto(answer: Recycled) -> cache_pb2.RecycleResponse:
    return cache_pb2.RecycleResponse(recycled_pages=answer.pages, cursors=answer.cursors)


def prefetched_to_proto(answer: Prefetched) -> cache_pb2.PrefetchResponse:
    return cache_pb2.PrefetchResponse(
        device_blocks=answer.device_blocks, tickets=[ticket_to_proto(ticket) for ticket in answer.tickets]
    )
