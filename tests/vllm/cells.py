"""Kernels of ``scheduling`` in a request's tables: what they read of what was computed before, and what they write.

A token's slot holds a digest of the tokens up to there. A state's page holds that of the last token that went into it,
and how many these are. Block 0 is in no table where it would be read.

States are moved as vLLM's workers do in mode ``align`` (``vllm/v1/worker/mamba_utils.py``). A request's running state
is in the column of its last scheduled token. With drafts the state behind draft ``i`` is ``i`` columns further, so the
next step begins at the column of the last one that was accepted:

    before a step     the running state is copied to the new column, if that is another one
    the step          column c gets the state of its first token, c + 1, c + 2, ... those of the drafts
    behind it         where what is accepted reaches the end of a block, its state is copied to that block's column
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.vllm.shape import BLOCK_TOKENS, Group

Slots = npt.NDArray[np.uint64]


@dataclass
class Running:
    """Place of a request's running states in a worker. ``column``: None before its first step; ``accepted``: tokens of
    the last step that count, the first one included."""

    column: int | None = None
    accepted: int = 1


class Misread(Exception):
    """A page does not hold what was computed."""


@dataclass
class Cells:
    """Pages of one request in one group, in the slab ``slots``. ``running``: of its states."""

    group: Group
    table: Sequence[int]
    slots: Slots
    running: Running

    def read(self, digests: Sequence[int], computed: int) -> None:
        """Read what the tokens behind ``computed`` need. Raises Misread."""
        if self.group.is_state:
            self._begin_state(len(digests), computed)
        for page, slot, expected in self._needed(digests, computed):
            if not page:
                raise Misread("it uses the page that is never granted")
            if self.slots[page, slot] != expected:
                raise Misread(f"page {page} of {self.group} in {self.table} is not that of {computed} computed tokens")

    def write(self, digests: Sequence[int], computed: int, drafts: int) -> None:
        """Write what is computed behind ``computed``; the last ``drafts`` tokens are guesses."""
        end = len(digests)
        if self.group.is_state:
            for ahead in range(drafts + 1):
                self._write_state(self.column(end) + ahead, end - drafts + ahead, digests)
            whole = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            if self.group.saves_within and whole > computed and self.table[whole // BLOCK_TOKENS - 1]:
                self._write_state(whole // BLOCK_TOKENS - 1, whole, digests)
            return
        for at in range(computed, end):
            self.slots[self._page(at // self.group.block_tokens), at % self.group.block_tokens] = digests[at]

    def accept(self, end: int, drafts: int, accepted: int) -> bool:
        """A step up to ``end`` with ``drafts`` guesses has ``accepted`` tokens of its own, the first one included: keep
        the state at the end of a block. True where the running state has moved with it."""
        if not self.group.is_state:
            return False
        first = end - drafts
        last = (first + accepted - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if last < first:
            return False
        column, kept = self.column(end), self.column(last)
        self._copy(column + last - first, kept)
        return column == kept

    def _begin_state(self, end: int, computed: int) -> None:
        before = (computed - 1) // BLOCK_TOKENS if self.running.column is None else self.running.column
        if computed and before != self.column(end):
            self._copy(before + self.running.accepted - 1, self.column(end))

    def _copy(self, source: int, target: int) -> None:
        if not self.table[source]:
            raise Misread("a state is copied from the page that is never granted")
        self.slots[self._page(target), :2] = self.slots[self.table[source], :2]

    def _write_state(self, column: int, tokens: int, digests: Sequence[int]) -> None:
        page = self._page(column)
        self.slots[page, 0], self.slots[page, 1] = digests[tokens - 1], tokens

    @staticmethod
    def column(end: int) -> int:
        """The column of the last of ``end`` tokens."""
        return -(-end // BLOCK_TOKENS) - 1

    def _needed(self, digests: Sequence[int], computed: int) -> Iterator[tuple[int, int, int]]:
        if self.group.is_state:
            if computed:
                column = self.column(len(digests))
                stays = self.running.column == column
                page = self.table[column + self.running.accepted - 1 if stays else column]
                yield page, 0, digests[computed - 1]
                yield page, 1, computed
            return
        window = self.group.window_tokens
        for at in range(0 if window is None else max(0, computed - window + 1), computed):
            yield self.table[at // self.group.block_tokens], at % self.group.block_tokens, digests[at]

    def _page(self, column: int) -> int:
        page = self.table[column]
        assert page, f"column {column} of {self.group} has the page that is never granted"
        return page
