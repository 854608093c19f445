"""Bytes to messages, and no message for bytes that would cost more to parse than its call may ask for.

A parser makes an object of every entry, and an empty entry is two bytes on the wire: 8 MiB become four million objects.
So a large message is walked first, along its tags and without an object for any: no field may come more often than the
table of limits says, none that is not a list more than once, and all fields together not more than ``MAX_FIELDS``
times. What is small is parsed at once, for that costs less than to look: a message of fewer than two bytes for each
entry that its shortest list may have cannot break a limit. Such entries are stepped over, up to ``SKIPPED_BYTES``.

The encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cachesvc.model.columns import MAX_OPERATIONS
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.wire.limits import LIMITS
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
