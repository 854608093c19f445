"""Bytes to messages, and no message for bytes that would cost more to parse than its call may ask for.

A parser makes an object of every entry, and an empty entry is two bytes on the wire: 8 MiB become four million objects.
So a large message is walked first, along its tags and without an object for any: no field may come more often than the
table of limits says, none that is not a list more than once, and all fields together not more than ``MAX_FIELDS``
times. What is small is parsed at once, for that costs less than to look: a message of fewer than two bytes for each
entry that its shortest list may have cannot break a limit. Such entries are stepped over, up to ``SKIPPED_BYTES``.

The encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cachesvc.model.answers import MAX_OPERATIONS
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.layout import MAX_DIMS, MAX_GROUPS, MAX_NAME_BYTES, MAX_PLANES, MAX_RANKS
from cachesvc.model.words import KEY_BYTES, MOST_KEYS
from cachesvc.wire.status import MAX_MESSAGE_BYTES

WALKED_BYTES = 72 << 10
"""Size above which a message is walked before it is parsed. Keys of 2,048 blocks are shorter."""
MAX_FIELDS = 16 * MAX_OPERATIONS
"""Fields of one message, with those of all messages in it: as many as the longest Step has."""
SKIPPED_BYTES = 4 * MAX_FIELDS
"""Bytes of small entries that are not walked: their parser makes at most twice ``MAX_FIELDS`` objects."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
_ONE_BYTE = 0x7F
"""The greatest size that is one byte on the wire."""
_UNKNOWN_BYTES = 1024
"""Fields of a newer release."""

M = TypeVar("M", bound=Message)


class FieldRow(NamedTuple):
    """A field as the walk sees it. ``most``: how often it may come; ``within``: of the message in it, which is walked
    where it has more than ``small`` bytes."""

    name: str
    most: int
    within: Descriptor | None
    small: int


class _Budget:
    """Budget left for one message: ``fields`` to be walked, ``skipped`` bytes to be stepped over."""

    def __init__(self) -> None:
        self.fields = MAX_FIELDS
        self.skipped = SKIPPED_BYTES


def parse(kind: type[M], raw: bytes) -> M:
    """The message. Raises InvalidRequest for bytes that are none, LimitExceeded before it parses too many."""
    if len(raw) > WALKED_BYTES:
        require_bounded(kind.DESCRIPTOR, raw)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise _none(kind.DESCRIPTOR) from error


def require_bounded(kind: Any, raw: bytes) -> None:
    """Raises LimitExceeded for bytes or fields beyond what the message may have, InvalidRequest for broken ones."""
    most = most_bytes(kind)
    if len(raw) > most:
        raise LimitExceeded(f"bytes of {kind.name}", len(raw), most)
    try:
        _walk(kind, raw, 0, len(raw), _Budget())
    except IndexError:
        raise _none(kind) from None


@cache
def most_bytes(kind: Any) -> int:
    """The longest encoding of a message within its limits, and within what a message may be at all."""
    sizes = sum(_field_bytes(field) for field in kind.fields)
    return min(MAX_MESSAGE_BYTES, sizes + _UNKNOWN_BYTES)


def _field_bytes(field: FieldDescriptor) -> int:
    assert field.containing_type is not None
    bound = LIMITS.get(f"{field.containing_type.name}.{field.name}")
    count = bound.most if bound is not None and field.is_repeated else 1
    if field.message_type is not None:
        each = most_bytes(field.message_type)
    elif field.type == FieldDescriptor.TYPE_STRING:
        each = 4 * ((bound.each if field.is_repeated else bound.most) if bound is not None else 0)
    elif field.type == FieldDescriptor.TYPE_BYTES and bound is not None:
        each = bound.each if field.is_repeated else bound.most
    else:
        each = _LONGEST_VARINT
    return count * (each + 2 * _LONGEST_VARINT)


# Length limits of every text, bytes and list of a request: one table, enforced by the edge.
#
# A field that is not here may not be in a request: ``tests/unit/wire/test_limits.py`` walks all protos. ``Where.EDGE``
# is refused by ``check_fields`` before a handler looks at the message, ``Where.FLOW`` by the flow that reads it
# (because its limit is configured, or because reading it twice would cost), ``Where.CUT`` is shortened.


