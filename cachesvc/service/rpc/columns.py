"""Execution of one step's columns: in plain loops while their entries take the fast path, else as operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from kvcache.v1 import cache_pb2

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.engine.publish import is_tight, publish_many
from cachesvc.flows.engine.recycle import recycle_many
from cachesvc.flows.engine.release import release_many
from cachesvc.flows.engine.stock import extend_many
from cachesvc.model.columns import MAX_OPERATIONS
from cachesvc.wire.columns import GROW, IN_ORDER, ODD, PUBLISH, RECYCLE, RELEASE, Column, StepColumns, pack_answer

TURN_BLOCKS = 256
"""Blocks of straight entries before other calls get their turn: some 0.5 ms."""

_FLOWS: dict[Column, Callable[..., None]] = {
    GROW: extend_many,
    PUBLISH: publish_many,
    RECYCLE: recycle_many,
    RELEASE: release_many,
}


class EntryRef(NamedTuple):
    """An entry of a column; without a column, an operation of the step."""

    column: Column
    entry: int


class ColumnRun:
    """Progress of a step's columns, and the answers to their entries. ``end`` writes ``answer``.

    ``column``: the first that has entries left; None where all have been looked at. ``numbers``: for each column the
    answers so far, ODD where they are still to come or take more than a number. ``weight``: what each block of the last
    entries counts for in a turn. ``_reach``: entries that are looked at together; fewer while others are not straight,
    for those behind such a one are looked at for nothing.
    """

    def __init__(self, columns: StepColumns, answer: cache_pb2.StepColumnsAnswer) -> None:
        self.columns = columns
        self.answer = answer
        self.column: Column | None = None
        self.weight = 1
        self.numbers: dict[Column, list[int]] = {GROW: [], PUBLISH: [], RECYCLE: [], RELEASE: []}
        self._data: tuple[Any, ...] = columns[1:]
        self._starts = {GROW: columns.growth.starts, PUBLISH: columns.publishes.starts}
        self._at = 0
        self._reach = MAX_OPERATIONS
        self._look_on()

    def go_on(self, core: Core, call: Call, left: int, held: Collection[int]) -> bool:
        """Carry out some next entries of the column, of ``left`` blocks of a turn and one at least, as long as they are
        straight and their sequences are not ``held``. False where one is not: it is the next.

        Raises what has broken the next entry.
        """
        assert self.column is not None
        numbers, data = self.numbers[self.column], self._data[self._at]
        first = len(numbers)
        last = min(len(data[0]), first + self._reach)
        self.weight = 1
        if self.column == PUBLISH and is_tight(core, call):
            self.weight = max(1, TURN_BLOCKS // core.turns.evicted)
        if self.blocks(self.column, first, last) * self.weight > left:
            last = self._cut(self.column, first, left // self.weight)
        _FLOWS[self.column](core, call, data, range(first, last), numbers, held)
        is_straight = len(numbers) == last
        self._reach = min(2 * self._reach, MAX_OPERATIONS) if is_straight else max(1, len(numbers) - first)
        self._look_on()
        return is_straight

    def leave(self) -> EntryRef:
        """Leave the next entry to its operation form; returns the place of its answer."""
        assert self.column is not None
        numbers = self.numbers[self.column]
        numbers.append(ODD)
        ref = EntryRef(self.column, len(numbers) - 1)
        self._look_on()
        return ref

    def odd(self, ref: EntryRef) -> cache_pb2.OperationResult:
        """Result for an answer that takes more than a number."""
        return self.answer.odd.add(column=ref.column, index=ref.entry).result

    def blocks(self, column: Column, first: int, last: int) -> int:
        """Blocks of some entries, one each where they name none."""
        starts = self._starts.get(column)
        return last - first if starts is None else max(starts[last] - starts[first], last - first)

    def end(self) -> None:
        """End: every entry has its answer."""
        pack_answer(self.numbers, self.answer)

    def _cut(self, column: Column, first: int, left: int) -> int:
        """End of the range of ``left`` blocks, one entry on at least."""
        starts = self._starts.get(column)
        last = first + max(left, 1)
        if starts is not None:
            last = min(last, max(bisect_right(starts, starts[first] + left) - 1, first + 1))
        return last

    def _look_on(self) -> None:
        """Find the column that has entries left."""
        for at in range(self._at, len(IN_ORDER)):
            column = IN_ORDER[at]
            if len(self.numbers[column]) < len(self._data[at][0]):
                self._at, self.column = at, column
                return
        self._at, self.column = len(IN_ORDER), None
