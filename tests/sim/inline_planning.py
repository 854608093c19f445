"""Planning without a thread: the same calls give the same order."""

from __future__ import annotations

from cachesvc.model.transfer import Direction, Urgency
from cachesvc.swap.planner_threads import Devices, Work


class InlinePlanning:
    """Plans inside ``submit``: deterministic, no thread."""

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, direction: Direction, urgency: Urgency, devices: Devices, ticket: int, work: Work) -> None:
        """Plan now."""
        work(None)

    def expedite(self, direction: Direction, ticket: int) -> None:
        """Nothing waits."""

    def ended(self, direction: Direction, ticket: int) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""
