"""Many operations in one message: what a step carries, and how its answer finds back to who asked. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kvcache.v1 import cache_pb2

from cachesvc.model.answers import GroupCells
from cachesvc.wire.convert import cells_from_proto
from cachesvc_client.errors import (
    CacheClientError,
    DaemonFault,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    error_of,
)
from cachesvc_client.keys import PackedKeys
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.wire.methods import HELD, Operation, no_action

STEPS_UNDER_WAY = 16
"""Steps that may be sent before the first is collected: an engine runs one or two ahead."""


class Recorded(Protocol):
    """A handle of a sequence, of either client."""

    @property
    def record(self) -> SequenceRecord:
        """What is known of the sequence."""


H = TypeVar("H", bound=Recorded)


class StepBatch(Generic[H]):
    """Operations of one step, in order. Each method returns where its result will stand in the step's results."""

    def __init__(self, lease: LeaseRecord, make_handle: Callable[[SequenceRecord], H]) -> None:
        self.operations: list[Operation[Any]] = []
        self._lease = lease
        self._make_handle = make_handle

    def match(self, keys: PackedKeys, *, max_blocks: int = 0, sequence_id: int | None = None) -> int:
        """Open a sequence; the result is its handle."""
        operation: Operation[Any] = self._lease.new_sequence(sequence_id).open(keys, max_blocks)
        take = operation.apply
        operation.apply = lambda response: self._make_handle(take(response))
        return self._add(operation)

    def allocate(self, sequence: H, blocks: int) -> int:
        """As ``Sequence.allocate``; the result is an Allocated."""
        return self._add(sequence.record.allocate(blocks))

    def publish(self, sequence: H, upto_blocks: int, keys: PackedKeys = b"") -> int:
        """As ``Sequence.publish``; the result is a Published."""
        return self._add(sequence.record.publish(upto_blocks, keys))

    def recycle(self, sequence: H, computed_tokens: int, *, launch: int | None = None) -> int:
        """As ``Sequence.recycle``; the result is a Recycled."""
        return self._add(sequence.record.recycle(computed_tokens, launch))

    def swap_out(self, sequence: H, *, launch: int | None = None) -> int:
        """As ``Sequence.swap_out``; the result is a Swapped."""
        return self._add(sequence.record.swap_out(launch))

    def swap_in(self, sequence: H) -> int:
        """As ``Sequence.swap_in``; the result is a Swapped."""
        return self._add(sequence.record.swap_in())

    def release(self, sequence: H, *, launch: int | None = None) -> int:
        """As ``Sequence.release``; the result is the number of pages that came back, 0 while launches use it."""
        record = sequence.record
        if record.end_later(launch):
            return self._add(Operation(HELD, None, lambda _: 0, no_action, record))
        self._lease.growing.pop(record.id, None)
        return self._add(record.release(self._lease.stock))

    def prefetch(self, keys: PackedKeys) -> int:
        """As ``Lease.prefetch``; the result is a Prefetched."""
        return self._add(self._lease.prefetch(keys))

    def _add(self, operation: Operation[Any]) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1


@dataclass(slots=True)
class SentStep:
    """A step on its way. ``results`` is filled by the answer; ``hidden`` operations come before the caller's, of which
    those at ``held`` were not sent: they are releases that wait for launches. ``told``: the growth that goes first.
    ``is_quiet``: nobody collects the results."""

    request: cache_pb2.StepRequest
    operations: list[Operation[Any]]
    hidden: int
    held: tuple[int, ...]
    told: tuple[tuple[SequenceRecord, list[GroupCells]], ...] = ()
    is_quiet: bool = False
    results: list[Any] = field(default_factory=list)
    error: CacheClientError | None = None
    is_answered: bool = False

    def outcome(self) -> list[Any]:
        """One result or CacheClientError for each operation. Raises what refused the step as a whole."""
        assert self.is_answered
        if self.error is not None:
            raise self.error
        results = self.results[self.hidden :]
        for place in self.held:
            results.insert(place, 0)
        return results


