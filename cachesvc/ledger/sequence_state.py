"""States of a sequence, and the only moves between them.

ACTIVE ──▶ LOADING ──▶ ACTIVE          a hit on the host comes to the device
              └──────▶ FAILED          it did not come: the sequence can only be released
ACTIVE ──▶ LEAVING ──▶ AWAY ──▶ RETURNING ──▶ ACTIVE
              └▶ ACTIVE           AWAY ◀──┘                 a failed swap leaves it where it was
any but ENDED ──▶ ENDED
"""

from __future__ import annotations

from enum import Enum

from cachesvc.model.errors import LedgerBroken


class SequenceState(Enum):
    ACTIVE = "active"  # on the device: it may grow, publish and be swapped out
    LOADING = "loading"  # as active, but what is published has to wait for the loads of its hit
    LEAVING = "leaving"  # its pages are being copied to the host
    AWAY = "away"  # on the host; without pages on the device
    RETURNING = "returning"  # its pages are being copied to the device
    FAILED = "failed"  # a load failed: release it
    ENDED = "ended"  # gives back what it holds; no call sees it


ACTIVE, LOADING, LEAVING, AWAY, RETURNING, FAILED, ENDED = SequenceState
"""Module constants: looking a member up in its enum takes as long as a rule."""

ON_DEVICE = frozenset({ACTIVE, LOADING})
"""States in which a sequence grows."""
PASSING = frozenset({LOADING, LEAVING, RETURNING})
"""States that end with a ticket."""

MOVES = frozenset(
    {
        *((ACTIVE, LOADING), (LOADING, LOADING), (LOADING, ACTIVE), (LOADING, FAILED), (FAILED, FAILED)),
        *((ACTIVE, LEAVING), (LEAVING, AWAY), (LEAVING, ACTIVE)),
        *((AWAY, RETURNING), (RETURNING, ACTIVE), (RETURNING, AWAY)),
        *((state, ENDED) for state in SequenceState if state is not ENDED),
    }
)


def move(source: SequenceState, target: SequenceState) -> SequenceState:
    """The target of a legal move. Raises LedgerBroken for any other."""
    if (source, target) not in MOVES:
        raise LedgerBroken(f"a sequence that is {source.value} cannot become {target.value}")
    return target
