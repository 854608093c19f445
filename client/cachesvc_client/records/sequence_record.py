"""State of one sequence in a client, and the operations on it. No I/O: others send them and bring the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import (
    LONGEST_EXPECTED_WAIT_SECONDS,
    NO_POSITIONS,
    Allocated,
    Expected,
    GroupCells,
    Matched,
    Positions,
    Published,
    Recycled,
    Swapped,
    TicketView,
)
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc.wire.convert import cells_from_proto, cells_to_proto, expected_to_proto, positions_to_proto
from cachesvc_client.core.arguments import Retention
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    LoadFailed,
    Maker,
    NotFound,
)
from cachesvc_client.core.keys import PackedKeys, as_bytes, packed
from cachesvc_client.memory.pool import AttachedPool, LoadOutcome
from cachesvc_client.wire.messages import build_recycle, parse_publish, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import ALLOCATE, MATCH, PUBLISH, RECYCLE, RELEASE, SWAP, Method

Pages = npt.NDArray[np.int32]
States = Mapping[int, Mapping[int, int]]
"""Pages to publish as states, by group and position."""
NO_STATES: States = MappingProxyType({})
NO_DEAD: Mapping[int, int] = MappingProxyType({})
_LEAST_CAPACITY = 64
_NO_CELLS: Pages = np.empty(0, np.int32)


class BlockTable:
    """Grows at its end; cells change in place when a page is swapped for a sealed one, or recycled. ``cells``: with
    those that are reserved."""

    __slots__ = ("blocks", "cells")

    def __init__(self) -> None:
        self.cells = _NO_CELLS
        self.blocks = 0

    @property
    def pages(self) -> Pages:
        """``[blocks]``, -1 where there is no page; read-only, good until the next call for the sequence."""
        view = self.cells[: self.blocks]
        view.flags.writeable = False
        return view

    def put(self, first_block: int, pages: Sequence[int]) -> None:
        """Write cells from ``first_block`` on; the table grows to hold them."""
        end = first_block + len(pages)
        if self.blocks or first_block:
            if end > len(self.cells):
                self.reserve(end)
            if len(pages) == 1:
                self.cells[first_block] = pages[0]
            else:
                self.cells[first_block:end] = pages
        else:
            self.cells = np.array(pages, np.int32)
        self.blocks = max(self.blocks, end)

    def put_at(self, positions: Sequence[int], pages: Sequence[int]) -> None:
        """Write cells at given positions, which are in the table."""
        assert not positions or max(positions) < self.blocks
        self.cells[list(positions)] = pages

    def clear(self, first_block: int, end_block: int) -> None:
        self.cells[first_block : min(end_block, self.blocks)] = NO_PAGE

    def forget(self, pages: Sequence[int]) -> None:
        mine = self.cells[: self.blocks]
        mine[np.isin(mine, pages)] = NO_PAGE

    def reserve(self, blocks: int) -> None:
        """Make room for a table of ``blocks`` blocks."""
        if blocks <= len(self.cells):
            return
        grown = np.empty(max(blocks, 2 * len(self.cells), _LEAST_CAPACITY), np.int32)
        grown[: self.blocks] = self.cells[: self.blocks]
        grown[self.blocks :] = NO_PAGE
        self.cells = grown


def append_each(tables: Iterable[BlockTable], positions: Iterable[int], pages: Iterable[int]) -> None:
    """Write a page at the end of each table or behind it: one loop, for a call for each costs as much again."""
    for table, at, page in zip(tables, positions, pages, strict=True):
        if at >= len(table.cells):
            table.reserve(at + 1)
        table.cells[at] = page
        table.blocks = at + 1


def growth_positions(layout: Layout, positions: Positions) -> Positions:
    """Positions that get a page of the stock, with none for states that are not named. Raises InvalidRequest."""
    if not positions and not layout.state_groups:
        return positions
    if full := positions.keys() & set(layout.full_groups):
        raise InvalidRequest(f"group {min(full)} has no window: each of its new blocks gets a page")
    return {**dict.fromkeys(layout.state_groups, ()), **positions}


T = TypeVar("T")


@dataclass(slots=True)
class Operation(Generic[T]):
    """One request of a lease and what becomes of its answer: by itself or in a Step.

    ``request`` gets its lease_id and request_id when it is sent. ``apply`` takes the answer into the record of the
    sequence and returns what the caller sees; ``fail`` puts the record right after a refusal. One of the two is called,
    once. ``owner``: the sequence that it is for, if any. ``waits_s``: how long the daemon may wait before it answers,
    beside the time limit of the call, seconds.
    """

    method: Method[Any, Any]
    request: Any
    apply: Callable[[Any], T]
    fail: Callable[[CacheClientError], None]
    owner: SequenceRecord | None = None
    waits_s: float = 0.0

    def end_with(self, error: CacheClientError) -> None:
        """Note a failure. After a lost answer the owner keeps the operation, to ask again under the same id."""
        is_open = isinstance(error, DeadlineExceeded) and not error.was_answered
        if is_open and self.owner is not None:
            self.owner.unanswered = self
        else:
            self.fail(error)


def no_action(_: CacheClientError) -> None:
    """No-op where a failure leaves nothing to put right."""


class SequenceRecord:
    """Block tables and cursors of one sequence, as of the last answer.

    ``loading``: blocks that ``tickets`` bring, or brought. ``sealed_blocks``: blocks known to be shared;
    ``asked_blocks``: up to where publishing was asked for. ``allocations`` counts allocate operations without an
    answer. ``last_step``: number of the last step that carries something of it, ``growth_step``: of the one that tells
    of its last growth from stock; ``stranded``: stock pages that the daemon does not have in it.
    ``give_backs``: what the next recycles give back. ``output_tokens``: of its request, at its end.
    ``clock_seconds``: the time in a replay's trace.
    ``failure``: why it serves no call but its release. ``swap_failure``: why the last swap left it where it was, until
    the next one. ``retention``: hint of its engine. ``ends_after``: launch that its release waits for, 0: none.
    """

    def __init__(self, sequence_id: int, layout: Layout, launches: Launches | None = None) -> None:
        self.maker = Maker()
        self.id = sequence_id
        self.layout = layout
        self.launches = launches if launches is not None else Launches()
        self.tables = [BlockTable() for _ in layout.groups]
        self.matched = Matched(0, 0, 0, ())
        self.sealed_blocks = self.asked_blocks = self.known_keys = 0
        self.tickets: tuple[TicketView, ...] = ()
        self.loading = range(0)
        self.give_backs = GiveBacks(self.launches)
        self.stranded: list[GroupCells] = []
        self.swap_tickets: tuple[TicketView, ...] = ()
        self.is_released = self.is_swapped_out = self.has_failed_load = False
        self.ends_after = 0
        self.freed_pages = 0
        self.output_tokens: int | None = None
        self.clock_seconds: float | None = None
        self.retention = Retention.DEFAULT
        self.failure: CacheClientError | None = None
        self.swap_failure: LoadFailed | None = None
        self.unanswered: Operation[Any] | None = None
        self.allocations = self.last_step = self.growth_step = 0
        self._cursors: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        return self.tables[0].blocks

    def open(
        self, keys: PackedKeys, max_blocks: int, waited_seconds: float = 0, expected: Expected | None = None
    ) -> Operation[SequenceRecord]:
        """Match: the sequence begins with the longest hit."""
        sent = as_bytes(keys)

        def apply(response: cache_pb2.MatchResponse) -> SequenceRecord:
            self.matched = Matched(
                response.device_blocks,
                response.host_blocks,
                response.computing_blocks,
                cells_from_proto(response.tables),
                response.storage_blocks,
                response.full_blocks,
                response.coming_blocks,
            )
            self.sealed_blocks = self.asked_blocks = self.matched.device_blocks
            self.known_keys = len(sent) // KEY_BYTES
            self._put(self.matched.tables)
            return self

        def fail(_: CacheClientError) -> None:
            self.is_released = True

        request = cache_pb2.MatchRequest(
            sequence_id=self.id,
            keys=sent,
            max_blocks=max_blocks,
            waited_ms=min(max(0, round(waited_seconds * 1000)), 0xFFFFFFFF),
            clock_seconds=self.clock_seconds,
            retention=self.retention.number,
            expected=None if expected is None else expected_to_proto(expected),
        )
        operation = self._operation(MATCH, request, apply, fail)
        if expected is not None and expected.waits:
            operation.waits_s = LONGEST_EXPECTED_WAIT_SECONDS
        return operation

    def allocate(
        self, blocks: int, *, short_suffix: bool = False, positions: Positions = NO_POSITIONS
    ) -> Operation[Allocated]:
        """Make the tables ``blocks`` long. ``positions``: by windowed group, the new blocks that get a page."""
        self.require_usable()
        request = cache_pb2.AllocateRequest(
            sequence_id=self.id, blocks=blocks, short_suffix=short_suffix, positions=positions_to_proto(positions)
        )
        self.allocations += 1

        def apply(response: cache_pb2.AllocateResponse) -> Allocated:
            answer = Allocated(
                cells_from_proto(response.tables), parse_tickets(response.tickets), response.loading_blocks
            )
            self.tickets += answer.tickets
            self._put(answer.tables)
            hit = self.matched.device_blocks + self.matched.host_blocks
            if answer.tickets:
                self.loading = range(self.matched.device_blocks, hit)
            self.sealed_blocks = max(self.sealed_blocks, hit)
            self.asked_blocks = max(self.asked_blocks, hit)
            self.allocations -= 1  # last: until then a wait in another thread has no tickets to wait for
            return answer

        def fail(_: CacheClientError) -> None:
            self.allocations -= 1

        return self._operation(ALLOCATE, request, apply, fail)

    def publish(
        self,
        upto_blocks: int,
        keys: PackedKeys,
        *,
        first_key: int = 0,
        states: States = NO_STATES,
        after: int | None = None,
    ) -> Operation[Published]:
        """Seal blocks up to ``upto_blocks``, and ``states``. ``keys``: from block ``first_key`` on, or empty where
        known. ``after``: see ``begin_publish``; without it the publish counts as asked for."""
        self.maker.check()
        first, wanted = self.begin_publish(upto_blocks, keys, first_key, self.asked_blocks if after is None else after)
        if after is None:
            self.asked_blocks = upto_blocks
        named = [GroupCells(group, at, (page,)) for group, mine in states.items() for at, page in mine.items()]

        def apply(response: cache_pb2.PublishResponse) -> Published:
            answer = self.published(upto_blocks, parse_publish(response))
            own = {(cells.group, page) for cells in answer.kept for page in cells.pages}
            for group, position, pages, _ in named:  # sealed states; those kept stay where they are
                if (group, pages[0]) not in own:
                    self.tables[group].forget(pages)
                    if position >= self._cursors.get(group, 0):  # else its block was given back
                        self.tables[group].put_at((position,), pages)
            return answer

        request = cache_pb2.PublishRequest(
            sequence_id=self.id,
            first_block=first,
            blocks=upto_blocks - first,
            keys=wanted,
            states=cells_to_proto(named),
        )
        return self._operation(PUBLISH, request, apply, self.refuse_publish)

    def begin_publish(self, upto_blocks: int, keys: PackedKeys, first_key: int, first: int) -> tuple[int, bytes]:
        """Check a publish of blocks ``first`` to ``upto_blocks``, which changes nothing before it is sent. Returns the
        first of them, and their keys to send: empty where ``keys`` is and Match had them. Given keys are always sent:
        the daemon compares them with Match's. They begin at block ``first_key``."""
        if self.is_released or self.ends_after or self.failure is not None:
            self.require_usable()
        if upto_blocks < first:
            raise InvalidRequest(
                f"blocks up to {first} of sequence {self.id} are published already; publish({upto_blocks}) goes back"
            )
        wanted = b""
        if upto_blocks > self.known_keys or keys:
            chain = packed(keys)
            if first_key > first:
                raise InvalidRequest(f"block {first} comes next, and the keys begin at block {first_key}")
            if len(chain) < (upto_blocks - first_key) * KEY_BYTES:
                raise InvalidRequest(
                    f"publish up to block {upto_blocks} needs the keys of all {upto_blocks} blocks from the root on; "
                    f"{first_key + len(chain) // KEY_BYTES} were given, and Match was told {self.known_keys}"
                )
            wanted = bytes(chain[(first - first_key) * KEY_BYTES : (upto_blocks - first_key) * KEY_BYTES])
        return first, wanted

    def published(self, upto_blocks: int, answer: Published) -> Published:
        """The answer to what was asked for up to ``upto_blocks``."""
        note_sealed((self,), (upto_blocks,), (answer.sealed_blocks,))
        if answer.duplicate_positions:
            for cells in answer.duplicates:
                self.tables[cells.group].put_at(answer.duplicate_positions, cells.pages)
            self.give_backs.add_spares((cells.group, page) for cells in answer.spares for page in cells.pages)
        return answer

    def refuse_publish(self, error: CacheClientError) -> None:
        """Undo a publish that the daemon refused."""
        self._note_refusal(error)
        self.asked_blocks = self.sealed_blocks

    def recycle(
        self, computed_tokens: int, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> Operation[Recycled]:
        """Give back the spares, and what fell out of every window, as far as no launch under way may use them."""
        return self.give_back(self.due(computed_tokens, launch, dead))

    def due(self, computed_tokens: int, launch: int | None, dead: Mapping[int, int] = NO_DEAD) -> Due:
        """Pages and windows to give back now that ``computed_tokens`` are computed. ``dead``: by windowed group, the
        first block that is needed still, where the engine knows better. Raises InvalidRequest (no such launch; no
        such window)."""
        self.require_usable()
        windows = self.layout.window_groups
        if unknown := dead.keys() - set(windows):
            raise InvalidRequest(f"group {min(unknown)} has no window: its blocks are never dead")
        dead_blocks = tuple([dead.get(group, 0) for group in windows]) if dead else ()
        self.give_backs.hold_windows(computed_tokens, launch, dead_blocks)
        return self.give_backs.take_due()

    def drop_pages(self, group: int, pages: Sequence[int]) -> None:
        """Take own pages of a windowed group out of the table; the next recycle gives them back."""
        self.require_usable()
        if group not in self.layout.window_groups:
            raise InvalidRequest(f"group {group} has no window: its pages stay in the table until the end")
        self.tables[group].forget(pages)
        self.give_backs.add_spares((group, page) for page in pages)

    def give_back(self, due: Due) -> Operation[Recycled]:

        def apply(response: cache_pb2.RecycleResponse) -> Recycled:
            answer = parse_recycle(response)
            for group, cursor in zip(self.layout.window_groups, answer.cursors, strict=True):
                self.tables[group].clear(self.layout.sink_blocks(group), cursor)
                self._cursors[group] = cursor
            return answer

        def fail(_: CacheClientError) -> None:
            self.give_backs.put_back(due.pages)

        pages: dict[int, list[int]] = {}
        for group, page in sorted(due.pages):
            pages.setdefault(group, []).append(page)
        cells = [GroupCells(group, 0, tuple(mine)) for group, mine in pages.items()]
        request = build_recycle(self.id, due.computed_tokens, cells, due.dead_blocks)
        return self._operation(RECYCLE, request, apply, fail)

    def swap_out(self, launch: int | None = None) -> Operation[Swapped]:
        """Take the sequence off the device, which only ``launch`` and those before it use."""
        self.require_usable()
        if pending := self.launches.pending(launch):
            raise Conflict(
                f"launch {pending} may still write sequence {self.id}, and {self.launches.completed} is the last that "
                "is complete; swap it out after lease.completed, or say which launch was the last to use it"
            )

        def apply(response: cache_pb2.SwapResponse) -> Swapped:
            answer = Swapped(parse_tickets(response.tickets), cells_from_proto(response.tables))
            self.is_swapped_out = True
            self.give_backs.forget()  # the daemon has freed them
            self.tickets = ()  # the daemon swaps out only what has been loaded
            self.swap_tickets = answer.tickets
            self.swap_failure = None
            return answer

        request = cache_pb2.SwapRequest(sequence_id=self.id, direction=cache_pb2.SWAP_DIRECTION_OUT)
        return self._operation(SWAP, request, apply)

    def swap_in(self, *, short_suffix: bool = False) -> Operation[Swapped]:
        self.require_usable()

        def apply(response: cache_pb2.SwapResponse) -> Swapped:
            answer = Swapped(parse_tickets(response.tickets), cells_from_proto(response.tables))
            self.swap_failure = None
            self.tickets = self.swap_tickets = answer.tickets
            self._put(answer.tables)
            self.loading = range(self.blocks)
            self.is_swapped_out = False  # last: until then a wait in another thread has no tickets to wait for
            return answer

        request = cache_pb2.SwapRequest(
            sequence_id=self.id, direction=cache_pb2.SWAP_DIRECTION_IN, short_suffix=short_suffix
        )
        return self._operation(SWAP, request, apply)

    def release(self) -> Operation[int]:
        self.maker.check()
        if self.is_released:
            raise AlreadyClosed(f"sequence {self.id} was released before")
        request = cache_pb2.ReleaseRequest(
            sequence_id=self.id, output_tokens=self.output_tokens, clock_seconds=self.clock_seconds
        )
        return self._operation(RELEASE, request, lambda each: self.released(each.freed_pages), self.refuse_release)

    def released(self, freed_pages: int) -> int:
        self.is_released = True
        self.freed_pages = freed_pages
        return freed_pages

    def refuse_release(self, error: CacheClientError) -> None:
        """The daemon has not ended it, or it had ended before."""
        self.is_released = isinstance(error, NotFound | LeaseLost | DaemonUnavailable | AlreadyClosed)
        if self.stranded and self.failure is None:  # the tables name pages that the daemon does not know of
            self.failure = error

    def end_later(self, launch: int | None, output_tokens: int | None = None) -> bool:
        """True where the release has to wait for ``launch`` (None: the newest): nothing else can be done with it then.
        ``output_tokens``: what its request has put out.

        Raises AlreadyClosed (released before), InvalidRequest (no such launch), UsedAfterFork.
        """
        self.maker.check()
        if self.is_released or self.ends_after:
            raise AlreadyClosed(f"sequence {self.id} was released before")
        if output_tokens is not None:
            self.output_tokens = output_tokens
        self.ends_after = self.launches.pending(launch)
        return self.ends_after > 0

    def require_growable(self) -> None:
        """Raises what keeps the sequence from growing, with its ``sequence_id``."""
        self.require_usable()
        if self.allocations:
            raise self._named(Conflict(f"sequence {self.id} has an allocate without an answer; collect it, then grow"))

    def grown(self, blocks: int, expected: int) -> int:
        """The daemon's table is ``blocks`` long after growing to ``expected``."""
        if blocks != expected:
            self.failure = Conflict(
                f"sequence {self.id} has {blocks} blocks in the daemon and {expected} here; release it"
            )
        return blocks

    def refuse_growth(self, error: CacheClientError, cells: list[GroupCells]) -> None:
        """The daemon refused growth: the sequence is unusable, for its tables say what is not so."""
        self.has_failed_load |= isinstance(error, LoadFailed)
        self.failure = error
        self.stranded += cells

    def end_swap(self, tickets: tuple[TicketView, ...]) -> None:
        """The swap's transfer has ended. Raises LoadFailed where it failed: the sequence is where it was before."""
        broken = next((ticket for ticket in tickets if ticket.state == "failed"), None)
        if broken is not None:
            self.is_swapped_out = broken.direction == "load"
            self.swap_failure = LoadFailed(
                f"sequence {self.id} could not be swapped ({broken.reason}); it is where it was before, swap it again"
            )
        self._forget(tickets)  # last: a wait in another thread that finds none has to find the failure
        self.require_swapped()

    def end_loads(self, tickets: tuple[TicketView, ...]) -> None:
        """The loads have ended. Raises LoadFailed where one failed; where it is the swap's, as ``end_swap``."""
        if any(ticket.id == swap.id for swap in self.swap_tickets for ticket in tickets):
            self.end_swap(tickets)
            return
        broken = next((ticket for ticket in tickets if ticket.state == "failed"), None)
        if broken is not None:
            self._note_refusal(
                LoadFailed(
                    f"load {broken.id} of sequence {self.id} failed: {broken.reason}; release it, match again and "
                    "recompute"
                )
            )
        self._forget(tickets)  # last, as of a swap
        self.require_usable()

    def require_loaded(self) -> None:
        """Raises what keeps the tables' pages from having their bytes, now that no ticket is left to wait for: as
        ``require_usable``, Conflict for a sequence that is swapped out (LoadFailed where it could not be brought back)
        and for an allocate whose loads are not known."""
        self.require_usable()
        if self.is_swapped_out:
            self.require_swapped()
            raise self._named(Conflict(f"sequence {self.id} is swapped out and has no pages; swap it in first"))
        if self.allocations:
            raise self._named(
                Conflict(f"sequence {self.id} has an allocate without an answer; collect it, then wait for its loads")
            )

    def require_swapped(self) -> None:
        """Raises what ``require_usable`` does, and LoadFailed where the last swap failed, until the next one."""
        self.require_usable()
        if self.swap_failure is not None:
            raise self._named(copy(self.swap_failure))

    def lost_tokens(self, pools: Iterable[AttachedPool], is_lost: bool) -> range:
        """Positions of the tokens whose loads failed, or had not ended for all that is known when the lease was lost
        (``is_lost``). Which blocks a ticket brings is not known, because others' loads are joined: one that is lost
        loses all that the sequence loaded. What was swapped out then will never be loaded."""
        block_tokens, known = self.layout.block_tokens, tuple(pools)
        if is_lost and self.is_swapped_out:
            return range(self.blocks * block_tokens)
        if not self.has_failed_load and not any(self._is_lost(ticket, known, is_lost) for ticket in self.tickets):
            return range(0)
        return range(self.loading.start * block_tokens, self.loading.stop * block_tokens)

    def _is_lost(self, ticket: TicketView, pools: tuple[AttachedPool, ...], is_lost: bool) -> bool:
        if ticket.state != "running":
            return ticket.state == "failed"
        came: set[int] = set()
        for pool in pools if ticket.slot is not None else ():
            try:
                outcome = pool.outcome(ticket)
            except AlreadyClosed:  # it knows nothing any more
                continue
            if outcome in (LoadOutcome.FAILED, LoadOutcome.LOST):
                return True
            if outcome is LoadOutcome.CAME:
                came.add(pool.rank)
        return is_lost and len(came) < self.layout.ranks

    def require_usable(self) -> None:
        """Raises what keeps the sequence from being used, with its ``sequence_id``."""
        self.maker.check()
        if self.is_released or self.ends_after:
            raise self._named(AlreadyClosed(f"sequence {self.id} was released; match again"))
        if self.failure is not None:
            raise self._named(copy(self.failure))

    def _note_refusal(self, error: CacheClientError) -> None:
        """Note an error that ends the use of the sequence: after a failed load the daemon only releases it."""
        if isinstance(error, LoadFailed):
            self.failure = self.failure or error
            self.has_failed_load = True

    def _forget(self, tickets: tuple[TicketView, ...]) -> None:
        """Drop ended tickets, and no others: a later call may have brought new ones."""
        ended = {ticket.id for ticket in tickets}
        self.swap_tickets = tuple(ticket for ticket in self.swap_tickets if ticket.id not in ended)
        self.tickets = tuple(ticket for ticket in self.tickets if ticket.id not in ended)

    def _named(self, error: CacheClientError) -> CacheClientError:
        error.sequence_id = self.id
        return error

    def _operation(
        self,
        method: Method[Any, Any],
        request: Any,
        apply: Callable[[Any], T],
        fail: Callable[[CacheClientError], None] = no_action,
    ) -> Operation[T]:
        def refused(error: CacheClientError) -> None:
            self._note_refusal(error)
            fail(error)

        return Operation(method, request, apply, refused, self)

    def _put(self, tables: tuple[GroupCells, ...]) -> None:
        for cells in tables:
            self.tables[cells.group].put(cells.first_block, cells.pages)


def note_sealed(records: Iterable[SequenceRecord], uptos: Iterable[int], sealed: Iterable[int]) -> None:
    """Note how many blocks are sealed of each sequence that asked for ``uptos``."""
    for record, upto, blocks in zip(records, uptos, sealed, strict=True):
        record.sealed_blocks = blocks
        if blocks < upto:
            record.asked_blocks = blocks
        if upto > record.known_keys:
            record.known_keys = upto
        record.tickets = ()  # the daemon publishes only what has been loaded


class Launches:
    """The launches of one lease, numbered from 1; they end in their order. Safe to use from several threads."""

    def __init__(self) -> None:
        self.newest = 0
        self.completed = 0
        self._lock = threading.Lock()

    @property
    def are_under_way(self) -> bool:
        """True while a launch is not complete."""
        return self.completed < self.newest

    def begin(self) -> int:
        with self._lock:
            self.newest += 1
            return self.newest

    def complete(self, launch: int) -> None:
        """Note that all launches up to ``launch`` have ended. Idempotent. Raises InvalidRequest for an unknown one."""
        self.check(launch)
        with self._lock:
            self.completed = max(self.completed, launch)

    def check(self, launch: int | None) -> int:
        """``launch``, or the newest for None. Raises InvalidRequest for one that never was."""
        if launch is None:
            return self.newest
        if not 0 <= launch <= self.newest:
            raise InvalidRequest(f"launch {launch} never was; the newest is {self.newest}: take what launch() returned")
        return launch

    def pending(self, launch: int | None) -> int:
        """``launch`` (None: the newest), or 0 where it is complete. Raises InvalidRequest for one that never was."""
        launch = self.check(launch)
        return launch if launch > self.completed else 0


class Due(NamedTuple):
    """Pages and windows to give back now: spare ``pages`` as ``(group, page)``, and windows behind
    ``computed_tokens``, or in some groups what lies before the ``dead_blocks`` that their engine names."""

    pages: list[tuple[int, int]]
    computed_tokens: int
    dead_blocks: tuple[int, ...] = ()


class GiveBacks:
    """Pages and windows that one sequence has to give back, each with the launch whose end it waits for."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self._spares: list[tuple[int, tuple[int, int]]] = []
        self._windows: list[tuple[int, int, tuple[int, ...]]] = []

    def add_spares(self, pages: Iterable[tuple[int, int]]) -> None:
        """Pages ``(group, page)`` that have just left the tables."""
        newest = self._launches.newest
        self._spares += [(newest, page) for page in pages]

    def hold_windows(self, computed_tokens: int, launch: int | None, dead_blocks: tuple[int, ...] = ()) -> None:
        """Windows may move up to ``computed_tokens``, or by ``dead_blocks``, once ``launch`` (None: the newest) is
        complete."""
        launch = self._launches.check(launch)
        if computed_tokens or dead_blocks:
            self._windows.append((launch, computed_tokens, dead_blocks))

    def take_due(self) -> Due:
        """Remove and return what waits for no launch any more."""
        completed = self._launches.completed
        pages = [page for launch, page in self._spares if launch <= completed]
        due = [(tokens, dead) for launch, tokens, dead in self._windows if launch <= completed]
        if pages:
            self._spares = [held for held in self._spares if held[0] > completed]
        if not due:
            return Due(pages, 0)
        self._windows = [held for held in self._windows if held[0] > completed]
        dead_blocks = tuple(map(max, *filled)) if len(filled := [dead for _, dead in due if dead]) > 1 else ()
        return Due(pages, max(tokens for tokens, _ in due), dead_blocks or (filled[0] if filled else ()))

    def put_back(self, pages: list[tuple[int, int]]) -> None:
        """Pages that were due and could not be given back; the next ``take_due`` has them again."""
        self._spares = [(0, page) for page in pages] + self._spares

    def forget(self) -> None:
        """The daemon has taken everything by itself."""
        self._spares.clear()
        self._windows.clear()
