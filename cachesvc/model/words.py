"""Types shared by all layers: tiers, copy states, page runs and write policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum

NO_PAGE = -1
"""A cell of a block table that holds no page: behind a window, or not granted yet."""
STAMP_BITS = 48
"""Numbers of accesses have no more bits: nine years of a million a second."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CopyState(IntEnum):
    """State of one copy: one block's page in one group on one place."""

    ABSENT = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


ABSENT, FILLING, READY, DRAINING = map(int, CopyState)
"""The states as they lie in columns: to compare with an enum's member takes three times as long."""


class PageState(IntEnum):
    """State of a page; it has exactly one of these at any moment."""

    FREE = 0
    PRIVATE = 1
    SEALED = 2
    IN_FLIGHT = 3
    QUARANTINED = 4


class WritePolicy(Enum):
    """Time at which a sealed block's bytes are copied to the host tier. ``WRITE_THROUGH``: as soon as the block is
    sealed. ``WRITE_THROUGH_SELECTIVE``: once it was hit often enough. ``WRITE_BACK``: only when its last device copy is
    evicted.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` pages whose ids follow one another, from ``first`` on."""

    first: int
    count: int


def runs_of(pages: Iterable[int]) -> list[Run]:
    """Split ``pages`` into its maximal runs of consecutive rising ids, in order."""
    runs: list[Run] = []
    first = previous = None
    for page in pages:
        if first is None or previous is None:
            first = page
        elif page != previous + 1:
            runs.append(Run(first, previous - first + 1))
            first = page
        previous = page
    if first is not None and previous is not None:
        runs.append(Run(first, previous - first + 1))
    return runs
