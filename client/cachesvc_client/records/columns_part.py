"""Columns that one step carries, and the changes by its answer. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import GroupCells
from cachesvc.wire.columns import GROW, IN_ORDER, NOT_TOLD, ODD, OPERATION_NAMES, PUBLISH, RECYCLE, RELEASE, Column
from cachesvc_client.errors import CacheClientError, DaemonFault, error_of
from cachesvc_client.records.entries import Entry, Grow, Publish, Recycle, Release
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.wire.methods import Operation

Indices = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Told = dict[Column, npt.NDArray[np.uint32]]
"""The answers of each column."""
NO_COUNTS = (0, 0, 0, 0)
NOBODY: Indices = np.empty(0, np.intp)
NO_NUMBERS = np.empty(0, np.uint32)


class Growing(NamedTuple):
    """Sequences that took ``more`` stock pages of each group, ``total`` in all, up to ``after`` blocks. ``taken``:
    pages and generations by group."""

    slots: Indices
    more: Counts
    after: npt.NDArray[Any]
    total: int
    taken: Sequence[tuple[array[int], array[int]]]


class Publishing(NamedTuple):
    """Blocks ``[first, upto)`` of each slot, ``total`` in all, with all their keys or none."""

    slots: Indices
    first: npt.NDArray[np.int32]
    upto: Counts
    counts: Counts
    total: int
    keys: memoryview


class Lent(Protocol):
    """The columns that a part is of: see ``SequenceColumns``."""

    ids: npt.NDArray[np.uint64]
    output_tokens: npt.NDArray[np.int64]
    sealed: npt.NDArray[np.int32]
    asked: npt.NDArray[np.int32]
    known: npt.NDArray[np.int32]
    parts: list[ColumnsPart]
    untold: list[Growing]

    def record(self, slot: int) -> SequenceRecord:
        """State of the sequence of a slot."""

    def pull(self, slot: int) -> SequenceRecord:
        """Record of a slot's sequence, with what the columns hold."""

    def push(self, slot: int) -> None:
        """The columns hold what its record has."""

    def free(self, slot: int) -> None:
        """Mark the slot unused."""

    def end_later(self, slot: int, launch: int) -> None:
        """Release its sequence once a launch has ended; the slot is free."""

    def cells(self, growing: Growing, entry: int) -> list[GroupCells]:
        """The stock pages that an entry took."""

    def clear_windows(self, slots: Indices, tokens: Numbers) -> None:
        """Windowed groups have given back what lies behind."""


class OddEntry(NamedTuple):
    """An answer that is more than a number. ``call``: ``grow``, ``publish``, ``recycle`` or ``release``; ``result``: a
    Published with duplicates or pending, or the error, which is not raised."""

    call: str
    slot: int
    result: Any


class ColumnsAnswer(NamedTuple):
    """``odd``: what became of the entries whose answer is more than a number. ``results``: of the batch beside them."""

    results: list[Any]
    odd: list[OddEntry]


