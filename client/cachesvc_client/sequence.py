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
from typing import Any, TypeVar

import grpc
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.model.answers import NO_POSITIONS, Allocated, Positions, Published, Recycled, Swapped, TicketView
from cachesvc_client.core.arguments import explains_arguments, one_each, renamed
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    NotFound,
    Unauthenticated,
    error_of,
)
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.entries import stock_targets
from cachesvc_client.records.lease_record import ANSWER_MARGIN_S, LATER, LONGEST_WAIT_S, LeaseRecord, list_running
from cachesvc_client.records.sequence_record import NO_DEAD, NO_STATES, SequenceRecord, States, lost_tokens
from cachesvc_client.records.steps import Recorded, SentStep, StepBatch, StepBook
from cachesvc_client.records.views import SequenceView
from cachesvc_client.wire.connection import Connection, pause_after
from cachesvc_client.wire.messages import build_recycle, build_wait_tickets, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import CLOSE, RECYCLE, WAIT_TICKETS, Operation, no_action
from cachesvc_client.wire.transports import StepLine

T = TypeVar("T")

log = logging.getLogger(__name__)


class Sequence(SequenceView):
    """An open sequence. Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.

    One thread uses it at a time. After a DeadlineExceeded the next call first asks again, under the same request_id,
    what became of the last one.
    """

    def __init__(self, record: SequenceRecord, calls: LeaseCalls) -> None:
        super().__init__(record)
        self._calls = calls

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
        return self._run(lambda: self.record.allocate(upto_blocks, short_suffix=short_suffix, positions=positions))

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
        return self._run(lambda: self.record.publish(upto_blocks, keys, states=states))

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
        return self._run(lambda: self.record.recycle(computed_tokens, launch, dead))

    @explains_arguments
    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        """Add ``blocks`` private blocks to the tables without a round trip; the next step tells the daemon.

        ``positions``: as of ``allocate`` (left out: all of a window, none of a state).
        Raises StockEmpty (nothing is taken: allocate instead), Conflict (an allocate is under way), InvalidRequest (no
        step stream with a stock).
        """
        self._calls.record.grow((self.record,), (blocks,), positions)

    @explains_arguments
    def swap_out(self, *, launch: int | None = None) -> Swapped:
        """Start to take the sequence off the device; its pages must stay as they are until the tickets are done.

        ``launch``: the last that used the sequence (left out: the newest). Raises PoolExhausted (no room on the host),
        Conflict (that launch is not complete, or a swap runs), InvalidRequest (it never was).
        """
        return self._run(lambda: self.record.swap_out(launch))

    @explains_arguments
    def swap_in(self, *, short_suffix: bool = False) -> Swapped:
        """Start to bring the sequence back; ``tables`` are new, and ``tickets`` are what to wait for.

        ``short_suffix``: as of ``allocate``. Raises PoolExhausted, Conflict (on the device already, or on its way out).
        """
        return self._run(lambda: self.record.swap_in(short_suffix=short_suffix))

    @explains_arguments
    def wait_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until all of ``tickets`` are done: the tables' pages have their bytes then. Raises LoadFailed, also when
        asked again, DeadlineExceeded, Conflict (swapped out, or an allocate without an answer)."""
        self._require_answered()
        if tickets := self.record.tickets:
            self.record.end_loads(self._calls.wait_tickets(_ids(tickets), timeout_s))
        self.record.require_loaded()
        self._calls.record.check()

    def lost_tokens(self) -> range:
        """Positions of the tokens that this sequence's loads did not bring, because they failed or the daemon went:
        what is to be computed anew; all of them where it was swapped out at the loss. Empty when all came, and for
        loads that still run. No round trip. After the daemon has gone, let nothing use these pages before the pool
        is quiet (``AttachedPool.wait_quiet``): a copy that was on its way may still land there."""
        return lost_tokens(self.record, self._calls.record.pools, self._calls.record.is_lost)

    @explains_arguments
    def wait_swapped(self, timeout_s: float | None = None) -> None:
        """Wait until the last swap is done. Raises LoadFailed (it is where it was before), also when asked again,
        DeadlineExceeded."""
        self._require_answered()
        if tickets := self.record.swap_tickets:
            self.record.end_swap(self._calls.wait_tickets(_ids(tickets), timeout_s))
        self.record.require_swapped()
        self._calls.record.check()

    @explains_arguments
    def release(self, *, launch: int | None = None, output_tokens: int | None = None) -> int:
        """End the sequence: unpin what it shares, free what is its own; device pages that came back.

        No kernel may write its pages any more, but for launches under way up to ``launch``, the last that used it (left
        out: the newest): the answer is 0 then, and ``lease.completed`` gives the pages back. Eviction learns from
        ``output_tokens``, what its request has put out. Raises AlreadyClosed when it was released before,
        InvalidRequest (no such launch).
        """
        lease = self._calls.record
        lease.require_no_steps(self.record)
        if not self.record.is_released and self.record.end_later(launch, output_tokens):
            lease.hold(self.record)
            return 0
        is_asked_again = self.record.unanswered is not None
        try:
            self._calls.settle(self.record)
            if not (is_asked_again and self.is_released):
                lease.growing.withdraw((self.record,))
                self._calls.run(self.record.release())
        except (*LATER, KeyboardInterrupt):
            lease.orphans.append(self.record)
            raise
        lease.end(self.record)
        return self.record.freed_pages

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
        lease = self._calls.record
        is_cared_for = self.is_released or any(self.record is each for each in lease.orphans)
        if is_cared_for or lease.is_closed or lease.is_lost or self._calls.connection.maker.is_elsewhere:
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
        self._calls.record.check()
        self._calls.settle(self.record)

    def _run(self, build: Callable[[], Operation[T]]) -> T:
        lease = self._calls.record
        lease.require_no_steps(self.record)
        self._calls.settle(self.record)
        if lease.growing.has(self.record):
            self._calls.flush()
        return self._calls.run(build())


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

    def __init__(self, calls: LeaseCalls) -> None:
        self._calls = calls
        self._book = StepBook(calls.record)
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
        return StepBatch(self._calls.record, lambda record: Sequence(record, self._calls))

    def resize(self, stock_pages: int | Seq[int], due_blocks: int = 0) -> None:
        """Keep ``stock_pages`` in stock from the next step on, for every group or for each; it gives back what is above
        that. ``due_blocks``: of these, blocks that are about to be taken: the daemon evicts others for them. Raises
        InvalidRequest."""
        record = self._calls.record
        if record.stock is not None:
            record.stock.aim(stock_targets(stock_pages, record.registration.layout))
            record.stock.due = due_blocks

    @explains_arguments
    def grow_all(self, sequences: Seq[Recorded], blocks: int | Seq[int] = 1) -> None:
        """Add ``blocks`` private blocks to the tables of each sequence without a round trip, or as many as a list says
        for each; the next step tells the daemon. ``Sequence.grow_from_stock`` is this for one.

        All or nothing. Raises StockEmpty; what keeps one of them from growing, AlreadyClosed, LoadFailed or Conflict,
        with its ``sequence_id``; InvalidRequest (no stock, a sequence twice).
        """
        self._calls.record.grow([each.record for each in sequences], one_each(blocks, len(sequences)))

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
                self._calls.settle(owing)
        if not self._is_ready:
            self._make_way()
            self._choose_way()
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
        close_s = self._calls.connection.timeouts.close_s
        try:
            if self._book.under_way:
                self._collect(self._book.under_way[-1], close_s)
            if self._calls.record.growing:
                self.submit(timeout_s=close_s)
        except CacheClientError as error:  # what it held goes with the lease
            log.debug("steps_closed_early why=%s", error)
        self._is_closed = True
        if self._line is not None:
            self._line.close()
        self._book.refuse(AlreadyClosed("the step stream was closed before the answer was collected"))
        self._calls.end_stream()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, step: SentStep, timeout_s: float | None) -> list[Any]:
        """Take in answers until that of ``step`` has come; its results. Raises as ``PendingStep.results``."""
        if not step.is_answered:
            default_s = self._calls.connection.timeouts.step_s + self._book.waits_until(step)
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
        return self._take_until(step, now_s, now_s + self._calls.connection.timeouts.step_s)

    def _take_until(self, step: SentStep, deadline_s: float, renewed_s: float) -> bool:
        """Take in answers until that of ``step`` has come; False at the deadline. ``renewed_s``: the deadline for a
        stream that has to be opened again."""
        pauses = self._calls.connection.retries.pauses()
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
        """True where a step can be sent by the way that it should take."""
        line = self._line
        return line is not None and line.is_lane and not (self._calls.connection.wants_lane or self._book.is_full)

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")

    def _make_way(self) -> None:
        """Take in the oldest answers where too many steps are in flight and the caller collects none."""
        while self._book.is_full and self._book.under_way[0].is_quiet:
            try:
                self._collect(self._book.under_way[0], None)
            except DeadlineExceeded:
                raise
            except CacheClientError as refusal:  # what it carried is sent again, or was lost with the lease
                log.debug("told_step_refused why=%s", refusal)

    def _choose_way(self) -> None:
        """Open the stream anew where no step is in flight by gRPC, and there is a lane again or the token is another
        one."""
        connection, line = self._calls.connection, self._line
        connection.keep_lane()
        if line is None or line.is_lane or self._book.under_way:
            return
        if connection.has_lane or not set(connection.proof.metadata) <= set(line.metadata):
            self._line = None
            line.close()

    def _enter(self, batch: StepBatch[Any] | None) -> SentStep:
        self._require_open()
        self._calls.connection.maker.check()
        self._book.require_room()
        return self._put(self._book.enter(batch))

    def _put(self, step: SentStep) -> SentStep:
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
                self._calls.connection.judge(refusal)
            except CacheClientError as gone:
                self._book.refuse(gone)
                return
        self._book.refuse_one(answer.request_id, refusal)

    def _renew(self, failure: grpc.RpcError, pauses: Iterator[float], deadline_s: float) -> None:
        """The stream broke: open it again and send what has no answer under the same ids, or give up."""
        connection = self._calls.connection
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
            self._line = self._calls.connection.open_steps()
        except CacheClientError as error:
            self._book.refuse(error)
            raise
        for step in self._book.under_way:
            self._line.put(step.request)


class LeaseCalls:
    """The calls of one lease's handles. ``stream``: its step stream, while one is open."""

    def __init__(self, connection: Connection, record: LeaseRecord) -> None:
        self.connection = connection
        self.record = record
        self.stream: StepStream | None = None

    def run(self, operation: Operation[T]) -> T:
        """Send an operation under a fresh request_id and take in its answer."""
        try:
            self.record.address(operation)
        except CacheClientError as error:
            operation.end_with(error)
            raise
        return self._send(operation)

    def settle(self, record: SequenceRecord) -> None:
        """Ask again for an answer that never came, under its own request_id."""
        operation = record.unanswered
        if operation is None:
            return
        record.unanswered = None
        try:
            self._send(operation)
        except (DeadlineExceeded, DaemonUnavailable, LeaseLost):
            raise
        except CacheClientError as refusal:  # it was refused: nothing happened, and its caller has moved on
            log.debug("unanswered_was_refused sequence=%s why=%s", record.id, refusal)

    def flush(self) -> None:
        """Tell the daemon of growth from stock now, by a step of its own."""
        if self.stream is not None:
            self.stream.submit()

    def wait_tickets(self, tickets: Seq[int], timeout_s: float | None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended. Raises DeadlineExceeded, NotFound."""
        limit_s = self.connection.timeouts.wait_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self.record.check()
            slice_s = min(max(deadline_s - time.monotonic(), 0), LONGEST_WAIT_S)
            request = build_wait_tickets(self.record.id, tickets, int(slice_s * 1000))
            answer = self.connection.ask(WAIT_TICKETS, request, slice_s + ANSWER_MARGIN_S)
            views = parse_tickets(answer.tickets)
            running = list_running(views)
            if not running:
                return views
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"tickets {running} still run after {limit_s:g} s", was_answered=True)

    def release_abandoned(self) -> None:
        """Release abandoned sequences, and those whose Match or Release got no answer: they may hold pins."""
        while (record := self.record.take_orphan(and_ended=self.stream is None)) is not None:
            try:
                self.settle(record)
                if not record.is_released:
                    self.run(record.release())
            except NotFound as gone:  # nothing is held, which is what was wanted
                log.debug("release_needless lease=%s why=%s", self.record.id, gone)
            except BaseException:
                self.record.orphans.append(record)
                raise
            self.record.end(record)

    def end_stream(self) -> None:
        """The step stream was closed: its stock goes back."""
        self.stream = None
        stock, self.record.stock = self.record.stock, None
        pages = stock.drain() if stock is not None else ()
        if not pages:
            return
        try:
            self.run(Operation(RECYCLE, build_recycle(0, 0, pages), parse_recycle, no_action))
        except CacheClientError as error:  # the stock goes back with the lease
            log.debug("stock_not_returned lease=%s why=%s", self.record.id, error)

    def end(self, *, quiesced: bool, for_all: bool = False) -> None:
        """End the lease at the daemon, of an instance for this process unless ``for_all``; an end that cannot be sent
        now waits for the next connection."""
        leaver = self.record.process_token if self.record.instance and not for_all else b""
        request = lease_pb2.CloseRequest(lease_id=self.record.id, quiesced=quiesced, process_token=leaver)
        try:
            self.connection.insist(CLOSE, request, self.connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", self.record.id, over)
        except (AlreadyClosed, DaemonUnavailable, DeadlineExceeded, Unauthenticated) as gone:
            log.debug("close_untold lease=%s why=%s", self.record.id, gone)
            self.connection.unreported.append(request)

    def move(self, connection: Connection) -> None:
        """Move a lost lease to ``connection``, over which its end will be reported: the same daemon was found again."""
        self.record.lose(self.connection.gone())
        self.connection = connection

    def _send(self, operation: Operation[T]) -> T:
        try:
            limit_s = self.connection.timeouts.call_s + operation.waits_s
            answer: Any = self.connection.ask(operation.method, operation.request, limit_s)
        except CacheClientError as error:
            operation.end_with(error)
            is_gone = isinstance(error, DaemonUnavailable) and self.connection.lost.is_set()
            if is_gone or isinstance(error, LeaseLost):
                self.record.lose(error)
            raise
        except KeyboardInterrupt:  # the call may have been carried out: the next one asks
            if operation.owner is not None:
                operation.owner.unanswered = operation
            raise
        return operation.apply(answer)


def _ids(tickets: tuple[TicketView, ...]) -> tuple[int, ...]:
    return tuple(ticket.id for ticket in tickets)
