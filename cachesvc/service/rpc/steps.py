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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.flows.allocate import allocate, check_stock, extend, extend_many, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Call, Core
from cachesvc.flows.loads import Sharing
from cachesvc.flows.make_room import room_left
from cachesvc.flows.match import match, prefetch, require_clock
from cachesvc.flows.publish import Publishing, is_tight, publish, publish_many
from cachesvc.flows.recycle import Recycling, ended, recycle, recycle_many, release, release_many
from cachesvc.ledger.ledger import member_of
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.answers import (
    MAX_OPERATIONS,
    NO_POSITIONS,
    Allocated,
    GroupCells,
    Matched,
    Prefetched,
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
    GROW,
    IN_ORDER,
    ODD,
    OPERATION_NAMES,
    PUBLISH,
    RECYCLE,
    RELEASE,
    Column,
    StepColumns,
    pack_answer,
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

OPERATION_BLOCKS, FEWEST_BLOCKS = 16, 8
"""Weight of an operation, or of an entry that is not straight, among ``TURN_BLOCKS``, and least weight of entries that
go together: they take 25 us and 15 us, for any number."""
NONE = "none"
"""Name of an empty operation."""
NO_COLUMN = cache_pb2.STEP_COLUMN_UNSPECIFIED


class Parked(NamedTuple):
    """An operation that waits for transfers, and what is to be run again."""

    ref: EntryRef
    name: str
    run: Callable[[], Any]
    wait: Wait


class StepRun:
    """One step. ``begin`` answers, or has the dispatcher go on. ``counts``: operations by name and code, added to once
    at the end."""

    def __init__(self, ask: Ask, request: cache_pb2.StepRequest, counts: dict[tuple[str, str], int]) -> None:
        self._dispatcher = ask.dispatcher
        self._ask = ask
        self._request = request
        self._operations = request.operations
        self._targets = tuple(request.stock_pages)
        self._response = cache_pb2.StepResponse(request_id=request.request_id)
        self._columns: ColumnRun | None = None
        self._device: Place | None = None
        self._next = 0
        self._parked: list[tuple[Parked, deque[EntryRef]]] = []
        self._behind: dict[int, deque[EntryRef]] = {}
        self._is_broken = False
        self._all_counts = counts
        self._counts: dict[tuple[str, str], int] = {}
        self._span = current_span.get()

    def begin(self) -> cache_pb2.StepResponse | asyncio.Future[Any]:
        """Apply what can be applied at once. Raises what refuses the step as a whole, with nothing applied."""
        call = self._ask.call
        assert call is not None, "a Step is a call of a lease"
        self._device = call.replica.place
        if self._targets:
            check_stock(self._dispatcher.node.core, call.lease, self._targets)
        if self._request.HasField("columns"):
            answer = self._response.columns
            answer.SetInParent()
            self._columns = ColumnRun(read_columns(self._request.columns, call.lease.groups), answer)
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
        return self._next == len(self._operations) and (self._columns is None or self._columns.column is None)

    def _take_turn(self, call: Call | None) -> None:
        """Apply what comes next, or put it behind what waits of its sequence. ``call``: as looked up just now."""
        left = TURN_BLOCKS
        if (columns := self._columns) is not None:
            while left > 0 and columns.column is not None:
                left -= self._take_entries(columns, columns.column, left, call)
        if not self._operations:
            return
        last = min(self._next + max(left, 0) // OPERATION_BLOCKS, len(self._operations))
        while self._next < last:
            self._next += 1
            if self._enter(EntryRef(NO_COLUMN, self._next - 1), call):
                break

    def _take_entries(self, columns: ColumnRun, column: Column, left: int, call: Call | None) -> int:
        """Apply the next entries of a column up to the first that is not straight, and that one as an operation.
        Returns the blocks that they count for."""
        name, numbers = OPERATION_NAMES[column], columns.numbers[column]
        first = len(numbers)
        is_straight = False
        if not self._is_broken:
            try:
                call = call or self._ask.renewed()
                is_straight = columns.go_on(self._dispatcher.node.core, call, left, self._behind)
            except CacheError:
                is_straight = False  # as an operation it gets the reason
            except Exception as broken:  # noqa: BLE001 - the root of an entry
                self._count(name, OK, len(numbers) - first)
                self._distrust(broken)
                self._break(columns.leave(), name)
                return OPERATION_BLOCKS
        self._count(name, OK, len(numbers) - first)
        blocks = columns.blocks(column, first, len(numbers)) * columns.weight
        if is_straight:
            return max(blocks, FEWEST_BLOCKS)
        return TURN_BLOCKS if self._enter(columns.leave(), call) else blocks + OPERATION_BLOCKS

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
        if ref.column and self._columns is not None:
            return OPERATION_NAMES[ref.column], self._columns.columns.operation(ref.column, ref.entry)
        message = self._operations[ref.entry]
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
            answer = operation.run(self._dispatcher, call or self._ask.renewed(), inner, memory)
            if isinstance(answer, Wait):
                run: Callable[[], Any] = partial(self._run_again, operation, inner, memory)
                if self._request.no_wait:
                    run = partial(self._without_waiting, run)
                    answer = self._turns_alone(answer, run)
                if isinstance(answer, Wait):
                    return Parked(ref, name, run, answer)
            self._tell(ref, name, answer)
        except CacheError as error:
            self._refuse(ref, name, error)
        except Exception:  # noqa: BLE001 - the root of an operation: the others have results of their own
            self._break(ref, name)
        return None

    def _run_again(self, operation: FlowOperation[Any, Any, Any, Any], inner: Any, memory: Any) -> Any:
        return operation.run(self._dispatcher, self._ask.renewed(), inner, memory)

    def _without_waiting(self, run: Callable[[], Any]) -> Any:
        """Run an operation that takes several turns, or can do without its transfers. Raises AsksAgain for one that
        must wait."""
        return self._turns_alone(run(), run)

    def _turns_alone(self, outcome: Any, run: Callable[[], Any]) -> Any:
        """Have an outcome that waits for no transfers. What these free is kept for it a moment: it is asked again."""
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
        number = plain_number(ref.column, reply) if ref.column else None
        if number is None or self._columns is None:
            getattr(self._result(ref), name).CopyFrom(reply)
        else:
            self._columns.numbers[ref.column][ref.entry] = number
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
        if ref.column and self._columns is not None:
            return self._columns.odd(ref)
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
        if self._columns is not None:
            self._columns.end()
        response = self._response
        if self._targets and not self._is_broken:
            for cells in self._fill_stock(call):
                pages, generations = array("i", cells.pages).tobytes(), array("I", cells.generations).tobytes()
                response.stock.add(group=cells.group, pages=pages, generations=generations)
        if self._device is not None:
            free, evictable = room_left(self._device)
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


TURN_BLOCKS = 256
"""Blocks of straight entries before other calls get their turn: some 0.5 ms."""

_FLOWS: dict[Column, Callable[..., object]] = {
    GROW: extend_many,
    PUBLISH: publish_many,
    RECYCLE: recycle_many,
    RELEASE: release_many,
}


class EntryRef(NamedTuple):
    """An entry of a column; without a column, an operation of the step."""

    column: Column
    entry: int


class ColumnRun:
    """Progress of a step's columns, and the answers to their entries. ``end`` writes ``answer``.

    ``column``: the first that has entries left; None where all have been looked at. ``numbers``: for each column the
    answers so far, ODD where they are still to come or take more than a number. ``weight``: what each block of the last
    entries counts for in a turn. ``_reach``: entries that are looked at together; fewer while others are not straight,
    for those behind such a one are looked at for nothing.
    """

    def __init__(self, columns: StepColumns, answer: cache_pb2.StepColumnsAnswer) -> None:
        self.columns = columns
        self.answer = answer
        self.column: Column | None = None
        self.weight = 1
        self.numbers: dict[Column, list[int]] = {GROW: [], PUBLISH: [], RECYCLE: [], RELEASE: []}
        self._data: tuple[Any, ...] = columns[1:]
        self._starts = {GROW: columns.growth.starts, PUBLISH: columns.publishes.starts}
        self._at = 0
        self._reach = MAX_OPERATIONS
        self._look_on()

    def go_on(self, core: Core, call: Call, left: int, held: Collection[int]) -> bool:
        """Carry out some next entries of the column, of ``left`` blocks of a turn and one at least, as long as they are
        straight and their sequences are not ``held``. False where one is not: it is the next.

        Raises what has broken the next entry.
        """
        assert self.column is not None
        numbers, data = self.numbers[self.column], self._data[self._at]
        first = len(numbers)
        last = min(len(data[0]), first + self._reach)
        self.weight = 1
        if self.column == PUBLISH and is_tight(core, call):
            self.weight = max(1, TURN_BLOCKS // core.turns.evicted)
        if self.blocks(self.column, first, last) * self.weight > left:
            last = self._cut(self.column, first, left // self.weight)
        _FLOWS[self.column](core, call, data, range(first, last), numbers, held)
        is_straight = len(numbers) == last
        self._reach = min(2 * self._reach, MAX_OPERATIONS) if is_straight else max(1, len(numbers) - first)
        self._look_on()
        return is_straight

    def leave(self) -> EntryRef:
        """Leave the next entry to its operation form; returns the place of its answer."""
        assert self.column is not None
        numbers = self.numbers[self.column]
        numbers.append(ODD)
        ref = EntryRef(self.column, len(numbers) - 1)
        self._look_on()
        return ref

    def odd(self, ref: EntryRef) -> cache_pb2.OperationResult:
        """Result for an answer that takes more than a number."""
        return self.answer.odd.add(column=ref.column, index=ref.entry).result

    def blocks(self, column: Column, first: int, last: int) -> int:
        """Blocks of some entries, one each where they name none."""
        starts = self._starts.get(column)
        return last - first if starts is None else max(starts[last] - starts[first], last - first)

    def end(self) -> None:
        pack_answer(self.numbers, self.answer)

    def _cut(self, column: Column, first: int, left: int) -> int:
        """End of the range of ``left`` blocks, one entry on at least."""
        starts = self._starts.get(column)
        last = first + max(left, 1)
        if starts is not None:
            last = min(last, max(bisect_right(starts, starts[first] + left) - 1, first + 1))
        return last

    def _look_on(self) -> None:
        """Find the column that has entries left."""
        for at in range(self._at, len(IN_ORDER)):
            column = IN_ORDER[at]
            if len(self.numbers[column]) < len(self._data[at][0]):
                self._at, self.column = at, column
                return
        self._at, self.column = len(IN_ORDER), None


Q = TypeVar("Q", bound=Message)
M = TypeVar("M")
A = TypeVar("A")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlowOperation(Operation[Q, R], Generic[Q, M, A, R]):
    """An operation that is one flow under a lease. It is run until it does not wait, and ``reply`` makes its message.

    ``memory`` makes what the flow has to remember from one run to the next. ``quota`` is held right before each run.
    ``has_order``: a Step keeps the order of its operations on one sequence.
    """

    flow: Callable[[Core, Call, Q, M], A | Wait]
    reply: Callable[[A], R]
    memory: Callable[[], M]
    quota: Callable[[Quotas, Call, Q], None] | None = None
    is_repeatable: bool = True
    is_of_lease: bool = True
    has_order: bool = True

    def carry(self, ask: Ask, message: Q) -> R | asyncio.Future[Any]:
        """Run the flow, and have the dispatcher go on with it where it waits."""
        call, memory = ask.call, self.memory()
        assert call is not None, "an operation of a lease"
        answer = self.run(ask.dispatcher, call, message, memory)
        return self._wait_out(ask, message, memory, answer) if isinstance(answer, Wait) else self.reply(answer)

    def run(self, dispatcher: Dispatcher, call: Call, message: Q, memory: M) -> A | Wait:
        """Run the flow once. Raises what refuses the operation."""
        if self.quota is not None and (quotas := dispatcher.admission.quotas) is not None:
            self.quota(quotas, call, message)
        node = dispatcher.node
        return node.run_of(call.model.id, self.flow, node.core, call, message, memory)

    def _wait_out(self, ask: Ask, message: Q, memory: M, wait: Wait) -> asyncio.Future[Any]:
        dispatcher = ask.dispatcher
        ask.goes_on = wait.goes_on

        def run() -> A | Wait:
            dispatcher.free_bytes(ask)  # for this run: what it opens counts by itself
            again = self.run(dispatcher, ask.renewed(), message, memory)
            if isinstance(again, Wait):
                dispatcher.hold_bytes(ask)
            ask.goes_on = isinstance(again, Wait) and again.goes_on
            return again

        async def wait_out(place: Slot) -> R:
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


def _nothing() -> None:
    """Memory of a flow that needs none."""


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


def _prefetch(core: Core, call: Call, m: cache_pb2.PrefetchRequest, sharing: Sharing) -> Prefetched | Wait:
    return prefetch(core, call, m.keys, sharing)


def _extend(core: Core, call: Call, m: cache_pb2.ExtendRequest, _: None) -> int | Wait:
    return extend(core, call, m.sequence_id, cells_from_proto(m.pages))


MATCH_FLOW: FlowOperation[cache_pb2.MatchRequest, Sharing, Matched, cache_pb2.MatchResponse] = FlowOperation(
    name="CacheService/Match",
    flow=_match,
    memory=Sharing,
    reply=matched_to_proto,
    quota=lambda quotas, call, _: quotas.require_sequence(call),
)
ALLOCATE_FLOW: FlowOperation[cache_pb2.AllocateRequest, None, Allocated, cache_pb2.AllocateResponse] = FlowOperation(
    name="CacheService/Allocate",
    flow=_allocate,
    memory=_nothing,
    reply=allocated_to_proto,
    quota=lambda quotas, call, m: quotas.require_blocks(call, m.sequence_id, m.blocks),
)
PUBLISH_FLOW: FlowOperation[cache_pb2.PublishRequest, Publishing, Published, cache_pb2.PublishResponse] = FlowOperation(
    name="CacheService/Publish", flow=_publish, memory=Publishing, reply=published_to_proto
)
SWAP_FLOW: FlowOperation[cache_pb2.SwapRequest, None, Swapped, cache_pb2.SwapResponse] = FlowOperation(
    name="CacheService/Swap",
    flow=_swap,
    memory=_nothing,
    reply=swapped_to_proto,
    quota=lambda quotas, call, m: quotas.require_swapped(call, m.sequence_id),
)
RECYCLE_FLOW: FlowOperation[cache_pb2.RecycleRequest, Recycling, Recycled, cache_pb2.RecycleResponse] = FlowOperation(
    name="CacheService/Recycle", flow=_recycle, memory=Recycling, reply=recycled_to_proto
)
RELEASE_FLOW: FlowOperation[cache_pb2.ReleaseRequest, None, int, cache_pb2.ReleaseResponse] = FlowOperation(
    name="CacheService/Release",
    flow=_release,
    memory=_nothing,
    reply=lambda freed: cache_pb2.ReleaseResponse(freed_pages=freed),
    kind=CallKind.LIFE,
)
PREFETCH_FLOW: FlowOperation[cache_pb2.PrefetchRequest, Sharing, Prefetched, cache_pb2.PrefetchResponse] = (
    FlowOperation(
        name="CacheService/Prefetch",
        flow=_prefetch,
        memory=lambda: Sharing(Urgency.BACKGROUND),
        reply=prefetched_to_proto,
        has_order=False,
    )
)
EXTEND: FlowOperation[cache_pb2.ExtendRequest, None, int, cache_pb2.ExtendResponse] = FlowOperation(
    name="CacheService/Extend",  # within a Step alone
    flow=_extend,
    memory=_nothing,
    reply=lambda blocks: cache_pb2.ExtendResponse(blocks=blocks),
)

OPERATIONS: dict[str, FlowOperation[Any, Any, Any, Any]] = {
    "match": MATCH_FLOW,
    "allocate": ALLOCATE_FLOW,
    "publish": PUBLISH_FLOW,
    "swap": SWAP_FLOW,
    "recycle": RECYCLE_FLOW,
    "release": RELEASE_FLOW,
    "prefetch": PREFETCH_FLOW,
    "extend": EXTEND,
}
"""Operations by their names in StepOperation and OperationResult."""
