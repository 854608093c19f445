"""The columns of a Step as messages: read for flows, and entry by entry as the operations that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.answers import Growth, Publishes, Releases
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import KEY_BYTES

GROW = cache_pb2.STEP_COLUMN_GROW
PUBLISH = cache_pb2.STEP_COLUMN_PUBLISH
RECYCLE = cache_pb2.STEP_COLUMN_RECYCLE
RELEASE = cache_pb2.STEP_COLUMN_RELEASE
IN_ORDER = (GROW, PUBLISH, RECYCLE, RELEASE)
"""Columns in the order in which they are applied."""
OPERATION_NAMES = {GROW: "extend", PUBLISH: "publish", RECYCLE: "recycle", RELEASE: "release"}
"""Names of an entry in StepOperation and OperationResult."""
REPLY_FIELDS = {GROW: "blocks", PUBLISH: "sealed_blocks", RECYCLE: "recycled_pages", RELEASE: "freed_pages"}
ANSWER_FIELDS = {GROW: "grown_blocks", PUBLISH: "sealed_blocks", RECYCLE: "recycled_pages", RELEASE: "freed_pages"}
NOT_TOLD = 0xFFFFFFFF
"""Value in ``release_output_tokens`` of an engine that does not report them."""
ODD = 0xFFFFFFFF
"""Value in an answer's column where ``odd`` has the answer."""

Column: TypeAlias = "cache_pb2.StepColumn.ValueType"


@dataclass(slots=True, eq=False)
class Lot:
    """Entries of a step that are applied in their order: those of a column, or (without one) its operations.

    ``data``: for the flow that carries many out, the sequences first. ``starts``: first block of each entry, where
    they name blocks. ``operation`` makes the message of the operation that an entry stands for. ``numbers``: the
    answers so far, ODD where one is still to come or takes more than a number.
    """

    column: Column
    data: Any
    starts: Sequence[int] | None
    operation: Callable[[int], Any]
    numbers: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.numbers) == len(self.data[0])

    def blocks(self, first: int, last: int) -> int:
        """Blocks of some entries, one each where they name none."""
        starts = self.starts
        return last - first if starts is None else max(starts[last] - starts[first], last - first)


def count_entries(message: cache_pb2.StepColumns) -> int:
    """Entries of all columns; nothing is read for it."""
    numbers = (message.grow_sequences, message.publish_sequences, message.recycle_sequences, message.release_sequences)
    return sum(map(len, numbers)) >> 3


def read_columns(message: cache_pb2.StepColumns, groups: int) -> list[Lot]:
    """The columns of a step that have entries, in the order of ``IN_ORDER``, for a layout of ``groups`` groups. Raises
    InvalidRequest for ragged ones."""
    lots = []
    if message.grow_sequences or message.grow_counts or message.grow:
        lots.append(_read_growth(message, groups))
    if message.publish_sequences or message.publish_first or message.publish_counts or message.publish_keys:
        lots.append(_read_publishes(message))
    if message.recycle_sequences or message.recycle_tokens:
        lots.append(_read_recycles(message))
    if message.release_sequences or message.release_output_tokens:
        lots.append(_read_releases(message))
    return lots


def plain_number(column: Column, result: Any) -> int | None:
    """The number that says all of a result's message; None where it takes more than a number."""
    if column == PUBLISH and (result.pending or result.duplicate_positions):
        return None
    return int(getattr(result, REPLY_FIELDS[column]))


