"""Operators' counts of a place: blocks by state, pins, and departures."""

from __future__ import annotations

from cachesvc.model.numbers.histogram import AGE_SECONDS, Histogram
from cachesvc.model.words import CopyState


class PlaceCounts:
    """Counts of one place, in blocks, for operators.

    ``states``: blocks by state of their full groups. ``pinned``: blocks that pins protect, each counted once for each
    pin above which it lies. ``left``: blocks that were dropped, ``left_unused`` those of them that were not used since
    they came: no hit on a device, no load from the host. ``windows_left``: windowed copies dropped by themselves.
    """

    __slots__ = ("ages", "left", "left_unused", "pinned", "states", "windows_left")

    def __init__(self) -> None:
        self.states = [0] * len(CopyState)
        self.pinned = 0
        self.left = 0
        self.left_unused = 0
        self.windows_left = 0
        self.ages = Histogram(AGE_SECONDS)

    def leave(self, age_seconds: float | None, blocks: int, unused: int) -> None:
        """``blocks`` blocks are dropped ``age_seconds`` after their last access; None: they count as never used."""
        if age_seconds is not None:
            self.ages.observe(age_seconds, blocks)
        self.left += blocks
        self.left_unused += unused

    def add_left(self, other: PlaceCounts) -> None:
        """Count what has left another place too."""
        self.left += other.left
        self.left_unused += other.left_unused
        self.windows_left += other.windows_left
        self.ages.add(other.ages)
