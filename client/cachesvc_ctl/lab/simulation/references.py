"""Token hits of two simple rules for the copies of a hybrid model, to compare policies with. No daemon works like this.

All that is cached is one LRU, of blocks and copies alike; a prompt is used from its end to its root. EVERY keeps copies
at every position at which there can be any. ENDS keeps them at the end of each prompt, and where one leaves what is
cached, so that the next one that does so is served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cachesvc_ctl.lab.simulation.hybrid import Copies
from cachesvc_ctl.lab.traces.prompts import Prompts

EVERY, ENDS = "every aligned block", "ends and branches"


def reference_hits(
    prompts: Prompts, blocks: int, copies: Copies, *, keeps_every: bool, host_blocks: int = 0
) -> list[int]:
    """Hit blocks of each prompt on a device of ``blocks`` blocks, and on a host that has nothing of what it has."""
    cache = _Cache(blocks + host_blocks, copies)
    return [cache.serve(prompts.blocks(prompt).tolist(), keeps_every=keeps_every) for prompt in range(len(prompts))]


class _Cache:
    """``_used``: blocks and copies, least recently used first, with their pages; a copy's number is negative."""

    def __init__(self, capacity: int, copies: Copies) -> None:
        self._capacity = capacity
        self._pages = copies.state_pages or copies.window_pages
        self._between = copies.state_blocks if copies.state_pages else 1
        self._window = 1 if copies.state_pages else copies.window_blocks
        self._used: OrderedDict[int, int] = OrderedDict()
        self._taken = 0

    def serve(self, path: Sequence[int], *, keeps_every: bool) -> int:
        """Use a prompt; returns its hit."""
        known = next((at for at, block in enumerate(path) if block not in self._used), len(path))
        branch = known - known % self._between
        hit = branch
        while hit and not all(~path[at] in self._used for at in self._needed(hit)):
            hit -= self._between
        end = len(path) - len(path) % self._between
        kept = range(hit + self._between, end + 1, self._between) if keeps_every else (branch, end)
        wanted = {at for position in kept if position > hit for at in self._needed(position)}
        for at in range(len(path) - 1, -1, -1):
            self._use(path[at], 1)
            if at in wanted:
                self._use(~path[at], self._pages)
        for at in self._needed(hit):
            self._use(~path[at], self._pages)
        while self._taken > self._capacity:
            self._taken -= self._used.popitem(last=False)[1]
        return hit

    def _needed(self, position: int) -> range:
        return range(max(0, position - self._window), position)

    def _use(self, number: int, pages: int) -> None:
        if number not in self._used:
            self._used[number] = pages
            self._taken += pages
        self._used.move_to_end(number)
