"""Worth of the heads of the queues, all at once: one choice is a few operations on arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.model.requests import LINEAR_TOKENS
from cachesvc.policy.hazard.ages import BINS, bin_of
from cachesvc.policy.hazard.asked import Heads
from cachesvc.policy.hazard.rates import Floats, Ints, Rates

MARGIN = 0.4
"""Margin by which a head must be worth less than the oldest before it goes first: this share, where all uses are
younger."""
NO_RANK = (1 << 63) - 1
"""Rank of a queue without candidates."""


def worth_of(heads: Heads, rates: Rates, now: float, weighed_tokens: int) -> Floats:
    """Hits a second that each head is expected to bring; infinite where there is none. ``weighed_tokens``: tokens of a
    block, where a hit counts for more the later in a prompt it is; 0: all count the same."""
    queues = min(len(heads.ranks), rates.rows)
    bins = np.log2(np.maximum(now + 1.0 - heads.since[:queues], 1.0))
    bins += bins
    at = np.minimum(bins, BINS - 1).astype(np.int64)
    at += _ROW_STARTS[:queues] if queues <= len(_ROW_STARTS) else np.arange(queues) * BINS
    worth: Floats = rates.density.ravel()[at]
    if weighed_tokens:
        worth *= 1 + heads.depths[:queues] * (weighed_tokens / LINEAR_TOKENS)
    worth[heads.ranks[:queues] == NO_RANK] = np.inf
    return worth


_ROW_STARTS: Ints = np.arange(1024, dtype=np.int64) * BINS


def choose_stored(rates: Rates, queues: Sequence[int], ages: Sequence[float], known_seconds: float) -> int:
    """Index of the queue whose oldest block goes next from storage, by the ``ages`` of these, seconds. The oldest of
    all goes where it is older than what is known of uses, or where no other is worth much less. It only reads: any
    thread."""
    oldest = max(range(len(ages)), key=ages.__getitem__)
    if ages[oldest] > known_seconds:
        return oldest
    margin = 1 - MARGIN * float(rates.reused_before[bin_of(ages[oldest])])
    worth = [float(rates.density[queue, bin_of(age)]) for queue, age in zip(queues, ages, strict=True)]
    least = min(range(len(worth)), key=worth.__getitem__)
    return least if worth[least] <= margin * worth[oldest] and worth[least] < worth[oldest] else oldest
