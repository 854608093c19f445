"""Many operations in one message: a step, and the way of its answer to the callers. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from kvcache.v1 import cache_pb2

from cachesvc.model.answers import NO_POSITIONS, Expected, Positions
from cachesvc.wire.columns import ANSWER_FIELDS, IN_ORDER, ODD, RECYCLE, RELEASE, Column
from cachesvc.wire.convert import unpack_numbers
from cachesvc_client.core.arguments import Retention, explains_arguments, one_each, renamed
from cachesvc_client.core.errors import (
    CacheClientError,
    DaemonFault,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    error_of,
)
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.entries import (
    NO_PLACE,
    Entries,
    GrowEntries,
    PublishEntries,
    RecycleEntries,
    ReleaseEntries,
    Stock,
    operation_error,
)
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import NO_DEAD, NO_STATES, Due, Operation, SequenceRecord, States
from cachesvc_client.wire.messages import build_recycle, parse_recycle
from cachesvc_client.wire.methods import RECYCLE as RECYCLE_CALL
from cachesvc_client.wire.methods import RELEASE as RELEASE_CALL

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


BEHIND_COLUMNS = RELEASE + 1
"""Reached by a sequence that has an operation: its further ones are no entries of columns."""


class Recorded(Protocol):
    """A handle of a sequence, of either client."""

    @property
    def record(self) -> SequenceRecord:
        """State of the sequence."""


H = TypeVar("H", bound=Recorded)


class StepBatch(Generic[H]):
    """Operations of one step, in order. Each method returns where its result will stand in the step's results.

    Publishes, recycles and releases at the beginning travel in columns, many in a few bytes: ask for them before
    anything else. ``size``: number of results. ``no_wait``: an operation that has to wait for transfers is refused
    (DeadlineExceeded), and these go on: ask again later. A batch is empty once it was sent, and can be filled again.
    """

    def __init__(self, lease: LeaseRecord, make_handle: Callable[[SequenceRecord], H]) -> None:
        self.no_wait = False
        self._lease = lease
        self._make_handle = make_handle
        self.clear()

    def clear(self) -> None:
        """Begin anew with other lists: a step in flight has those that were filled so far."""
        self.publishes = PublishEntries()
        self.recycles = RecycleEntries()
        self.releases = ReleaseEntries()
        self.operations: list[tuple[int, Operation[Any]]] = []
        self.held: list[SequenceRecord] = []
        self.refused: dict[int, CacheClientError] = {}
        self.size = 0
        self._are_columns = True
        self._reached: dict[int, int] = {}
        self._asked: dict[SequenceRecord, int] = {}

    def note_sent(self) -> None:
        """Note in the sequences what is published: a batch that is dropped unsent leaves them as they were."""
        for record, upto in self._asked.items():
            record.asked_blocks = upto

    @property
    def owners(self) -> list[SequenceRecord]:
        """Sequences of all operations, each as often as it has some."""
        owners = [*self.publishes.owners, *self.recycles.owners, *self.releases.owners, *self.held]
        if self.operations:
            owners += [each.owner for _, each in self.operations if isinstance(each.owner, SequenceRecord)]
        return owners

    @explains_arguments
    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
        upto_blocks: int = 0,
        short_suffix: bool = False,
    ) -> int:
        """Open a sequence; the result is its handle. With ``upto_blocks``, which no hit exceeds, the batch goes on with
        its ``allocate``, whose result comes next."""
        record = self._lease.new_sequence(sequence_id)
        record.retention = retention
        operation: Operation[Any] = record.open(keys, max_blocks, waited_seconds, expected)
        take = operation.apply
        operation.apply = lambda response: self._make_handle(take(response))
        place = self._add(operation)
        if upto_blocks:
            self._add(record.allocate(upto_blocks, short_suffix=short_suffix))
        return place

    @renamed(blocks="upto_blocks")
    @explains_arguments
    def allocate(
        self, sequence: H, upto_blocks: int, *, short_suffix: bool = False, positions: Positions = NO_POSITIONS
    ) -> int:
        """Add a ``Sequence.allocate``; the result is an Allocated."""
        return self._add(sequence.record.allocate(upto_blocks, short_suffix=short_suffix, positions=positions))

    @explains_arguments
    def publish(
        self,
        sequence: H,
        upto_blocks: int,
        keys: PackedKeys = b"",
        *,
        first_key: int = 0,
        states: States = NO_STATES,
    ) -> int:
        """Add a ``Sequence.publish``; the result is a Published. ``keys`` may begin at block ``first_key``, from where
        on none was published yet."""
        if states:
            self._publish_behind(sequence.record, upto_blocks, keys, first_key, states, self.size)
        else:
            self._publish((self.size,), (sequence.record,), (upto_blocks,), (keys,), (first_key,))
            if self.refused and self.size in self.refused:
                raise self.refused.pop(self.size)
        return self._next_place()

    @explains_arguments
    def publish_all(
        self,
        sequences: Sequence[H],
        upto_blocks: int | Sequence[int],
        keys: Sequence[PackedKeys] = (),
        *,
        first_key: int | Sequence[int] = 0,
    ) -> range:
        """Add a ``publish`` of each sequence; the results are those of each, in order. ``upto_blocks``, ``first_key``:
        one for all or one for each; ``keys``: those of each, or none at all where Match was told all.

        A sequence that cannot be published has the error as its result, and the others go on. Raises InvalidRequest
        (lists of several lengths).
        """
        count = len(sequences)
        uptos, first_keys = one_each(upto_blocks, count), one_each(first_key, count)
        if not len(uptos) == len(first_keys) == (len(keys) or count) == count:
            raise InvalidRequest(f"{count} sequences need a number of blocks each, and keys each or none")
        places = range(self.size, self.size + count)
        self.size += count  # first: after a wrong argument, those before it are in the batch
        self._publish(places, [each.record for each in sequences], uptos, keys or repeat(b"", count), first_keys)
        return places

    @explains_arguments
    def recycle(
        self, sequence: H, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> int:
        """Add a ``Sequence.recycle``; the result is a Recycled."""
        record = sequence.record
        due = record.due(computed_tokens, launch, dead)
        if due.pages or record.layout.window_groups or not self._fits(record, RECYCLE):
            return self._add(record.give_back(due))
        self._reached[record.id] = RECYCLE
        self.recycles.add(record, self.size)
        self.recycles.tokens.append(due.computed_tokens)
        return self._next_place()

    @explains_arguments
    def give_back(self, sequence: H, dead: Mapping[int, int], pages: list[tuple[int, int]]) -> int:
        """Give back what lies before the first block that is needed still (``dead``, by windowed group), and ``pages``,
        as ``(group, page)``, that other engines' took the place of. Unlike ``recycle`` it leaves other spares, which
        the engine's kernels may use on. The result is a Recycled."""
        blocks = tuple(dead.get(group, 0) for group in sequence.record.layout.window_groups)
        return self._add(sequence.record.give_back(Due(pages, 0, blocks)))

    @explains_arguments
    def swap_out(self, sequence: H, *, launch: int | None = None) -> int:
        """Add a ``Sequence.swap_out``; the result is a Swapped."""
        return self._add(sequence.record.swap_out(launch))

    @explains_arguments
    def swap_in(self, sequence: H, *, short_suffix: bool = False) -> int:
        """Add a ``Sequence.swap_in``; the result is a Swapped."""
        return self._add(sequence.record.swap_in(short_suffix=short_suffix))

    @explains_arguments
    def release(self, sequence: H, *, launch: int | None = None, output_tokens: int | None = None) -> int:
        """Add a ``Sequence.release``; the result is the number of pages that came back, 0 while launches use it."""
        record = sequence.record
        if record.end_later(launch, output_tokens):
            self.held.append(record)
        elif not self._fits(record, RELEASE):
            return self._add(record.release())
        else:
            self._reached[record.id] = RELEASE
            self.releases.add(record, self.size)
        return self._next_place()

    @explains_arguments
    def prefetch(self, keys: PackedKeys) -> int:
        """Add a ``Lease.prefetch``; the result is a Prefetched."""
        return self._add(self._lease.prefetch(keys))

    def _publish(
        self,
        places: Iterable[int],
        records: Iterable[SequenceRecord],
        uptos: Iterable[int],
        keys: Iterable[PackedKeys],
        first_keys: Iterable[int],
    ) -> None:
        """Add publishes, or their refusals, whose results stand at ``places``."""
        self._lease.maker.check()
        entries, reached, asked = self.publishes, self._reached, self._asked
        for place, record, upto, chain, first_key in zip(places, records, uptos, keys, first_keys, strict=True):
            sends_keys = upto > record.known_keys or bool(chain)
            before = asked.get(record, record.asked_blocks) if asked else record.asked_blocks
            try:
                if (
                    upto <= before
                    or entries.sends_keys is (not sends_keys)  # a column has the keys of all its entries, or of none
                    or not self._are_columns
                    or (reached and record.id in reached)
                ):
                    self._publish_behind(record, upto, chain, first_key, NO_STATES, place)
                    continue
                first, wanted = record.begin_publish(upto, chain, first_key, before)
            except CacheClientError as refusal:
                self.refused[place] = refusal
                continue
            asked[record] = upto
            if wanted:
                entries.keys += wanted
            entries.sends_keys = sends_keys
            entries.owners.append(record)
            entries.places.append(place)
            entries.firsts.append(first)
            entries.uptos.append(upto)

    def _publish_behind(
        self, record: SequenceRecord, upto_blocks: int, keys: PackedKeys, first_key: int, states: States, place: int
    ) -> None:
        """Add a publish that is no entry of the column: the sequence's further operations are none either."""
        after = self._asked.get(record, record.asked_blocks)
        publish = record.publish(upto_blocks, keys, first_key=first_key, states=states, after=after)
        self.operations.append((place, publish))
        self._asked[record] = upto_blocks
        self._reached[record.id] = BEHIND_COLUMNS

    def _fits(self, record: SequenceRecord, column: Column) -> bool:
        """True where the order of a sequence's operations is that of the columns."""
        return self._are_columns and self._reached.get(record.id, 0) <= column

    def _add(self, operation: Operation[Any]) -> int:
        self._are_columns = False
        self.operations.append((self.size, operation))
        return self._next_place()

    def _next_place(self) -> int:
        self.size += 1
        return self.size - 1
