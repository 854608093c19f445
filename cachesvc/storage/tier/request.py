"""A request to the engine until it is begun: it ends, even if its carrier fails.

    WAITING ── claim ──▶ CLAIMED ── begun ──▶ BEGUN     the store reports each item, or that it is LATE
       └── expire, fail ────┴── fail ───────▶ OVER      all of it was refused: no byte moves for it

What was begun has a deadline of its own, after which its memory is in quarantine until the engine answers after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from cachesvc.storage.seam import Outcome


class Stage(Enum):
    """Progress of a request; see above."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    BEGUN = "begun"
    OVER = "over"


class StorageRequest:
    """``refuse``: tells that all of its items ended by an outcome. ``deadline``: monotonic seconds. Any thread."""

    def __init__(self, deadline: float, refuse: Callable[[Outcome], None]) -> None:
        self.deadline = deadline
        self.stage = Stage.WAITING
        self._refuse = refuse
        self._was_put = False
        self._lock = threading.Lock()

    @property
    def is_settled(self) -> bool:
        """True where the request needs no further care."""
        return self.stage in (Stage.BEGUN, Stage.OVER)

    def put_to_engine(self) -> None:
        """Note that the engine was asked. A late answer counts against the engine."""
        self._was_put = True

    def claim(self) -> bool:
        """Claim the request: the claimer begins it, or fails it. False where it is over."""
        with self._lock:
            is_mine = self.stage is Stage.WAITING
            if is_mine:
                self.stage = Stage.CLAIMED
        return is_mine

    def begun(self) -> None:
        """Note that the store reports its items from now on."""
        with self._lock:
            assert self.stage is Stage.CLAIMED, "it was claimed before it begins"
            self.stage = Stage.BEGUN

    def expire(self) -> None:
        """End a request whose time has passed. No-op once it was begun."""
        self._end(Stage.WAITING)

    def fail(self) -> None:
        """Fail the request of a broken carrier. No-op where it was begun."""
        self._was_put = True
        self._end(Stage.WAITING, Stage.CLAIMED)

    def _end(self, *stages: Stage) -> None:
        with self._lock:
            if self.stage not in stages:
                return
            self.stage = Stage.OVER
        self._refuse(Outcome.FAILED if self._was_put else Outcome.BUSY)
