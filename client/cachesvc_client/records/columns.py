"""Sequences of one lease as arrays: the cells of all of them in one table, and steps without an object for each.

A sequence is opened and allocated by its handle, lent to the columns while it decodes, and taken back for what they do
not have, such as swaps. What is more than a number in an answer goes through the sequence's own record. No I/O.
"""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cachesvc.model.answers import GroupCells
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import NO_PAGE
from cachesvc_client.errors import Conflict, InvalidRequest, LimitExceeded
from cachesvc_client.keys import PackedKeys, packed
from cachesvc_client.records.batches import Recorded
from cachesvc_client.records.columns_part import NOBODY, ColumnsPart, Counts, Growing, Publishing
from cachesvc_client.records.launches import Due
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord

H = TypeVar("H", bound=Recorded)
Slots = npt.ArrayLike
"""Positions in the table, each once."""
Indices = npt.NDArray[np.intp]
MOST_BLOCKS = np.iinfo(np.int32).max
"""Numbers of blocks up to here stay int32, as the columns are: to mix widths costs more than to count."""


class SequenceColumns(Generic[H]):
    """Made by ``Lease.columns``; used from the thread of the lease's step stream. ``record``: for that stream."""

    def __init__(self, record: ColumnsRecord[H]) -> None:
        self.record = record

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """``[groups, max_sequences, max_blocks]``: the page of each block, -1 where there is none. Not to be
        written."""
        return self.record.tables

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """``[max_sequences]``: the length of each table. Not to be written."""
        return self.record.blocks

    @property
    def sealed(self) -> npt.NDArray[np.int32]:
        """``[max_sequences]``: leading blocks that are shared and immutable. Not to be written."""
        return self.record.sealed

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """``[max_sequences]``, for the engine to write: what the request of a slot has put out when it is released, of
        which eviction learns; -1 where it does not say."""
        return self.record.output_tokens

    def add(self, sequence: H) -> int:
        """Lend a sequence; its slot, the lowest that is free. Until ``take`` it is used by its slot alone.

        Raises LimitExceeded (no slot, or more blocks than a row has), Conflict (swapped out, lent, operations of it
        under way, growth that no step has told of), and what its last calls ended with.
        """
        return self.record.add(sequence)

    def take(self, slot: int) -> H:
        """The sequence of a slot, with all that has become of it; the slot is free. Raises InvalidRequest (nothing is
        there), Conflict (operations of it are under way, or growth that no step has told of)."""
        return self.record.take(slot)


