"""Size of an engine's stock: what its next iterations may take, so that the daemon grants it between them.

No other engine can use what lies in a stock. So its target follows what waits, what runs and what recent iterations
took; an engine that runs nothing goes back to its ``base``, and the rest flows back to the pool.

    target = base .. most, of  running + max(recent iterations, first blocks of requests that wait)
"""

from __future__ import annotations

SHARE_DIVISOR = 32
"""Largest part of the pool that a stock may have: it holds what requests would return to, and other engines want it."""

STEP_SHARE = 0.9
"""Part of the largest recent take that is expected a step later."""

SLACK_DIVISOR = 4
"""A target falls once it is lower by such a part: pages do not go to and fro."""


def most_in_stock(step_blocks: int, requests: int, pool_blocks: int, limit: int) -> int:
    """Return the largest target: blocks of a whole iteration and one for each request, at most a share of the pool and
    ``limit`` (0: none)."""
    most = min(step_blocks + requests, pool_blocks // SHARE_DIVISOR)
    return min(most, limit) if limit else most


class StockDemand:
    """``base``: target of an engine that runs nothing. ``most``: the largest."""

    def __init__(self, base: int, most: int = 0) -> None:
        self.base = base
        self.most = max(base, most)
        self.target = base
        self._taken = 0
        self._recent = 0.0
        self._rests = True

    @property
    def due(self) -> int:
        """Blocks that other blocks are evicted for: none while nothing runs."""
        return 0 if self._rests else self.target

    def least(self, running: int) -> int:
        """Return what an iteration takes where each of ``running`` requests takes a block."""
        return min(running, self.most)

    def take(self, blocks: int) -> None:
        """Note blocks that an allocation took."""
        self._taken += blocks

    def rest(self) -> None:
        """Nothing runs and nothing waits: go back to the base."""
        self._taken, self._recent, self.target, self._rests = 0, 0.0, self.base, True

    def look(self, running: int, waiting_blocks: int) -> int:
        """Return the target of the step that is sent now. ``running``: requests that may take a block each;
        ``waiting_blocks``: first blocks of those that wait."""
        self._recent = max(self._taken, STEP_SHARE * self._recent)
        self._taken, self._rests = 0, False
        wanted = min(self.most, max(self.base, running + max(round(self._recent), waiting_blocks)))
        if wanted > self.target or wanted <= self.target - self.target // SLACK_DIVISOR:
            self.target = wanted
        return self.target
