"""Where plans are made: on a thread for each direction, so that who submits never waits; or at once, in
simulations.

What is submitted first is planned first, by direction and urgency: awaited plans never wait for background ones.
``work`` is called once, with None to plan or with the error to end the ticket with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from cachesvc.model.errors import Unavailable
from cachesvc.model.transfer import Direction, Urgency

Work = Callable[[Exception | None], None]

PLANNED_AHEAD = 16
"""Planned transfers of one direction and urgency that may wait for the streams: enough to keep them busy and to let the
arbiter choose; a plan can take megabytes."""


class Planning(Protocol):
    """Calls every ``work`` once, in order for each direction and urgency. ``work`` never raises."""

    def start(self) -> None:
        """Make ready."""

    def submit(self, direction: Direction, urgency: Urgency, ticket: int, work: Work) -> None:
        """Have ``work`` done after what was submitted before in this direction and urgency."""

    def expedite(self, direction: Direction, ticket: int) -> None:
        """A ticket is awaited now, planned or not. Nothing where it is not known."""

    def ended(self, direction: Direction, ticket: int) -> None:
        """A planned transfer has ended: there is room for the next plan."""

    def close(self) -> None:
        """Abandon what was not planned yet, and end."""


class InlinePlanning:
    """Plans inside ``submit``: deterministic, no thread."""

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, direction: Direction, urgency: Urgency, ticket: int, work: Work) -> None:  # noqa: ARG002 - a protocol's
        """Plan now."""
        work(None)

    def expedite(self, direction: Direction, ticket: int) -> None:
        """Nothing waits."""

    def ended(self, direction: Direction, ticket: int) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""


class ThreadPlanning:
    """One thread for each direction; of each urgency at most ``planned_ahead`` plans wait for their streams."""

    def __init__(self, planned_ahead: int = PLANNED_AHEAD) -> None:
        self._lanes = {direction: _Lane(f"plan-{direction.value}", planned_ahead) for direction in Direction}

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes.values():
            lane.start()

    def submit(self, direction: Direction, urgency: Urgency, ticket: int, work: Work) -> None:
        """Queue ``work``; returns at once. After ``close`` it is abandoned at once."""
        self._lanes[direction].submit(urgency, ticket, work)

    def expedite(self, direction: Direction, ticket: int) -> None:
        """Move a ticket to the end of the awaited ones."""
        self._lanes[direction].expedite(ticket)

    def ended(self, direction: Direction, ticket: int) -> None:
        """Room for one more plan."""
        self._lanes[direction].ended(ticket)

    def close(self) -> None:
        """Abandon what waits, and join the threads."""
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    def __init__(self, name: str, planned_ahead: int) -> None:
        self._planned_ahead = planned_ahead
        self._waiting: dict[Urgency, dict[int, Work]] = {urgency: {} for urgency in Urgency}
        self._planned: dict[Urgency, set[int]] = {urgency: set() for urgency in Urgency}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, urgency: Urgency, ticket: int, work: Work) -> None:
        with self._changed:
            if not self._closed:
                self._waiting[urgency][ticket] = work  # bounded by the slots that the engine hands out
                self._changed.notify()
                return
        work(_closed())

    def expedite(self, ticket: int) -> None:
        with self._changed:
            if ticket in self._planned[Urgency.BACKGROUND]:
                self._planned[Urgency.BACKGROUND].remove(ticket)
                self._planned[Urgency.AWAITED].add(ticket)
            elif ticket in self._waiting[Urgency.BACKGROUND]:
                self._waiting[Urgency.AWAITED][ticket] = self._waiting[Urgency.BACKGROUND].pop(ticket)
            self._changed.notify()

    def ended(self, ticket: int) -> None:
        with self._changed:
            for planned in self._planned.values():
                planned.discard(ticket)
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
                while (urgency := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                ticket = next(iter(self._waiting[urgency]))
                work = self._waiting[urgency].pop(ticket)
                error = _closed() if self._closed else None
                self._planned[urgency].add(ticket)
            work(error)
            del work

    def _next(self) -> Urgency | None:
        """Which is planned next: awaited ones first, unless enough of them are planned already."""
        for urgency in (Urgency.AWAITED, Urgency.BACKGROUND):
            if self._waiting[urgency] and (self._closed or len(self._planned[urgency]) < self._planned_ahead):
                return urgency
        return None


def _closed() -> Unavailable:
    return Unavailable("the swap engine was closed before the transfer was planned")
