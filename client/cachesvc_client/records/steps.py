"""Many operations in one message: a step, and the way of its answer to the callers. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

from kvcache.v1 import cache_pb2

from cachesvc.wire.columns import ANSWER_FIELDS, IN_ORDER, ODD, Column
from cachesvc.wire.convert import unpack_numbers
from cachesvc_client.core.errors import (
    CacheClientError,
    DaemonFault,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    error_of,
)
from cachesvc_client.records.batches import StepBatch
from cachesvc_client.records.entries import NO_PLACE, Entries, GrowEntries, operation_error
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.stock import Stock
from cachesvc_client.wire.messages import build_recycle, parse_recycle
from cachesvc_client.wire.methods import RECYCLE as RECYCLE_CALL
from cachesvc_client.wire.methods import RELEASE as RELEASE_CALL
from cachesvc_client.wire.methods import Operation

STEPS_UNDER_WAY = 16
"""Steps that may be sent before the first is collected: an engine runs one or two ahead."""

MOST_ENDED = 256
"""Releases that a step carries unasked: what several refused steps leave must not make the next one too large."""


@dataclass(slots=True, eq=False)
class SentStep:
    """A step in flight. ``number``: among the lease's; ``size``: number of its results. ``growth``, the other
    ``entries`` of columns, and ``operations``, with their places, are what was sent: growth and some releases are the
    client's own. ``ended``: sequences that it releases. ``results``: by place. ``is_quiet``: the caller collects none.
    """

    request: cache_pb2.StepRequest
    number: int
    size: int
    growth: GrowEntries
    entries: Sequence[Entries]
    operations: list[tuple[int, Operation[Any]]]
    ended: list[SequenceRecord]
    results: dict[int, Any]
    is_quiet: bool = False
    error: CacheClientError | None = None
    is_answered: bool = False

    @property
    def waits_s(self) -> float:
        """Time for which the daemon may wait before it answers, beside the time limit of a step, seconds."""
        return 0.0 if self.request.no_wait else sum(operation.waits_s for _, operation in self.operations)

    def outcome(self) -> list[Any]:
        """Result or CacheClientError of each operation. Raises what refused the step as a whole."""
        assert self.is_answered
        if self.error is not None:
            raise self.error
        results = self.results
        return [results.get(place, 0) for place in range(self.size)]


class StepBook:
    """The steps of one lease that have no answer yet, oldest first; answers come in the order of the requests."""

    def __init__(self, lease: LeaseRecord) -> None:
        self.under_way: deque[SentStep] = deque()
        self._packed_room = b"", b""
        self._room: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._lease = lease

    @property
    def room(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Free and evictable pages of each group, as of the last answer; empty before the first."""
        if self._room is None:
            free, evictable = map(unpack_numbers, self._packed_room)
            self._room = tuple(free), tuple(evictable)
        return self._room

    def waits_until(self, step: SentStep) -> float:
        """Seconds for which the daemon may wait in all steps under way up to one of them."""
        before = takewhile(lambda each: each is not step, self.under_way)
        return step.waits_s + sum(each.waits_s for each in before)

    @property
    def is_full(self) -> bool:
        """True when no step can be sent until an answer was taken in."""
        return len(self.under_way) >= STEPS_UNDER_WAY

    def require_room(self) -> None:
        """Raises LimitExceeded, LeaseLost, AlreadyClosed where no step can be sent."""
        self._lease.check()
        if len(self.under_way) >= STEPS_UNDER_WAY:
            raise LimitExceeded.from_message(
                f"{len(self.under_way)} steps are under way; collect the results of the first"
            )

    def enter(self, batch: StepBatch[Any] | None) -> SentStep:
        """Number a batch and put the growth of sequences before it, and releases that waited for launches. The batch is
        empty then. There is room: see ``require_room``."""
        lease = self._lease
        batch = StepBatch(lease, _no_handle) if batch is None else batch
        self._end_sequences(batch)
        number, growth, operations = lease.growing.step, lease.growing.take(), batch.operations
        request = cache_pb2.StepRequest(lease_id=lease.id, request_id=lease.next_request_id())
        if batch.no_wait:
            request.no_wait = True
        if lease.stock is not None:
            request.stock_pages.extend(lease.stock.targets)
            request.stock_due = lease.stock.due
            if lease.stock.has_surplus:
                operations.append((NO_PLACE, _give_back_surplus(lease.stock)))
        ended = batch.releases.owners.copy()
        entries = (growth, batch.publishes, batch.recycles, batch.releases)  # as ``IN_ORDER``
        for each in entries:
            if each.owners:
                each.write(request.columns)
                for owner in each.owners:
                    owner.last_step = number
        for _, operation in operations:
            _add_message(request, operation)
            if isinstance(operation.owner, SequenceRecord):
                operation.owner.last_step = number
                if operation.method is RELEASE_CALL:
                    ended.append(operation.owner)
        batch.note_sent()
        step = SentStep(request, number, batch.size, growth, entries, operations, ended, batch.refused)
        batch.clear()
        self.under_way.append(step)
        return step

    def _end_sequences(self, batch: StepBatch[Any]) -> None:
        """Add releases that waited for launches to a batch, and take growth back that it need not tell."""
        lease = self._lease
        if lease.ending:
            for record in lease.take_ended(batch.owners, MOST_ENDED):
                batch.releases.add(record, NO_PLACE)
        for record in batch.held:
            lease.hold(record)
        if batch.releases.owners and lease.growing:
            lease.growing.withdraw(set(batch.releases.owners).difference(batch.publishes.owners))

    def answer(self, response: cache_pb2.StepResponse) -> None:
        """Take in the answer of the oldest step."""
        if response.HasField("error"):
            self.refuse_one(response.request_id, error_of(response.error))
            return
        step = self._next(response.request_id)
        if len(response.results) != len(step.operations):
            self._end(step, DaemonFault(f"{len(response.results)} results for {len(step.operations)} operations"))
            return
        try:
            told, odd = _read_answer(step, response.columns)
        except DaemonFault as fault:
            self._end(step, fault)
            return
        if response.free_pages:
            self._packed_room, self._room = (response.free_pages, response.evictable_pages), None
        if self._lease.stock is not None:
            for cells in response.stock:
                self._lease.stock.add_packed(cells.group, cells.pages, cells.generations)
        for entries, numbers in zip(step.entries, told, strict=True):
            if numbers:
                entries.take(numbers, odd.get(entries.column, _NOTHING_ODD), step.results)
        for (place, operation), message in zip(step.operations, response.results, strict=True):
            step.results[place] = _take(operation, message)
            if isinstance(operation.owner, SequenceRecord) and operation.owner.is_released:
                self._lease.end(operation.owner)
        self._finish(step)

    def refuse(self, error: CacheClientError) -> None:
        """Fail every step in flight: no answer will come."""
        while self.under_way:
            self._end(self.under_way.popleft(), error)

    def refuse_one(self, request_id: int, error: CacheClientError) -> None:
        """Note that the daemon refused the oldest step before it did any of it: the next step reports its growth."""
        step = self._next(request_id)
        if not isinstance(error, LeaseLost) and step.growth.owners:
            self._lease.growing.put_back(step.growth)
            step.entries = step.entries[1:]
        self._end(step, error)

    def _next(self, request_id: int) -> SentStep:
        """The oldest step, which is answered now. Raises DaemonFault where it is another one's answer."""
        step = self.under_way.popleft() if self.under_way else None
        if step is None or step.request.request_id != request_id:
            raise DaemonFault(f"an answer came for step {request_id}, which is not the next one")
        return step

    def _end(self, step: SentStep, error: CacheClientError) -> None:
        """Fail all operations of a step: no result comes."""
        for entries in step.entries:
            entries.fail_all(error)
        for _, operation in step.operations:
            operation.fail(error)
        step.error = error
        self._finish(step)
        if isinstance(error, LeaseLost):
            self._lease.lose(error)

    def _finish(self, step: SentStep) -> None:
        """Note that a step has ended. Releases that the daemon did not do go with a later one: it holds the sequences'
        pages until then."""
        for record in step.ended:
            if record.is_released:
                self._lease.end(record)
            else:
                self._lease.hold(record)
        self._lease.answered_step = step.number
        step.is_answered = True


