"""The most that any cache of a size could hit on a trace: Belady's MIN, under the rule that a hit is a leading run.

It knows the future: kept is what is used again soonest, of one prompt the blocks nearer its root. The blocks of the
running prompt are in place, as in a device pool.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cachesvc_ctl.lab.traces.prompts import Prompts


def optimal_hits(prompts: Prompts, device_blocks: int, host_blocks: int = 0) -> list[int]:
    """Largest number of hit blocks of each prompt, on a device and on its host together, for pools of these sizes.

    Exact for a device alone; with a host a bound that no policy passes. Of a prompt longer than the device only its
    first ``device_blocks`` are cached.
    """
    paths = [prompts.blocks(prompt)[:device_blocks] for prompt in range(len(prompts))]
    lengths = np.fromiter(map(len, paths), np.int64, len(paths))
    starts = np.concatenate(([0], np.cumsum(lengths)))
    flat = np.concatenate(paths) if paths else np.empty(0, np.int64)
    next_use = _next_uses(flat)
    return _hits(flat.tolist(), starts.tolist(), next_use.tolist(), device_blocks + host_blocks)


def _next_uses(flat: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Position in ``flat`` of the next access to each access's block, -1 where there is none."""
    order = np.argsort(flat, kind="stable")
    again = flat[order[1:]] == flat[order[:-1]]
    next_use = np.full(len(flat), -1, np.int64)
    next_use[order[:-1][again]] = order[1:][again]
    return next_use


def _hits(flat: list[int], starts: list[int], next_use: list[int], capacity: int) -> list[int]:
    """A later position is a later prompt, or a deeper block of the same: the greatest goes first."""
    kept = [-1] * (max(flat, default=-1) + 1)  # of each block that is kept the position of its next use
    size, hits = 0, []
    farthest: list[int] = []  # negated; one whose block was dropped or used since is skipped
    for first, end in pairwise(starts):
        before = size
        for block in flat[first:end]:
            if kept[block] >= 0:
                size -= 1
                kept[block] = -1
        hits.append(before - size)
        while size > capacity - (end - first):
            position = -heapq.heappop(farthest)
            block = flat[position]
            if kept[block] == position:
                kept[block] = -1
                size -= 1
        for at in range(first, end):
            position = next_use[at]
            if position < 0:
                break  # nor are the blocks below it used again
            kept[flat[at]] = position
            heapq.heappush(farthest, -position)
            size += 1
    return hits
