"""Fault injection for copies, for tests of the recovery: enabled by the flag ``--fault-copies`` alone.

A fault is either a slice of which nothing was copied, or one that broke half way: then its target holds some new bytes
and some old ones, as after a fault of a real copy engine. Its word is not set, and its job fails.
"""

from __future__ import annotations

import random
from dataclasses import replace

from cachesvc.memory.interface import COPY_FIELDS, Slice, SliceRunner

_HEIGHT = COPY_FIELDS.index("height")


class InjectedFault(RuntimeError):
    """A copy was made to fail."""


class FaultyRunner:
    """A runner of which ``rate`` (0 to 1) of the slices fail. Used by one thread at a time, as any runner."""

    def __init__(self, runner: SliceRunner, rate: float, seed: int) -> None:
        self.depth = runner.depth
        self.only_queues = False
        self._runner = runner
        self._rate = rate
        self._rng = random.Random(seed)

    def begin(self) -> None:
        """Begin the wrapped runner."""
        self._runner.begin()

    def submit(self, piece: Slice) -> object:
        """Start the slice, or a half of it and no word. Raises InjectedFault."""
        if self._rng.random() >= self._rate:
            return self._runner.submit(piece)
        half = piece.copies[: (len(piece.copies) + 1) // 2].copy()
        if self._rng.random() < 0.5 or not len(half):
            raise InjectedFault("a copy was made to fail before it began (--fault-copies)")
        half[-1, _HEIGHT] = (half[-1, _HEIGHT] + 1) // 2
        self._runner.wait(self._runner.submit(replace(piece, copies=half, word_value=None)))
        raise InjectedFault("a copy was made to fail half way (--fault-copies)")

    def wait(self, started: object) -> None:
        """Wait for the wrapped runner."""
        self._runner.wait(started)
