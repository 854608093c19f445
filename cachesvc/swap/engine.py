"""Runs transfers: gives each a place on the timeline, and hands one job a rank to the movers.

Every ticket ends exactly once, in ``on_done(ticket, error)``; it ends after its timeline words do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from cachesvc.memory.extents import ExtentTable
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, Unavailable
from cachesvc.model.layout import Geometry, Layout, device_geometry, host_geometry
from cachesvc.model.numbers import Histogram
from cachesvc.model.words import CopiesHang, Direction, TimelineSlot, Transfer, TransferTimes, Urgency
from cachesvc.swap.movers import Movers, RankEnd, RankJob, SlotPool
from cachesvc.swap.planner import ALL_BUT_FIRST, PEER_RATE, GroupMove, Pool
from cachesvc.telemetry.tracing import Tracer, TransferSpan

log = logging.getLogger(__name__)

OnDone = Callable[[int, Exception | None], None]

LANDING_SECONDS = 2.0
"""Wait of ``finish`` for copies that are on their way; those of a GPU that hangs do not land."""


@dataclass
class _Flight:
    """A ticket on its way: which ranks have not ended, and the first thing that broke."""

    transfer: Transfer
    slot: TimelineSlot
    devices: tuple[str, ...]
    moves: RankMoves
    left: int
    urgency: Urgency
    submitted: float
    began: float | None = None
    trace: TransferSpan | None = None
    error: Exception | None = None


class SwapEngine:
    """Moves pages between the host pool and the devices of each replica, and from replica to replica. ``on_done`` is
    called from a backend thread."""

    def __init__(
        self,
        movers: Movers,
        on_done: OnDone | None = None,
        *,
        layers_per_step: int | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_done`` may be set until it starts. ``layers_per_step``: of layered loads; None lets the movers choose.
        ``clock``: the movers'."""
        self._movers = movers
        self.layers_per_step = layers_per_step
        self.on_done = on_done
        self._models: dict[int, AttachedModel] = {}
        self._flights: dict[int, _Flight] = {}
        self._hang: set[int] = set()
        self._words = 0
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)
        self._is_open = False
        self.transfers = TransferCounts()
        self._tracer = tracer
        self._clock = clock

    def start(self) -> None:
        """Begin to take transfers. The memory runs already, and its timelines are for this engine alone."""
        self._movers.listen(self._end_rank)
        timelines = [self._movers.timeline(device) for device in self._movers.memory.devices()]
        self._words = min((timeline.words for timeline in timelines), default=0)
        self._is_open = True

    def close(self) -> None:
        """Refuse what is new, and end what has not been copied; what is on its way lands. Idempotent."""
        with self._lock:
            self._is_open = False
        self._movers.stop()

    def finish(self) -> None:
        """Close, and wait until no transfer is under way; no longer than ``LANDING_SECONDS``."""
        self.close()
        with self._landed:
            self._landed.wait_for(lambda: not self._flights, LANDING_SECONDS)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def hangs(self, model_id: int) -> bool:
        """True where copies of a model never ended: its memory may still be written, and is to be kept."""
        return model_id in self._hang

    def waiting(self) -> dict[tuple[str, Urgency], Waiting]:
        """Transfers that have not ended, by direction and urgency."""
        now = self._clock()
        found: dict[tuple[str, Urgency], Waiting] = {}
        with self._lock:
            flights = [
                (direction_of(f.transfer), f.urgency, f.submitted, self._began(f)) for f in self._flights.values()
            ]
        for direction, urgency, submitted, began in flights:
            queued, copying, oldest = found.get((direction, urgency), Waiting(0, 0, 0.0))
            if began is None:
                found[direction, urgency] = Waiting(queued + 1, copying, max(oldest, now - submitted))
            else:
                found[direction, urgency] = Waiting(queued, copying + 1, oldest)
        return found

    def attach_model(self, model_id: int, layout: Layout, host_slabs: Sequence[Sequence[HostPages]]) -> None:
        """``host_slabs[group][host rank]``. A number names one model and no other one ever. Raises InvalidRequest where
        they do not fit, LedgerBroken when attached."""
        model = attached_model(layout, host_slabs, SlotPool(self._words, model_id * self._words))
        with self._lock:
            if model_id in self._models:
                raise LedgerBroken(f"model {model_id} is attached already")
            self._models[model_id] = model

    def attach_replica(
        self,
        model_id: int,
        replica_id: int,
        devices: Sequence[str],
        slabs: Sequence[Sequence[Slab]],
        pages: Sequence[int],
    ) -> None:
        """``slabs[rank][group]`` of ``pages[group]`` pages on ``devices[rank]``, where the model gets words of its own.
        One thread at a time; waits for drivers. Raises as ``attach_model`` does, and Unavailable."""
        with self._lock:
            layout = self._model(model_id).layout
        made = attached_replica(layout, devices, slabs, pages)
        with self._lock:
            model = self._model(model_id)
            if replica_id in model.replicas:
                raise LedgerBroken(f"replica {replica_id} of model {model_id} is attached already")
        for device in sorted({*devices} - model.sheets):
            self._movers.memory.open_sheet(device, model_id)
            model.sheets.add(device)
        with self._lock:
            model.replicas[replica_id] = made

    def detach_model(self, model_id: int) -> None:
        """Forget a model with its replicas and words; waits for drivers. Raises as ``forget_model``."""
        for device in self.forget_model(model_id):
            self.close_sheet(device, model_id)

    def forget_model(self, model_id: int) -> list[str]:
        """Forget a model with its replicas, without waiting for any driver; returns the devices that have words of it,
        for ``close_sheet``. Raises NotFound, or LedgerBroken while transfers touch it."""
        with self._lock:
            self._model(model_id)
            busy = [ticket for ticket, flight in self._flights.items() if flight.transfer.model == model_id]
            if busy:
                raise LedgerBroken(f"model {model_id}: {len(busy)} transfers in flight, such as ticket {busy[0]}")
            model = self._models.pop(model_id)
        self._movers.forget(model.every_pool())
        return sorted(model.sheets)

    def close_sheet(self, device: str, model_id: int) -> None:
        """Give the words of a forgotten model on one device back; waits for its driver."""
        self._movers.memory.close_sheet(device, model_id)

    def detach_replica(self, model_id: int, replica_id: int, seconds: float) -> bool:
        """Forget a replica, once the transfers that touch it have ended; False where they have not in ``seconds``
        seconds. The caller submits none for it meanwhile. Raises NotFound."""

        def has_landed() -> bool:
            return not any(flight.transfer.touches(model_id, replica_id) for flight in self._flights.values())

        with self._landed:
            model = self._model(model_id)
            if not self._landed.wait_for(has_landed, seconds):
                return False
            gone = model.replicas.pop(replica_id)
        self._movers.forget([pool for rank in gone.pools for pool in rank])
        return True

    def free_slots(self, model_id: int, replica_id: int) -> int:
        """Transfers of a model's replica that ``submit`` takes now; the number holds until the next ``submit`` for that
        model. Raises NotFound.

        So the only submitting thread can make sure of a ticket before changing anything. 0 once closed.
        """
        model = self._model(model_id)
        model.replica(replica_id)
        return model.slots.free if self._is_open else 0

    def submit(self, transfer: Transfer) -> TimelineSlot:
        """Start a transfer and say where in the model's sheet it can be followed; returns before anything is planned.

        A ticket whose pages do not fit fails once it is planned. Raises, with nothing queued: NotFound (model,
        replica), InvalidRequest (groups), LimitExceeded (too many in flight), LedgerBroken (ticket in use), Unavailable
        (closed).
        """
        with self._lock:
            model = self._model(transfer.model)
            replica = model.replica(transfer.replica)
            source = None if transfer.source_replica is None else model.replica(transfer.source_replica)
        moves = rank_moves(model, replica, source, transfer)
        with self._lock:
            if not self._is_open:
                raise Unavailable("the swap engine is closed")
            if transfer.ticket in self._flights:
                raise LedgerBroken(f"ticket {transfer.ticket} is in flight already")
            for number, known in ((transfer.replica, replica), (transfer.source_replica, source)):
                if number is not None and model.replicas.get(number) is not known:
                    raise NotFound("replica", number)
            slot = model.slots.acquire(model.layout.layers)
            flight = _Flight(transfer, slot, replica.devices, moves, len(moves), transfer.urgency, self._clock())
            if self._tracer is not None:
                flight.trace = self._tracer.begin(transfer, sum(map(_move_bytes, moves)))
            self._flights[transfer.ticket] = flight
        way, step = transfer.direction, self._step_of(transfer)
        for device, move in zip(flight.devices, flight.moves, strict=True):
            urgency, from_peer = flight.urgency, source is not None
            self._movers.submit(RankJob(transfer.ticket, device, way, urgency, step, slot, move, from_peer))
        return model.slots.told(slot)

    def expedite(self, ticket: int) -> None:
        """Make a ticket awaited. No-op where it has ended or was awaited before."""
        with self._lock:
            flight = self._flights.get(ticket)
            if flight is None or flight.urgency is Urgency.AWAITED:
                return
            flight.urgency = Urgency.AWAITED
        self._movers.expedite(flight.devices, flight.transfer.direction, ticket)

    def can_reach(self, model_id: int, source_replica: int, target_replica: int) -> bool:
        """True where every rank's device can copy from its like in the other replica. Raises NotFound."""
        with self._lock:
            model = self._model(model_id)
            source, target = model.replica(source_replica), model.replica(target_replica)
        pairs = zip(source.devices, target.devices, strict=True)
        return all(self._movers.memory.can_reach(one, other) for one, other in pairs)

    def peer_rate(self, model_id: int, source_replica: int, target_replica: int) -> float:
        """Rate of copies from one replica's devices to the other's, in units of the host's; 0 where they pass through
        the host. Raises NotFound."""
        return PEER_RATE if self.can_reach(model_id, source_replica, target_replica) else 0.0

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        """Start no copies of BACKGROUND stores on the devices for ``seconds``. Raises NotFound (device)."""
        for device in devices:
            self._movers.pause_background(device, seconds)

    def page_bytes(self, model_id: int, replica_id: int | None, rank: int, group: int, page: int) -> bytes:
        """Read one page in copy order, from a replica or (None) from the host. Raises NotFound and InvalidRequest."""
        with self._lock:
            model = self._model(model_id)
            replica = None if replica_id is None else model.replica(replica_id)
        if not (0 <= rank < model.layout.ranks and 0 <= group < len(model.layout.groups)):
            raise InvalidRequest(f"rank {rank} of {model.layout.ranks}, group {group} of {len(model.layout.groups)}")
        pool = model.host_pool(group, rank) if replica is None else replica.pools[rank][group]
        return b"".join(self._movers.memory.read(*row) for row in pool.rows_of(page))

    def _step_of(self, transfer: Transfer) -> int | None:
        if not transfer.layered:
            return 0
        return ALL_BUT_FIRST if transfer.short_suffix and self.layers_per_step is None else self.layers_per_step

    def _began(self, flight: _Flight) -> float | None:
        """Time at which the first slice of the first rank was started."""
        told = [flight.began, *(self._movers.began(device, flight.transfer.ticket) for device in flight.devices)]
        return min((began for began in told if began is not None), default=None)

    def _end_rank(self, end: RankEnd) -> None:
        with self._lock:
            flight = self._flights[end.ticket]
            flight.left -= 1
            flight.error = end.error if isinstance(end.error, CopiesHang) else flight.error or end.error
            if end.began is not None:
                flight.began = end.began if flight.began is None else min(flight.began, end.began)
            if flight.left:
                return
        if flight.error is not None:  # a rank that did well gets it too: the ticket as a whole has failed
            for device in flight.devices:
                self._movers.timeline(device).write(flight.slot.failed_word, flight.slot.end)
        times = TransferTimes(flight.submitted, flight.began, self._clock())
        by_device = zip(flight.devices, map(_move_bytes, flight.moves), strict=True)
        with self._lock:
            self.transfers.ended(flight.transfer, flight.urgency, times, by_device, well=flight.error is None)
            slots = self._models[flight.transfer.model].slots
            del self._flights[flight.transfer.ticket]
            self._landed.notify_all()
        if isinstance(flight.error, CopiesHang):
            self._hang.add(flight.transfer.model)  # and a GPU that goes on may still set its words
        else:
            slots.release(flight.slot)
        try:
            if self.on_done is not None:
                self.on_done(flight.transfer.ticket, flight.error)
        except Exception:
            log.exception("swap_done_callback_failed ticket=%d", flight.transfer.ticket)
        if flight.trace is not None:
            flight.trace.ended(times, flight.error)

    def _model(self, model_id: int) -> AttachedModel:
        if model_id not in self._models:
            raise NotFound("model", model_id)
        return self._models[model_id]