Odd = dict[Column, dict[int, cache_pb2.OperationResult]]
"""Results of entries that are more than a number, by column and entry."""
_NOTHING_ODD: dict[int, cache_pb2.OperationResult] = {}
_NAMES = [ANSWER_FIELDS[column] for column in IN_ORDER]
_columns_of = attrgetter(*_NAMES)
_ODD_BYTES = ODD.to_bytes(4, "little")


def _read_answer(step: SentStep, answer: cache_pb2.StepColumnsAnswer) -> tuple[list[list[int]], Odd]:
    """The numbers of each column, and what is more than a number. Raises DaemonFault."""
    odd: Odd = {}
    for each in answer.odd if len(answer.odd) else ():
        odd.setdefault(each.column, {})[each.index] = each.result
    told: list[list[int]] = []
    for name, raw, entries in zip(_NAMES, _columns_of(answer), step.entries, strict=True):
        if len(raw) != 4 * len(entries.owners):
            raise DaemonFault(f"{name} has {len(raw) / 4:g} answers for {len(entries.owners)} entries")
        numbers = memoryview(raw).cast("I").tolist() if raw else []
        if _ODD_BYTES in raw:
            known = odd.get(entries.column, _NOTHING_ODD)
            if any(number == ODD and at not in known for at, number in enumerate(numbers)):
                raise DaemonFault(f"{name} has entries without an answer")
        told.append(numbers)
    return told, odd


def _no_handle(_: SequenceRecord) -> SequenceRecord:
    raise AssertionError("a batch without operations opens no sequence")


def _give_back_surplus(stock: Stock) -> Operation[Any]:
    """Give back what the stock has above its targets. A refusal leaves it in the stock."""
    pages = stock.take_surplus()
    return Operation(RECYCLE_CALL, build_recycle(0, 0, pages), parse_recycle, lambda _: stock.add(pages))


def _take(operation: Operation[Any], result: cache_pb2.OperationResult) -> Any:
    kind = result.WhichOneof("result")
    if kind == operation.method.step_field:
        return operation.apply(getattr(result, kind))
    error = operation_error(operation.method.step_field, kind, result)
    operation.end_with(error)
    return error


def _add_message(step: cache_pb2.StepRequest, operation: Operation[Any]) -> None:
    field_name = operation.method.step_field
    if not field_name:
        raise InvalidRequest(f"a step cannot carry {operation.method.name}")
    getattr(step.operations.add(), field_name).CopyFrom(operation.request)
