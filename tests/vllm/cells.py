"""Kernels of ``scheduling`` in a request's tables: what they read of what was computed before, and what they write.

A token's slot holds a digest of the tokens up to there. A state's page holds that of the last token that went into it,
and how many these are: it is copied from the page of the last step to that of this one, as vLLM's workers do in mode
``align``. Block 0 is in no table where it would be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.vllm.shape import BLOCK_TOKENS, Group

Slots = npt.NDArray[np.uint64]


class Misread(Exception):
    """A page does not hold what was computed."""


@dataclass
class Cells:
    """Pages of one request in one group, in the slab ``slots``."""

    group: Group
    table: Sequence[int]
    slots: Slots

    def read(self, digests: Sequence[int], computed: int) -> None:
        """Read what the tokens behind ``computed`` need. Raises Misread."""
        for page, slot, expected in self._needed(digests, computed):
            if not page:
                raise Misread("it uses the page that is never granted")
            if self.slots[page, slot] != expected:
                raise Misread(f"page {page} of {self.group} in {self.table} is not that of {computed} computed tokens")

    def write(self, digests: Sequence[int], computed: int) -> None:
        """Write what is computed behind ``computed``."""
        end = len(digests)
        if self.group.is_state:
            self._write_state(end, digests)
            whole = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            if self.group.saves_within and whole > computed and self.table[whole // BLOCK_TOKENS - 1]:
                self._write_state(whole, digests)
            return
        for at in range(computed, end):
            self.slots[self._page(at), at % self.group.block_tokens] = digests[at]

    def _write_state(self, tokens: int, digests: Sequence[int]) -> None:
        page = self._page(tokens - 1)
        self.slots[page, 0], self.slots[page, 1] = digests[tokens - 1], tokens

    def _needed(self, digests: Sequence[int], computed: int) -> Iterator[tuple[int, int, int]]:
        if self.group.is_state:
            if computed:
                page = self.table[(computed - 1) // BLOCK_TOKENS]
                yield page, 0, digests[computed - 1]
                yield page, 1, computed
            return
        window = self.group.window_tokens
        for at in range(0 if window is None else max(0, computed - window + 1), computed):
            yield self.table[at // self.group.block_tokens], at % self.group.block_tokens, digests[at]

    def _page(self, at: int) -> int:
        page = self.table[at // self.group.block_tokens]
        assert page, f"token {at} of {self.group} has the page that is never granted"
        return page
