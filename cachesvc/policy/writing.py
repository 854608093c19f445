"""Rules for copying sealed blocks to the host tier.

write_through: when sealed. write_through_selective: at the ``threshold``-th reuse (a match that passes through the
block), counts of dropped blocks being remembered. write_back: only when the last device copy is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import WritePolicy


@dataclass(frozen=True, slots=True)
class WriteRule:
    """``threshold``: reuses after which write_through_selective copies. ``remember``: counts kept of dropped blocks.
    ``share``: write_back copies blocks of a class that is used from the host at least ``share`` times as often as the
    mean, where eviction knows of classes; 0: all."""

    policy: WritePolicy
    threshold: int = 2
    remember: int = 65536
    share: float = 0.0

    copies_when_sealed: bool = field(init=False)
    """True where a block is backed up when it is published."""
    counts_reuse: bool = field(init=False)
    """True where matches must be counted block by block."""
    copies_when_evicted: bool = field(init=False)
    """True where an evicted block's last copy is saved first."""

    def __post_init__(self) -> None:
        if self.share < 0:
            raise InvalidRequest(f"write_back_share cannot be negative, got {self.share}")
        if self.threshold < 1:
            raise InvalidRequest(f"write_through_threshold must be at least 1, got {self.threshold}")
        # Set once: every match and publish asks.
        object.__setattr__(self, "copies_when_sealed", self.policy is WritePolicy.WRITE_THROUGH)
        object.__setattr__(self, "counts_reuse", self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE)
        object.__setattr__(self, "copies_when_evicted", self.policy is WritePolicy.WRITE_BACK)

    def is_due(self, reuses: int) -> bool:
        """True when a block that was reused so often should have a host copy."""
        return self.counts_reuse and reuses >= self.threshold
