"""The seam between the swap engine and what moves bytes: one job a rank goes in, its end comes back.

A mover belongs to one device: it alone plans for it, copies on its link, and writes its timeline words.
``InProcessMovers`` is the mover of every device in the daemon's own process; processes of their own stand behind the
same seam (``cachesvc.mover``).

Rules on either side of it:

* A job ends exactly once, in ``on_end``, after its timeline words have: ``word`` at the slot's end, and before it
  ``failed_word``, where it failed.
* A device's arbiter alone chooses the next job: a job is planned during its copy, part by part.
* Pools are compared by identity: the geometry of a pool and its table are never changed, only replaced.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cachesvc.memory.host_pool import FreeRanges
from cachesvc.memory.interface import Backend, CopyJob, CopyStream, DeviceMemory, Timeline
from cachesvc.model.errors import LimitExceeded, Unavailable
from cachesvc.model.layout import PLANE_ALIGN_BYTES, Layout, slab_strides
from cachesvc.model.words import Direction, TimelineSlot, Urgency
from cachesvc.swap.planner import GroupMove, LinkCosts, Pool, peer_costs, plan


@dataclass(frozen=True, slots=True)
class RankJob:
    """One rank's share of a ticket, in pages. ``layers_per_step``: after how many layers its word moves; 0: at its end
    alone, None: as the link's costs choose; or ``ALL_BUT_FIRST``. ``is_from_peer``: a load whose ``host`` pages are
    another replica's, on its device."""

    ticket: int
    device: str
    direction: Direction
    urgency: Urgency
    layers_per_step: int | None
    slot: TimelineSlot
    moves: tuple[GroupMove, ...]
    is_from_peer: bool = False


class RankEnd(NamedTuple):
    """A job has ended. ``error``: what broke, or None when every byte has landed. ``began``: as ``Movers.began``."""

    ticket: int
    device: str
    error: Exception | None
    began: float | None


OnEnd = Callable[[RankEnd], None]


class Movers(Protocol):
    """The movers of all devices. Calls return at once."""

    @property
    def memory(self) -> DeviceMemory:
        """The memory whose pages are moved."""

    def listen(self, on_end: OnEnd) -> None:
        """Begin to take jobs; the memory has started. ``on_end`` is called from a mover's thread."""

    def timeline(self, device: str) -> Timeline:
        """The words of a device that works, or of one that worked last."""

    def submit(self, job: RankJob) -> None:
        """Have a job done. Raises nothing: a job that cannot be done ends, perhaps before this returns."""

    def expedite(self, devices: Sequence[str], direction: Direction, ticket: int) -> None:
        """Make a ticket's jobs awaited. No-op where they have ended."""

    def began(self, device: str, ticket: int) -> float | None:
        """Time at which the first slice of a job in flight was started, monotonic seconds; None: not yet."""

    def pause_background(self, device: str, seconds: float) -> None:
        """Start no slice of BACKGROUND stores on the device for a while. Raises NotFound (device)."""

    def forget(self, pools: Sequence[Pool]) -> None:
        """Forget pools that no job names any more."""

    def stop(self) -> None:
        """Take no more jobs, and start no more copies: what is on its way lands, and jobs of which something is left
        end as failed. Does not wait. Idempotent."""


@dataclass(slots=True)
class _UnderWay:
    job: RankJob
    urgency: Urgency
    began: float | None = None


