"""What a request was, as eviction policies learn from it."""

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
    """How a request ended, as far as its engine tells: tokens of output (None: it does not), and when (seconds of the
    daemon's clock; None: now)."""

    output_tokens: int | None = None
    at: float | None = None


class Worth(NamedTuple):
    """What a policy that learns knows of a block: its class in words, its age there (seconds), and the hits a second
    that it is expected to bring."""

    words: str
    age: float
    density: float
