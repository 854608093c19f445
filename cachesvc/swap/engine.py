"""Runs transfers: plans them, gives each a place on the timeline, and hands one job a rank to the copy
streams.

Every ticket ends exactly once, in ``on_done(ticket, error)``; it ends after its timeline words do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.memory.seam import Backend, CopyJob, Slab, Timeline
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, Unavailable
from cachesvc.model.layout import Layout
from cachesvc.model.transfer import Direction, TimelineSlot, Transfer, Urgency
from cachesvc.swap.attached import (
    AttachedModel,
    HostPages,
    RankMoves,
    attached_model,
    attached_replica,
    rank_moves,
)
from cachesvc.swap.planner import GroupMove, LinkCosts, plan
from cachesvc.swap.planner_threads import Planning, ThreadPlanning
from cachesvc.swap.slots import SlotPool
from cachesvc.swap.transfer_counts import (
    TransferCounts,
    TransferTimes,
    TransferTrace,
    TransferTracer,
    Waiting,
    direction_of,
)

log = logging.getLogger(__name__)

OnDone = Callable[[int, Exception | None], None]


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
    trace: TransferTrace | None = None
    error: Exception | None = None

    def begin(self, now: float) -> None:
        """The first slice of the first rank starts."""
        if self.began is None:
            self.began = now


class SwapEngine:
    """Moves pages between the host pool and the devices of each replica, and from replica to replica. ``on_done`` is
    called from a backend thread."""

    def __init__(
        self,
        backend: Backend,
        on_done: OnDone,
        *,
        costs: LinkCosts | None = None,
        planning: Planning | None = None,
        layers_per_step: int | None = None,
        tracer: TransferTracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``layers_per_step``: of layered loads; None lets ``costs`` choose. ``planning``: threads unless
        given. ``clock``: the backend's."""
        self._backend = backend
        self._on_done = on_done
        self._costs = costs or LinkCosts()
        self._planning = planning or ThreadPlanning()
        self._layers_per_step = layers_per_step
        self._models: dict[int, AttachedModel] = {}
        self._flights: dict[int, _Flight] = {}
        self._slots = SlotPool(0)
        self._timelines: dict[str, Timeline] = {}
        self._lock = threading.Lock()
        self._is_open = False
        self.transfers = TransferCounts()
        self._tracer = tracer
        self._clock = clock

    def plan_by(self, costs: LinkCosts) -> None:
        """Plan what is submitted from now on by these costs: those of links that were measured since."""
        self._costs = costs

    def start(self) -> None:
        """Begin to take transfers. The backend runs already, and its timelines are this engine's alone."""
        self._timelines = {device: self._backend.timeline(device) for device in self._backend.devices()}
        self._slots = SlotPool(min((timeline.words for timeline in self._timelines.values()), default=0))
        self._planning.start()
        self._is_open = True

    def close(self) -> None:
        """Refuse what is new and end what is not planned yet; the rest ends with the backend. Idempotent."""
        with self._lock:
            self._is_open = False
        self._planning.close()

    @property
    def in_flight(self) -> int:
        """Tickets that have not ended."""
        return len(self._flights)

    def waiting(self) -> dict[tuple[str, Urgency], Waiting]:
        """Transfers that have not ended, by direction and urgency."""
        now = self._clock()
        found: dict[tuple[str, Urgency], Waiting] = {}
        with self._lock:
            flights = [(direction_of(f.transfer), f.urgency, f.submitted, f.began) for f in self._flights.values()]
        for direction, urgency, submitted, began in flights:
            queued, copying, oldest = found.get((direction, urgency), Waiting(0, 0, 0.0))
            if began is None:
                found[direction, urgency] = Waiting(queued + 1, copying, max(oldest, now - submitted))
            else:
                found[direction, urgency] = Waiting(queued, copying + 1, oldest)
        return found

    def attach_model(self, model_id: int, layout: Layout, host_slabs: Sequence[Sequence[HostPages]]) -> None:
        """``host_slabs[group][host rank]``. Raises InvalidRequest where they do not fit, LedgerBroken
        when attached."""
        model = attached_model(layout, host_slabs)
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
        """``slabs[rank][group]`` of ``pages[group]`` pages on ``devices[rank]``. Raises as
        ``attach_model`` does."""
        with self._lock:
            layout = self._model(model_id).layout
        made = attached_replica(layout, devices, slabs, pages)
        with self._lock:
            model = self._model(model_id)
            if replica_id in model.replicas:
                raise LedgerBroken(f"replica {replica_id} of model {model_id} is attached already")
            model.replicas[replica_id] = made

    def detach_model(self, model_id: int) -> None:
        """Forget a model with its replicas. Raises NotFound, or LedgerBroken while transfers touch it."""
        with self._lock:
            self._model(model_id)
            busy = [ticket for ticket, flight in self._flights.items() if flight.transfer.model == model_id]
            if busy:
                raise LedgerBroken(f"model {model_id}: {len(busy)} transfers in flight, such as ticket {busy[0]}")
            del self._models[model_id]

    def free_slots(self, model_id: int, replica_id: int) -> int:
        """Transfers of a replica that ``submit`` takes now; as many until somebody submits. Raises NotFound.

        Whoever alone submits may so make sure of a ticket before changing anything. 0 once closed.
        """
        self._model(model_id).replica(replica_id)
        return self._slots.free if self._is_open else 0

    def submit(self, transfer: Transfer) -> TimelineSlot:
        """Start a transfer and say where it can be followed; returns before anything is planned.

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
            slot = self._slots.acquire(model.layout.layers)
            flight = _Flight(transfer, slot, replica.devices, moves, len(moves), transfer.urgency, self._clock())
            if self._tracer is not None:
                flight.trace = self._tracer.begin(transfer, sum(map(_move_bytes, moves)))
            self._flights[transfer.ticket] = flight
        self._planning.submit(
            transfer.direction,
            transfer.urgency,
            flight.devices,
            transfer.ticket,
            lambda error: self._launch(flight, error),
        )
        return slot

    def expedite(self, ticket: int) -> None:
        """Somebody waits for a ticket now. Nothing where it has ended or was awaited before."""
        with self._lock:
            flight = self._flights.get(ticket)
            if flight is None or flight.urgency is Urgency.AWAITED:
                return
            flight.urgency = Urgency.AWAITED
        self._planning.expedite(flight.transfer.direction, ticket)
        for device in flight.devices:
            self._backend.expedite(device, ticket)

    def can_reach(self, model_id: int, source_replica: int, target_replica: int) -> bool:
        """True where every rank's device can copy from its like in the other replica. Raises NotFound."""
        with self._lock:
            model = self._model(model_id)
            source, target = model.replica(source_replica), model.replica(target_replica)
        pairs = zip(source.devices, target.devices, strict=True)
        return all(self._backend.can_reach(one, other) for one, other in pairs)

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        """Start no copies of BACKGROUND stores on the devices for ``seconds``. Raises NotFound (device)."""
        for device in devices:
            self._backend.pause_background(device, seconds)

    def page_bytes(self, model_id: int, replica_id: int | None, rank: int, group: int, page: int) -> bytes:
        """One page in copy order, from a replica or (None) from the host. Raises NotFound and
        InvalidRequest."""
        with self._lock:
            model = self._model(model_id)
            replica = None if replica_id is None else model.replica(replica_id)
        if not (0 <= rank < model.layout.ranks and 0 <= group < len(model.layout.groups)):
            raise InvalidRequest(f"rank {rank} of {model.layout.ranks}, group {group} of {len(model.layout.groups)}")
        pool = model.host_pool(group, rank) if replica is None else replica.pools[rank][group]
        return b"".join(self._backend.read(*row) for row in pool.rows_of(page))

    def _launch(self, flight: _Flight, error: Exception | None) -> None:
        """Plan and submit one job a rank; a rank that cannot be launched ends here, with its waiters
        released."""
        for rank in range(len(flight.devices)):
            try:
                if error is not None:
                    raise error
                self._launch_rank(flight, rank)
            except Exception as failure:  # noqa: BLE001 - a thread's root: the ticket tells it
                self._timelines[flight.devices[rank]].write(flight.slot.failed_word, flight.slot.end)
                self._timelines[flight.devices[rank]].write(flight.slot.word, flight.slot.end)
                self._end_rank(flight, failure)

    def _launch_rank(self, flight: _Flight, rank: int) -> None:
        transfer, slot, device = flight.transfer, flight.slot, flight.devices[rank]
        steps = plan(
            flight.moves[rank],
            transfer.direction,
            layers=slot.layers,
            base=slot.base,
            layers_per_step=self._layers_per_step if transfer.layered else 0,
            costs=self._costs,
        )
        job = CopyJob(
            ticket=transfer.ticket,
            steps=steps,
            word=slot.word,
            failed_word=slot.failed_word,
            end_value=slot.end,
            done=lambda error: self._end_rank(flight, error),
            urgency=flight.urgency,
            begun=flight.begin,
        )
        is_load = transfer.direction is Direction.LOAD
        stream = self._backend.load_stream(device) if is_load else self._backend.store_stream(device)
        stream.submit(job)
        if flight.urgency is not job.urgency:  # expedited since the job was made, perhaps before it was queued
            self._backend.expedite(device, transfer.ticket)

    def _end_rank(self, flight: _Flight, error: Exception | None) -> None:
        with self._lock:
            flight.left -= 1
            flight.error = flight.error or error
            if flight.left:
                return
        if flight.error is not None:  # a rank that did well is told too: the ticket as a whole has failed
            for device in flight.devices:
                self._timelines[device].write(flight.slot.failed_word, flight.slot.end)
        times = TransferTimes(flight.submitted, flight.began, self._clock())
        by_device = zip(flight.devices, map(_move_bytes, flight.moves), strict=True)
        with self._lock:
            self.transfers.ended(flight.transfer, flight.urgency, times, by_device, well=flight.error is None)
            del self._flights[flight.transfer.ticket]
        self._slots.release(flight.slot)
        self._planning.ended(flight.transfer.direction, flight.transfer.ticket)
        try:
            self._on_done(flight.transfer.ticket, flight.error)
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