def _read_growth(message: cache_pb2.StepColumns, groups: int) -> Lot:
    numbers = _unpack("Q", "grow_sequences", message.grow_sequences)
    starts = _read_starts("grow_counts", message.grow_counts, len(numbers))
    blocks = starts[-1]
    pages: list[list[int]] = []
    generations: list[list[int]] = []
    for each in message.grow if len(message.grow) == 1 else sorted(message.grow, key=lambda each: each.group):
        group = each.group
        if group != len(pages):
            break
        pages.append(_unpack("i", f"grow.pages of group {group}", each.pages, blocks))
        generations.append(_unpack("I", f"grow.generations of group {group}", each.generations, blocks))
    if len(pages) != groups or len(message.grow) != groups:
        raise InvalidRequest(f"grow needs the pages of each of {groups} groups once")

    def operation(entry: int) -> cache_pb2.ExtendRequest:
        first, last = starts[entry : entry + 2]
        cells = [_cut(each, first, last) for each in message.grow]
        return cache_pb2.ExtendRequest(sequence_id=numbers[entry], pages=cells)

    return Lot(GROW, Growth(numbers, starts, pages, generations), starts, operation)


def _read_publishes(message: cache_pb2.StepColumns) -> Lot:
    numbers = _unpack("Q", "publish_sequences", message.publish_sequences)
    first = _unpack("I", "publish_first", message.publish_first, len(numbers))
    starts = _read_starts("publish_counts", message.publish_counts, len(numbers))
    keys = message.publish_keys
    if keys and len(keys) != starts[-1] * KEY_BYTES:
        raise InvalidRequest(f"publish_keys has {len(keys)} bytes for {starts[-1]} blocks, of {KEY_BYTES} each")

    def operation(entry: int) -> cache_pb2.PublishRequest:
        start, end = starts[entry : entry + 2]
        mine = keys[start * KEY_BYTES : end * KEY_BYTES]
        return cache_pb2.PublishRequest(
            sequence_id=numbers[entry], first_block=first[entry], blocks=end - start, keys=mine
        )

    return Lot(PUBLISH, Publishes(numbers, first, starts, keys), starts, operation)


def _read_recycles(message: cache_pb2.StepColumns) -> Lot:
    numbers = _unpack("Q", "recycle_sequences", message.recycle_sequences)
    tokens = _unpack("Q", "recycle_tokens", message.recycle_tokens, len(numbers))

    def operation(entry: int) -> cache_pb2.RecycleRequest:
        return cache_pb2.RecycleRequest(sequence_id=numbers[entry], computed_tokens=tokens[entry])

    return Lot(RECYCLE, (numbers, tokens), None, operation)


def _read_releases(message: cache_pb2.StepColumns) -> Lot:
    numbers, raw = _unpack("Q", "release_sequences", message.release_sequences), message.release_output_tokens
    tokens = _unpack("I", "release_output_tokens", raw, len(numbers)) if raw else []
    told = [None if each == NOT_TOLD else each for each in tokens]

    def operation(entry: int) -> cache_pb2.ReleaseRequest:
        return cache_pb2.ReleaseRequest(sequence_id=numbers[entry], output_tokens=told[entry] if told else None)

    return Lot(RELEASE, Releases(numbers, told), None, operation)


def _read_starts(name: str, raw: bytes, entries: int) -> Sequence[int]:
    """Beginning of each entry among the blocks of all, and the end of the last one."""
    if not raw:
        return range(entries + 1)
    return list(accumulate(_unpack("I", name, raw, entries), initial=0))


def _unpack(code: str, name: str, raw: bytes, entries: int | None = None) -> list[int]:
    """Numbers of one column, ``entries`` where that is known. Raises InvalidRequest."""
    size_bytes = 8 if code == "Q" else 4
    if len(raw) % size_bytes:
        raise InvalidRequest(f"{name} has {len(raw)} bytes, which is no multiple of {size_bytes}")
    if entries is not None and len(raw) != entries * size_bytes:
        raise InvalidRequest(f"{name} has {len(raw) // size_bytes} entries; {entries} are needed")
    return memoryview(raw).cast(code).tolist()  # type: ignore[call-overload,no-any-return]  # a code of one number


def _cut(cells: common_pb2.GroupPages, first: int, last: int) -> common_pb2.GroupPages:
    part = slice(4 * first, 4 * last)
    return common_pb2.GroupPages(group=cells.group, pages=cells.pages[part], generations=cells.generations[part])
