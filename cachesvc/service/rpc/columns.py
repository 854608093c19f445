"""The columns of one step, carried out: in plain loops as far as their entries are straight, else as operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from kvcache.v1 import cache_pb2

from cachesvc.flows.call import Call
from cachesvc.flows.publish import publish_many
from cachesvc.flows.recycle import recycle_many
from cachesvc.flows.release import release_many
from cachesvc.flows.stock import extend_many
from cachesvc.service.node import Node
from cachesvc.wire.columns import GROW, IN_ORDER, ODD, PUBLISH, RECYCLE, RELEASE, Column, StepColumns, pack_answer

_FLOWS: dict[Column, Callable[..., None]] = {
    GROW: extend_many,
    PUBLISH: publish_many,
    RECYCLE: recycle_many,
    RELEASE: release_many,
}


class Spot(NamedTuple):
    """An entry of a column; without a column, an operation of the step."""

    column: Column
    entry: int


class ColumnRun:
    """How far the columns of a step have come, and what their entries were answered. ``answer`` is written by ``end``.

    ``numbers``: for each column the answers so far, ODD where they are still to come or take more than a number.
    """

    def __init__(self, columns: StepColumns, answer: cache_pb2.StepColumnsAnswer) -> None:
        self.columns = columns
        self.answer = answer
        self.numbers: dict[Column, list[int]] = {column: [] for column in IN_ORDER}
        self._data: dict[Column, Any] = dict(zip(IN_ORDER, columns[1:], strict=True))
        self._entries = {column: len(data[0]) for column, data in self._data.items()}
        self._starts = {GROW: columns.growth.starts, PUBLISH: columns.publishes.starts}
        self._at = 0

    @property
    def column(self) -> Column | None:
        """The first column that has entries left; None where all have been looked at."""
        while self._at < len(IN_ORDER):
            column = IN_ORDER[self._at]
            if len(self.numbers[column]) < self._entries[column]:
                return column
            self._at += 1
        return None

    def go_on(self, node: Node, call: Call, column: Column, left: int, held: Collection[int]) -> bool:
        """Carry out the next entries of a column, of ``left`` blocks and one at least, as long as they are straight and
        their sequences are not ``held``. False where one is not: it is the next.

        Raises what has broken the next entry.
        """
        numbers = self.numbers[column]
        entries = self._cut(column, len(numbers), left)
        node.run_of(call.model.id, _FLOWS[column], node.core, call, self._data[column], entries, numbers, held)
        return len(numbers) == entries.stop

    def leave(self, column: Column) -> Spot:
        """The next entry is not carried out here."""
        numbers = self.numbers[column]
        numbers.append(ODD)
        return Spot(column, len(numbers) - 1)

    def odd(self, spot: Spot) -> cache_pb2.OperationResult:
        """Where to put an answer that takes more than a number."""
        return self.answer.odd.add(column=spot.column, index=spot.entry).result

    def blocks(self, column: Column, first: int, last: int) -> int:
        """Blocks of some entries, one each where they name none."""
        starts = self._starts.get(column)
        return last - first if starts is None else max(starts[last] - starts[first], last - first)

    def end(self) -> None:
        """Every entry has its answer."""
        pack_answer(self.numbers, self.answer)

    def _cut(self, column: Column, first: int, left: int) -> range:
        last = min(first + max(left, 1), self._entries[column])
        starts = self._starts.get(column)
        if starts is not None:
            last = min(last, max(bisect_right(starts, starts[first] + left) - 1, first + 1))
        return range(first, last)
