"""Budget of the node's background copies, where the host's memory and no link limits what all devices copy at once.

One page of shared memory, which the daemon makes and the mover of each device maps. The daemon writes the head. Each
mover writes the line of its device and reads the others' between two slices, so no copy costs a call:

    line 0      bytes a second of all background copies together while an awaited copy runs anywhere; 0: no limit
    line 1 ..   of one device: until when its awaited copies count, until when its background copies do (ns)

Both times are leases that end by themselves: a mover that dies or hangs holds nothing back for longer than ``LEASE_S``.
A device holds its background copies back only while another device's line says awaited; its own arbiter orders its own
copies. Devices that copy in the background share the budget evenly, so each always has a part of it.

No thread and no clock: ``now`` comes in, in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cachesvc.memory.extents import map_memfd, sealed_memfd

LEASE_S = 0.1
"""Lease of a line's times, seconds: many slices long, and the longest that a hung mover holds others back."""
MOST_LEASE_S = 10.0
"""Times further ahead are of another clock and count for nothing."""
LOOK_S = 0.002
"""Longest delay after which a held device notices that no awaited copy runs any more, seconds."""
BACKGROUND_PARTS = 4
"""Background slices are this part of a slice where there is a budget: no awaited copy overtakes the two slices that the
copy engines of each other device have queued."""
LINKS_LIMIT = 0.8
"""Part of the sum of their rates alone that all devices reach at once where links are the limit."""
BACKGROUND_SHARE = 0.25
"""Share of the host's bandwidth that background copies may take together beside awaited ones. Eight H200s stored 120
GB/s at once (2026-11): a quarter of that leaves room for one load at its link's 50, and is more than engines write."""

_NS = 1_000_000_000
_LINE = 8
"""Words of a line: 64 bytes, a cache line, so that writers do not disturb one another."""
_AWAITED, _BACKGROUND = 0, 1


class HostBudget:
    """The page. ``fd``: what the movers get; this object takes it over."""

    def __init__(self, fd: int) -> None:
        """Map the page. Raises OSError."""
        self.fd = fd
        self._words = map_memfd(fd, os.fstat(fd).st_size).cast("q")

    @classmethod
    def make(cls, devices: int) -> HostBudget:
        """Make a page for ``devices`` devices, without a limit. Raises OSError."""
        return cls(sealed_memfd("kvcache-budget", (1 + devices) * _LINE * 8))

    @property
    def bytes_per_second(self) -> int:
        return self._words[0]

    def set(self, bytes_per_second: int) -> None:
        """Set another budget, from the next slice on; 0 is no limit."""
        self._words[0] = bytes_per_second

    def of(self, device: int) -> Neighbours:
        """View of one device, by its place among the others."""
        return Neighbours(self._words, device)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last reference. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Neighbours:
    """Other devices of the node as one device's arbiter knows them, and what they know of it."""

    def __init__(self, words: memoryview, device: int) -> None:
        """``words``: of the page, 64 bits each."""
        self._words = words
        self._own = (1 + device) * _LINE
        self._lines = range(_LINE, len(words), _LINE)
        assert self._own in self._lines

    @property
    def has_budget(self) -> bool:
        """True where background copies have a budget."""
        return self._words[0] > 0

    def begin_awaited(self, now: float) -> None:
        """Tell the others that awaited copies run here: renewed with each slice that is started."""
        self._words[self._own + _AWAITED] = round((now + LEASE_S) * _NS)

    def end_awaited(self) -> None:
        """Tell the others that no awaited copy is left here. Idempotent."""
        self._words[self._own + _AWAITED] = 0

    def seconds_of(self, size_bytes: int, now: float) -> float:
        """Time that a background slice, started now, takes out of this device's part of the budget."""
        budget, own = self._words[0], self._own + _BACKGROUND
        if not budget:
            return 0.0
        others = sum(self._counts(line + _BACKGROUND, now) for line in self._lines if line != self._own)
        seconds = size_bytes * (1 + others) / budget
        self._words[own] = round((now + seconds + LEASE_S) * _NS)
        return seconds

    def have_awaited(self, now: float) -> bool:
        """True while an awaited copy runs on another device."""
        return any(self._counts(line + _AWAITED, now) for line in self._lines if line != self._own)

    def _counts(self, word: int, now: float) -> bool:
        return 0 < self._words[word] / _NS - now <= MOST_LEASE_S


def no_neighbours() -> Neighbours:
    """View of a device that is alone, or whose links are the limit."""
    return Neighbours(memoryview(bytearray(2 * _LINE * 8)).cast("q"), 0)


def budget_of(alone: Sequence[float], at_once: Sequence[float]) -> int:
    """Budget in bytes a second by rates that were measured, of each device alone and of each while all copy: 0 where
    links are the limit."""
    together = sum(at_once)
    return 0 if together >= LINKS_LIMIT * sum(alone) else round(BACKGROUND_SHARE * together)
