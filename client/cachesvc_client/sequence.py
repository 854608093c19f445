"""Handles of sequences, what a request holds in the cache from Match to release, and of the step stream.

A step stream sends one message for each engine iteration, and has its answer when the engine wants it.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any

import grpc
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import NO_POSITIONS, Allocated, Positions, Published, Recycled, Swapped, TicketView
from cachesvc_client.core.arguments import explains_arguments, one_each, renamed
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    NotFound,
    error_of,
)
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.entries import stock_targets
from cachesvc_client.records.lease_record import LATER, LeaseRecord
from cachesvc_client.records.sequence_record import NO_DEAD, NO_STATES, Pages, SequenceRecord, States
from cachesvc_client.records.steps import Recorded, SentStep, StepBatch, StepBook
from cachesvc_client.wire.connection import pause_after
from cachesvc_client.wire.transports import StepLine

log = logging.getLogger(__name__)


class Sequence:
    """An open sequence. Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.

    One thread uses it at a time. After a DeadlineExceeded the next call first asks again, under the same request_id,
    what became of the last one.
    """

    def __init__(self, record: SequenceRecord, lease: LeaseRecord) -> None:
        self.record = record
        self._lease = lease

    def __repr__(self) -> str:
        """State, as of the last call or step."""
        state = "released" if self.is_released else "swapped out" if self.is_swapped_out else "open"
        return (
            f"<{type(self).__name__} {self.id}: {state}, {self.blocks} blocks, {self.sealed_blocks} sealed, hit "
            f"{self.device_blocks} on the device and {self.host_blocks} on the host>"
        )

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def device_blocks(self) -> int:
        """Blocks of the hit that were in place at Match: nothing to load, nothing to compute."""
        return self.record.matched.device_blocks

    @property
    def host_blocks(self) -> int:
        """Blocks of the hit behind those that ``allocate`` starts to load."""
        return self.record.matched.host_blocks

    @property
    def storage_blocks(self) -> int:
        """Number of ``host_blocks`` whose bytes came from storage for this Match."""
        return self.record.matched.storage_blocks

    @property
    def hit_blocks(self) -> int:
        """``device_blocks + host_blocks``: what need not be computed."""
        return self.device_blocks + self.host_blocks

    @property
    def full_blocks(self) -> int:
        """Blocks that the groups without a window have: more than ``hit_blocks`` where a missing window page or state
        has shortened the hit."""
        return self.record.matched.full_blocks

    @property
    def computing_blocks(self) -> int:
        """Blocks after the hit that another engine was computing at Match: waiting and matching again may pay."""
        return self.record.matched.computing_blocks

    @property
    def coming_blocks(self) -> int:
        """Blocks after the hit that were on their way from another node at Match, as ``expected``: match again."""
        return self.record.matched.coming_blocks

    @property
    def blocks(self) -> int:
        return self.record.blocks

    @property
    def sealed_blocks(self) -> int:
        """Leading blocks that are shared and immutable: never write into their pages."""
        return self.record.sealed_blocks

    @property
    def tables(self) -> tuple[Pages, ...]:
        """Page of each block, for each group of the layout: int32 ``[blocks]``, -1 where there is none.

        Read-only views, good until the sequence's next call. Raises Conflict while the sequence is swapped out,
        UsedAfterFork in a child of the process that opened it.
        """
        self.record.maker.check()
        if self.record.is_swapped_out:
            raise Conflict(f"sequence {self.id} is swapped out and has no pages; swap it in first")
        return tuple([table.pages for table in self.record.tables])

    @property
    def tickets(self) -> tuple[TicketView, ...]:
        """Loads that the tables rely on: wait for their layers in ``AttachedPool``, or for all in ``wait_loaded``."""
        return self.record.tickets

    @property
    def is_swapped_out(self) -> bool:
        return self.record.is_swapped_out

    @property
    def is_released(self) -> bool:
        """True once ``release`` was called: nothing else can be done with the sequence."""
        return self.record.is_released or self.record.ends_after > 0

    @renamed(blocks="upto_blocks")
    @explains_arguments
    def allocate(
        self, upto_blocks: int, *, short_suffix: bool = False, positions: Positions = NO_POSITIONS
    ) -> Allocated:
        """Make the block tables ``upto_blocks`` long, all or nothing; blocks of the hit on the host start to load.

        ``loading_blocks`` of the answer says how many of the new blocks are loads; the rest is fresh and this
        sequence's alone. ``short_suffix``: what is to be computed takes less time than the load, or nothing waits layer
        by layer; then the first layer comes by itself and all others together, which takes the link least time.
        ``positions``: by group with a window or states, the new blocks that get a page (left out: all of a window, the
        last of a state). Raises PoolExhausted, LimitExceeded, LoadFailed, InvalidRequest (shorter than now or the hit).
        """
        self._begin()
        return self._lease.run(self.record.allocate(upto_blocks, short_suffix=short_suffix, positions=positions))

    @explains_arguments
    def publish(self, upto_blocks: int, keys: PackedKeys = b"", *, states: States = NO_STATES) -> Published:
        """Seal the computed blocks up to ``upto_blocks``; from then on they are shared and immutable.

        ``keys``: packed keys of the sequence from its root on (``BlockHasher.keys``), at least up to there; leave them
        out for blocks whose keys Match got. Where a key was sealed before, the table gets that page, and the sequence's
        own page becomes a spare, which ``recycle`` gives back once no launch under way uses it. ``pending`` in the
        answer: publish the rest later. ``states``: by group and position, this sequence's own page that holds the state
        at the end of that block; earlier blocks may be named too. Raises Conflict, NotOwned (allocate first),
        LoadFailed, InvalidRequest.
        """
        self._begin()
        return self._lease.run(self.record.publish(upto_blocks, keys, states=states))

    @explains_arguments
    def recycle(
        self, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> Recycled:
        """Give back spares, and what no window needs once ``computed_tokens`` tokens are computed and verified.

        The pages may be another's at once, so launches under way (``lease.launch``) are waited for: a later call gives
        back what this one held. ``launch``: the one whose end makes the tokens computed (left out: the newest). Without
        launches, call it when no kernel that still uses the pages runs or will. ``dead``: by group with a window or
        states, the first block that is needed still, where the engine knows better. Raises InvalidRequest, NotFound.
        """
        self._begin()
        return self._lease.run(self.record.recycle(computed_tokens, launch, dead))

    @explains_arguments
    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        """Add ``blocks`` private blocks to the tables without a round trip; the next step tells the daemon.

        ``positions``: as of ``allocate`` (left out: all of a window, none of a state).
        Raises StockEmpty (nothing is taken: allocate instead), Conflict (an allocate is under way), InvalidRequest (no
        step stream with a stock).
        """
        self._lease.grow((self.record,), (blocks,), positions)

    @explains_arguments
    def swap_out(self, *, launch: int | None = None) -> Swapped:
        """Start to take the sequence off the device; its pages must stay as they are until the tickets are done.

        ``launch``: the last that used the sequence (left out: the newest). Raises PoolExhausted (no room on the host),
        Conflict (that launch is not complete, or a swap runs), InvalidRequest (it never was).
        """
        self._begin()
        return self._lease.run(self.record.swap_out(launch))

    @explains_arguments
    def swap_in(self, *, short_suffix: bool = False) -> Swapped:
        """Start to bring the sequence back; ``tables`` are new, and ``tickets`` are what to wait for.

        ``short_suffix``: as of ``allocate``. Raises PoolExhausted, Conflict (on the device already, or on its way out).
        """
        self._begin()
        return self._lease.run(self.record.swap_in(short_suffix=short_suffix))

    @explains_arguments
    def wait_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until all of ``tickets`` are done: the tables' pages have their bytes then. Raises LoadFailed, also when
        asked again, DeadlineExceeded, Conflict (swapped out, or an allocate without an answer)."""
        self._require_answered()
        if tickets := self.record.tickets:
            self.record.end_loads(self._lease.wait_tickets([each.id for each in tickets], timeout_s))
        self.record.require_loaded()
        self._lease.check()

    def lost_tokens(self) -> range:
        """Positions of the tokens that this sequence's loads did not bring, because they failed or the daemon went:
        what is to be computed anew; all of them where it was swapped out at the loss. Empty when all came, and for
        loads that still run. No round trip. After the daemon has gone, let nothing use these pages before the pool
        is quiet (``AttachedPool.wait_quiet``): a copy that was on its way may still land there."""
        return self.record.lost_tokens(self._lease.pools, self._lease.is_lost)

    @explains_arguments
    def wait_swapped(self, timeout_s: float | None = None) -> None:
        """Wait until the last swap is done. Raises LoadFailed (it is where it was before), also when asked again,
        DeadlineExceeded."""
        self._require_answered()
        if tickets := self.record.swap_tickets:
            self.record.end_swap(self._lease.wait_tickets([each.id for each in tickets], timeout_s))
        self.record.require_swapped()
        self._lease.check()

    @explains_arguments
    def release(self, *, launch: int | None = None, output_tokens: int | None = None) -> int:
        """End the sequence: unpin what it shares, free what is its own; device pages that came back.

        No kernel may write its pages any more, but for launches under way up to ``launch``, the last that used it (left
        out: the newest): the answer is 0 then, and ``lease.completed`` gives the pages back. Eviction learns from
        ``output_tokens``, what its request has put out. Raises AlreadyClosed when it was released before,
        InvalidRequest (no such launch).
        """
        lease, record = self._lease, self.record
        lease.require_no_steps(record)
        if not record.is_released and record.end_later(launch, output_tokens):
            lease.hold(record)
            return 0
        is_asked_again = record.unanswered is not None
        try:
            lease.settle(record)
            if not (is_asked_again and record.is_released):
                lease.growing.withdraw((record,))
                lease.run(record.release())
        except (*LATER, KeyboardInterrupt):
            lease.orphans.append(record)
            raise
        lease.end(record)
        return record.freed_pages

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_released:
            return
        try:
            self.release()
        except (DaemonUnavailable, LeaseLost) as gone:  # nothing is held any more, which is what was wanted
            log.debug("release_needless sequence=%s why=%s", self.id, gone)

    def __del__(self) -> None:
        lease = self._lease
        is_cared_for = self.is_released or any(self.record is each for each in lease.orphans)
        if is_cared_for or lease.is_closed or lease.is_lost or lease.maker.is_elsewhere:
            return
        warnings.warn(
            f"sequence {self.id} of lease {lease.id} was dropped without release: it holds its blocks until the lease "
            "ends; use it in a with block, or release it",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _require_answered(self) -> None:
        """Ask for what a call without an answer has begun, which tickets there are to wait for. Raises what the state
        says: a wait finds it out before it asks the daemon."""
        self.record.require_usable()
        self._lease.check()
        self._lease.settle(self.record)

    def _begin(self) -> None:
        """Before a call: ask for the answer of the last one, and report growth from stock."""
        lease, record = self._lease, self.record
        lease.require_no_steps(record)
        if record.unanswered is not None:
            lease.settle(record)
        if record.growth_step == lease.growing.step and lease.flush is not None:
            lease.flush()


class PendingStep:
    def __init__(
        self,
        step: SentStep,
        collect: Callable[[SentStep, float | None], list[Any]],
        poll: Callable[[SentStep], bool],
    ) -> None:
        self._step = step
        self._collect = collect
        self._poll = poll

    @property
    def is_answered(self) -> bool:
        """True once its answer was taken in, or none will come: ``results`` tells at once."""
        return self._step.is_answered

    def poll(self) -> bool:
        """Take in answers that have come, without waiting; True once this step's is among them, or none will come.
        ``results`` then tells at once."""
        return self._poll(self._step)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Results of the batch's operations, one each, in order: a result, or a CacheClientError (not raised). Answers
        of steps sent before it are taken in first.

        Raises DeadlineExceeded (ask again for the same step), DaemonUnavailable, and what refused the step as a whole,
        such as LeaseLost.
        """
        return self._collect(self._step, timeout_s)


class StepStream:
    """A stream of steps under one lease; used from one thread. The stock is filled up by every answer."""

    def __init__(self, lease: LeaseRecord) -> None:
        self._lease = lease
        self._book = StepBook(lease)
        self._line: StepLine | None = None
        self._is_closed = False

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free device pages of each group as of the last answer; empty before the first answer. The stock is not among
        them, and other engines take from them too."""
        return self._book.room[0]

    @property
    def evictable_pages(self) -> tuple[int, ...]:
        """Device pages of each group that eviction could give, as ``free_pages``: their blocks are unpinned. Some take
        a transfer, such as their write-back, before they are free."""
        return self._book.room[1]

    def batch(self) -> StepBatch[Sequence]:
        return StepBatch(self._lease, lambda record: Sequence(record, self._lease))

    def resize(self, stock_pages: int | Seq[int], due_blocks: int = 0) -> None:
        """Keep ``stock_pages`` in stock from the next step on, for every group or for each; it gives back what is above
        that. ``due_blocks``: of these, blocks that are about to be taken: the daemon evicts others for them. Raises
        InvalidRequest."""
        stock = self._lease.stock
        if stock is not None:
            stock.aim(stock_targets(stock_pages, self._lease.registration.layout))
            stock.due = due_blocks

    @explains_arguments
    def grow_all(self, sequences: Seq[Recorded], blocks: int | Seq[int] = 1) -> None:
        """Add ``blocks`` private blocks to the tables of each sequence without a round trip, or as many as a list says
        for each; the next step tells the daemon. ``Sequence.grow_from_stock`` is this for one.

        All or nothing. Raises StockEmpty; what keeps one of them from growing, AlreadyClosed, LoadFailed or Conflict,
        with its ``sequence_id``; InvalidRequest (no stock, a sequence twice).
        """
        self._lease.grow([each.record for each in sequences], one_each(blocks, len(sequences)))

    def submit(self, batch: StepBatch[Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        """Send a batch (None: growth and stock alone) and wait for its results; see ``PendingStep.results``."""
        return self.send(batch).results(timeout_s)

    def send(self, batch: StepBatch[Any] | None = None) -> PendingStep:
        """Send a batch and go on; collect its results later, in any order.

        Raises LimitExceeded (too many steps under way), LeaseLost, AlreadyClosed, DaemonUnavailable.
        """
        self._require_open()
        if batch is not None:
            for owing in [record for record in batch.owners if record.unanswered is not None]:
                self._lease.settle(owing)
        if not self._is_ready:
            self._take_quiet()
            self._choose_line()
        return PendingStep(self._enter(batch), self._collect, self._poll)

    @property
    def is_silent(self) -> bool:
        """True where no answer has come that was not taken in."""
        return self._line is not None and self._line.is_silent

    def tell(self) -> None:
        """Send growth, and releases that waited for launches, in a step whose results are not collected. Raises as
        ``send``."""
        self._enter(None).is_quiet = True

    def close(self) -> None:
        """Take in the answers that are still to come, end the stream and give the stock back. Idempotent."""
        if self._is_closed:
            return
        close_s = self._lease.connection.timeouts.close_s
        try:
            if self._book.under_way:
                self._collect(self._book.under_way[-1], close_s)
            if self._lease.growing:
                self.submit(timeout_s=close_s)
        except CacheClientError as error:  # what it held goes with the lease
            log.debug("steps_closed_early why=%s", error)
        self._is_closed = True
        if self._line is not None:
            self._line.close()
        self._book.refuse(AlreadyClosed("the step stream was closed before the answer was collected"))
        self._lease.end_stream()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, step: SentStep, timeout_s: float | None) -> list[Any]:
        """Take in answers until that of ``step`` has come; its results. Raises as ``PendingStep.results``."""
        if not step.is_answered:
            default_s = self._lease.connection.timeouts.step_s + self._book.waits_until(step)
            limit_s = default_s if timeout_s is None else timeout_s
            deadline_s = time.monotonic() + limit_s
            if not self._take_until(step, deadline_s, deadline_s):
                raise DeadlineExceeded(f"no answer to the step within {limit_s:g} s; ask again for its results")
        return step.outcome()

    def _poll(self, step: SentStep) -> bool:
        """Take in what has come; True once the answer to ``step`` is among it. A stream that broke is opened again,
        which takes its time."""
        now_s = time.monotonic()
        if self._line is None:
            return step.is_answered
        return self._take_until(step, now_s, now_s + self._lease.connection.timeouts.step_s)

    def _take_until(self, step: SentStep, deadline_s: float, renewed_s: float) -> bool:
        """Take in answers until that of ``step`` has come; False at the deadline. ``renewed_s``: the deadline for a
        stream that has to be opened again."""
        pauses = self._lease.connection.retries.pauses()
        while not step.is_answered:
            if self._line is None:
                raise InvalidRequest("this step was sent on a stream that was closed")
            answer = self._line.get(deadline_s)
            if isinstance(answer, cache_pb2.StepResponse):
                if answer.HasField("error"):
                    self._take_refusal(answer)
                else:
                    self._book.answer(answer)
            elif answer is None:
                return False
            else:
                self._renew(answer, pauses, renewed_s)
        return True

    @property
    def _is_ready(self) -> bool:
        """True where a step can be sent at once, by the lane."""
        line = self._line
        return line is not None and line.is_lane and not (self._lease.connection.wants_lane or self._book.is_full)

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")

    def _take_quiet(self) -> None:
        """Take in the oldest answers where too many steps are in flight and the caller collects none."""
        while self._book.is_full and self._book.under_way[0].is_quiet:
            try:
                self._collect(self._book.under_way[0], None)
            except DeadlineExceeded:
                raise
            except CacheClientError as refusal:  # what it carried is sent again, or was lost with the lease
                log.debug("quiet_step_refused why=%s", refusal)

    def _choose_line(self) -> None:
        """Open the stream anew where no step is in flight by gRPC, and there is a lane again or the token is another
        one."""
        connection, line = self._lease.connection, self._line
        connection.keep_lane()
        if line is None or line.is_lane or self._book.under_way:
            return
        if connection.has_lane or not set(connection.proof.metadata) <= set(line.metadata):
            self._line = None
            line.close()

    def _enter(self, batch: StepBatch[Any] | None) -> SentStep:
        self._require_open()
        self._lease.maker.check()
        self._book.require_room()
        step = self._book.enter(batch)
        if self._line is None:
            self._open_line()
        else:
            self._line.put(step.request)
        return step

    def _take_refusal(self, answer: cache_pb2.StepResponse) -> None:
        """Take in a refusal of a step. One that does not know the lease may be another daemon's."""
        refusal = error_of(answer.error)
        if isinstance(refusal, NotFound):
            try:
                self._lease.connection.judge(refusal)
            except CacheClientError as gone:
                self._book.refuse(gone)
                return
        self._book.refuse_one(answer.request_id, refusal)

    def _renew(self, failure: grpc.RpcError, pauses: Iterator[float], deadline_s: float) -> None:
        """The stream broke: open it again and send what has no answer under the same ids, or give up."""
        connection = self._lease.connection
        assert self._line is not None
        used = self._line.metadata
        self._line.close()
        self._line = None
        try:
            connection.judge(failure)
            if not connection.proof.renew_stream(failure, used):
                connection.lost.wait(pause_after(failure, pauses, deadline_s))
            self._open_line()
        except CacheClientError as error:
            self._book.refuse(error)

    def _open_line(self) -> None:
        try:
            self._line = self._lease.connection.open_steps()
        except CacheClientError as error:
            self._book.refuse(error)
            raise
        for step in self._book.under_way:
            self._line.put(step.request)