def _move_bytes(moves: Sequence[GroupMove]) -> int:
    return sum(len(move.device_pages) * move.page_bytes for move in moves)


DIRECTIONS = ("h2d", "d2h", "p2p")


def direction_of(transfer: Transfer) -> str:
    """Direction of a transfer, one of DIRECTIONS."""
    if transfer.source_replica is not None:
        return "p2p"
    return "h2d" if transfer.direction is Direction.LOAD else "d2h"


class Waiting(NamedTuple):
    """Transfers of one direction and urgency that have not ended. ``oldest_seconds``: of those not begun."""

    queued: int
    copying: int
    oldest_seconds: float


class TransferCounts:
    """Histograms of ended transfers. One thread at a time calls ``ended``; others may read."""

    def __init__(self) -> None:
        self.seconds = {direction: Histogram() for direction in DIRECTIONS}
        self.queued = {(direction, urgency): Histogram() for direction in DIRECTIONS for urgency in Urgency}
        self.failures = dict.fromkeys(DIRECTIONS, 0)
        self.device_bytes: dict[tuple[str, str], int] = {}

    def ended(
        self,
        transfer: Transfer,
        urgency: Urgency,
        times: TransferTimes,
        by_device: Iterable[tuple[str, int]],
        *,
        well: bool,
    ) -> None:
        """Count one transfer; ``by_device``: bytes that each device copied."""
        direction = direction_of(transfer)
        if not well:
            self.failures[direction] += 1
            return
        self.seconds[direction].observe(times.ended - times.submitted)
        began = times.ended if times.began is None else times.began
        self.queued[direction, urgency].observe(began - times.submitted)
        for device, size_bytes in by_device:
            key = (direction, device)
            self.device_bytes[key] = self.device_bytes.get(key, 0) + size_bytes


