"""Facts of a request that eviction policies learn from."""

from __future__ import annotations

from typing import NamedTuple

LINEAR_TOKENS = 30_500
"""Position at which computing a token again costs twice what it costs at the beginning (an 8B model with GQA)."""


class Parts(NamedTuple):
    """A request that an eviction policy follows: its number, and the segments of its blocks ``[0, shared_blocks)`` and
    of those behind them."""

    number: int
    shared: int
    own: int
    shared_blocks: int


class Ended(NamedTuple):
    """End of a request, as far as its engine reports it: tokens of output (None: unknown), and when (seconds of the
    daemon's clock; None: now)."""

    output_tokens: int | None = None
    at: float | None = None


class Worth(NamedTuple):
    """Worth of a block to a policy that learns: its class in words, its age there (seconds), and the expected hits a
    second."""

    words: str
    age: float
    density: float
