"""Hints of engines on how a request's blocks will be used, as access numbers: the order of eviction reads these alone.

A block that will not return counts as never used: it goes before all others, on every tier. One that is expected back
counts as used later, by as many accesses as its pool has blocks. So a hint moves blocks within the order of their own
model and tenant, whose pools these are. The same hint on all blocks changes nothing, and a false one keeps a block for
at most one more turn of its pool.
"""

from __future__ import annotations

from enum import IntEnum

from cachesvc.model.errors import InvalidRequest


class RequestHint(IntEnum):
    """Expected use of a request's blocks. The values are those of the wire."""

    DEFAULT = 0
    ONCE = 1
    KEEP = 2


def retention_of(number: int) -> RequestHint:
    """RequestHint of a message. Raises InvalidRequest for a number that is none."""
    try:
        return RequestHint(number)
    except ValueError:
        raise InvalidRequest(f"retention is {number}; it is 0 (default), 1 (once) or 2 (keep)") from None


def hinted(stamp: int, retention: RequestHint, pool_blocks: int) -> int:
    """Access number under which an access at ``stamp`` counts, in a pool of ``pool_blocks`` blocks."""
    if retention is RequestHint.ONCE:
        return 0
    return stamp + pool_blocks if retention is RequestHint.KEEP else stamp
