"""A Step: many operations of one lease in one message, applied in order for each sequence.

An operation that has to wait for transfers parks, and with it the later operations of its sequence; those of other
sequences go on. So the order of the request holds for each sequence, and between sequences as long as nothing waits:

    request   match A   allocate A (waits)   extend A   extend B   release C
    applied   match A   ...                             extend B   release C   allocate A   extend A

The columns of a step come before its operations. Entries that are straight are carried out by column, many at a time;
any other is an operation like those. The stock is filled up when all have ended, and then the step is answered, results
in the order of the request. Nothing waits beyond the step's own deadline, and with ``no_wait`` nothing waits at all.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.v1 import cache_pb2

from cachesvc.flows.allocate import allocate, check_stock, extend, extend_many, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Call, Core
from cachesvc.flows.loads import Sharing
from cachesvc.flows.make_room import room_left
from cachesvc.flows.match import match, prefetch, require_clock
from cachesvc.flows.publish import Publishing, is_tight, publish, publish_many
from cachesvc.flows.recycle import Recycling, ended, recycle, recycle_many, release, release_many
from cachesvc.ledger.ledger import member_of
from cachesvc.model.answers import (
    MAX_OPERATIONS,
    NO_POSITIONS,
    Allocated,
    GroupCells,
    Matched,
    Published,
    Recycled,
    Swapped,
    Wait,
)
from cachesvc.model.errors import CacheError, InvalidRequest, LimitExceeded, Unavailable
from cachesvc.model.words import Urgency
from cachesvc.policy.eviction import RequestHint, retention_of
from cachesvc.service.access.admission import CallKind, Slot
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import INTERNAL, OK, Ask, Dispatcher, Operation
from cachesvc.service.loop.line import AsksAgain, keep_a_moment
from cachesvc.service.loop.node import end_wait
from cachesvc.telemetry.tracing import current_span
from cachesvc.wire.columns import (
    ANSWER_FIELDS,
    GROW,
    ODD,
    OPERATION_NAMES,
    PUBLISH,
    RECYCLE,
    RELEASE,
    Column,
    Lot,
    plain_number,
    read_columns,
)
from cachesvc.wire.convert import (
    allocated_to_proto,
    cells_from_proto,
    expected_from_proto,
    matched_to_proto,
    positions_from_proto,
    prefetched_to_proto,
    published_to_proto,
    recycled_to_proto,
    swapped_to_proto,
)
from cachesvc.wire.parse import check_fields
from cachesvc.wire.status import refusal

TURN_BLOCKS = 256
"""Blocks of straight entries before other calls get their turn: some 0.5 ms."""
OPERATION_BLOCKS, FEWEST_BLOCKS = 16, 8
"""Cost in blocks of one operation (25 us), and the least cost of entries that go together (15 us), against
``TURN_BLOCKS``."""
NONE = "none"
"""Name of an empty operation."""
NO_COLUMN = cache_pb2.STEP_COLUMN_UNSPECIFIED

_FLOWS: dict[Column, Callable[..., object]] = {
    GROW: extend_many,
    PUBLISH: publish_many,
    RECYCLE: recycle_many,
    RELEASE: release_many,
}


class EntryRef(NamedTuple):
    """An entry of a column, or an operation of the step."""

    lot: Lot
    entry: int


class Parked(NamedTuple):
    """An operation that waits for transfers, and what is to be run again."""

    ref: EntryRef
    name: str
    run: Callable[[], Any]
    wait: Wait


class StepRun:
    """One step. ``begin`` answers, or has the dispatcher go on. ``counts``: operations by name and code, added to once
    at the end.

    ``_lots``: its columns, and behind them its operations; those before ``_at`` have been looked at. ``_reach``:
    entries that are looked at together; fewer while others are not straight, because those behind such a one are
    looked at for nothing.
    """

    def __init__(self, ask: Ask, request: cache_pb2.StepRequest, counts: dict[tuple[str, str], int]) -> None:
        assert ask.call is not None, "a Step is a call of a lease"
        self._dispatcher = ask.dispatcher
        self._ask = ask
        self._call = ask.call
        self._request = request
        self._targets = tuple(request.stock_pages)
        self._response = cache_pb2.StepResponse(request_id=request.request_id)
        self._lots: list[Lot] = []
        self._at = 0
        self._reach = MAX_OPERATIONS
        self._parked: list[tuple[Parked, deque[EntryRef]]] = []
        self._behind: dict[int, deque[EntryRef]] = {}
        self._is_broken = False
        self._all_counts = counts
        self._counts: dict[tuple[str, str], int] = {}
        self._span = current_span.get()

    def begin(self) -> cache_pb2.StepResponse | asyncio.Future[Any]:
        """Apply what can be applied at once. Raises what refuses the step as a whole, with nothing applied."""
        call, request = self._call, self._request
        if self._targets:
            check_stock(self._dispatcher.node.core, call.lease, self._targets)
        if request.HasField("columns"):
            self._response.columns.SetInParent()
            self._lots = read_columns(request.columns, call.lease.groups)
        self._lots.append(Lot(NO_COLUMN, (request.operations,), None, request.operations.__getitem__))
        return self._dispatcher.node.run(self._begin, call)

    def _begin(self, call: Call) -> cache_pb2.StepResponse | asyncio.Future[Any]:
        self._take_turn(call)
        if not self._is_through:
            return self._dispatcher.later(self._ask, CallKind.WORK, self._go_on, is_admitted=True)
        if self._parked:
            try:
                return self._dispatcher.later(self._ask, CallKind.WAITS, self._go_on)
            except LimitExceeded as full:
                self._give_up_waiting(full)
        if self._parked:
            return self._dispatcher.later(self._ask, CallKind.WORK, self._go_on, is_admitted=True)
        return self._end(call)

    async def _go_on(self, place: Slot) -> cache_pb2.StepResponse:
        node = self._dispatcher.node
        while not self._is_through:
            await node.next_turn(self._ask.holder.process)
            with node.loop_watch.watching(self._ask.method):
                node.run(self._take_turn, None)
        if self._parked:
            try:
                place.wait()
            except LimitExceeded as full:
                self._give_up_waiting(full)
        if self._parked:
            await asyncio.gather(*(self._wait_out(parked, behind) for parked, behind in self._parked))
        return node.run(self._end, None)

    @property
    def _is_through(self) -> bool:
        """True when everything was applied, or waits."""
        while self._at < len(self._lots) and self._lots[self._at].is_done:
            self._at += 1
        return self._at == len(self._lots)

    def _take_turn(self, call: Call | None) -> None:
        """Apply what comes next, or put it behind what waits of its sequence. ``call``: as looked up just now."""
        left = TURN_BLOCKS
        while left > 0 and not self._is_through:
            left -= self._take_entries(self._lots[self._at], left, call)

    def _take_entries(self, lot: Lot, left: int, call: Call | None) -> int:
        """Apply the next entries up to the first that is not straight, and that one as an operation. Returns the
        blocks that they count for."""
        if not lot.column:
            return TURN_BLOCKS if self._enter(_leave(lot), call) else OPERATION_BLOCKS
        first, weight, is_straight = len(lot.numbers), 1, False
        if not self._is_broken:
            try:
                call = call or self._ask.renewed()
                if lot.column == PUBLISH and is_tight(self._dispatcher.node.core, call):
                    weight = max(1, TURN_BLOCKS // self._dispatcher.node.core.turns.evicted)
                is_straight = self._carry_straight(lot, call, left // weight)
            except CacheError:
                is_straight = False  # as an operation it gets the reason
            except Exception as broken:  # noqa: BLE001 - the root of an entry
                self._count(OPERATION_NAMES[lot.column], OK, len(lot.numbers) - first)
                self._distrust(broken)
                self._break(_leave(lot), OPERATION_NAMES[lot.column])
                return OPERATION_BLOCKS
        self._count(OPERATION_NAMES[lot.column], OK, len(lot.numbers) - first)
        blocks = lot.blocks(first, len(lot.numbers)) * weight
        if is_straight:
            return max(blocks, FEWEST_BLOCKS)
        return TURN_BLOCKS if self._enter(_leave(lot), call) else blocks + OPERATION_BLOCKS

    def _carry_straight(self, lot: Lot, call: Call, left: int) -> bool:
        """Carry out some next entries of a column, of ``left`` blocks and one at least, as long as they are straight
        and nothing of their sequences waits. False where one is not: it is the next.

        Raises what has broken the next entry.
        """
        first = len(lot.numbers)
        last = min(len(lot.data[0]), first + self._reach)
        if lot.blocks(first, last) > left:
            last = first + max(left, 1)
            if lot.starts is not None:
                last = min(last, max(bisect_right(lot.starts, lot.starts[first] + left) - 1, first + 1))
        _FLOWS[lot.column](self._dispatcher.node.core, call, lot.data, range(first, last), lot.numbers, self._behind)
        is_straight = len(lot.numbers) == last
        self._reach = min(2 * self._reach, MAX_OPERATIONS) if is_straight else max(1, len(lot.numbers) - first)
        return is_straight

    def _enter(self, ref: EntryRef, call: Call | None) -> bool:
        """Apply an operation, or have it wait, or put it behind one of its sequence that waits. True where it has taken
        a turn, and has more to do."""
        sequence = self._sequence_of(ref) if self._behind else None
        if sequence is not None and sequence in self._behind:
            self._behind[sequence].append(ref)
        elif (parked := self._start(ref, call)) is not None:
            behind: deque[EntryRef] = deque()
            self._parked.append((parked, behind))
            sequence = self._sequence_of(ref)
            if sequence is not None:
                self._behind[sequence] = behind
            return not parked.wait.tickets
        return False

    def _read(self, ref: EntryRef) -> tuple[str, Any]:
        message = ref.lot.operation(ref.entry)
        if ref.lot.column:
            return OPERATION_NAMES[ref.lot.column], message
        name = message.WhichOneof("operation") or NONE
        return name, None if name == NONE else getattr(message, name)

    def _sequence_of(self, ref: EntryRef) -> int | None:
        """Sequence whose order an operation keeps; None: of none."""
        name, inner = self._read(ref)
        operation = OPERATIONS.get(name)
        return inner.sequence_id if operation is not None and operation.has_order else None

    def _start(self, ref: EntryRef, call: Call | None) -> Parked | None:
        """Run one operation for the first time, and tell its result unless it has to wait."""
        name, inner = self._read(ref)
        try:
            if self._is_broken:
                raise Unavailable("not carried out: an operation of this step met a defect of the daemon")
            if name == NONE:
                raise InvalidRequest("an operation of the step is empty")
            operation = OPERATIONS[name]
            check_fields(inner)
            memory = operation.memory()

            def run() -> Any:
                return operation.run(self._dispatcher, self._ask.renewed(), inner, memory)

            answer, again = operation.run(self._dispatcher, call or self._ask.renewed(), inner, memory), run
            if self._request.no_wait:
                answer = self._turns_alone(answer, run)
                again = lambda: self._turns_alone(run(), run)  # noqa: E731
            if isinstance(answer, Wait):
                return Parked(ref, name, again, answer)
            self._tell(ref, name, answer)
        except CacheError as error:
            self._refuse(ref, name, error)
        except Exception:  # noqa: BLE001 - the root of an operation: the others have results of their own
            self._break(ref, name)
        return None

    def _turns_alone(self, outcome: Any, run: Callable[[], Any]) -> Any:
        """An outcome that waits for no transfers, from an operation that takes several turns or can do without them.
        Raises AsksAgain for one that must wait: what its transfers free is kept for it a moment."""
        while isinstance(outcome, Wait) and outcome.tickets:
            if outcome.seconds is None:
                keep_a_moment(outcome.reserved, self._dispatcher.node.now())
                raise AsksAgain("the operation has to wait for transfers, and its step does not; they go on: ask again")
            end_wait(outcome)
            outcome = run()
        return outcome

    async def _wait_out(self, parked: Parked, behind: deque[EntryRef]) -> None:
        """See an operation through that waits, and those behind it in turn."""
        waiting: Parked | None = parked
        until = self._dispatcher.until(self._ask)
        while waiting is not None:
            ref, name, run, wait = waiting
            try:
                party, what = self._ask.holder.process, self._ask.method
                self._tell(ref, name, await self._dispatcher.node.wait_out(run, wait, until, party, what))
            except CacheError as error:
                self._refuse(ref, name, error)
            except Exception:  # noqa: BLE001 - the root of an operation
                self._break(ref, name)
            waiting = self._run_behind(behind)

    def _run_behind(self, behind: deque[EntryRef]) -> Parked | None:
        """Run the operations of one sequence in order, up to one that has to wait."""
        waiting: Parked | None = None
        while behind and waiting is None:
            waiting = self._start(behind.popleft(), None)
        return waiting

    def _give_up_waiting(self, why: CacheError) -> None:
        """Refuse entries that wait for transfers, and go on behind them. Entries that only wait for their next turn
        stay."""
        parked, self._parked = self._parked, []
        for each, behind in parked:
            waiting: Parked | None = each
            while waiting is not None and waiting.wait.tickets:
                end_wait(waiting.wait)
                self._refuse(waiting.ref, waiting.name, why)
                waiting = self._run_behind(behind)
            if waiting is not None:
                self._parked.append((waiting, behind))

    def _tell(self, ref: EntryRef, name: str, answer: Any) -> None:
        reply = OPERATIONS[name].reply(answer)
        number = plain_number(ref.lot.column, reply) if ref.lot.column else None
        if number is None:
            getattr(self._result(ref), name).CopyFrom(reply)
        else:
            ref.lot.numbers[ref.entry] = number
        self._count(name, OK)

    def _refuse(self, ref: EntryRef, name: str, error: CacheError) -> None:
        self._result(ref).error.CopyFrom(refusal(error))
        self._count(name, error.code.value)

    def _distrust(self, broken: Exception) -> None:
        """Take a model out of service that one of the step's own flows has left half-done."""
        lease = self._ask.lease
        if lease is not None:
            self._dispatcher.node.distrust(lease.model, f"{type(broken).__name__}: {broken}")

    def _break(self, ref: EntryRef, name: str) -> None:
        """A defect, from within its ``except``: nothing of this step is carried out any more."""
        self._is_broken = True
        self._result(ref).error.CopyFrom(self._dispatcher.broke(f"{self._ask.method}/{name}", self._ask.lease))
        self._count(name, INTERNAL)

    def _result(self, ref: EntryRef) -> cache_pb2.OperationResult:
        """Result message for an operation. Those before it are made too, and all at once would hold the loop."""
        if ref.lot.column:
            return self._response.columns.odd.add(column=ref.lot.column, index=ref.entry).result
        results = self._response.results
        while len(results) <= ref.entry:
            results.add()
        return results[ref.entry]

    def _count(self, name: str, code: str, count: int = 1) -> None:
        if not count:
            return
        key = (name, code)
        self._counts[key] = self._counts.get(key, 0) + count
        if self._span is not None:
            self._span.event(name, code=code, count=count)

    def _end(self, call: Call | None) -> cache_pb2.StepResponse:
        response = self._response
        for lot in self._lots:
            if lot.column and lot.numbers:
                setattr(response.columns, ANSWER_FIELDS[lot.column], array("I", lot.numbers).tobytes())
        if self._targets and not self._is_broken:
            for cells in self._fill_stock(call):
                pages, generations = array("i", cells.pages).tobytes(), array("I", cells.generations).tobytes()
                response.stock.add(group=cells.group, pages=pages, generations=generations)
        free, evictable = room_left(self._call.replica.place)
        response.free_pages = array("I", free).tobytes()
        response.evictable_pages = array("I", evictable).tobytes()
        for key, count in self._counts.items():
            self._all_counts[key] = self._all_counts.get(key, 0) + count
        return response

    def _fill_stock(self, call: Call | None) -> tuple[GroupCells, ...]:
        """Take pages for the stock; none is no error. What was applied counts: the next call reports a lease that was
        lost meanwhile."""
        quotas = self._dispatcher.admission.quotas
        try:
            call = call or self._ask.renewed()
            allowed = self._targets if quotas is None else quotas.cap_stock(call, self._targets)
            member = member_of(self._request.request_id)
            return refill_stock(self._dispatcher.node.core, call, allowed, member, self._request.stock_due)
        except CacheError:
            return ()
        except Exception as broken:  # noqa: BLE001 - the root of the refill: the operations have their results
            self._distrust(broken)
            self._dispatcher.broke(f"{self._ask.method}/stock", self._ask.lease)
            return ()