class ColumnsPart:
    """Entries of one step by arrays. ``operations``: spares that are given back with it. ``odd``: answers that are more
    than numbers, once it was answered. ``counts``: entries of each column. ``launch``: what releases wait for, 0 for
    nothing; those that wait are no entries, and their slots are free once the step was answered."""

    def __init__(
        self,
        columns: Lent,
        growing: list[Growing],
        publishing: Publishing | None,
        recycled: Indices,
        tokens: Numbers,
        ending: Indices,
        launch: int,
    ) -> None:
        self.operations: list[Operation[Any]] = []
        self.odd: list[OddEntry] = []
        self._columns = columns
        self._growing = growing
        self._publishing = publishing
        self._recycled = recycled
        self._tokens = tokens
        self._ending = NOBODY if launch else ending
        self._leaving = ending if launch else NOBODY
        self._launch = launch
        grown = len(growing[0].slots) if len(growing) == 1 else sum([len(each.slots) for each in growing])
        published = 0 if publishing is None else len(publishing.slots)
        self.counts = grown, published, len(recycled), len(self._ending)

    @property
    def sends_keys(self) -> bool | None:
        """True where its publishes have keys; None without any."""
        return None if self._publishing is None or not len(self._publishing.slots) else len(self._publishing.keys) > 0

    def used(self) -> Iterator[Indices]:
        """The slots of each column, in the order of the columns; those of growth in parts."""
        for growing in self._growing:
            yield growing.slots
        yield self._slots(PUBLISH)
        yield self._recycled
        yield self._ending
        yield self._leaving

    def add_to(self, message: cache_pb2.StepColumns) -> None:
        """Put the entries behind those of the message."""
        ids = self._columns.ids
        for growing in self._growing:
            before = len(message.grow_sequences) >> 3
            message.grow_sequences += ids[growing.slots].tobytes()
            if growing.total != len(growing.slots) or message.grow_counts:
                message.grow_counts = _with_counts(message.grow_counts, before, growing.more)
            for group, (pages, generations) in enumerate(growing.taken):
                grow = message.grow.add(group=group) if group == len(message.grow) else message.grow[group]
                grow.pages += pages.tobytes()
                grow.generations += generations.tobytes()
        if (publishing := self._publishing) is not None:
            before = len(message.publish_sequences) >> 3
            message.publish_sequences += ids[publishing.slots].tobytes()
            message.publish_first += publishing.first.tobytes()
            if publishing.total != len(publishing.slots) or message.publish_counts:
                message.publish_counts = _with_counts(message.publish_counts, before, publishing.counts)
            if len(publishing.keys):
                message.publish_keys += bytes(publishing.keys)
        if len(self._recycled):
            message.recycle_sequences += ids[self._recycled].tobytes()
            message.recycle_tokens += self._tokens.astype(np.uint64).tobytes()
        if len(self._ending):
            before = len(message.release_sequences) >> 3
            message.release_sequences += ids[self._ending].tobytes()
            tokens = self._columns.output_tokens[self._ending]
            if message.release_output_tokens or (tokens >= 0).any():
                nobody = NOT_TOLD.to_bytes(4, "little") * before
                told = tokens.clip(-1, NOT_TOLD).astype(np.uint32)  # -1 becomes NOT_TOLD
                message.release_output_tokens = (message.release_output_tokens or nobody) + told.tobytes()

    def take(self, numbers: Told, odd: dict[tuple[Column, int], Any], lease: LeaseRecord) -> None:
        """Take the answers in: plain ones by the column, then the ``odd`` ones entry by entry."""
        columns = self._columns
        columns.parts.remove(self)
        first = 0
        for growing in self._growing:
            told = numbers[GROW][first : first + len(growing.slots)]
            if told.tobytes() != growing.after.astype(np.uint32).tobytes():
                for entry, number in enumerate(told.tolist()):
                    if number != ODD:
                        self._entry(GROW, first + entry, lease).plain(number)
            first += len(growing.slots)
        if (publishing := self._publishing) is not None:
            slots, upto, sealed = publishing.slots, publishing.upto, numbers[PUBLISH]
            if odd:
                plain = sealed != ODD
                slots, sealed, upto = slots[plain], sealed[plain], upto[plain]
            columns.sealed[slots] = sealed
            if len(publishing.keys):  # else they were known
                columns.known[slots] = np.maximum(columns.known[slots], upto)
        if len(self._recycled):
            plain = numbers[RECYCLE] != ODD
            columns.clear_windows(self._recycled[plain], self._tokens[plain])
        for (column, index), result in sorted(odd.items(), key=_spot) if odd else ():
            self._take_odd(column, index, result, lease)
        for index, number in enumerate(numbers[RELEASE].tolist()) if self.counts[-1] else ():
            if number != ODD:
                self._released(int(self._ending[index]), number, lease)
        for slot in self._leaving.tolist() if self._launch else ():
            columns.end_later(slot, self._launch)

    def tell_again(self) -> None:
        """Report the growth again in the next step: this one was refused as a whole."""
        self._columns.untold = self._growing + self._columns.untold
        self._growing = []
        self.counts = 0, *self.counts[1:]

    def fail(self, error: CacheClientError, lease: LeaseRecord) -> None:
        """Fail the part: no answer comes."""
        self._columns.parts.remove(self)
        for column, count in zip(IN_ORDER, self.counts, strict=True):
            for index in range(count):
                self._fail(column, index, error, lease)

    def _slots(self, column: Column) -> Indices:
        if column == PUBLISH:
            return self._publishing.slots if self._publishing is not None else NOBODY
        return self._recycled if column == RECYCLE else self._ending

    def _take_odd(self, column: Column, index: int, result: cache_pb2.OperationResult, lease: LeaseRecord) -> None:
        name, kind = OPERATION_NAMES[column], result.WhichOneof("result")
        if kind != name:
            is_error = kind == "error"
            error = error_of(result.error) if is_error else DaemonFault(f"the answer to {name} is a {kind}")
            self._fail(column, index, error, lease)
            return
        entry = self._entry(column, index, lease)
        slot = self._slot(column, index)
        self._columns.pull(slot)
        self.odd.append(OddEntry(_CALLS[column], slot, entry.take(getattr(result, name))))
        self._columns.push(slot)

    def _fail(self, column: Column, index: int, error: CacheClientError, lease: LeaseRecord) -> None:
        slot = self._slot(column, index)
        record = self._columns.pull(slot)
        self._entry(column, index, lease).fail(error)
        self.odd.append(OddEntry(_CALLS[column], slot, error))
        if record.is_released:
            self._released(slot, 0, lease)
        else:
            self._columns.push(slot)

    def _released(self, slot: int, freed_pages: int, lease: LeaseRecord) -> None:
        record = self._columns.record(slot)
        record.released(freed_pages, lease.stock)
        lease.forget(record)
        self._columns.free(slot)

    def _slot(self, column: Column, index: int) -> int:
        if column != GROW:
            return int(self._slots(column)[index])
        growing, entry = self._growing_of(index)
        return int(growing.slots[entry])

    def _growing_of(self, index: int) -> tuple[Growing, int]:
        for growing in self._growing:
            if index < len(growing.slots):
                return growing, index
            index -= len(growing.slots)
        raise IndexError(index)

    def _entry(self, column: Column, index: int, lease: LeaseRecord) -> Entry:
        """An entry as that of the sequence's record."""
        record = self._columns.record(self._slot(column, index))
        if column == GROW:
            growing, entry = self._growing_of(index)
            return Grow(record, self._columns.cells(growing, entry), int(growing.after[entry]))
        if column == PUBLISH and self._publishing is not None:
            return Publish(record, int(self._publishing.first[index]), int(self._publishing.upto[index]), b"")
        if column == RECYCLE:
            return Recycle(record, int(self._tokens[index]))
        return Release(record, lease.stock)


_spot = itemgetter(0)
_CALLS = {GROW: "grow", PUBLISH: "publish", RECYCLE: "recycle", RELEASE: "release"}


def _with_counts(known: bytes, before: int, counts: Counts) -> bytes:
    """A column of counts, which is empty while all are 1, with some more."""
    return (known or np.ones(before, np.uint32).tobytes()) + counts.astype(np.uint32).tobytes()
