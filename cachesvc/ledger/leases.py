"""Who is there: leases, the processes behind them, and the pages that outlive a lost lease in quarantine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cachesvc.ledger.sequences import Sequence


class LeaseState(Enum):
    """A lease is live until it is closed, falls silent or loses its processes; then only its quarantine is left."""

    LIVE = "live"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Lease:
    """What one engine holds on one replica. ``processes`` are the life-socket tokens of all that may write its pages.

    ``stock[g]`` are granted pages that no sequence has taken yet; ``quarantine`` pages that wait for the
    processes; ``attached`` the ranks that each process has mapped; ``opened_by`` the opener's token and request_id.
    """

    id: str
    engine: str
    model: int
    replica: int
    last_heard: float
    groups: int
    processes: set[bytes] = field(default_factory=set)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    stock: list[set[int]] = field(default_factory=list)
    state: LeaseState = LeaseState.LIVE
    why: str = ""
    quarantine: list[tuple[int, int]] = field(default_factory=list)
    attached: dict[bytes, set[int]] = field(default_factory=dict)
    opened_by: tuple[bytes, int] = (b"", 0)

    def __post_init__(self) -> None:
        if not self.stock:
            self.stock = [set() for _ in range(self.groups)]

    def heard(self, now: float) -> None:
        """A sign of life. A call that waited brings the time when it began, which moves nothing back."""
        self.last_heard = max(self.last_heard, now)


@dataclass(slots=True)
class Process:
    """A process that holds a life connection, and the leases whose pages it may write."""

    token: bytes
    pid: int
    uid: int
    gids: frozenset[int] = frozenset()
    leases: set[str] = field(default_factory=set)
