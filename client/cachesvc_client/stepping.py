"""The step stream of a lease: one message for each engine iteration, and its answer when the engine wants it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import grpc
from kvcache.v1 import cache_pb2

from cachesvc_client.core.arguments import explains_arguments, one_each
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    error_of,
)
from cachesvc_client.records.entries import stock_targets
from cachesvc_client.records.steps import Recorded, SentStep, StepBatch, StepBook
from cachesvc_client.sequence import LeaseCalls, Sequence
from cachesvc_client.wire.connection import Attempts
from cachesvc_client.wire.transports import StepLine

log = logging.getLogger(__name__)


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
        return (self.send(batch)).results(timeout_s)

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
        attempts: Attempts | None = None
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
                attempts = attempts or Attempts(self._calls.connection.retries, renewed_s)
                self._renew(attempts, answer)
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
        if connection.has_lane or not connection.proof.is_in(line.metadata):
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

    def _renew(self, attempts: Attempts, failure: grpc.RpcError) -> None:
        """The stream broke: open it again and send what has no answer under the same ids, or give up."""
        connection = self._calls.connection
        assert self._line is not None
        used = self._line.metadata
        self._line.close()
        self._line = None
        try:
            connection.judge(failure)
            if not connection.proof.renew_stream(failure, used):
                connection.channels.wait_end(attempts.pause_after(failure, time.monotonic()))
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
