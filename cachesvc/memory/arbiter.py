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
5. The node's budget (``host_pool.py``): while another device has awaited jobs, background jobs of both directions
   keep to this device's part of it. Without a budget, and without such jobs, they are not held back.

Pure: no thread and no clock. ``now`` comes in, and the owner holds a lock around every call.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cachesvc.memory.extents import Int64s
from cachesvc.memory.host_pool import BACKGROUND_PARTS, LOOK_S, Neighbours, no_neighbours
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, CopyJob, CopyStep, Slice
from cachesvc.memory.memcpy import extremes
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.numbers import Bucket
from cachesvc.model.words import Direction, Urgency

SLICE_BYTES = 32 << 20
"""0.6 ms on a PCIe 5 x16 link: long beside a submission (6 us a copy), short beside what a request notices."""

BURST_SLICES = 2


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
class _Lane:
    """One direction. ``credit``: twice the bytes that the oldest of each class has to its good. ``background_since``:
    when the background class was last served, or began to wait."""

    bucket: Bucket
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
        self._lanes = {direction: _Lane(Bucket(rate, burst)) for direction, rate in rates.items()}
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

    def pop(self, direction: Direction, now: float) -> Slice | None:
        """The slice to start now, which counts as on its way until ``landed``; None where none may go yet. Raises what
        cutting raises."""
        lane = self._lanes[direction]
        queued = self.next_up(direction, now)
        if queued is None:
            return None
        piece = queued.cut()
        if lane.bucket.take(piece.size_bytes, now):
            return None
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
        queued = self.next_up(direction, now)
        if queued is not None:
            return now + (0.0 if queued.head is None else lane.bucket.wait_s(queued.head.size_bytes, now))
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
        bucket.rate = bytes_per_second

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


# Cuts copy jobs into slices, lazily: short pieces of work between which the arbiter can choose again.
#
# A step is cut between its copies; only a copy that is larger than a slice is cut itself, by rows, and a row that is
# larger than a slice by width. The pieces in order are the very bytes of the step in order.

_REACH_LIMIT = 1 << 61
"""Offset beyond all memory. A copy that reaches further is not cut, because its arithmetic may overflow: the runner's
check refuses it."""


def cut(job: CopyJob, slice_bytes: int) -> tuple[int, Iterator[Slice]]:
    """The job's bytes, and its slices in order, at least one. A step's word goes with the last slice of the step.

    Where the job says how large it is, nothing is looked at here, and each step is asked for when it is its turn: only
    when no bytes are left is there a look for steps that have none.
    """
    if job.size_bytes is not None:
        return job.size_bytes, _slices(job, iter(job.steps), job.size_bytes, slice_bytes)
    steps = tuple(job.steps)
    size_bytes = sum(int(_sizes(step.copies).sum()) for step in steps)
    return size_bytes, _slices(job, iter(steps), size_bytes, slice_bytes)


def _slices(job: CopyJob, steps: Iterator[CopyStep], left_bytes: int, slice_bytes: int) -> Iterator[Slice]:
    step, is_last = next(steps, None), False
    while step is not None:
        total, sizes = step.size_bytes, None
        if total is None:
            sizes = _sizes(step.copies)
            total = int(sizes.sum())
        left_bytes -= total
        following = next(steps, None) if left_bytes <= 0 else None
        is_last = left_bytes <= 0 and following is None
        word_value = step.word_value if job.word is not None else None
        parts = _parts(step.copies, sizes, total, slice_bytes)
        part: tuple[CopyBatch, int] | None = next(parts)
        while part is not None:
            (copies, size_bytes), part = part, next(parts, None)
            ends_step = part is None
            yield Slice(job, copies, size_bytes, word_value if ends_step else None, ends_step and is_last)
        step = following or (None if is_last else next(steps, None))
    if not is_last:  # no steps, or fewer bytes than there were to be: what has no sane size counts as none
        yield Slice(job, np.empty((0, len(COPY_FIELDS)), np.int64), 0, None, is_last=True)


def _parts(copies: CopyBatch, sizes: Int64s | None, total: int, slice_bytes: int) -> Iterator[tuple[CopyBatch, int]]:
    if total <= slice_bytes:
        yield copies, total
        return
    ends = np.cumsum(copies[:, 4] * copies[:, 5] if sizes is None else sizes)
    first, before = 0, 0
    while first < len(copies):
        stop = int(np.searchsorted(ends, before + slice_bytes, side="right"))
        if stop == first:  # a copy larger than a slice
            yield from _pieces(copies[first].tolist(), slice_bytes)
            stop = first + 1
        else:
            yield copies[first:stop], int(ends[stop - 1]) - before
        first, before = stop, int(ends[stop - 1])


def _pieces(copy: list[int], slice_bytes: int) -> Iterator[tuple[CopyBatch, int]]:
    src, src_at, dst, dst_at, width, height, src_pitch, dst_pitch = copy
    if width <= slice_bytes:
        rows = slice_bytes // width
        for row in range(0, height, rows):
            count = min(rows, height - row)
            at = (src, src_at + row * src_pitch, dst, dst_at + row * dst_pitch)
            yield np.array([(*at, width, count, src_pitch, dst_pitch)], np.int64), width * count
        return
    for row in range(height):
        for column in range(0, width, slice_bytes):
            size = min(slice_bytes, width - column)
            at = (src, src_at + row * src_pitch + column, dst, dst_at + row * dst_pitch + column)
            yield np.array([(*at, size, 1, size, size)], np.int64), size


def _sizes(copies: CopyBatch) -> Int64s:
    """Bytes of each copy; 0 for one that no memory can hold."""
    width, height = copies[:, 4], copies[:, 5]
    if len(copies):
        least, most = extremes(copies)
        reach_at_most = most[5] * max(most[4], most[6], most[7])
        if min(least) >= 0 and min(least[4:6]) > 0 and max(reach_at_most, most[1], most[3]) < _REACH_LIMIT:
            product: Int64s = width * height
            return product
    reach = np.maximum(np.maximum(copies[:, 6], copies[:, 7]), np.maximum(width, 1))
    is_sane = (width > 0) & (height > 0) & (height <= _REACH_LIMIT // reach)
    is_sane &= (copies[:, [1, 3, 6, 7]] >= 0).all(axis=1) & (copies[:, [1, 3]] < _REACH_LIMIT).all(axis=1)
    sizes: Int64s = np.where(is_sane, width * height, 0)
    return sizes


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
        return iter(list(self._by_age.values()))

    def add(self, queued: Queued) -> None:
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
        del self._by_age[queued.number]

    @property
    def oldest(self) -> Queued:
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
