"""Worth of copies and of blocks per block of memory: requests a second times the blocks that they need not compute.

All sizes are in blocks of the full groups: a state that takes as much memory as three blocks costs 3.
"""

from __future__ import annotations

from collections.abc import Sequence


def copy_worth(density: float, saved: int, cost: float) -> float:
    """Worth of copies behind which a prompt goes on: without them a request that continues there, ``density`` a second,
    computes the ``saved`` blocks since the copies above again."""
    return density * saved / cost


def branch_worth(requests: Sequence[tuple[float, int]], memory: float) -> float:
    """Worth of the end of a prompt, blocks and copies together: the ones are of no use without the others.

    ``requests``: of each position with copies, how many a second continue there, and the blocks that they would compute
    again. ``memory``: of all of it, in blocks.
    """
    return sum(density * saved for density, saved in requests) / memory


def fallback(saved: int, below: int, cost: float, capacity: int) -> float:
    """Worth of copies as what is left of a prompt once its end has gone, as a share of that end's.

    The ``below`` blocks down to the next copies free their memory bit by bit, while all of ``capacity`` is replaced
    once. For that part of the time the ``saved`` blocks are hit as before.
    """
    return saved * below / (cost * capacity)