RankMoves = tuple[tuple[GroupMove, ...], ...]
"""Moves of each rank, group by group."""


class HostPages(Protocol):
    """Host memory of one group and host rank; ``table`` holds the pages that are usable now."""

    pages: int
    page_bytes: int

    @property
    def table(self) -> ExtentTable:
        """Places of the usable pages."""


@dataclass(frozen=True)
class AttachedReplica:
    """Replica with one GPU for each rank; ``pools[rank][group]``."""

    devices: tuple[str, ...]
    pools: tuple[tuple[Pool, ...], ...]


@dataclass
class AttachedModel:
    """A layout, its host slabs ``host_slabs[group][host rank]``, and the replicas that hold it. ``slots``: its places
    on timelines; ``sheets``: the devices whose timelines have a sheet for it."""

    layout: Layout
    host_slabs: tuple[tuple[HostPages, ...], ...]
    host_geometries: tuple[Geometry, ...]
    slots: SlotPool
    replicas: dict[int, AttachedReplica] = field(default_factory=dict)
    sheets: set[str] = field(default_factory=set)

    def replica(self, replica_id: int) -> AttachedReplica:
        """Raises NotFound."""
        if replica_id not in self.replicas:
            raise NotFound("replica", replica_id)
        return self.replicas[replica_id]

    def every_pool(self) -> list[Pool]:
        """Device pools of all replicas, and host pools as they are now."""
        ranks = range(self.layout.ranks)
        host = [self.host_pool(group, rank) for group in range(len(self.layout.groups)) for rank in ranks]
        return host + [pool for replica in self.replicas.values() for rank in replica.pools for pool in rank]

    def host_pool(self, group: int, rank: int) -> Pool:
        """The host side of one rank: the same for all ranks where the group is replicated."""
        mine = self.host_slabs[group]
        return Pool(self.host_geometries[group], mine[rank if len(mine) > 1 else 0].table)


