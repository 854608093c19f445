"""Where plans are made: on a thread for each direction, so that who submits never waits.

What is submitted first is planned first, by direction, urgency and devices: awaited plans never wait for background
ones, nor plans for one GPU for what another one is slow with.
``work`` is called once, with None to plan or with the error to end the ticket with.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cachesvc.model.errors import Unavailable
from cachesvc.model.transfer import Direction, Urgency

Work = Callable[[Exception | None], None]
Devices = tuple[str, ...]

PLANNED_AHEAD = 16
"""Planned transfers of one direction and urgency that may wait for the streams of the same devices: enough to keep them
busy and to let the arbiter choose; a plan can take megabytes."""


class Planning(Protocol):
    """Calls every ``work`` once, in order for each direction, urgency and devices. ``work`` never raises."""

    def start(self) -> None:
        """Make ready."""

    def submit(self, direction: Direction, urgency: Urgency, devices: Devices, ticket: int, work: Work) -> None:
        """Have ``work`` done after what was submitted before in this direction and urgency for these devices."""

    def expedite(self, direction: Direction, ticket: int) -> None:
        """A ticket is awaited now, planned or not. Nothing where it is not known."""

    def ended(self, direction: Direction, ticket: int) -> None:
        """A planned transfer has ended: there is room for the next plan."""

    def close(self) -> None:
        """Abandon what was not planned yet, and end."""


class ThreadPlanning:
    """One thread for each direction; of each urgency at most ``planned_ahead`` plans wait for the same streams.

    ``at_once``: who submits an awaited ticket plans it, where nothing is before it; for those who have the time.
    """

    def __init__(self, planned_ahead: int = PLANNED_AHEAD, *, at_once: bool = False) -> None:
        self._lanes = {direction: _Lane(f"plan-{direction.value}", planned_ahead, at_once) for direction in Direction}

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes.values():
            lane.start()

    def submit(self, direction: Direction, urgency: Urgency, devices: Devices, ticket: int, work: Work) -> None:
        """Queue ``work``; returns at once. After ``close`` it is abandoned at once."""
        self._lanes[direction].submit(urgency, devices, ticket, work)

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


@dataclass(slots=True)
class _Queue:
    """Tickets of one urgency for the same devices. ``waiting``: the number that it came with, and the work."""

    waiting: dict[int, tuple[int, Work]] = field(default_factory=dict)
    planned: set[int] = field(default_factory=set)

    @property
    def oldest(self) -> int:
        return next(iter(self.waiting.values()))[0]


class _Lane:
    def __init__(self, name: str, planned_ahead: int, at_once: bool) -> None:
        self._planned_ahead = planned_ahead
        self._at_once = at_once
        self._is_planning = False
        self._queues: defaultdict[tuple[Urgency, Devices], _Queue] = defaultdict(_Queue)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, urgency: Urgency, devices: Devices, ticket: int, work: Work) -> None:
        with self._changed:
            queue = self._queues[urgency, devices]
            is_first = not queue.waiting and len(queue.planned) < self._planned_ahead and not self._is_planning
            is_mine = self._at_once and urgency is Urgency.AWAITED and is_first and not self._closed
            if is_mine:
                queue.planned.add(ticket)
            elif not self._closed:
                # bounded by the slots that the engine hands out
                queue.waiting[ticket] = next(self._numbers), work
                self._changed.notify()
                return
        work(None if is_mine else _closed())

    def expedite(self, ticket: int) -> None:
        with self._changed:
            for (urgency, devices), queue in list(self._queues.items()):
                awaited = self._queues[Urgency.AWAITED, devices]
                if urgency is Urgency.BACKGROUND and ticket in queue.planned:
                    queue.planned.remove(ticket)
                    awaited.planned.add(ticket)
                elif urgency is Urgency.BACKGROUND and ticket in queue.waiting:
                    awaited.waiting[ticket] = next(self._numbers), queue.waiting.pop(ticket)[1]
            self._changed.notify()

    def ended(self, ticket: int) -> None:
        with self._changed:
            for queue in self._queues.values():
                queue.planned.discard(ticket)
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
                while (queue := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                ticket = next(iter(queue.waiting))
                _, work = queue.waiting.pop(ticket)
                error = _closed() if self._closed else None
                queue.planned.add(ticket)
                self._is_planning = True
            work(error)
            del work
            self._is_planning = False

    def _next(self) -> _Queue | None:
        """Whose oldest ticket is planned next: awaited ones first, unless enough for the same devices are planned."""
        for urgency in (Urgency.AWAITED, Urgency.BACKGROUND):
            able = [
                queue
                for (of, _), queue in self._queues.items()
                if of is urgency and queue.waiting and (self._closed or len(queue.planned) < self._planned_ahead)
            ]
            if able:
                return min(able, key=lambda queue: queue.oldest)
        return None


def _closed() -> Unavailable:
    return Unavailable("the swap engine was closed before the transfer was planned")