def _leave(lot: Lot) -> EntryRef:
    """Leave the next entry to its operation form; returns the place of its answer."""
    lot.numbers.append(ODD)
    return EntryRef(lot, len(lot.numbers) - 1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlowOperation(Operation[Any, Any]):
    """An operation that is one flow under a lease. It is run until it does not wait, and ``reply`` makes its message.

    ``flow(core, call, message, memory)`` answers or waits. ``memory`` makes what it has to remember from one run to the
    next. ``quota`` is checked right before each run. ``has_order``: a Step keeps the order of its operations on one
    sequence.
    """

    flow: Callable[[Core, Call, Any, Any], Any]
    reply: Callable[[Any], Any]
    memory: Callable[[], Any] = lambda: None
    quota: Callable[[Quotas, Call, Any], None] | None = None
    is_repeatable: bool = True
    is_of_lease: bool = True
    has_order: bool = True

    def carry(self, ask: Ask, message: Any) -> Any:
        """Run the flow, and have the dispatcher go on with it where it waits."""
        call, memory = ask.call, self.memory()
        assert call is not None, "an operation of a lease"
        answer = self.run(ask.dispatcher, call, message, memory)
        return self._wait_out(ask, message, memory, answer) if isinstance(answer, Wait) else self.reply(answer)

    def run(self, dispatcher: Dispatcher, call: Call, message: Any, memory: Any) -> Any:
        """Run the flow once. Raises what refuses the operation."""
        if self.quota is not None and (quotas := dispatcher.admission.quotas) is not None:
            self.quota(quotas, call, message)
        node = dispatcher.node
        return node.run_of(call.model.id, self.flow, node.core, call, message, memory)

    def _wait_out(self, ask: Ask, message: Any, memory: Any, wait: Wait) -> asyncio.Future[Any]:
        dispatcher = ask.dispatcher
        ask.goes_on = wait.goes_on

        def run() -> Any:
            dispatcher.free_bytes(ask)  # for this run: what it opens counts by itself
            again = self.run(dispatcher, ask.renewed(), message, memory)
            if isinstance(again, Wait):
                dispatcher.hold_bytes(ask)
            ask.goes_on = isinstance(again, Wait) and again.goes_on
            return again

        async def wait_out(place: Slot) -> Any:
            node, until = dispatcher.node, dispatcher.until(ask)
            return self.reply(await node.wait_out(run, wait, until, ask.holder.process, ask.method, place.wait))

        kind = CallKind.WAITS if wait.tickets else CallKind.WORK  # for which there was room, or nothing had been done
        try:
            later = dispatcher.later(ask, kind, wait_out, is_admitted=not wait.tickets)
        except LimitExceeded:
            end_wait(wait)
            raise
        later.add_done_callback(lambda _: end_wait(wait))  # where it was given up before its first turn
        return later


def _match(core: Core, call: Call, m: cache_pb2.MatchRequest, sharing: Sharing) -> Matched | Wait:
    clock = m.clock_seconds if m.HasField("clock_seconds") else None
    if m.HasField("expected"):
        sharing.expected = expected_from_proto(m.expected)
    hint = retention_of(m.retention) if m.retention else RequestHint.DEFAULT
    return match(core, call, m.sequence_id, m.keys, m.max_blocks, sharing, m.waited_ms / 1000, clock, hint)


def _allocate(core: Core, call: Call, m: cache_pb2.AllocateRequest, _: None) -> Allocated | Wait:
    positions = positions_from_proto(m.positions) if m.positions else NO_POSITIONS
    return allocate(core, call, m.sequence_id, m.blocks, short_suffix=m.short_suffix, positions=positions)


def _publish(core: Core, call: Call, m: cache_pb2.PublishRequest, publishing: Publishing) -> Published | Wait:
    states = cells_from_proto(m.states) if m.states else ()
    return publish(core, call, m.sequence_id, m.first_block, m.keys, m.blocks, publishing, states)


def _swap(core: Core, call: Call, m: cache_pb2.SwapRequest, _: None) -> Swapped | Wait:
    if m.direction == cache_pb2.SWAP_DIRECTION_OUT:
        return swap_out(core, call, m.sequence_id)
    if m.direction == cache_pb2.SWAP_DIRECTION_IN:
        return swap_in(core, call, m.sequence_id, short_suffix=m.short_suffix)
    raise InvalidRequest("swap needs a direction, OUT or IN")


def _recycle(core: Core, call: Call, m: cache_pb2.RecycleRequest, recycling: Recycling) -> Recycled | Wait:
    pages = () if recycling.has_begun else cells_from_proto(m.pages)
    return recycle(core, call, m.sequence_id, m.computed_tokens, pages, recycling, tuple(m.dead_blocks))


def _release(core: Core, call: Call, m: cache_pb2.ReleaseRequest, _: None) -> int | Wait:
    tokens = m.output_tokens if m.HasField("output_tokens") else None
    clock = require_clock(m.clock_seconds) if m.HasField("clock_seconds") else None
    return release(core, call, m.sequence_id, ended(call, tokens, m.ended_ms / 1000, clock))


OPERATIONS: dict[str, FlowOperation] = {
    "match": FlowOperation(
        name="CacheService/Match",
        flow=_match,
        memory=Sharing,
        reply=matched_to_proto,
        quota=lambda quotas, call, _: quotas.require_sequence(call),
    ),
    "allocate": FlowOperation(
        name="CacheService/Allocate",
        flow=_allocate,
        reply=allocated_to_proto,
        quota=lambda quotas, call, m: quotas.require_blocks(call, m.sequence_id, m.blocks),
    ),
    "publish": FlowOperation(name="CacheService/Publish", flow=_publish, memory=Publishing, reply=published_to_proto),
    "swap": FlowOperation(
        name="CacheService/Swap",
        flow=_swap,
        reply=swapped_to_proto,
        quota=lambda quotas, call, m: quotas.require_swapped(call, m.sequence_id),
    ),
    "recycle": FlowOperation(name="CacheService/Recycle", flow=_recycle, memory=Recycling, reply=recycled_to_proto),
    "release": FlowOperation(
        name="CacheService/Release",
        flow=_release,
        reply=lambda freed: cache_pb2.ReleaseResponse(freed_pages=freed),
        kind=CallKind.LIFE,
    ),
    "prefetch": FlowOperation(
        name="CacheService/Prefetch",
        flow=lambda core, call, m, sharing: prefetch(core, call, m.keys, sharing),
        memory=lambda: Sharing(Urgency.BACKGROUND),
        reply=prefetched_to_proto,
        has_order=False,
    ),
    "extend": FlowOperation(
        name="CacheService/Extend",  # within a Step alone
        flow=lambda core, call, m, _: extend(core, call, m.sequence_id, cells_from_proto(m.pages)),
        reply=lambda blocks: cache_pb2.ExtendResponse(blocks=blocks),
    ),
}
"""Operations by their names in StepOperation and OperationResult."""