def attached_model(layout: Layout, host_slabs: Sequence[Sequence[HostPages]], slots: SlotPool) -> AttachedModel:
    """Raises InvalidRequest where the slabs do not fit the layout."""
    if len(host_slabs) != len(layout.groups):
        raise InvalidRequest(f"host slabs of {len(host_slabs)} groups for a layout of {len(layout.groups)}")
    for group, slabs in enumerate(host_slabs):
        if len(slabs) != layout.host_ranks(group):
            raise InvalidRequest(f"group {group}: {len(slabs)} host slabs for {layout.host_ranks(group)} host ranks")
        for slab in slabs:
            if slab.page_bytes != layout.host_page_bytes(group):
                raise InvalidRequest(
                    f"group {group}: host pages of {slab.page_bytes} bytes, not {layout.host_page_bytes(group)}"
                )
    geometries = tuple(host_geometry(layout, group, slabs[0].pages) for group, slabs in enumerate(host_slabs))
    return AttachedModel(layout, tuple(tuple(slabs) for slabs in host_slabs), geometries, slots)


def attached_replica(
    layout: Layout, devices: Sequence[str], slabs: Sequence[Sequence[Slab]], pages: Sequence[int]
) -> AttachedReplica:
    """``slabs[rank][group]`` with ``pages[group]`` pages. Raises InvalidRequest where they do not fit the
    layout."""
    if not len(devices) == len(slabs) == layout.ranks:
        raise InvalidRequest(f"{len(devices)} devices and slabs of {len(slabs)} ranks for a layout of {layout.ranks}")
    if len(pages) != len(layout.groups):
        raise InvalidRequest(f"pages of {len(pages)} groups for a layout of {len(layout.groups)}")
    geometries = [device_geometry(layout, group, count) for group, count in enumerate(pages)]
    pools = []
    for rank, mine in enumerate(slabs):
        if len(mine) != len(geometries):
            raise InvalidRequest(f"rank {rank}: slabs of {len(mine)} groups for a layout of {len(geometries)}")
        for slab, geometry in zip(mine, geometries, strict=True):
            if slab.handle.size_bytes < geometry.total_bytes:
                raise InvalidRequest(f"rank {rank}: a slab of {slab.handle.size_bytes} of {geometry.total_bytes} bytes")
        pools.append(
            tuple(
                Pool(geometry, ExtentTable.whole(slab.region, geometry.pages))
                for slab, geometry in zip(mine, geometries, strict=True)
            )
        )
    return AttachedReplica(tuple(devices), tuple(pools))


