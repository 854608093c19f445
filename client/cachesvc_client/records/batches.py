"""A batch: what an engine wants of one step, in order. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from cachesvc.model.answers import Expected
from cachesvc.model.columns import NO_POSITIONS, Positions
from cachesvc.wire.columns import PUBLISH, RECYCLE, RELEASE, Column
from cachesvc_client.core.arguments import explains_arguments, renamed
from cachesvc_client.core.hints import Retention
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.entries import Entry, Publish, Recycle, Release
from cachesvc_client.records.launches import Due
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.tables import NO_DEAD, NO_STATES, States
from cachesvc_client.wire.methods import HELD, Operation, no_action


class Recorded(Protocol):
    """A handle of a sequence, of either client."""

    @property
    def record(self) -> SequenceRecord:
        """State of the sequence."""


H = TypeVar("H", bound=Recorded)


class StepBatch(Generic[H]):
    """Operations of one step, in order. Each method returns where its result will stand in the step's results.

    Publishes, recycles and releases at the beginning travel in columns, many in a few bytes: ask for them before
    anything else. ``sends_keys``: whether publishes in columns have keys; None without any. ``no_wait``: an operation
    that has to wait for transfers is refused (DeadlineExceeded), and these go on: ask again later.
    """

    def __init__(self, lease: LeaseRecord, make_handle: Callable[[SequenceRecord], H]) -> None:
        self.asked: list[Operation[Any] | Entry] = []
        self._lease = lease
        self._make_handle = make_handle
        self._are_columns = True
        self._columns: dict[int, Column] = {}
        self._sealed: set[int] = set()
        self.sends_keys: bool | None = None
        self.no_wait = False

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
    ) -> int:
        """Open a sequence; the result is its handle."""
        record = self._lease.new_sequence(sequence_id)
        record.retention = retention
        operation: Operation[Any] = record.open(keys, max_blocks, waited_seconds, expected)
        take = operation.apply
        operation.apply = lambda response: self._make_handle(take(response))
        return self._add(operation)

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
        record = sequence.record
        self._sealed.add(record.id)
        sends_keys = upto_blocks > record.known_keys or bool(keys)
        fits = self.sends_keys in (None, sends_keys)  # a column has the keys of all its entries, or of none
        if states or not fits or upto_blocks <= record.asked_blocks or not self._fits(record, PUBLISH):
            return self._add(record.publish(upto_blocks, keys, first_key=first_key, states=states))
        first, wanted = record.begin_publish(upto_blocks, keys, first_key=first_key)
        self.sends_keys = sends_keys
        return self._enter(Publish(record, first, upto_blocks, wanted))

    @explains_arguments
    def recycle(
        self, sequence: H, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> int:
        """Add a ``Sequence.recycle``; the result is a Recycled."""
        record = sequence.record
        due = record.due(computed_tokens, launch, dead)
        if due.pages or record.layout.window_groups or not self._fits(record, RECYCLE):
            return self._add(record.give_back(due))
        return self._enter(Recycle(record, due.computed_tokens))

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
            return self._put(Operation(HELD, None, lambda _: 0, no_action, record))
        if record.id not in self._sealed:  # else the daemon has to know of the pages
            self._lease.growing.pop(record.id, None)
        if not self._fits(record, RELEASE):
            return self._add(record.release(self._lease.stock))
        return self._enter(Release(record, self._lease.stock))

    @explains_arguments
    def prefetch(self, keys: PackedKeys) -> int:
        """Add a ``Lease.prefetch``; the result is a Prefetched."""
        return self._add(self._lease.prefetch(keys))

    def _fits(self, record: SequenceRecord, column: Column) -> bool:
        """True where the order of a sequence's operations is that of the columns."""
        return self._are_columns and self._columns.get(record.id, 0) <= column

    def _enter(self, entry: Entry) -> int:
        self._columns[entry.owner.id] = entry.column
        return self._put(entry)

    def _add(self, operation: Operation[Any]) -> int:
        self._are_columns = False
        return self._put(operation)

    def _put(self, asked: Operation[Any] | Entry) -> int:
        self.asked.append(asked)
        return len(self.asked) - 1
