"""The columns of a step: growth, publishes, recycles and releases of many sequences, a list for each number. No I/O.

Calls write into these lists, which become the message's bytes, so that no entry has an object of its own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from kvcache.v1 import cache_pb2

from cachesvc.model.answers import NO_POSITIONS, GroupCells, Positions, Published, Recycled
from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc.wire.columns import GROW, NOT_TOLD, OPERATION_NAMES, PUBLISH, RECYCLE, RELEASE, Column
from cachesvc_client.core.errors import CacheClientError, DaemonFault, InvalidRequest, StockEmpty, error_of
from cachesvc_client.records.sequence_record import SequenceRecord, append_each, growth_positions, note_sealed
from cachesvc_client.wire.messages import parse_publish, parse_recycle

NO_PLACE = -1
"""Place of an entry whose result is not among the step's: the client added it by itself."""


class Entries(ABC):
    """Entries of one column, in order. ``owners``: their sequences; ``places``: where their results stand among the
    step's."""

    column: ClassVar[Column]

    def __init__(self) -> None:
        self.owners: list[SequenceRecord] = []
        self.places: list[int] = []

    def add(self, owner: SequenceRecord, place: int) -> None:
        self.owners.append(owner)
        self.places.append(place)

    @abstractmethod
    def write(self, message: cache_pb2.StepColumns) -> None:
        """Write the column into a message. There are entries."""

    @abstractmethod
    def plain(self, at: int, number: int) -> Any:
        """Take in the daemon's answer to an entry, a number alone; what the caller sees."""

    @abstractmethod
    def parsed(self, at: int, answer: Any) -> Any:
        """Take in the daemon's answer as a message; what the caller sees."""

    @abstractmethod
    def fail(self, at: int, error: CacheClientError) -> None:
        """Undo an entry that the daemon refused."""

    def take(
        self, numbers: Sequence[int], odd: Mapping[int, cache_pb2.OperationResult], results: dict[int, Any]
    ) -> None:
        for at, (number, place) in enumerate(zip(numbers, self.places, strict=True)):
            results[place] = self._judge(at, odd[at]) if at in odd else self.plain(at, number)

    def fail_all(self, error: CacheClientError) -> None:
        for at in range(len(self.owners)):
            self.fail(at, error)

    def _judge(self, at: int, result: cache_pb2.OperationResult) -> Any:
        name, kind = OPERATION_NAMES[self.column], result.WhichOneof("result")
        if kind == name:
            return self.parsed(at, getattr(result, name))
        error = operation_error(name, kind, result)
        self.fail(at, error)
        return error

    def _ids(self) -> bytes:
        return array("Q", [owner.id for owner in self.owners]).tobytes()


