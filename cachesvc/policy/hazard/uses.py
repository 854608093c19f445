"""Classes of blocks that are worth a copy on the host: a share of them is used again after the device has dropped them
and before the host would.

Lives of blocks end by a use, or by being too old for the host. How old what leaves a device, or the host, is at that
time is followed as it changes.
"""

from __future__ import annotations

from collections import defaultdict

PRIOR_BLOCKS = 200
"""Blocks of the mean with which each class begins."""
FOLLOWS = 0.001
DECAY = 0.95
DECAY_EVERY = 400
"""Requests."""


class HostUses:
    """Counts of blocks by class. ``device_seconds``, ``host_seconds``: how old what leaves them is."""

    def __init__(self) -> None:
        self.device_seconds, self.host_seconds = 30.0, 300.0
        self._outlasted: defaultdict[int, float] = defaultdict(float)
        self._used: defaultdict[int, float] = defaultdict(float)
        self._all_outlasted, self._all_used = 2.0, 1.0
        self._requests = 0

    def request(self) -> None:
        """A request has come: what was long ago counts for less."""
        self._requests += 1
        if self._requests % DECAY_EVERY == 0:
            for column in (self._outlasted, self._used):
                for row in column:
                    column[row] *= DECAY
            self._all_outlasted *= DECAY
            self._all_used *= DECAY

    def used(self, rows: tuple[int, int], age: float, blocks: int) -> None:
        """Count ``blocks`` blocks of classes ``rows`` (0: none) that were used again at ``age`` seconds."""
        if age > self.device_seconds:
            self._end(rows, blocks, blocks if age <= self.host_seconds else 0)

    def unused(self, rows: tuple[int, int], blocks: int) -> None:
        """Count ``blocks`` blocks that have become too old for the host."""
        self._end(rows, blocks, 0)

    def _end(self, rows: tuple[int, int], blocks: int, used: int) -> None:
        for row in rows:
            if row:
                self._outlasted[row] += blocks
                self._used[row] += used
        self._all_outlasted += blocks
        self._all_used += used

    def let_go(self, age: float, blocks: int, *, is_host: bool) -> None:
        """Blocks have left the host, or a device, ``age`` seconds after their last use."""
        follows = FOLLOWS if blocks == 1 else 1 - (1 - FOLLOWS) ** blocks
        if is_host:
            self.host_seconds += follows * (age - self.host_seconds)
        else:
            self.device_seconds += follows * (age - self.device_seconds)

    def is_worth(self, row: int, share: float) -> bool:
        """True where blocks of the class are used from the host at least ``share`` times as often as the mean."""
        mean = self._all_used / self._all_outlasted
        used = (self._used[row] + PRIOR_BLOCKS * mean) / (self._outlasted[row] + PRIOR_BLOCKS)
        return used >= share * mean
