"""Watchdog for copies: a hung GPU reports no error, so waits need a time limit.

Only time in which this process runs and looks is counted: one that was stopped for an hour has waited a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachesvc.memory.interface import Slice

PATIENCE_S = 30.0
"""Time limit of a slice, seconds. It takes a millisecond; a driver that is busy with pinning may hold it for
seconds."""
SLOWEST_BYTES_PER_S = 100e6
"""Slowest rate beside the patience. Slices are small, so no link's own figure is needed: the narrowest rows go at 1
GB/s."""
MOST_COUNTED_S = 5.0
"""Between two looks, which come every two seconds."""


@dataclass(slots=True, eq=False)
class CopyTask:
    """Work that a copy thread asks of its GPU: to start a slice, or to report that it has landed. ``waited_s``: time
    counted so far."""

    piece: Slice
    waited_s: float = 0.0

    @property
    def is_overdue(self) -> bool:
        """True where it has taken longer than any slice of its size."""
        return self.waited_s > PATIENCE_S + self.piece.size_bytes / SLOWEST_BYTES_PER_S


class Watched(Protocol):
    """Copy thread with a time limit."""

    name: str
    task: CopyTask | None


class CopyWatch:
    """Watchdog of one device's copy threads; used by one thread at a time."""

    def __init__(self, streams: Sequence[Watched], clock: Callable[[], float]) -> None:
        self._streams = streams
        self._clock = clock
        self._seen_at = clock()

    def look(self) -> str:
        """Count the time since the last look; says what has taken too long, or nothing."""
        now = self._clock()
        passed, self._seen_at = min(now - self._seen_at, MOST_COUNTED_S), now
        overdue = ""
        for stream in self._streams:
            task = stream.task
            if task is not None:
                task.waited_s += passed
                if task.is_overdue:
                    size_bytes = task.piece.size_bytes
                    overdue = f"{size_bytes} bytes were not copied in {task.waited_s:.0f} s on {stream.name}"
        return overdue
