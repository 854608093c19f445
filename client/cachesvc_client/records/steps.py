"""Many operations in one message: a step, and the way of its answer to the callers. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcache.v1 import cache_pb2

from cachesvc.wire.columns import ANSWER_FIELDS, GROW, ODD, OPERATION_NAMES, PUBLISH, RECYCLE, RELEASE, Column
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
from cachesvc_client.records.entries import Entry, Grow, Release, pack_entries
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.stock import Stock
from cachesvc_client.wire.messages import build_recycle, parse_recycle
from cachesvc_client.wire.methods import HELD, Operation
from cachesvc_client.wire.methods import RECYCLE as RECYCLE_CALL
from cachesvc_client.wire.methods import RELEASE as RELEASE_CALL

STEPS_UNDER_WAY = 16
"""Steps that may be sent before the first is collected: an engine runs one or two ahead."""

MOST_ENDED = 256
"""Releases that a step carries unasked: what several refused steps leave must not make the next one too large."""


@dataclass(slots=True, eq=False)
class SentStep:
    """A step in flight. ``asked``: subjects of its results, in order; ``entries`` and ``operations`` are what was sent,
    of which growth and some releases are the client's own. ``ended``: sequences that it releases. ``is_quiet``: the
    caller collects no results."""

    request: cache_pb2.StepRequest
    asked: list[Operation[Any] | Entry]
    entries: dict[Column, list[Any]]
    operations: list[Operation[Any]]
    ended: list[SequenceRecord]
    is_quiet: bool = False
    results: dict[int, Any] = field(default_factory=dict)
    error: CacheClientError | None = None
    is_answered: bool = False

    def outcome(self) -> list[Any]:
        """Result or CacheClientError of each operation. Raises what refused the step as a whole."""
        assert self.is_answered
        if self.error is not None:
            raise self.error
        return [self.results.get(id(asked), 0) for asked in self.asked] if self.asked else []

    def all(self) -> list[Operation[Any] | Entry]:
        """Everything that was sent."""
        return [*(entry for column in self.entries.values() for entry in column), *self.operations]


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

    @property
    def has_untold(self) -> bool:
        """True when the daemon does not know of all growth from stock: once the stock is gone it never could."""
        return any(record.growth for record in self._lease.growing.values())

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
        """Number a batch and put the growth of sequences before it, and releases that waited for launches. There is
        room: see ``require_room``."""
        lease = self._lease
        asked = batch.asked if batch is not None else []
        entries: dict[Column, list[Any]] = {GROW: [], PUBLISH: [], RECYCLE: [], RELEASE: []}
        operations: list[Operation[Any]] = []
        ended: list[SequenceRecord] = []
        if lease.growing:
            grown = [record for record in lease.growing.values() if record.growth]
            lease.growing.clear()
            entries[GROW] = [Grow(record, record.take_growth(), record.blocks) for record in grown]
        if lease.ending:
            ended = lease.take_ended([each.owner for each in asked], MOST_ENDED)
            entries[RELEASE] = [Release(record, lease.stock) for record in ended]
        for each in asked:
            if not isinstance(each, Operation):
                entries[each.column].append(each)
            elif each.method is not HELD:
                operations.append(each)
            elif isinstance(each.owner, SequenceRecord):
                lease.ending.append(each.owner)
        request = cache_pb2.StepRequest(lease_id=lease.id, request_id=lease.next_request_id())
        if batch is not None and batch.no_wait:
            request.no_wait = True
        if lease.stock is not None:
            request.stock_pages.extend(lease.stock.targets)
            request.stock_due = lease.stock.due
            if lease.stock.has_surplus:
                operations.append(_give_back_surplus(lease.stock))
        groups = len(lease.registration.layout.groups)
        if any(entries.values()):
            pack_entries(entries, groups, request.columns)
        if operations:
            request.operations.extend(map(_as_message, operations))
        released: list[Any] = [entry.owner for entry in entries[RELEASE]]
        released += [each.owner for each in operations if each.method is RELEASE_CALL]
        step = SentStep(request, asked, entries, operations, released)
        if asked or ended or operations or entries[GROW]:
            for sent_one in step.all():
                if isinstance(sent_one.owner, SequenceRecord):
                    sent_one.owner.steps += 1
        self.under_way.append(step)
        return step

    def answer(self, response: cache_pb2.StepResponse) -> None:
        """Take in the answer of the oldest step."""
        if response.HasField("error"):
            self.refuse_one(response.request_id, error_of(response.error))
            return
        step = self._next(response.request_id)
        if len(response.results) != len(step.request.operations):
            self._end(
                step, DaemonFault(f"{len(response.results)} results for {len(step.request.operations)} operations")
            )
            return
        try:
            numbers, odd = _read_answer(step, response.columns)
        except DaemonFault as fault:
            self._end(step, fault)
            return
        if response.free_pages:
            self._packed_room, self._room = (response.free_pages, response.evictable_pages), None
        if self._lease.stock is not None:
            for cells in response.stock:
                self._lease.stock.add_packed(cells.group, cells.pages, cells.generations)
        for column, entries in step.entries.items():
            if not entries:
                continue
            for index, (entry, number) in enumerate(zip(entries, numbers[column].tolist(), strict=False)):
                result = odd.get((column, index)) if odd else None
                self._keep(step, entry, entry.plain(number) if result is None else _take_entry(entry, result))
        if step.operations:
            for operation, message in zip(step.operations, response.results, strict=True):
                self._keep(step, operation, _take(operation, message))
        if step.ended:
            self._hold_again(step)
        step.is_answered = True

    def refuse(self, error: CacheClientError) -> None:
        """Fail every step in flight: no answer will come."""
        while self.under_way:
            self._end(self.under_way.popleft(), error)

    def refuse_one(self, request_id: int, error: CacheClientError) -> None:
        """Note that the daemon refused the oldest step before it did any of it: the next step reports its growth."""
        step = self._next(request_id)
        if not isinstance(error, LeaseLost):
            for entry in step.entries[GROW]:
                entry.owner.growth = entry.cells + entry.owner.growth
                entry.owner.steps -= 1
                self._lease.growing[entry.owner.id] = entry.owner
            step.entries[GROW] = []
        self._end(step, error)

    def _next(self, request_id: int) -> SentStep:
        """The oldest step, which is answered now. Raises DaemonFault where it is another one's answer."""
        step = self.under_way.popleft() if self.under_way else None
        if step is None or step.request.request_id != request_id:
            raise DaemonFault(f"an answer came for step {request_id}, which is not the next one")
        return step

    def _keep(self, step: SentStep, asked: Operation[Any] | Entry, result: Any) -> None:
        step.results[id(asked)] = result
        owner = asked.owner
        if isinstance(owner, SequenceRecord):
            owner.steps -= 1
            if owner.is_released:
                self._lease.forget(owner)

    def _hold_again(self, step: SentStep) -> None:
        """Move releases that the daemon did not do to a later step: it holds the sequences' pages until then."""
        for record in step.ended:
            if not record.is_released:
                self._lease.hold(record)

    def _end(self, step: SentStep, error: CacheClientError) -> None:
        """Fail all operations of a step: no result comes."""
        for each in step.all():
            if isinstance(each.owner, SequenceRecord):
                each.owner.steps -= 1
            each.fail(error)
        self._hold_again(step)
        if isinstance(error, LeaseLost):
            self._lease.lose(error)
        step.error = error
        step.is_answered = True