def rank_moves(
    model: AttachedModel, replica: AttachedReplica, source: AttachedReplica | None, transfer: Transfer
) -> RankMoves:
    """Moves of each rank for a transfer; pages are checked when it is planned. Raises InvalidRequest for a group
    that does not exist, and for a store from two replicas.

    A replicated group is stored from rank 0 alone, and loaded from the one host page to every rank. From another
    replica (``source``) each rank loads what its like has there.
    """
    if source is not None and transfer.direction is Direction.STORE:
        raise InvalidRequest("a store goes to the host, not to another replica")
    groups = [pairs.group for pairs in transfer.pages]
    if len(set(groups)) != len(groups):
        raise InvalidRequest(f"a transfer names a group twice: {groups}")
    ranks: list[list[GroupMove]] = [[] for _ in replica.devices]
    for pairs in transfer.pages:
        if not 0 <= pairs.group < len(model.layout.groups):
            raise InvalidRequest(f"group {pairs.group} of {len(model.layout.groups)}")
        device_pages, host_pages = (
            np.array(pairs.device_pages, np.int64),
            np.array(pairs.host_pages, np.int64),
        )
        once = transfer.direction is Direction.STORE and model.layout.groups[pairs.group].replicated
        for rank, moves in enumerate(ranks[:1] if once else ranks):
            pool = replica.pools[rank][pairs.group]
            there = model.host_pool(pairs.group, rank) if source is None else source.pools[rank][pairs.group]
            moves.append(GroupMove(pool, there, device_pages, host_pages))
    return tuple(tuple(moves) for moves in ranks)
