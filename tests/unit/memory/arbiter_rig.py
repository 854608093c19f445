"""A link in virtual time: the slices of an arbiter take what their bytes take, and nothing else takes any."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachesvc.memory.arbiter import Arbiter, CopyRules
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import COPY_FIELDS, CopyJob, CopyStep, Slice
from cachesvc.model.words import Direction, Urgency

BYTES_PER_SECOND = 50e9
MIB = 1 << 20
TOKEN_BYTES = 128 << 10
BLOCK_TOKENS = 64
LOAD, STORE = Direction
AWAITED, BACKGROUND = Urgency
STEPS = 200_000


def copy_rules(slice_bytes: int = 16 * MIB, **others: Any) -> CopyRules:
    """Rules with slices that the sizes in these tests are multiples of."""
    return CopyRules(slice_bytes=slice_bytes, **others)


def job_of(
    ticket: int, size_bytes: int, urgency: Urgency = AWAITED, *, copy_bytes: int = 8 * MIB, steps: int = 1
) -> CopyJob:
    """A job of whole copies, spread over its steps."""
    count = -(-size_bytes // copy_bytes)
    copies = np.zeros((count, len(COPY_FIELDS)), np.int64)
    copies[:, 4:6] = (copy_bytes // 64, 64) if copy_bytes >= 64 else (copy_bytes, 1)
    copies[:, 6:] = copies[:, 4:5]
    parts = tuple(CopyStep(part, number) for number, part in enumerate(np.array_split(copies, steps), start=1))
    return CopyJob(ticket, parts, 0, 1, steps, lambda _: None, urgency)


def tokens_job(ticket: int, tokens: int, urgency: Urgency = AWAITED) -> CopyJob:
    """128 KiB a token, one copy a block."""
    return job_of(ticket, tokens * TOKEN_BYTES, urgency, copy_bytes=BLOCK_TOKENS * TOKEN_BYTES)


@dataclass
class Link:
    """``on_end(ticket)`` may push more. ``moved``: bytes by ticket, ``order``: tickets served, slice by slice."""

    rules: CopyRules = field(default_factory=copy_rules)
    depth: int = 1
    now: float = 0.0
    on_end: Callable[[int], object] = bool
    neighbours: Neighbours | None = None
    moved: Counter[int] = field(default_factory=Counter)
    begun: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arbiter = Arbiter("gpu", self.rules, self.neighbours)
        self._on_way: dict[Direction, deque[tuple[float, Slice]]] = {way: deque() for way in Direction}

    def push(self, job: CopyJob, way: Direction = LOAD) -> None:
        self.arbiter.push(way, job, self.now)

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is left to do, or time is up."""
        for _ in range(STEPS):
            for way in Direction:
                self._start(way)
            coming = [on_way[0][0] for on_way in self._on_way.values() if on_way]
            coming += [time for way in Direction if (time := self._next_time(way)) is not None]
            if not coming or min(coming) > until:
                self.now = self.now if until == float("inf") else until
                return
            assert min(coming) >= self.now
            self.now = min(coming)
            for way in Direction:
                self._land(way)
        raise AssertionError(f"no end after {STEPS} steps")

    def run_until_end_of(self, ticket: int) -> None:
        """Until a job has ended."""
        for _ in range(STEPS):
            if ticket in self.ended:
                return
            self.run(self.now + 1e-3)
        raise AssertionError(f"{ticket} never ended")

    def _next_time(self, way: Direction) -> float | None:
        return None if len(self._on_way[way]) >= self.depth else self.arbiter.next_time(way, self.now)

    def _start(self, way: Direction) -> None:
        on_way = self._on_way[way]
        while len(on_way) < self.depth and (piece := self.arbiter.pop(way, self.now)) is not None:
            free_at = on_way[-1][0] if on_way else self.now
            on_way.append((free_at + piece.size_bytes / BYTES_PER_SECOND, piece))
            self.order.append(piece.job.ticket)
            self.begun.setdefault(piece.job.ticket, self.now)

    def _land(self, way: Direction) -> None:
        on_way = self._on_way[way]
        while on_way and on_way[0][0] <= self.now:
            _, piece = on_way.popleft()
            self.arbiter.landed(way, piece)
            self.moved[piece.job.ticket] += piece.size_bytes
            if piece.is_last:
                self.ended[piece.job.ticket] = self.now
                self.on_end(piece.job.ticket)