@cache
def _rows(kind: Descriptor) -> dict[int, FieldRow]:
    rows = {}
    for field in kind.fields:
        bound = LIMITS.get(f"{kind.name}.{field.name}")
        most = bound.most if bound is not None and field.is_repeated else 1
        small = _ONE_BYTE if field.message_type is None else min(2 * _shortest_list(field.message_type), _ONE_BYTE)
        rows[field.number] = FieldRow(f"{kind.name}.{field.name}", most, field.message_type, small)
    return rows


@cache
def _shortest_list(kind: Descriptor) -> int:
    """Entries that the list with the lowest limit may have, of the message and those in it."""
    lists = [LIMITS[f"{kind.name}.{field.name}"].most for field in kind.fields if field.is_repeated]
    within = [_shortest_list(field.message_type) for field in kind.fields if field.message_type is not None]
    return min([*lists, *within, MAX_FIELDS])


def _skip(row: FieldRow, raw: bytes, at: int, end: int, count: int, budget: _Budget) -> tuple[int, int]:
    """Step over small entries of a list from ``at`` on, which follow on each other. Returns where they end, and
    ``count`` with them."""
    first, tag, small, most = at, raw[at], row.small, row.most
    last = min(end, at + budget.skipped)
    while at < last and raw[at] == tag and raw[at + 1] <= small and count <= most:
        at += 2 + raw[at + 1]
        count += 1
    budget.skipped -= at - first
    return at, count


def _walk(kind: Descriptor, raw: bytes, at: int, end: int, budget: _Budget) -> None:
    """Look at the fields of ``raw[at:end]``. Raises IndexError where the bytes end early."""
    rows, seen = _rows(kind), dict[int, int]()
    while at < end:
        tag = raw[at]
        number = tag >> 3
        row = rows.get(number)
        if row is not None and row.most > 1 and tag & 7 == _LENGTH and tag < 0x80:
            at, count = _skip(row, raw, at, end, seen.get(number, 0), budget)
            if count > row.most:
                raise LimitExceeded(row.name, count, row.most)
            seen[number] = count
            if at >= end or raw[at] != tag:
                continue
        budget.fields -= 1
        if budget.fields < 0:
            raise LimitExceeded("fields of a message", MAX_FIELDS + 1, MAX_FIELDS)
        at += 1
        if tag >= 0x80:
            tag, at = _varint(raw, at - 1)
        wire, number = tag & 7, tag >> 3
        count = seen[number] = seen.get(number, 0) + 1
        row = rows.get(number)
        if row is not None and count > row.most:
            raise LimitExceeded(row.name, count, row.most)
        if wire == _LENGTH:
            size, at = _varint(raw, at)
            if at + size > end:
                raise IndexError
            if size and row is not None and row.within is not None:
                _walk(row.within, raw, at, at + size, budget)
            at += size
        elif wire == _VARINT:
            while raw[at] >= 0x80:
                at += 1
            at += 1
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise InvalidRequest(f"a {kind.name} has groups, which no release of this API uses")
    if at > end:
        raise IndexError


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _none(kind: Any) -> InvalidRequest:
    return InvalidRequest(f"the bytes are not a {kind.name}; encode it with the stubs of this release")


class Where(Enum):
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
        rows = _CHECKS[message.DESCRIPTOR] = _limit_rows(message.DESCRIPTOR)
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


def _limit_rows(kind: Descriptor) -> tuple[_Row, ...]:
    """Checks of a message: the bytes of the longest one that cannot exceed the bound, name, bound, shape (length,
    texts; of what is within it: messages, one), and its whole name."""
    rows: list[_Row] = []
    for field in kind.fields:
        full_name = f"{kind.name}.{field.name}"
        bound = LIMITS.get(full_name, Bound(0, Where.FLOW))
        within = _limit_rows(field.message_type) if field.message_type is not None and full_name not in _APART else ()
        if bound.where is Where.EDGE:
            least = bound.most * _LEAST_ENTRY_BYTES if field.message_type is not None else bound.most
            shape = "texts" if bound.each else "length"
            rows.append((min(least, bound.each or least), field.name, bound, shape, full_name))
        if within:
            shape = "messages" if field.is_repeated else "one"
            rows.append((within[0][0], field.name, bound, shape, full_name))
    return tuple(sorted(rows, key=lambda row: row[0]))
