"""A batch: what an engine wants of one step, in order. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Generic, Protocol, TypeVar

from cachesvc.model.answers import Expected
from cachesvc.model.columns import NO_POSITIONS, Positions
from cachesvc.wire.columns import RECYCLE, RELEASE, Column
from cachesvc_client.core.arguments import explains_arguments, one_each, renamed
from cachesvc_client.core.errors import CacheClientError, InvalidRequest
from cachesvc_client.core.hints import Retention
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.entries import PublishEntries, RecycleEntries, ReleaseEntries
from cachesvc_client.records.launches import Due
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.tables import NO_DEAD, NO_STATES, States
from cachesvc_client.wire.methods import Operation

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