class GrowEntries(Entries):
    """Stock pages that became cells. ``counts``: blocks of each entry; ``uptos``: the table's length with these;
    ``pages``, ``generations``: by group, of all entries in order."""

    column = GROW

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.uptos: list[int] = []
        self.pages = [array("i") for _ in range(groups)]
        self.generations = [array("I") for _ in range(groups)]

    def extend(
        self,
        owners: Sequence[SequenceRecord],
        counts: Sequence[int],
        uptos: Sequence[int],
        cells: Iterable[GroupCells],
    ) -> None:
        """Add entries. ``cells``: of all of them, a run for each group."""
        self.owners += owners
        self.counts += counts
        self.uptos += uptos
        for group, _, pages, generations in cells:
            self.pages[group].extend(pages)
            self.generations[group].extend(generations)

    def join(self, later: GrowEntries) -> None:
        self.extend(later.owners, later.counts, later.uptos, later._run(0, sum(later.counts)))

    def merged(self, leaving: Collection[SequenceRecord] = ()) -> GrowEntries:
        """The same growth with one entry for each sequence. What ``leaving`` ones took is with them afterwards, as
        ``stranded``."""
        starts = list(accumulate(self.counts, initial=0))
        entries: dict[SequenceRecord, list[int]] = {}
        for at, owner in enumerate(self.owners):
            entries.setdefault(owner, []).append(at)
        kept = GrowEntries(len(self.pages))
        for owner, mine in entries.items():
            runs = [cells for at in mine for cells in self._run(starts[at], starts[at + 1])]
            if owner in leaving:
                owner.stranded += runs
            else:
                kept.extend([owner], [sum(self.counts[at] for at in mine)], [self.uptos[mine[-1]]], runs)
        return kept

    def write(self, message: cache_pb2.StepColumns) -> None:
        message.grow_sequences = self._ids()
        message.grow_counts = _counts(self.counts)
        for group, (pages, generations) in enumerate(zip(self.pages, self.generations, strict=True)):
            message.grow.add(group=group, pages=pages.tobytes(), generations=generations.tobytes())

    def take(
        self, numbers: Sequence[int], odd: Mapping[int, cache_pb2.OperationResult], results: dict[int, Any]
    ) -> None:
        """Take in the answers, which are mostly the lengths that are expected."""
        if odd or numbers != self.uptos:
            self.places = [NO_PLACE] * len(numbers)
            super().take(numbers, odd, results)

    def plain(self, at: int, number: int) -> int:
        """Compare the daemon's length with the client's."""
        return self.owners[at].grown(number, self.uptos[at])

    def parsed(self, at: int, answer: cache_pb2.ExtendResponse) -> int:
        return self.plain(at, answer.blocks)

    def fail(self, at: int, error: CacheClientError) -> None:
        """End the sequence's use: its tables name pages that the daemon does not have there. After an answer that says
        nothing, the daemon may have them there, so they never go back to the stock."""
        first = sum(self.counts[:at])
        cells = [] if isinstance(error, DaemonFault) else self._run(first, first + self.counts[at])
        self.owners[at].refuse_growth(error, cells)

    def fail_all(self, error: CacheClientError) -> None:
        """End the use of all: the daemon may have grown them, or not."""
        for owner in self.owners:
            owner.refuse_growth(error, [])

    def _run(self, first: int, last: int) -> list[GroupCells]:
        columns = enumerate(zip(self.pages, self.generations, strict=True))
        return [GroupCells(group, 0, pages[first:last], tuple(told[first:last])) for group, (pages, told) in columns]


class UntoldGrowth:
    """Growth from stock that the next step tells the daemon. ``step``: the number of that step; steps of a lease are
    numbered from 1. Grows and is taken in one thread, the stock's; other threads may end sequences."""

    def __init__(self, layout: Layout) -> None:
        self.step = 1
        self._layout = layout
        self._entries = GrowEntries(len(layout.groups))
        self._has_repeats = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries.owners)

    def has(self, record: SequenceRecord) -> bool:
        """True where the daemon has not been told of growth of the sequence."""
        return record.growth_step == self.step

    def grow(
        self,
        stock: Stock,
        records: Sequence[SequenceRecord],
        counts: Sequence[int],
        positions: Positions = NO_POSITIONS,
    ) -> None:
        """Take stock pages as the next cells of each sequence, ``counts`` blocks. ``positions`` (of a single sequence):
        by windowed group, the new blocks that get a page; left out: all of a window, and none of a state.

        Raises, and takes nothing: what keeps one of them from growing, with its ``sequence_id``; StockEmpty;
        InvalidRequest.
        """
        if len(counts) != len(records):
            raise InvalidRequest(f"{len(records)} sequences grow, and {len(counts)} numbers of blocks were given")
        if not records:
            return
        if min(counts) < 1:
            raise InvalidRequest(f"a sequence grows by at least 1 block, got {min(counts)}")
        if len(records) == 1:
            self._grow_alone(stock, records[0], counts[0], positions)
            return
        if len(set(records)) < len(records):
            raise InvalidRequest("a sequence is named twice in one call; say how many blocks it grows by")
        has_repeats = self._has_repeats
        for record in records:
            if record.is_released or record.ends_after or record.failure is not None or record.allocations:
                record.require_growable()
            if record.growth_step == self.step:
                has_repeats = True
        cells = stock.take(sum(counts), records[0].blocks, growth_positions(self._layout, positions))
        firsts = [record.tables[0].blocks for record in records]
        for group, _, pages, _ in cells:
            tables = [record.tables[group] for record in records]
            if len(records) == len(pages):
                append_each(tables, firsts, pages)
                continue
            taken = 0
            for table, first, count in zip(tables, firsts, counts, strict=True):
                table.put(first, pages[taken : taken + count])
                taken += count
        uptos = [first + count for first, count in zip(firsts, counts, strict=True)]
        with self._lock:
            for record in records:
                record.growth_step = self.step
            self._has_repeats = has_repeats
            self._entries.extend(records, counts, uptos, cells)

    def _grow_alone(self, stock: Stock, record: SequenceRecord, count: int, positions: Positions) -> None:
        if record.is_released or record.ends_after or record.failure is not None or record.allocations:
            record.require_growable()
        first = record.tables[0].blocks
        cells = stock.take(count, first, growth_positions(self._layout, positions))
        for group, _, pages, _ in cells:
            record.tables[group].put(first, pages)
        with self._lock:
            if record.growth_step == self.step:
                self._has_repeats = True
            record.growth_step = self.step
            entries = self._entries
            entries.owners.append(record)
            entries.counts.append(count)
            entries.uptos.append(first + count)
            for group, _, pages, generations in cells:
                entries.pages[group].extend(pages)
                entries.generations[group].extend(generations)

    def withdraw(self, leaving: Iterable[SequenceRecord]) -> None:
        """Tell nothing of sequences that end: what they took goes back to the stock with the end."""
        with self._lock:
            untold = {record for record in leaving if self.has(record)}
            if untold:
                self._entries = self._entries.merged(untold)
                for record in untold:
                    record.growth_step = 0

    def take(self) -> GrowEntries:
        """Remove and return the growth for the step that is sent now. Later growth never joins it, even an empty one:
        the answer to the step has no number for it."""
        with self._lock:
            entries, self._entries = self._entries, GrowEntries(len(self._layout.groups))
            has_repeats, self._has_repeats = self._has_repeats, False
            self.step += 1
        return entries.merged() if has_repeats else entries

    def put_back(self, refused: GrowEntries) -> None:
        """Have the next step tell growth again, before what came since: the daemon did none of it."""
        if not refused.owners:
            return
        with self._lock:
            refused.join(self._entries)
            self._entries, self._has_repeats = refused, True
            for record in refused.owners:
                record.growth_step = self.step