class StepBook:
    """The steps of one lease that have no answer yet, oldest first; answers come in the order of the requests."""

    def __init__(self, lease: LeaseRecord) -> None:
        self.under_way: deque[SentStep] = deque()
        self._lease = lease

    @property
    def has_untold(self) -> bool:
        """True when the daemon has not been told of all growth from stock: once the stock is gone it never could be."""
        return any(record.growth for record in self._lease.growing.values())

    @property
    def is_full(self) -> bool:
        """True when no step can be sent until an answer was taken in."""
        return len(self.under_way) >= STEPS_UNDER_WAY

    def enter(self, batch: StepBatch[Any] | None) -> SentStep:
        """Number a batch and put the growth of sequences before it, and releases that waited for launches.

        Raises LimitExceeded, LeaseLost, AlreadyClosed.
        """
        self._lease.check()
        if self.is_full:
            raise LimitExceeded.from_message(
                f"{len(self.under_way)} steps are under way; collect the results of the first"
            )
        asked = batch.operations if batch is not None else []
        told = tuple([(record, record.growth) for record in self._lease.growing.values() if record.growth])
        growth = [record.extend() for record, _ in told]
        self._lease.growing.clear()
        stock = self._lease.stock
        owners = [operation.owner for operation in asked]
        ended = [record.release(stock) for record in self._lease.take_ended(owners)]
        held = tuple(place for place, operation in enumerate(asked) if operation.method is HELD)
        self._lease.ending += [record for place in held if isinstance(record := asked[place].owner, SequenceRecord)]
        hidden = growth + ended
        operations = hidden + [operation for operation in asked if operation.method is not HELD]
        request = cache_pb2.StepRequest(
            lease_id=self._lease.id,
            request_id=self._lease.next_request_id(),
            operations=[_as_message(operation) for operation in operations],
            stock_pages=stock.targets if stock is not None else (),
        )
        for operation in operations:
            if isinstance(operation.owner, SequenceRecord):
                operation.owner.steps += 1
        step = SentStep(request, operations, len(hidden), held, told)
        self.under_way.append(step)
        return step

    def answer(self, response: cache_pb2.StepResponse) -> None:
        """Take in the answer of the oldest step."""
        step = self.under_way.popleft() if self.under_way else None
        if step is None or step.request.request_id != response.request_id:
            raise DaemonFault(f"an answer came for step {response.request_id}, which is not the next one")
        if response.HasField("error"):
            self._refuse(step, error_of(response.error))
            return
        if len(response.results) != len(step.operations):
            self._end(step, DaemonFault(f"{len(response.results)} results for {len(step.operations)} operations"))
            return
        if self._lease.stock is not None:
            self._lease.stock.add(cells_from_proto(response.stock))
        for operation, result in zip(step.operations, response.results, strict=True):
            step.results.append(self._take(operation, result))
        self._hold_again(step)
        step.is_answered = True

    def refuse(self, error: CacheClientError) -> None:
        """No answer will ever come: every step under way fails."""
        while self.under_way:
            self._end(self.under_way.popleft(), error)

    def _refuse(self, step: SentStep, error: CacheClientError) -> None:
        """The daemon refused a step before it did any of it: the growth that it told of is told by the next one."""
        untold = step.told if not isinstance(error, LeaseLost) else ()
        self._end(step, error, but_for=len(untold))
        for record, cells in untold:
            record.growth = cells + record.growth
            self._lease.growing[record.id] = record

    def _take(self, operation: Operation[Any], result: cache_pb2.OperationResult) -> Any:
        _leave_step(operation)
        kind = result.WhichOneof("result")
        if kind == operation.method.step_field:
            answer = operation.apply(getattr(result, kind))
            self._forget_released(operation)
            return answer
        error = (
            error_of(result.error)
            if kind == "error"
            else DaemonFault(f"the answer to {operation.method.step_field} is a {kind}")
        )
        operation.end_with(error)
        self._forget_released(operation)
        return error

    def _forget_released(self, operation: Operation[Any]) -> None:
        if isinstance(operation.owner, SequenceRecord) and operation.owner.is_released:
            self._lease.forget(operation.owner)

    def _hold_again(self, step: SentStep) -> None:
        """Releases that nobody asks for again, and that the daemon did not do, go with a later step."""
        for operation in step.operations[len(step.told) : step.hidden]:
            record = operation.owner
            if isinstance(record, SequenceRecord) and not record.is_released:
                self._lease.hold(record)

    def _end(self, step: SentStep, error: CacheClientError, *, but_for: int = 0) -> None:
        """No result comes: all operations fail, but for the first few."""
        for number, operation in enumerate(step.operations):
            _leave_step(operation)
            if number >= but_for:
                operation.fail(error)
        self._hold_again(step)
        if isinstance(error, LeaseLost):
            self._lease.lose(error)
        step.error = error
        step.is_answered = True


def _leave_step(operation: Operation[Any]) -> None:
    if isinstance(operation.owner, SequenceRecord):
        operation.owner.steps -= 1


def _as_message(operation: Operation[Any]) -> cache_pb2.StepOperation:
    field_name = operation.method.step_field
    if not field_name:
        raise InvalidRequest(f"a step cannot carry {operation.method.name}")
    fields: dict[str, Any] = {field_name: operation.request}
    return cache_pb2.StepOperation(**fields)