class InProcessMovers:
    """The movers of all devices in this process: planned and copied by the backend's streams."""

    def __init__(
        self,
        backend: Backend,
        *,
        costs: LinkCosts | None = None,
        on_begin: Callable[[int, float], None] | None = None,
    ) -> None:
        """``on_begin``: called with a ticket and the time once its job's first slice was started."""
        self._backend = backend
        self._costs = costs or LinkCosts()
        self._peer_costs = peer_costs(self._costs)
        self._timelines: dict[str, Timeline] = {}
        self._under_way: dict[tuple[str, int], _UnderWay] = {}
        self._on_end: OnEnd | None = None
        self._on_begin = on_begin
        self._is_stopped = False

    @property
    def memory(self) -> Backend:
        return self._backend

    def plan_by(self, costs: LinkCosts) -> None:
        """Plan what is submitted from now on by these costs: those of links that were measured since."""
        self._costs, self._peer_costs = costs, peer_costs(costs)

    def listen(self, on_end: OnEnd) -> None:
        """Begin to take jobs. The backend runs already, and its timelines are written by these movers alone."""
        self._timelines = {device: self._backend.timeline(device) for device in self._backend.devices()}
        self._on_end = on_end

    def timeline(self, device: str) -> Timeline:
        return self._timelines[device]

    def submit(self, job: RankJob) -> None:
        """Queue a job; one that cannot be ends here, with its waiters released."""
        self._take(job, lambda stream, copies: stream.submit(copies))

    def submit_here(self, job: RankJob) -> None:
        """Submit like ``submit``; a device that has nothing to do is given the first slice by this thread, which may
        take a driver's time."""
        self._take(job, lambda stream, copies: stream.submit_here(copies))

    def _take(self, job: RankJob, submit: Callable[[CopyStream, CopyJob], None]) -> None:
        mine = self._under_way[job.device, job.ticket] = _UnderWay(job, job.urgency)
        try:
            if self._is_stopped:
                raise Unavailable("the swap engine is closed")
            self._queue(mine, submit)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the ticket tells it
            timeline = self._timelines[job.device]
            timeline.write(job.slot.failed_word, job.slot.end)
            timeline.write(job.slot.word, job.slot.end)
            self._end(mine, failure)

    def expedite(self, devices: Sequence[str], direction: Direction, ticket: int) -> None:
        del direction
        for device in devices:
            if (mine := self._under_way.get((device, ticket))) is not None:
                mine.urgency = Urgency.AWAITED
            self._backend.expedite(device, ticket)

    def began(self, device: str, ticket: int) -> float | None:
        """Time at which a job's first slice was started."""
        mine = self._under_way.get((device, ticket))
        return None if mine is None else mine.began

    def pause_background(self, device: str, seconds: float) -> None:
        """Hold back background stores for a while."""
        self._backend.pause_background(device, seconds)

    def forget(self, pools: Sequence[Pool]) -> None:
        """No-op: no pools are kept here."""

    @property
    def is_busy(self) -> bool:
        """True while a job has not ended."""
        return bool(self._under_way)

    def stop(self) -> None:
        """End what is not on its way. A backend that was closed first has ended it all."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for device in self._timelines:
            for stream_of in (self._backend.load_stream, self._backend.store_stream, self._backend.peer_stream):
                with suppress(Unavailable):
                    stream_of(device).stop()

    def _queue(self, mine: _UnderWay, submit: Callable[[CopyStream, CopyJob], None]) -> None:
        job, slot = mine.job, mine.job.slot
        steps = plan(
            job.moves,
            job.direction,
            layers=slot.layers,
            base=slot.base,
            layers_per_step=job.layers_per_step,
            costs=self._peer_costs if job.is_from_peer else self._costs,
        )
        copies = CopyJob(
            ticket=job.ticket,
            steps=steps,
            word=slot.word,
            failed_word=slot.failed_word,
            end_value=slot.end,
            done=lambda error: self._end(mine, error),
            urgency=mine.urgency,
            begun=lambda now: self._begin(mine, now),
            size_bytes=sum(len(move.device_pages) * move.page_bytes for move in job.moves),
        )
        if job.is_from_peer:
            stream = self._backend.peer_stream(job.device)
        elif job.direction is Direction.LOAD:
            stream = self._backend.load_stream(job.device)
        else:
            stream = self._backend.store_stream(job.device)
        submit(stream, copies)
        if mine.urgency is not copies.urgency:  # expedited by another thread before they were queued
            self._backend.expedite(job.device, job.ticket)

    def _begin(self, mine: _UnderWay, now: float) -> None:
        mine.began = now
        if self._on_begin is not None:
            self._on_begin(mine.job.ticket, now)

    def _end(self, mine: _UnderWay, error: Exception | None) -> None:
        assert self._on_end is not None
        job = mine.job
        del self._under_way[job.device, job.ticket]
        self._on_end(RankEnd(job.ticket, job.device, error, mine.began))


# Allocator of a model's timeline words: one pair (progress, failure) for each ticket, the same on every rank.
#
# A pair that was used goes to the end of the line, and half of all pairs always wait there, so a waiter that comes late
# to an old ticket still finds its final words. A word only ever moves forward: the next ticket begins where the last
# one ended, so a cyclic comparison stays right on either side of a reuse.


class SlotPool:
    """The ``words`` words of a sheet, numbered from ``first`` on, as pairs (first + 2 i, first + 2 i + 1)."""

    def __init__(self, words: int, first: int = 0) -> None:
        self._first = first
        self._bases = [0] * (words // 2)
        self._waiting = deque(range(words // 2))
        self._resting = words // 4
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return len(self._waiting) - self._resting

    def acquire(self, layers: int) -> TimelineSlot:
        """The pair that has rested longest. Raises LimitExceeded when all that may be out are out."""
        with self._lock:
            if len(self._waiting) <= self._resting:
                limit = len(self._bases) - self._resting
                raise LimitExceeded("transfers in flight", limit + 1, limit)
            pair = self._waiting.popleft()
            word = self._first + 2 * pair
            return TimelineSlot(word=word, failed_word=word + 1, base=self._bases[pair], layers=layers)

    def release(self, slot: TimelineSlot) -> None:
        """The ticket has ended: its word stands at ``slot.end`` on every rank."""
        pair = (slot.word - self._first) // 2
        with self._lock:
            self._bases[pair] = slot.end
            self._waiting.append(pair)

    def told(self, slot: TimelineSlot) -> TimelineSlot:
        """Slot with the numbers of engines, which have this sheet alone."""
        return TimelineSlot(slot.word - self._first, slot.failed_word - self._first, slot.base, slot.layers)


# Number of pages of a layout that fit into what is left: pure, so that a registration is planned before anything
# changes.

SHARE_PRECISION = 1024
"""Precision of a share of the host pool: at most one part in this number below what would fit, as every try takes from
a copy."""


class PoolSizes:
    """Memory that pools of a layout take, worked out once. A block has one page in every group (and on every rank).

    ``device_block_bytes``: on one device; ``host_block_bytes``: on the host.
    ``host_slabs``: (first group, rank, bytes of a page) of each slab on the host, in the order in which they are made.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        units, host_units = layout.unit_pages, layout.host_unit_pages
        strides = [(pool[0], slab_strides(layout, pool)) for pool in layout.pools]
        self._planes = Counter((group, stride) for group, each in strides for stride in each)
        self.device_block_bytes = sum(
            sum(each) * (units[group] if group != layout.marker else 1) for group, each in strides
        )
        self.host_slabs = [
            (pool[0], rank, layout.host_page_bytes(pool[0]))
            for pool in layout.host_pools
            for rank in range(layout.host_ranks(pool[0]))
        ]
        self.host_block_bytes = sum(host_units[group] * page_bytes for group, _, page_bytes in self.host_slabs)

    def device_bytes(self, pages: Sequence[int]) -> int:
        """Bytes like ``geometry.device_bytes``, of counts for every group."""
        return sum(
            planes * -(-pages[group] * width // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
            for (group, width), planes in self._planes.items()
        )

    def host_bytes(self, pages: Sequence[int]) -> int:
        """Bytes like ``geometry.host_bytes``, of counts for every group."""
        return sum(pages[group] * page_bytes for group, _, page_bytes in self.host_slabs)

    def readers(self, group: int, rank: int, devices: Sequence[str]) -> frozenset[str]:
        """Devices that copy from and to a host slab: all ranks' where they share one."""
        return frozenset(devices if self.layout.host_ranks(group) == 1 else devices[rank : rank + 1])

    def device_pages(self, size_bytes: int) -> tuple[int, ...]:
        """Most pages of each group, in the layout's proportion, whose slabs take at most ``size_bytes`` of a device."""
        units = self.layout.unit_pages

        def pages(blocks: int) -> tuple[int, ...]:
            return tuple(blocks * unit for unit in units)

        block_bytes = sum(planes * width * units[group] for (group, width), planes in self._planes.items())
        high = max(0, size_bytes) // block_bytes
        if not high or self.device_bytes(pages(high)) <= size_bytes:
            return pages(high)
        # The rest is what planes lose by being aligned.
        low = max(0, (size_bytes - sum(self._planes.values()) * (PLANE_ALIGN_BYTES - 1)) // block_bytes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.device_bytes(pages(middle)) <= size_bytes else (low, middle)
        return pages(low)

    def host_pages(self, blocks: int) -> tuple[int, ...]:
        """Host pages of each group's pool for ``blocks`` blocks of every group."""
        return tuple(blocks * unit for unit in self.layout.host_unit_pages)


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory that the pools have left, or would have. ``device_bytes``: by device; ``nodes``: NUMA nodes by device.

    The capacities are totals, of each device and of the host.
    """

    device_bytes: Mapping[str, int]
    host: FreeRanges
    device_capacity: int
    host_capacity: int
    nodes: Mapping[str, int] = field(default_factory=dict)

    def left_on(self, devices: Sequence[str]) -> int:
        """Bytes that every one of the devices has left."""
        return min(self.device_bytes[device] for device in devices)

    def holds(self, sizes: PoolSizes, devices: Sequence[str], host_pages: Sequence[int]) -> bool:
        """True where the host pool has room for ``host_pages[group]`` pages of every rank."""
        if sizes.host_bytes(host_pages) > self.host.free_bytes:
            return False
        host = self.host.copy()
        return all(
            host.take(page_bytes, host_pages[group], self.nodes.get(devices[rank]), sizes.readers(group, rank, devices))
            is not None
            for group, rank, page_bytes in sizes.host_slabs
        )

    def host_blocks(self, sizes: PoolSizes, devices: Sequence[str], share: float = 1.0, most: int | None = None) -> int:
        """Blocks that ``share`` of the free host pool holds; ``most`` at most."""

        def holds(blocks: int) -> bool:
            return self.holds(sizes, devices, sizes.host_pages(blocks))

        high = int(self.host.free_bytes * share) // sizes.host_block_bytes
        high = high if most is None else max(0, min(high, most))
        if holds(high):
            return high
        # Little is lost, at the ends of chunks: look close below what bytes alone would allow, then further down.
        step = 1 + high // 64
        while (low := max(0, high - step)) and not holds(low):
            high, step = low, 4 * step
        while high - low > max(1, low // SHARE_PRECISION):
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low
