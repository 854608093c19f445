"""Copy jobs that wait for a link: finds the oldest and the lightest at once, for any number of jobs."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from cachesvc.memory.interface import CopyJob, Slice
from cachesvc.model.transfer import Urgency

STALE = 64
"""Weights of before that are kept, beside as many as there are jobs."""


@dataclass(slots=True, eq=False)
class Queued:
    """A job with what is left of it. ``number``: how many came before. ``head``: the slice that goes next, once it was
    cut."""

    job: CopyJob
    urgency: Urgency
    size_bytes: int
    left_bytes: int
    rest: Iterator[Slice]
    head: Slice | None = None
    number: int = 0

    @property
    def weight(self) -> int:
        """Weight of the job: the least goes first."""
        return self.left_bytes * self.size_bytes

    def cut(self) -> Slice:
        """Plan and cut the next slice, which takes time. Raises the planner's errors. For one thread at a time."""
        if self.head is None:
            self.head = next(self.rest)
        return self.head


class Rivals:
    """Jobs of one urgency in one direction."""

    def __init__(self) -> None:
        self._by_age: OrderedDict[int, Queued] = OrderedDict()
        self._by_weight: list[tuple[int, int]] = []  # and what was true before, until it comes up

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Queued]:
        """Iterate, oldest first."""
        return iter(list(self._by_age.values()))

    def add(self, queued: Queued) -> None:
        """Add a job, at its age."""
        is_youngest = not self._by_age or next(reversed(self._by_age)) < queued.number
        self._by_age[queued.number] = queued
        if not is_youngest:
            self._by_age = OrderedDict(sorted(self._by_age.items()))
        self.weigh(queued)

    def weigh(self, queued: Queued) -> None:
        """Weigh a job again, of which less is left."""
        heapq.heappush(self._by_weight, (queued.weight, queued.number))
        if len(self._by_weight) > STALE + 2 * len(self._by_age):  # beneath ever lighter ones the old never comes up
            self._by_weight = [(each.weight, each.number) for each in self._by_age.values()]
            heapq.heapify(self._by_weight)

    def remove(self, queued: Queued) -> None:
        """Remove a job that is done."""
        del self._by_age[queued.number]

    @property
    def oldest(self) -> Queued:
        """The oldest of some jobs."""
        return next(iter(self._by_age.values()))

    @property
    def lightest(self) -> Queued:
        """The job with the least weight, the oldest of those."""
        while True:
            weight, number = self._by_weight[0]
            queued = self._by_age.get(number)
            if queued is not None and queued.weight == weight:
                return queued
            heapq.heappop(self._by_weight)
