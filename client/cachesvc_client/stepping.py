"""The step stream of a lease: one message for each engine iteration, and its answer when the engine wants it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from cachesvc_client.aio.lease_calls import LeaseCalls
from cachesvc_client.aio.sequence import AsyncSequence
from cachesvc_client.aio.stepping import AsyncPendingStep, AsyncStepStream
from cachesvc_client.records.batches import Recorded, StepBatch
from cachesvc_client.sequence import Sequence
from cachesvc_client.wire.transports.blocking import drive


class PendingStep:
    """A step that was sent."""

    def __init__(self, calls: AsyncPendingStep) -> None:
        self._calls = calls

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Results of the batch's operations, one each, in order: a result, or a CacheClientError (not raised). Answers
        of steps sent before it are taken in first.

        Raises DeadlineExceeded (ask again for the same step), DaemonUnavailable, and what refused the step as a whole,
        such as LeaseLost.
        """
        return drive(self._calls.results(timeout_s))

    @property
    def is_answered(self) -> bool:
        """True once its answer was taken in, or none will come: ``results`` tells at once."""
        return self._calls.is_answered

    def poll(self) -> bool:
        """Take in answers that have come, without waiting; True once this step's is among them, or none will come.
        ``results`` then tells at once."""
        return drive(self._calls.poll())


class StepStream:
    """A stream of steps under one lease; used from one thread. The stock is filled up by every answer."""

    def __init__(self, calls: AsyncStepStream, lease: LeaseCalls) -> None:
        self._calls = calls
        self._lease = lease

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free device pages of each group as of the last answer; empty before the first answer. The stock is not among
        them, and other engines take from them too."""
        return self._calls.free_pages

    @property
    def evictable_pages(self) -> tuple[int, ...]:
        """Device pages of each group that eviction could give, as ``free_pages``: their blocks are unpinned. Some take
        a transfer, such as their write-back, before they are free."""
        return self._calls.evictable_pages

    @property
    def is_silent(self) -> bool:
        """True where no answer has come that was not taken in."""
        return self._calls.is_silent

    def resize(self, stock_pages: int | Seq[int], due_blocks: int = 0) -> None:
        """Keep ``stock_pages`` in stock from the next step on, for every group or for each; it gives back what is above
        that. ``due_blocks``: of these, blocks that are about to be taken: the daemon evicts others for them. Raises
        InvalidRequest."""
        self._calls.resize(stock_pages, due_blocks)

    def batch(self) -> StepBatch[Sequence]:
        """An empty batch."""
        return StepBatch(self._lease.record, lambda record: Sequence(AsyncSequence(record, self._lease)))

    def grow_all(self, sequences: Seq[Recorded], blocks: int | Seq[int] = 1) -> None:
        """Add ``blocks`` private blocks to the tables of each sequence without a round trip, or as many as a list says
        for each; the next step tells the daemon. ``Sequence.grow_from_stock`` is this for one.

        All or nothing. Raises StockEmpty; what keeps one of them from growing, AlreadyClosed, LoadFailed or Conflict,
        with its ``sequence_id``; InvalidRequest (no stock, a sequence twice).
        """
        self._calls.grow_all(sequences, blocks)

    def submit(self, batch: StepBatch[Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        """Send a batch (None: growth and stock alone) and wait for its results; see ``PendingStep.results``."""
        return drive(self._calls.submit(batch, timeout_s))

    def send(self, batch: StepBatch[Any] | None = None) -> PendingStep:
        """Send a batch and go on; collect its results later, in any order.

        Raises LimitExceeded (too many steps under way), LeaseLost, AlreadyClosed, DaemonUnavailable.
        """
        return PendingStep(drive(self._calls.send(batch)))

    def tell(self) -> None:
        """Send growth, and releases that waited for launches, in a step whose results are not collected. Raises as
        ``send``."""
        drive(self._calls.tell())

    def close(self) -> None:
        """Take in the answers that are still to come, end the stream and give the stock back. Idempotent."""
        drive(self._calls.close())

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