class PublishEntries(Entries):
    """Blocks ``[firsts, uptos)`` are sealed. ``keys``: those of all entries, or none where Match had them;
    ``sends_keys``: which of both, None without entries."""

    column = PUBLISH

    def __init__(self) -> None:
        super().__init__()
        self.firsts: list[int] = []
        self.uptos: list[int] = []
        self.keys = bytearray()
        self.sends_keys: bool | None = None

    def write(self, message: cache_pb2.StepColumns) -> None:
        message.publish_sequences = self._ids()
        message.publish_first = array("I", self.firsts).tobytes()
        message.publish_counts = _counts([upto - first for first, upto in zip(self.firsts, self.uptos, strict=True)])
        if self.keys:
            message.publish_keys = bytes(self.keys)

    def take(
        self, numbers: Sequence[int], odd: Mapping[int, cache_pb2.OperationResult], results: dict[int, Any]
    ) -> None:
        """Take in the answers; entries with one number of sealed blocks share a result."""
        if odd:
            super().take(numbers, odd, results)
            return
        note_sealed(self.owners, self.uptos, numbers)
        shared = Published(NO_PLACE, (), (), (), pending=False)
        for number, place in zip(numbers, self.places, strict=True):
            if number != shared.sealed_blocks:
                shared = Published(number, (), (), (), pending=False)
            results[place] = shared

    def plain(self, at: int, number: int) -> Published:
        return self.owners[at].published(self.uptos[at], Published(number, (), (), (), pending=False))

    def parsed(self, at: int, answer: cache_pb2.PublishResponse) -> Published:
        return self.owners[at].published(self.uptos[at], parse_publish(answer))

    def fail(self, at: int, error: CacheClientError) -> None:
        self.owners[at].refuse_publish(error)


class RecycleEntries(Entries):
    """``tokens`` are computed, of a layout without windows."""

    column = RECYCLE

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def write(self, message: cache_pb2.StepColumns) -> None:
        message.recycle_sequences = self._ids()
        message.recycle_tokens = array("Q", self.tokens).tobytes()

    def plain(self, _: int, number: int) -> Recycled:
        return Recycled(number, ())

    def parsed(self, _: int, answer: cache_pb2.RecycleResponse) -> Recycled:
        return parse_recycle(answer)

    def fail(self, at: int, error: CacheClientError) -> None:
        """No-op: spares of the sequence went by an operation, and a later recycle names as many tokens."""


