"""Length limits of every text, bytes and list of a request: one table, enforced by the edge.

A field that is not here may not be in a request: ``tests/unit/wire/test_limits.py`` walks all protos. ``Where.EDGE`` is
refused by ``check_fields`` before a handler looks at the message, ``Where.FLOW`` by the flow that reads it (because its
limit is configured, or because reading it twice would cost), ``Where.CUT`` is shortened.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor

from cachesvc.model.columns import MAX_OPERATIONS
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.keys import KEY_BYTES, MOST_KEYS
from cachesvc.model.layout import MAX_DIMS, MAX_GROUPS, MAX_NAME_BYTES, MAX_PLANES, MAX_RANKS


class Where(Enum):
    """Layer that enforces a limit."""

    EDGE = "edge"
    FLOW = "flow"
    CUT = "cut"


class Bound(NamedTuple):
    """Most characters of a text, bytes of a bytes field, or entries of a list; of entries, ``each`` may be so long."""

    most: int
    where: Where = Where.EDGE
    each: int = 0


ID = Bound(64)
TOKEN = Bound(64)
KEYS = Bound(MOST_KEYS * KEY_BYTES, Where.FLOW)
CELLS = Bound(4 * 65536)
COLUMN, LONG_COLUMN = Bound(4 * 65536), Bound(8 * 65536)
GROUPS = Bound(MAX_GROUPS * 4)
NAME = Bound(MAX_NAME_BYTES, Where.FLOW)

LIMITS: dict[str, Bound] = {
    "RegisterRequest.model": Bound(512, Where.FLOW),
    "RegisterRequest.tenant_salt": Bound(256, Where.FLOW),
    "RegisterRequest.display_name": Bound(128, Where.FLOW),
    "RegisterRequest.devices": Bound(MAX_RANKS, each=128),
    "PageCounts.pages": GROUPS,
    "Layout.groups": Bound(MAX_GROUPS, Where.FLOW),
    "Layout.planes": Bound(MAX_PLANES, Where.FLOW),
    "Plane.name": NAME,
    "Plane.group": NAME,
    "Plane.dtype": NAME,
    "Plane.page_shape": Bound(MAX_DIMS, Where.FLOW),
    "PlaneGroup.name": NAME,
    "PlaneGroup.pool": NAME,
    "AttachRequest.lease_id": ID,
    "AttachRequest.process_token": TOKEN,
    "DetachRequest.lease_id": ID,
    "DetachRequest.process_token": TOKEN,
    "OpenRequest.engine": Bound(128, Where.CUT),
    "OpenRequest.process_token": TOKEN,
    "OpenRequest.instance_id": ID,
    "OpenRequest.namespace": Bound(32),
    "KeepAliveRequest.lease_id": ID,
    "CloseRequest.lease_id": ID,
    "CloseRequest.process_token": TOKEN,
    "MatchRequest.lease_id": ID,
    "MatchRequest.keys": KEYS,
    "Expected.peer": Bound(256),
    "AllocateRequest.lease_id": ID,
    "AllocateRequest.positions": GROUPS,
    "GroupPositions.positions": CELLS,
    "PublishRequest.lease_id": ID,
    "PublishRequest.keys": KEYS,
    "PublishRequest.states": GROUPS,
    "SwapRequest.lease_id": ID,
    "RecycleRequest.lease_id": ID,
    "RecycleRequest.pages": GROUPS,
    "RecycleRequest.dead_blocks": GROUPS,
    "ReleaseRequest.lease_id": ID,
    "PrefetchRequest.lease_id": ID,
    "PrefetchRequest.keys": KEYS,
    "WaitTicketsRequest.lease_id": ID,
    "WaitTicketsRequest.tickets": Bound(1024, Where.FLOW),
    "ExtendRequest.pages": GROUPS,
    "GroupPages.pages": CELLS,
    "GroupPages.generations": CELLS,
    "StepColumns.grow_sequences": LONG_COLUMN,
    "StepColumns.grow_counts": COLUMN,
    "StepColumns.grow": GROUPS,
    "StepColumns.publish_sequences": LONG_COLUMN,
    "StepColumns.publish_first": COLUMN,
    "StepColumns.publish_counts": COLUMN,
    "StepColumns.publish_keys": Bound(MOST_KEYS * KEY_BYTES),
    "StepColumns.recycle_sequences": LONG_COLUMN,
    "StepColumns.recycle_tokens": LONG_COLUMN,
    "StepColumns.release_sequences": LONG_COLUMN,
    "StepColumns.release_output_tokens": COLUMN,
    "StepRequest.lease_id": ID,
    "StepRequest.operations": Bound(MAX_OPERATIONS, Where.FLOW),
    "StepRequest.stock_pages": Bound(MAX_GROUPS, Where.FLOW),
    "ListSequencesRequest.lease_id": ID,
    "ListBlocksRequest.keys": Bound(4096 * 32),
    "ListBlocksRequest.key_hex": Bound(4096, each=64),
    "GetTreeRequest.key": Bound(32),
    "GetTreeRequest.key_hex": Bound(64),
    "PinRequest.key_hex": Bound(64),
    "UnpinRequest.key_hex": Bound(64),
    "ExplainRequest.key_prefix": Bound(32, Where.FLOW),
    "SubscribeRequest.namespace": Bound(32, Where.FLOW),
    "EvictRequest.tier": Bound(16),
    "SetWeightsVersionRequest.version": Bound(128, Where.FLOW),
    "PurgeStorageRequest.model": Bound(512),
    "LaneHello.token": Bound(4096),
    "BorrowRequest.namespace": Bound(32),
    "BorrowRequest.layout_id": Bound(8),
    "BorrowRequest.keys": Bound(1024 * 32),
    "BorrowRequest.parts": Bound(MAX_GROUPS * MAX_RANKS),
    "BeatRequest.lease_ids": Bound(1024),
}

_APART = frozenset({"StepRequest.operations"})
"""Messages that are checked one by one as they are served."""

_LEAST_ENTRY_BYTES = 2
"""Bytes of a message in a list, by its tag and its length."""

_Row = tuple[int, str, Bound, str, str]
_CHECKS: dict[Any, tuple[_Row, ...]] = {}
"""Rows of each message, those first that the shortest message can exceed."""


def check_fields(message: Any, size_bytes: int | None = None) -> None:
    """Raises LimitExceeded for a field of the message, or of one within it, that is longer than the table says.

    ``size_bytes``: of the message or more, where that is known: no field is longer than the whole.
    """
    if size_bytes is None:
        size_bytes = message.ByteSize()
    rows = _CHECKS.get(message.DESCRIPTOR)
    if rows is None:
        rows = _CHECKS[message.DESCRIPTOR] = _rows(message.DESCRIPTOR)
    for least, name, bound, shape, full_name in rows:
        if size_bytes <= least:
            return
        if shape == "one":
            if message.HasField(name):
                check_fields(getattr(message, name), size_bytes)
            continue
        value = getattr(message, name)
        if shape == "messages":
            for each in value:
                check_fields(each, size_bytes)
            continue
        if len(value) > bound.most:
            raise LimitExceeded(full_name, len(value), bound.most)
        if shape == "texts":
            for each in value:
                if len(each) > bound.each:
                    raise LimitExceeded(f"{full_name}, an entry", len(each), bound.each)


def _rows(kind: Descriptor) -> tuple[_Row, ...]:
    """Checks of a message: the bytes of the longest one that cannot exceed the bound, name, bound, shape (length,
    texts; of what is within it: messages, one), and its whole name."""
    rows: list[_Row] = []
    for field in kind.fields:
        full_name = f"{kind.name}.{field.name}"
        bound = LIMITS.get(full_name, Bound(0, Where.FLOW))
        within = _rows(field.message_type) if field.message_type is not None and full_name not in _APART else ()
        if bound.where is Where.EDGE:
            least = bound.most * _LEAST_ENTRY_BYTES if field.message_type is not None else bound.most
            shape = "texts" if bound.each else "length"
            rows.append((min(least, bound.each or least), field.name, bound, shape, full_name))
        if within:
            shape = "messages" if field.is_repeated else "one"
            rows.append((within[0][0], field.name, bound, shape, full_name))
    return tuple(sorted(rows, key=lambda row: row[0]))