class ColumnsRecord(Generic[H]):
    """State of the sequences of some columns, by slot. ``asked``, ``known``: up to where publishing was asked
    for, and keys are known; ``parts``: of steps that have no answer yet; ``untold``: growth that the next step reports.
    ``_sound``: the slots that were looked at last, as bytes: an engine's batch is mostly that of its last step.
    """

    def __init__(
        self, lease: LeaseRecord, max_sequences: int, max_blocks: int, tables: npt.NDArray[np.int32] | None
    ) -> None:
        layout = lease.registration.layout
        shape = (len(layout.groups), max_sequences, max_blocks)
        if min(shape) < 1:
            raise InvalidRequest(f"columns need room for a sequence and a block, got {shape[1:]}")
        if tables is not None and (tables.shape != shape or tables.dtype != np.int32):
            raise InvalidRequest(f"tables must be int32 {list(shape)}, got {tables.dtype} {list(tables.shape)}")
        self.tables = np.empty(shape, np.int32) if tables is None else tables
        self.tables[:] = NO_PAGE
        self.blocks = np.zeros(max_sequences, np.int32)
        self.sealed = np.zeros(max_sequences, np.int32)
        self.output_tokens = np.full(max_sequences, -1, np.int64)
        self.max_blocks = max_blocks
        self.asked = np.zeros(max_sequences, np.int32)
        self.known = np.zeros(max_sequences, np.int32)
        self.ids = np.zeros(max_sequences, np.uint64)
        self.parts: list[ColumnsPart] = []
        self.untold: list[Growing] = []
        self._lease = lease
        self._layout = layout
        self._holders: list[H | None] = [None] * max_sequences
        self._free = list(range(max_sequences))
        self._mark = np.zeros(max_sequences, np.intp)
        self._order = np.arange(max_sequences)
        self._ones = np.ones(max_sequences, np.int32)
        self._checked: tuple[object, Indices] | None = None
        self._sound = b""
        self._windows: list[tuple[int, Indices, npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = []
        self._with_spares: set[int] = set()

    def add(self, sequence: H) -> int:
        """See ``SequenceColumns``."""
        record = sequence.record
        record.require_lendable()
        if not self._free:
            raise LimitExceeded.from_message(f"all {len(self._holders)} slots are in use; take or release a sequence")
        if record.blocks > self.max_blocks:
            raise LimitExceeded.from_message(f"{record.blocks} blocks do not fit into a row of {self.max_blocks}")
        slot = heapq.heappop(self._free)
        self._sound = b""
        self._holders[slot] = sequence
        self.ids[slot] = record.id
        record.is_lent = True
        self.push(slot)
        return slot

    def take(self, slot: int) -> H:
        """See ``SequenceColumns``."""
        record = self.record(slot)
        if any(slot in used for part in self.parts for used in part.used()) or any(
            slot in growing.slots for growing in self.untold
        ):
            raise Conflict(f"slot {slot} has operations under way; collect the step's results first")
        self.pull(slot)
        holder = self._holders[slot]
        assert holder is not None
        self.free(slot)
        record.is_lent = False
        return holder

    # -- what a step carries -----------------------------------------------------------------------------------

    def part(
        self,
        grow: Slots | tuple[Slots, npt.ArrayLike] | None,
        publish: tuple[Slots, npt.ArrayLike] | tuple[Slots, npt.ArrayLike, PackedKeys] | None,
        recycle: tuple[Slots, npt.ArrayLike] | None,
        release: Slots | None,
    ) -> ColumnsPart:
        """Contents of one step. Everything is checked before anything changes. Raises InvalidRequest, StockEmpty,
        LimitExceeded."""
        self._checked = None
        growth = None
        if grow is not None:
            growth = self._check_growth(*(grow if isinstance(grow, tuple) else (grow, None)))
        publishing = self._check_publish(*publish) if publish is not None else None
        ending = self._slots(release) if release is not None else NOBODY
        if recycle is not None:
            self._hold_windows(self._slots(recycle[0]), np.asarray(recycle[1], np.int64))
        growing, self.untold = self.untold, []
        if growth is not None:
            growing.append(self._grow(*growth))
        if publishing is not None:
            self.asked[publishing.slots] = publishing.upto
        recycled, tokens = self._due() if self._windows else (NOBODY, _NOTHING)
        if self._windows and len(ending):
            self._forget_windows(ending)
        launch = self._lease.launches.pending(None) if release is not None else 0
        part = ColumnsPart(self, growing, publishing, recycled, tokens, ending, launch)
        self.parts.append(part)
        part.operations = self._give_back_spares() if self._with_spares else []
        return part

    def _check_growth(self, slots: Slots, counts: npt.ArrayLike | None) -> _Growth:
        at = self._slots(slots)
        more: Counts = self._ones[: len(at)]
        total = len(at)
        if counts is not None:
            more = np.broadcast_to(np.asarray(counts, np.int64), at.shape)
            total = int(more.sum())
            if len(at) and int(more.min()) < 1:
                raise InvalidRequest("a sequence grows by at least 1 block")
        before = self.blocks[at]
        after = before + more
        if total and after[after.argmax()] > self.max_blocks:  # argmax alone of its kind passes no Python
            raise LimitExceeded.from_message(f"a row has {self.max_blocks} blocks; make the columns longer")
        if self._lease.stock is None:
            raise InvalidRequest("growing from stock needs a step stream: open one with lease.step(stock_pages=...)")
        self._lease.stock.require(total)
        return at, before, more, after, total

    def _grow(
        self,
        slots: Indices,
        before: npt.NDArray[np.int32],
        more: Counts,
        after: Counts,
        total: int,
    ) -> Growing:
        """Take stock pages and write the cells, before the daemon gets the step."""
        assert self._lease.stock is not None
        rows: npt.NDArray[Any] = slots
        positions: npt.NDArray[Any] = before.astype(np.intp)
        if total != len(slots):
            rows = np.repeat(slots, more)
            positions = np.repeat(before - np.cumsum(more) + more, more) + np.arange(total)
        taken = self._lease.stock.take_packed(total)
        for table, (pages, _) in zip(self.tables, taken, strict=True):
            table[rows, positions] = np.frombuffer(pages, np.int32)
        self.blocks[slots] = after
        return Growing(slots, more, after, total, taken)

    def _check_publish(self, slots: Slots, upto: npt.ArrayLike, keys: PackedKeys = b"") -> Publishing:
        at = self._slots(slots)
        last: Counts
        one_for_all: object = upto
        if isinstance(one_for_all, int) and 0 <= one_for_all <= MOST_BLOCKS:
            last = self._ones[: len(at)] * one_for_all
        else:
            last = np.asarray(upto, np.int64)
            if last.shape != at.shape:
                last = np.broadcast_to(last, at.shape)
        first = self.asked[at]
        counts = last - first
        total = len(at)
        if total and not counts[counts.argmin()] == counts[counts.argmax()] == 1:
            total = int(counts.sum())
            if int(counts.min()) < 1:
                raise InvalidRequest("publish goes on from where it was asked for last, by at least 1 block")
        chain = packed(keys) if len(keys) else _NO_KEYS
        if len(chain) not in (0, total * KEY_BYTES):
            raise InvalidRequest(f"{len(chain)} bytes of keys for {total} blocks: only new ones' are wanted")
        lacking = last - self.known[at] if total and not len(chain) else _NOTHING
        if len(lacking) and lacking[lacking.argmax()] > 0:
            raise InvalidRequest("publish needs the keys of blocks that Match was not told")
        return Publishing(at, first, last, counts, total, chain)

    def _hold_windows(self, slots: Indices, tokens: npt.NDArray[np.int64]) -> None:
        launch = self._lease.launches.check(None)
        self._windows.append((launch, slots, np.broadcast_to(tokens, slots.shape), self.ids[slots]))

    def _due(self) -> tuple[Indices, npt.NDArray[np.int64]]:
        """Slots and computed tokens of which no launch under way needs more; the newest of each slot."""
        completed = self._lease.launches.completed
        due = [held for held in self._windows if held[0] <= completed]
        self._windows = [held for held in self._windows if held[0] > completed]
        newest: dict[int, int] = {}
        for _, slots, tokens, ids in due:
            still = self.ids[slots] == ids
            if still.all() and len(due) == 1:
                return slots, tokens
            newest.update(zip(slots[still].tolist(), tokens[still].tolist(), strict=True))
        return np.array(list(newest), np.intp), np.array(list(newest.values()), np.int64)

    def _forget_windows(self, slots: Indices) -> None:
        """Forget the windows of slots that are to be released: later events may find another sequence in their
        place."""
        held = [(*each, ~np.isin(each[1], slots)) for each in self._windows]
        self._windows = [(launch, at[stay], tokens[stay], ids[stay]) for launch, at, tokens, ids, stay in held]

    def end_later(self, slot: int, launch: int) -> None:
        """The sequence of a slot is released once a launch has ended; the slot is free."""
        record = self.pull(slot)
        self.free(slot)
        record.is_lent = False
        record.end_later(launch)
        self._lease.hold(record)

    def _give_back_spares(self) -> list[Any]:
        operations = []
        for slot in sorted(self._with_spares):
            record = self.record(slot)
            if pages := record.give_backs.take_due().pages:
                operations.append(record.give_back(Due(pages, 0)))
        return operations

    # -- what answers change ---------------------------------------------------------------------------------------

    def record(self, slot: int) -> SequenceRecord:
        """State of the sequence of a slot, but for what the columns hold. Raises InvalidRequest."""
        holder = self._holders[slot] if 0 <= slot < len(self._holders) else None
        if holder is None:
            raise InvalidRequest(f"slot {slot} holds no sequence")
        return holder.record

    def pull(self, slot: int) -> SequenceRecord:
        """The sequence's record, with what the columns hold."""
        record, blocks = self.record(slot), int(self.blocks[slot])
        for table, cells in zip(record.tables, self.tables, strict=True):
            table.put(0, cells[slot, :blocks])
        record.sealed_blocks, record.asked_blocks = int(self.sealed[slot]), int(self.asked[slot])
        record.known_keys = max(record.known_keys, int(self.known[slot]))
        if self.output_tokens[slot] >= 0:
            record.output_tokens = int(self.output_tokens[slot])
        return record

    def push(self, slot: int) -> None:
        """The columns hold what the sequence's record has."""
        record = self.record(slot)
        for table, cells in zip(record.tables, self.tables, strict=True):
            cells[slot, : table.blocks] = table.pages
        self.blocks[slot], self.sealed[slot] = record.blocks, record.sealed_blocks
        self.asked[slot], self.known[slot] = record.asked_blocks, record.known_keys
        if record.give_backs.has_spares:
            self._with_spares.add(slot)

    def free(self, slot: int) -> None:
        """Mark the slot unused."""
        self.tables[:, slot, : self.blocks[slot]] = NO_PAGE
        for column in (self.blocks, self.sealed, self.asked, self.known, self.ids):
            column[slot] = 0
        self.output_tokens[slot] = -1
        self._holders[slot] = None
        self._sound = b""
        self._with_spares.discard(slot)
        heapq.heappush(self._free, slot)

    def cells(self, growing: Growing, entry: int) -> list[GroupCells]:
        """The stock pages that an entry took."""
        first = int(growing.more[:entry].sum())
        part = slice(first, first + int(growing.more[entry]))
        return [
            GroupCells(group, 0, tuple(pages[part]), tuple(generations[part]))
            for group, (pages, generations) in enumerate(growing.taken)
        ]

    def clear_windows(self, slots: Indices, tokens: npt.NDArray[np.int64]) -> None:
        """Windowed groups have given back what no query from ``tokens`` on looks back to."""
        layout = self._layout
        for group in layout.window_groups:
            window, sinks = layout.groups[group].window_tokens or 0, layout.sink_blocks(group)
            dead = np.maximum(tokens - window + 1, 0) // layout.block_tokens
            for slot, last in zip(slots.tolist(), dead.tolist(), strict=True):
                self.tables[group, slot, sinks : max(sinks, last)] = NO_PAGE

    def _slots(self, slots: Slots) -> Indices:
        """Checked slots. Raises InvalidRequest for one that is not in use, or named twice."""
        if self._checked is not None and self._checked[0] is slots:
            return self._checked[1]
        at: Indices = np.asarray(slots, np.intp)
        if at.ndim != 1:
            raise InvalidRequest(f"slots are a flat list of positions, got the shape {at.shape}")
        named = at.tobytes()
        if len(at) and named != self._sound:
            if len(at) > len(self.ids) or (at < 0).any() or (at >= len(self.ids)).any() or not self.ids[at].all():
                raise InvalidRequest("a slot holds no sequence, or one is named twice")
            order = self._order[: len(at)]
            self._mark[at] = order
            if (self._mark[at] != order).any():
                raise InvalidRequest("a slot is named twice")
            self._sound = named
        self._checked = slots, at
        return at


_Growth = tuple[Indices, npt.NDArray[np.int32], Counts, Counts, int]
_NO_KEYS = memoryview(b"")
_NOTHING = np.empty(0, np.int64)
