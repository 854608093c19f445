"""Entries of a step's columns: growth, publishes, recycles and the end of one sequence. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, Union

from kvcache.v1 import cache_pb2

from cachesvc.model.answers import GroupCells, Published, Recycled
from cachesvc.wire.columns import GROW, NOT_TOLD, PUBLISH, RECYCLE, RELEASE, Column
from cachesvc_client.core.errors import CacheClientError
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.stock import Stock
from cachesvc_client.wire.messages import parse_publish, parse_recycle


@dataclass(slots=True, eq=False)
class Grow:
    """Stock pages that became the sequence's cells, up to ``blocks``."""

    column: ClassVar[Column] = GROW
    owner: SequenceRecord
    cells: list[GroupCells]
    blocks: int

    def plain(self, number: int) -> int:
        """The daemon's answer, a number alone; what the caller sees."""
        return self.owner.grown(number, self.blocks)

    def take(self, answer: cache_pb2.ExtendResponse) -> int:
        """The daemon's answer as a message."""
        return self.plain(answer.blocks)

    def fail(self, error: CacheClientError) -> None:
        """The daemon has refused it."""
        self.owner.refuse_growth(error, self.cells)


@dataclass(slots=True, eq=False)
class Publish:
    """Blocks ``[first, upto)`` are sealed. ``keys``: theirs, or empty where Match had them."""

    column: ClassVar[Column] = PUBLISH
    owner: SequenceRecord
    first: int
    upto: int
    keys: bytes

    def plain(self, number: int) -> Published:
        """See ``Grow``."""
        return self.owner.published(self.upto, Published(number, (), (), (), pending=False))

    def take(self, answer: cache_pb2.PublishResponse) -> Published:
        """See ``Grow``."""
        return self.owner.published(self.upto, parse_publish(answer))

    def fail(self, error: CacheClientError) -> None:
        """See ``Grow``."""
        self.owner.refuse_publish(error)


@dataclass(slots=True, eq=False)
class Recycle:
    """``tokens`` are computed, of a layout without windows."""

    column: ClassVar[Column] = RECYCLE
    owner: SequenceRecord
    tokens: int

    def plain(self, number: int) -> Recycled:
        """See ``Grow``."""
        return Recycled(number, ())

    def take(self, answer: cache_pb2.RecycleResponse) -> Recycled:
        """See ``Grow``."""
        return parse_recycle(answer)

    def fail(self, error: CacheClientError) -> None:
        """See ``Grow``."""


@dataclass(slots=True, eq=False)
class Release:
    """The sequence ends; pages that the daemon never saw in it go back to ``stock``."""

    column: ClassVar[Column] = RELEASE
    owner: SequenceRecord
    stock: Stock | None

    def plain(self, number: int) -> int:
        """See ``Grow``."""
        return self.owner.released(number, self.stock)

    def take(self, answer: cache_pb2.ReleaseResponse) -> int:
        """See ``Grow``."""
        return self.plain(answer.freed_pages)

    def fail(self, error: CacheClientError) -> None:
        """See ``Grow``."""
        self.owner.refuse_release(error)


Entry: TypeAlias = Union[Grow, Publish, Recycle, Release]  # noqa: UP007 - an alias that is looked at when it runs


def pack_entries(columns: dict[Column, list[Any]], groups: int, message: cache_pb2.StepColumns) -> None:
    """Put the entries into the message that carries them."""
    if grown := columns[GROW]:
        pages, generations = [array("i") for _ in range(groups)], [array("I") for _ in range(groups)]
        counts = []
        for entry in grown:
            before = len(pages[0])
            for group, _, its_pages, its_generations in entry.cells:
                pages[group].extend(its_pages)
                generations[group].extend(its_generations)
            counts.append(len(pages[0]) - before)
        message.grow_sequences = _ids(grown)
        message.grow_counts = _counts(counts)
        for group in range(groups):
            message.grow.add(group=group, pages=pages[group].tobytes(), generations=generations[group].tobytes())
    if published := columns[PUBLISH]:
        message.publish_sequences = _ids(published)
        message.publish_first = array("I", [entry.first for entry in published]).tobytes()
        message.publish_counts = _counts([entry.upto - entry.first for entry in published])
        message.publish_keys = b"".join([entry.keys for entry in published])
    if recycled := columns[RECYCLE]:
        message.recycle_sequences = _ids(recycled)
        message.recycle_tokens = array("Q", [entry.tokens for entry in recycled]).tobytes()
    released = columns[RELEASE]
    message.release_sequences = _ids(released)
    if any(entry.owner.output_tokens is not None for entry in released):
        tokens = [NOT_TOLD if (told := entry.owner.output_tokens) is None else told for entry in released]
        message.release_output_tokens = array("I", tokens).tobytes()


def _ids(entries: Sequence[Entry]) -> bytes:
    return array("Q", [entry.owner.id for entry in entries]).tobytes()


def _counts(counts: Sequence[int]) -> bytes:
    return b"" if all(count == 1 for count in counts) else array("I", counts).tobytes()