class ReleaseEntries(Entries):
    column = RELEASE

    def write(self, message: cache_pb2.StepColumns) -> None:
        message.release_sequences = self._ids()
        tokens = [owner.output_tokens for owner in self.owners]
        if any(told is not None for told in tokens):
            told = [NOT_TOLD if each is None else each for each in tokens]
            message.release_output_tokens = array("I", told).tobytes()

    def plain(self, at: int, number: int) -> int:
        return self.owners[at].released(number)

    def parsed(self, at: int, answer: cache_pb2.ReleaseResponse) -> int:
        return self.plain(at, answer.freed_pages)

    def fail(self, at: int, error: CacheClientError) -> None:
        """Note whether the daemon still holds the sequence."""
        self.owners[at].refuse_release(error)


def operation_error(name: str, kind: str | None, result: cache_pb2.OperationResult) -> CacheClientError:
    """The error of an operation whose result is none of its ``name``."""
    return error_of(result.error) if kind == "error" else DaemonFault(f"the answer to {name} is a {kind}")


def _counts(counts: Sequence[int]) -> bytes:
    return b"" if counts.count(1) == len(counts) else array("I", counts).tobytes()


class Stock:
    """Granted pages of each pool, oldest first. ``targets[g]``: how many the daemon is to keep it filled up to, for
    each group; those of groups that share a pool count together, and its pages serve any of them. ``pools``: the groups
    by pool; left out: each has one of its own.

    ``due``: blocks that the daemon is to have there even where it must evict others for them. Used from one thread,
    like the step stream that fills it.
    """

    def __init__(self, targets: Sequence[int], pools: Sequence[Sequence[int]] = ()) -> None:
        if any(target < 0 for target in targets):
            raise InvalidRequest(f"a stock's targets cannot be negative, got {list(targets)}")
        self.due = 0
        self._pools = tuple(map(tuple, pools)) or tuple((group,) for group in range(len(targets)))
        at_of = {group: at for at, groups in enumerate(self._pools) for group in groups}
        self._at = [at_of[group] for group in range(len(targets))]
        self._set(targets)
        self._pages = [array("i") for _ in self._pools]
        self._generations = [array("I") for _ in self._pools]

    @property
    def blocks(self) -> int:
        """Number of blocks with a page in every group that could be taken now: the least of all pools."""
        pages = self._pages
        if len(pages) == len(self.targets):
            return len(pages[0]) if len(pages) == 1 else min(map(len, pages), default=0)
        return min(len(mine) // len(groups) for mine, groups in zip(pages, self._pools, strict=True))

    @property
    def pages(self) -> tuple[int, ...]:
        """Number of pages in the stock of each group's pool."""
        return tuple(map(self.count, range(len(self.targets))))

    def count(self, group: int) -> int:
        """Return the number of pages in the stock of a group's pool."""
        return len(self._pages[self._at[group]])

    def aim(self, targets: Sequence[int]) -> None:
        """Set other targets: steps fill up to them, and give back what is above. Raises InvalidRequest."""
        if len(targets) != len(self.targets) or any(target < 0 for target in targets):
            raise InvalidRequest(f"a stock of {len(self.targets)} groups cannot have the targets {list(targets)}")
        self._set(targets)

    @property
    def is_full(self) -> bool:
        """True where no pool has less than its targets."""
        return all(len(pages) >= target for pages, target in zip(self._pages, self._pool_targets, strict=True))

    @property
    def has_surplus(self) -> bool:
        """True where a pool has more than its targets."""
        return any(len(pages) > target for pages, target in zip(self._pages, self._pool_targets, strict=True))

    def take_surplus(self) -> tuple[GroupCells, ...]:
        """Take what is above the targets, newest first."""
        surplus = []
        pools = zip(self._pools, self._pages, self._generations, self._pool_targets, strict=True)
        for groups, pages, generations, target in pools:
            if len(pages) > target:
                surplus.append(GroupCells(groups[0], 0, tuple(pages[target:]), tuple(generations[target:])))
                del pages[target:], generations[target:]
        return tuple(surplus)

    def _set(self, targets: Sequence[int]) -> None:
        self.targets = tuple(targets)
        self._pool_targets = [sum(targets[group] for group in groups) for groups in self._pools]

    def add(self, granted: Iterable[GroupCells]) -> None:
        """Take in pages that the daemon granted, or that came back unused: generations first, since an abandoned
        sequence may end in another thread than the one that takes."""
        for cells in granted:
            at = self._at[cells.group]
            if NO_PAGE in cells.pages:
                pairs = [pair for pair in zip(cells.pages, cells.generations, strict=True) if pair[0] != NO_PAGE]
                self._generations[at].extend([generation for _, generation in pairs])
                self._pages[at].extend([page for page, _ in pairs])
            else:
                self._generations[at].extend(cells.generations)
                self._pages[at].extend(cells.pages)

    def add_packed(self, group: int, pages: bytes, generations: bytes) -> None:
        """``add`` for packed int32 page ids and uint32 generations."""
        at = self._at[group]
        self._pages[at].frombytes(pages)
        self._generations[at].frombytes(generations)

    def take(self, blocks: int, first_block: int, positions: Positions = NO_POSITIONS) -> tuple[GroupCells, ...]:
        """Pages for ``blocks`` blocks from ``first_block`` on: of every group, or in some at ``positions`` alone.
        Raises StockEmpty, and takes nothing, if a pool is short; InvalidRequest."""
        if blocks < 1:
            raise InvalidRequest(f"take at least 1 block, got {blocks}")
        if positions:
            _check_positions(positions, first_block, first_block + blocks)
        self.require(blocks, positions)
        cells = []
        for group, at in enumerate(self._at):
            mine = positions.get(group) if positions else None
            count = blocks if mine is None else len(mine)
            pages, generations = self._pages[at], self._generations[at]
            taken, told = pages[:count], generations[:count]
            del pages[:count], generations[:count]
            if mine is not None:
                taken, told = _spread(taken, told, blocks, first_block, mine)
            cells.append(GroupCells(group, first_block, tuple(taken), tuple(told)))
        return tuple(cells)

    def require(self, blocks: int, positions: Positions = NO_POSITIONS) -> None:
        """Raises StockEmpty where a pool has fewer pages than ``blocks`` blocks need."""
        for groups, pages in zip(self._pools, self._pages, strict=True):
            needed = blocks * len(groups)
            if positions:
                needed = sum(len(positions[group]) if group in positions else blocks for group in groups)
            if needed > len(pages):
                raise StockEmpty.from_message(
                    f"wanted {blocks} blocks of the stock, which has {list(self.pages)} pages by group (targets "
                    f"{list(self.targets)}); allocate, or go on after the next step"
                )

    def drain(self) -> tuple[GroupCells, ...]:
        """Take all pages; the stock is empty then."""
        drained = []
        for groups, pages, generations in zip(self._pools, self._pages, self._generations, strict=True):
            if pages:
                drained.append(GroupCells(groups[0], 0, tuple(pages), tuple(generations)))
                del pages[:], generations[:]
        return tuple(drained)


def _check_positions(positions: Positions, first_block: int, last: int) -> None:
    for group, named in positions.items():
        if any(not first_block <= position < last for position in named) or len(set(named)) < len(named):
            raise InvalidRequest(
                f"positions of group {group} must be of the new blocks [{first_block}, {last}), each once; got "
                f"{list(named)[:8]}"
            )


def _spread(
    pages: array[int], generations: array[int], blocks: int, first_block: int, positions: Sequence[int]
) -> tuple[array[int], array[int]]:
    """Cells of ``blocks`` blocks, of which those at ``positions`` have the pages."""
    cells, told = array("i", [NO_PAGE]) * blocks, array("I", bytes(4 * blocks))
    for position, page, generation in zip(positions, pages, generations, strict=True):
        cells[position - first_block], told[position - first_block] = page, generation
    return cells, told


def stock_targets(stock_pages: int | Sequence[int], layout: Layout) -> list[int]:
    """Targets of all groups, from one number for all or one for each; that of a layout's markers, of which a block
    takes one too, may be left out. Raises InvalidRequest."""
    groups, own = len(layout.groups), len(layout.own_groups)
    targets = [stock_pages] * groups if isinstance(stock_pages, int) else list(stock_pages)
    if len(targets) == own:
        targets += [max(targets)] * (groups - own)
    if len(targets) != groups:
        raise InvalidRequest(f"stock_pages needs one number for each of {own} groups, got {len(targets)}")
    return targets
