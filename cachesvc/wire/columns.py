"""The columns of a Step as messages: read for flows, and entry by entry as the operations that they stand for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

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
ANSWER_FIELDS = {GROW: "grown_blocks", PUBLISH: "sealed_blocks", RECYCLE: "recycled_pages", RELEASE: "freed_pages"}
NOT_TOLD = 0xFFFFFFFF
"""Value in ``release_output_tokens`` of an engine that does not report them."""
ODD = 0xFFFFFFFF
"""Value in an answer's column where ``odd`` has the answer."""

Column: TypeAlias = "cache_pb2.StepColumn.ValueType"


class StepColumns(NamedTuple):
    """The columns of one step; ``message`` is what they were read from."""

    message: cache_pb2.StepColumns
    growth: Growth
    publishes: Publishes
    recycles: tuple[Sequence[int], Sequence[int]]
    releases: Releases

    def sequences(self, column: Column) -> Sequence[int]:
        if column == GROW:
            return self.growth.sequences
        if column == PUBLISH:
            return self.publishes.sequences
        return self.recycles[0] if column == RECYCLE else self.releases.sequences

    def operation(self, column: Column, entry: int) -> Any:
        """The message of the operation that an entry stands for."""
        number = self.sequences(column)[entry]
        if column == GROW:
            first, last = self.growth.starts[entry : entry + 2]
            return cache_pb2.ExtendRequest(
                sequence_id=number, pages=[_cut(pages, first, last) for pages in self.message.grow]
            )
        if column == PUBLISH:
            first, last = self.publishes.starts[entry : entry + 2]
            keys = self.publishes.keys[first * KEY_BYTES : last * KEY_BYTES]
            return cache_pb2.PublishRequest(
                sequence_id=number, first_block=self.publishes.first[entry], blocks=last - first, keys=keys
            )
        if column == RECYCLE:
            return cache_pb2.RecycleRequest(sequence_id=number, computed_tokens=self.recycles[1][entry])
        tokens = self.releases.output_tokens
        return cache_pb2.ReleaseRequest(sequence_id=number, output_tokens=tokens[entry] if tokens else None)


def count_entries(message: cache_pb2.StepColumns) -> int:
    """Entries of all columns; nothing is read for it."""
    numbers = (message.grow_sequences, message.publish_sequences, message.recycle_sequences, message.release_sequences)
    return sum(map(len, numbers)) >> 3


def read_columns(message: cache_pb2.StepColumns, groups: int) -> StepColumns:
    """The columns of a step for a layout of ``groups`` groups. Raises InvalidRequest for ragged ones."""
    growth, publishes, recycles, releases = _NOTHING
    if message.grow_sequences or message.grow_counts or message.grow:
        growth = _read_growth(message, groups)
    if message.publish_sequences or message.publish_first or message.publish_counts or message.publish_keys:
        publishes = _read_publishes(message)
    if message.recycle_sequences or message.recycle_tokens:
        numbers = _unpack("Q", "recycle_sequences", message.recycle_sequences)
        recycles = numbers, _unpack("Q", "recycle_tokens", message.recycle_tokens, len(numbers))
    if message.release_sequences or message.release_output_tokens:
        releases = _read_releases(message)
    return StepColumns(message, growth, publishes, recycles, releases)


def pack_answer(numbers: dict[Column, list[int]], answer: cache_pb2.StepColumnsAnswer) -> None:
    """Write the numbers of each column into the answer."""
    for column, told in numbers.items():
        if told:
            setattr(answer, ANSWER_FIELDS[column], array("I", told).tobytes())


def plain_number(column: Column, result: Any) -> int | None:
    """The number that says all of a result's message; None where it takes more than a number."""
    if column == GROW:
        return int(result.blocks)
    if column == PUBLISH:
        is_plain = not (result.pending or result.duplicate_positions)
        return int(result.sealed_blocks) if is_plain else None
    return int(result.recycled_pages if column == RECYCLE else result.freed_pages)


def _read_growth(message: cache_pb2.StepColumns, groups: int) -> Growth:
    numbers = _unpack("Q", "grow_sequences", message.grow_sequences)
    starts = _read_starts("grow_counts", message.grow_counts, len(numbers))
    blocks = starts[-1]
    pages: list[list[int]] = []
    generations: list[list[int]] = []
    for each in message.grow if len(message.grow) == 1 else sorted(message.grow, key=_group_of):
        group = each.group
        if group != len(pages):
            break
        pages.append(_unpack("i", f"grow.pages of group {group}", each.pages, blocks))
        generations.append(_unpack("I", f"grow.generations of group {group}", each.generations, blocks))
    if len(pages) != groups or len(message.grow) != groups:
        raise InvalidRequest(f"grow needs the pages of each of {groups} groups once")
    return Growth(numbers, starts, pages, generations)


def _read_publishes(message: cache_pb2.StepColumns) -> Publishes:
    numbers = _unpack("Q", "publish_sequences", message.publish_sequences)
    first = _unpack("I", "publish_first", message.publish_first, len(numbers))
    starts = _read_starts("publish_counts", message.publish_counts, len(numbers))
    keys = message.publish_keys
    if keys and len(keys) != starts[-1] * KEY_BYTES:
        raise InvalidRequest(f"publish_keys has {len(keys)} bytes for {starts[-1]} blocks, of {KEY_BYTES} each")
    return Publishes(numbers, first, starts, keys)


def _read_releases(message: cache_pb2.StepColumns) -> Releases:
    numbers = _unpack("Q", "release_sequences", message.release_sequences)
    raw = message.release_output_tokens
    tokens = _unpack("I", "release_output_tokens", raw, len(numbers)) if raw else []
    return Releases(numbers, [None if each == NOT_TOLD else each for each in tokens])


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


_group_of = attrgetter("group")
_NOTHING: tuple[Growth, Publishes, tuple[Sequence[int], Sequence[int]], Releases]
_NOTHING = Growth((), range(1), (), ()), Publishes((), (), range(1), b""), ((), ()), Releases((), ())
"""Columns without entries."""


def _cut(cells: common_pb2.GroupPages, first: int, last: int) -> common_pb2.GroupPages:
    part = slice(4 * first, 4 * last)
    return common_pb2.GroupPages(group=cells.group, pages=cells.pages[part], generations=cells.generations[part])
