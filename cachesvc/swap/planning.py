"""Where plans are made: on a thread for each direction, so that who submits never waits; or at once, in
simulations.

Order is kept: what is submitted first in a direction is planned first. ``work`` is called once, with None
to plan or with the error to end the ticket with.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from cachesvc.model.errors import Unavailable
from cachesvc.model.transfer import Direction

Work = Callable[[Exception | None], None]

PLANNED_AHEAD = 16
"""Planned transfers that may wait for one direction's streams: enough to keep them busy; a plan can take
megabytes."""


class Planning(Protocol):
    """Calls every ``work`` once, in order for each direction. ``work`` never raises."""

    def start(self) -> None:
        """Make ready."""

    def submit(self, direction: Direction, work: Work) -> None:
        """Have ``work`` done after everything that was submitted before in this direction."""

    def ended(self, direction: Direction) -> None:
        """A planned transfer has ended: there is room for the next plan."""

    def close(self) -> None:
        """Abandon what was not planned yet, and end."""


class InlinePlanning:
    """Plans inside ``submit``: deterministic, no thread."""

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, direction: Direction, work: Work) -> None:  # noqa: ARG002 - a protocol's
        """Plan now."""
        work(None)

    def ended(self, direction: Direction) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""


class ThreadPlanning:
    """One thread for each direction; at most ``planned_ahead`` plans wait for their streams."""

    def __init__(self, planned_ahead: int = PLANNED_AHEAD) -> None:
        self._lanes = {direction: _Lane(f"plan-{direction.value}", planned_ahead) for direction in Direction}

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes.values():
            lane.start()

    def submit(self, direction: Direction, work: Work) -> None:
        """Queue ``work``; returns at once. After ``close`` it is abandoned at once."""
        self._lanes[direction].submit(work)

    def ended(self, direction: Direction) -> None:
        """Room for one more plan."""
        self._lanes[direction].ended()

    def close(self) -> None:
        """Abandon what waits, and join the threads."""
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    def __init__(self, name: str, planned_ahead: int) -> None:
        self._planned_ahead = planned_ahead
        self._planned = 0
        self._works: deque[Work] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Work) -> None:
        with self._changed:
            if not self._closed:
                self._works.append(work)  # bounded by the slots that the engine hands out
                self._changed.notify()
                return
        work(_closed())

    def ended(self) -> None:
        with self._changed:
            self._planned -= 1
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._works or self._planned >= self._planned_ahead):
                    self._changed.wait()
                if not self._works:
                    return
                work = self._works.popleft()
                error = _closed() if self._closed else None
                self._planned += 1
            work(error)
            del work


def _closed() -> Unavailable:
    return Unavailable("the swap engine was closed before the transfer was planned")