Told = dict[Column, npt.NDArray[np.uint32]]
"""The answers of each column."""
NO_NUMBERS = np.empty(0, np.uint32)
Odd = dict[tuple[Column, int], cache_pb2.OperationResult]
_ODD_BYTES = ODD.to_bytes(4, "little")


def _read_answer(step: SentStep, answer: cache_pb2.StepColumnsAnswer) -> tuple[Told, Odd]:
    """The numbers of each column, and the results of entries that are more than a number. Raises DaemonFault."""
    odd = {(each.column, each.index): each.result for each in answer.odd} if len(answer.odd) else {}
    numbers: Told = {}
    for column, entries in step.entries.items():
        raw, wanted = getattr(answer, ANSWER_FIELDS[column]), len(entries)
        if not (raw or wanted):
            numbers[column] = NO_NUMBERS
            continue
        told = numbers[column] = np.frombuffer(raw, np.uint32) if raw and len(raw) % 4 == 0 else NO_NUMBERS
        if len(told) != wanted:
            raise DaemonFault(f"{ANSWER_FIELDS[column]} has {len(told)} answers for {wanted} entries")
        if _ODD_BYTES in raw and any((column, at) not in odd for at in np.flatnonzero(told == ODD).tolist()):
            raise DaemonFault(f"{ANSWER_FIELDS[column]} has entries without an answer")
    return numbers, odd


def _give_back_surplus(stock: Stock) -> Operation[Any]:
    """Give back what the stock has above its targets. A refusal leaves it in the stock."""
    pages = stock.take_surplus()
    return Operation(RECYCLE_CALL, build_recycle(0, 0, pages), parse_recycle, lambda _: stock.add(pages))


def _take(operation: Operation[Any], result: cache_pb2.OperationResult) -> Any:
    kind = result.WhichOneof("result")
    if kind == operation.method.step_field:
        return operation.apply(getattr(result, kind))
    error = _error(operation.method.step_field, kind, result)
    operation.end_with(error)
    return error


def _take_entry(entry: Entry, result: cache_pb2.OperationResult) -> Any:
    name, kind = OPERATION_NAMES[entry.column], result.WhichOneof("result")
    if kind == name:
        return entry.take(getattr(result, name))
    error = _error(name, kind, result)
    entry.fail(error)
    return error


def _error(name: str, kind: str | None, result: cache_pb2.OperationResult) -> CacheClientError:
    return error_of(result.error) if kind == "error" else DaemonFault(f"the answer to {name} is a {kind}")


def _as_message(operation: Operation[Any]) -> cache_pb2.StepOperation:
    field_name = operation.method.step_field
    if not field_name:
        raise InvalidRequest(f"a step cannot carry {operation.method.name}")
    fields: dict[str, Any] = {field_name: operation.request}
    return cache_pb2.StepOperation(**fields)
