"""Arbiter of copy jobs: chooses the next slice, for both directions of one device.

A device has one link each way and many jobs for it. First come, first served lets a short load, for which a request
waits, stand behind seconds of others' long ones, and behind backups without a waiter. The rules, in their order:

1. Urgency. AWAITED jobs go before BACKGROUND jobs of their direction: only the former have a waiter. Background stores
   also wait for awaited loads, because both directions share the host's memory bus and the device's copy engines. So
   that nothing starves, a background class that was served nothing for ``background_delay_s`` gets one slice. The delay
   is the class's, not each job's: with many jobs waiting, one slice each would be the whole link.
2. Shares within a class, by bytes: two thirds to the job with the least (bytes left x bytes in all), one third to the
   oldest. A short load behind endless long ones takes 1.5 times its time alone; the oldest job gets a third at the
   least, and every job becomes the oldest. Bytes left alone would let a long job's tail, as large as the short job, go
   first: 2.5 times. Jobs of one size go in the order they came.
3. A byte budget for each direction: a token bucket that holds two slices, for hosts whose memory or network cannot do
   without a limit.
4. A pause: an engine has reported that its decode suffers. Background stores get nothing until it is over, overdue or
  not; the caller keeps it short. Expedited jobs go on.
5. The node's budget (``host_budget.py``): while another device has awaited jobs, background jobs of both directions
   keep to this device's part of it. Without a budget, and without such jobs, they are not held back.

Pure: no thread and no clock. ``now`` comes in, and the owner holds a lock around every call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from cachesvc.memory.copy.host_budget import BACKGROUND_PARTS, LOOK_S, Neighbours, no_neighbours
from cachesvc.memory.copy.job_queue import Queued, Rivals
from cachesvc.memory.copy.slices import cut
from cachesvc.memory.interface import CopyJob, Slice
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.transfer import Direction, Urgency

SLICE_BYTES = 32 << 20
"""0.6 ms on a PCIe 5 x16 link: long beside a submission (6 us a copy), short beside what a request notices."""

BURST_SLICES = 2
_CLOCK_GRAIN_S = 1e-6
"""Times are floats: a slice may go this much before the bucket holds all of it."""


@dataclass(frozen=True, slots=True)
class CopyRules:
    """Rules of one device's copies. ``*_bytes_per_second``: 0 is no limit.

    ``queued_jobs``: jobs that wait at most, both directions together; more than the engine has tickets in flight.
    """

    slice_bytes: int = SLICE_BYTES
    load_bytes_per_second: int = 0
    store_bytes_per_second: int = 0
    background_delay_s: float = 0.25
    queued_jobs: int = 4096


@dataclass(slots=True)
class _Bucket:
    """Tokens are bytes. A rate of 0 is no limit."""

    bytes_per_second: int
    burst_bytes: int
    tokens: float
    filled_at: float = 0.0

    def fill(self, now: float) -> None:
        earned = max(now - self.filled_at, 0.0) * self.bytes_per_second
        self.tokens = min(self.burst_bytes, self.tokens + earned)
        self.filled_at = max(now, self.filled_at)

    def wait_s(self, size_bytes: int) -> float:
        """Seconds after the last ``fill`` until ``size_bytes`` may go."""
        short = size_bytes - self.tokens
        if not self.bytes_per_second or short <= _CLOCK_GRAIN_S * self.bytes_per_second:
            return 0.0
        return short / self.bytes_per_second


@dataclass(slots=True)
class _Lane:
    """One direction. ``credit``: twice the bytes that the oldest of each class has to its good. ``background_since``:
    when the background class was last served, or began to wait."""

    bucket: _Bucket
    rivals: dict[Urgency, Rivals] = field(default_factory=lambda: {urgency: Rivals() for urgency in Urgency})
    on_way: list[tuple[Slice, Urgency]] = field(default_factory=list)
    credit: dict[Urgency, int] = field(default_factory=lambda: dict.fromkeys(Urgency, 0))
    background_since: float = 0.0
    paused_until: float = 0.0

    @property
    def queued(self) -> list[Queued]:
        return [queued for rivals in self.rivals.values() for queued in rivals]

    @property
    def jobs(self) -> int:
        return sum(map(len, self.rivals.values()))

    @property
    def has_awaited(self) -> bool:
        """True while an awaited job is queued or on its way."""
        is_awaited = any(urgency is Urgency.AWAITED for _, urgency in self.on_way)
        return is_awaited or bool(self.rivals[Urgency.AWAITED])


class Arbiter:
    """The queued jobs of one device. ``device`` is for messages. ``neighbours``: the node's other devices."""

    def __init__(self, device: str, rules: CopyRules, neighbours: Neighbours | None = None) -> None:
        assert rules.slice_bytes > 0
        self._device = device
        self._rules = rules
        burst = BURST_SLICES * rules.slice_bytes
        rates = {Direction.LOAD: rules.load_bytes_per_second, Direction.STORE: rules.store_bytes_per_second}
        self._lanes = {direction: _Lane(_Bucket(rate, burst, burst)) for direction, rate in rates.items()}
        self._numbers = itertools.count()
        self._neighbours = neighbours or no_neighbours()
        self._budgeted_until = 0.0  # the last background slice has used up this device's part until then

    def push(self, direction: Direction, job: CopyJob, now: float) -> None:
        """Queue a job. Raises LimitExceeded."""
        waiting = sum(lane.jobs for lane in self._lanes.values())
        if waiting >= self._rules.queued_jobs:
            raise LimitExceeded(f"copy jobs waiting on {self._device}", waiting + 1, self._rules.queued_jobs)
        lane, slice_bytes = self._lanes[direction], self._rules.slice_bytes
        if job.urgency is Urgency.BACKGROUND:
            if not lane.rivals[Urgency.BACKGROUND]:
                lane.background_since = now
            if self._neighbours.has_budget:
                slice_bytes = max(1, slice_bytes // BACKGROUND_PARTS)
        elif not self._has_awaited:  # later only slices that start renew it: a device that hangs starts none
            self._neighbours.begin_awaited(now)
        size_bytes, rest = cut(job, slice_bytes)
        queued = Queued(job, job.urgency, size_bytes, size_bytes, rest, number=next(self._numbers))
        lane.rivals[job.urgency].add(queued)

    def next_up(self, direction: Direction, now: float) -> Queued | None:
        """Job whose slice ``pop`` would give out, were there no byte budget. ``pop`` cuts it, unless that was done
        already: without the owner's lock, by the direction's one thread."""
        return self._choose(direction, now)

    def pop(self, direction: Direction, now: float) -> Slice | None:
        """The slice to start now, which counts as on its way until ``landed``; None where none may go yet. Raises what
        cutting raises."""
        lane = self._lanes[direction]
        queued = self._choose(direction, now)
        if queued is None:
            return None
        piece = queued.cut()
        lane.bucket.fill(now)
        if lane.bucket.wait_s(piece.size_bytes):
            return None
        lane.bucket.tokens -= piece.size_bytes
        self._account(lane, queued, piece)
        if queued.urgency is Urgency.BACKGROUND:
            lane.background_since = now
            self._budgeted_until = now + self._neighbours.seconds_of(piece.size_bytes, now)
        else:
            self._neighbours.begin_awaited(now)
        lane.on_way.append((piece, queued.urgency))
        queued.head = None
        if piece.is_last:
            lane.rivals[queued.urgency].remove(queued)
        else:
            queued.left_bytes -= piece.size_bytes
            lane.rivals[queued.urgency].weigh(queued)
        return piece

    def next_time(self, direction: Direction, now: float) -> float | None:
        """Time at which ``pop`` may give something if nothing else changes; None where nothing waits."""
        lane = self._lanes[direction]
        if not lane.jobs:
            return None
        queued = self._choose(direction, now)
        if queued is not None:
            lane.bucket.fill(now)
            return now + (0.0 if queued.head is None else lane.bucket.wait_s(queued.head.size_bytes))
        overdue_at = lane.background_since + self._rules.background_delay_s
        held_until = min(self._budgeted_until, now + LOOK_S) if self._is_held(now) else now
        return max(lane.paused_until, overdue_at if self._yields(direction) else now, held_until)

    def landed(self, direction: Direction, piece: Slice) -> bool:
        """A slice is no longer on its way. True when the other direction may have waited for just that."""
        lane = self._lanes[direction]
        lane.on_way = [(other, urgency) for other, urgency in lane.on_way if other is not piece]
        self._tell_end()
        return direction is Direction.LOAD and bool(self._lanes[Direction.STORE].jobs) and not lane.has_awaited

    def fail(self, job: CopyJob) -> None:
        """Forget what is left of a job, if anything is."""
        for lane in self._lanes.values():
            for queued in lane.queued:
                if queued.job is job:
                    lane.rivals[queued.urgency].remove(queued)
        self._tell_end()

    def drain(self, direction: Direction) -> list[CopyJob]:
        """Take out all jobs of which something is left, in the order in which they came."""
        lane = self._lanes[direction]
        left = sorted(lane.queued, key=lambda queued: queued.number)
        for queued in left:
            lane.rivals[queued.urgency].remove(queued)
        self._tell_end()
        return [queued.job for queued in left]

    def queued(self, direction: Direction) -> int:
        """Jobs of which something is left."""
        return self._lanes[direction].jobs

    def expedite(self, ticket: int) -> None:
        """Make a ticket awaited: what is left of its jobs is AWAITED. They keep their age."""
        for lane in self._lanes.values():
            for queued in lane.rivals[Urgency.BACKGROUND]:
                if queued.job.ticket == ticket:
                    lane.rivals[Urgency.BACKGROUND].remove(queued)
                    queued.urgency = Urgency.AWAITED
                    lane.rivals[Urgency.AWAITED].add(queued)

    def pause_background(self, direction: Direction, until: float) -> None:
        """Give background jobs nothing before ``until``; a longer pause stays."""
        lane = self._lanes[direction]
        lane.paused_until = max(lane.paused_until, until)

    def limit(self, direction: Direction, bytes_per_second: int, now: float) -> None:
        """Set another byte budget; 0 is none."""
        bucket = self._lanes[direction].bucket
        bucket.fill(now)
        bucket.bytes_per_second = bytes_per_second

    def _choose(self, direction: Direction, now: float) -> Queued | None:
        lane = self._lanes[direction]
        may_awaited = bool(lane.rivals[Urgency.AWAITED])
        may_background = bool(lane.rivals[Urgency.BACKGROUND])
        if may_background:
            is_overdue = now >= lane.background_since + self._rules.background_delay_s
            if now < lane.paused_until or self._is_held(now):
                may_background = False
            elif is_overdue:
                may_awaited = False
            elif self._yields(direction):
                may_background = False
        if may_awaited:
            return self._share(lane, Urgency.AWAITED)
        return self._share(lane, Urgency.BACKGROUND) if may_background else None

    @property
    def _has_awaited(self) -> bool:
        return any(lane.has_awaited for lane in self._lanes.values())

    def _tell_end(self) -> None:
        """Let the other devices go on once no awaited job is left here."""
        if not self._has_awaited:
            self._neighbours.end_awaited()

    def _is_held(self, now: float) -> bool:
        """True where background jobs wait for another device's awaited ones, as of the node's budget."""
        return now < self._budgeted_until and self._neighbours.have_awaited(now)

    def _yields(self, direction: Direction) -> bool:
        """True where background jobs wait for the other direction."""
        return direction is Direction.STORE and self._lanes[Direction.LOAD].has_awaited

    def _share(self, lane: _Lane, urgency: Urgency) -> Queued:
        rivals = lane.rivals[urgency]
        oldest = rivals.oldest
        next_bytes = min(oldest.left_bytes, self._rules.slice_bytes) if oldest.head is None else oldest.head.size_bytes
        return oldest if lane.credit[urgency] >= 2 * next_bytes else rivals.lightest

    def _account(self, lane: _Lane, queued: Queued, piece: Slice) -> None:
        """Keep the oldest job's third: it earns half of what another is given, and pays with what it is given."""
        rivals = lane.rivals[queued.urgency]
        if queued is not rivals.oldest:
            lane.credit[queued.urgency] += piece.size_bytes
        elif rivals.lightest is not queued:
            lane.credit[queued.urgency] -= 2 * piece.size_bytes
