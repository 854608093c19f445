"""Handles of sequences: what a request holds in the cache, from Match to release."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any

from cachesvc.model.answers import NO_POSITIONS, Allocated, Positions, Published, Recycled, Swapped
from cachesvc_client.aio.sequence import AsyncSequence, LeaseCalls
from cachesvc_client.aio.stepping import AsyncPendingStep, AsyncStepStream
from cachesvc_client.core.arguments import renamed
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.sequence_record import NO_DEAD, NO_STATES, States
from cachesvc_client.records.steps import Recorded, StepBatch
from cachesvc_client.records.views import SequenceView
from cachesvc_client.wire.transports import drive


class Sequence(SequenceView):
    """An open sequence. Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.

    One thread uses it at a time. After a DeadlineExceeded the next call first asks again, under the same request_id,
    what became of the last one.
    """

    def __init__(self, calls: AsyncSequence) -> None:
        super().__init__(calls.record)
        self._calls = calls

    @renamed(blocks="upto_blocks")
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
        return drive(self._calls.allocate(upto_blocks, short_suffix=short_suffix, positions=positions))

    def publish(self, upto_blocks: int, keys: PackedKeys = b"", *, states: States = NO_STATES) -> Published:
        """Seal the computed blocks up to ``upto_blocks``; from then on they are shared and immutable.

        ``keys``: packed keys of the sequence from its root on (``BlockHasher.keys``), at least up to there; leave them
        out for blocks whose keys Match got. Where a key was sealed before, the table gets that page, and the sequence's
        own page becomes a spare, which ``recycle`` gives back once no launch under way uses it. ``pending`` in the
        answer: publish the rest later. ``states``: by group and position, this sequence's own page that holds the state
        at the end of that block; earlier blocks may be named too. Raises Conflict, NotOwned (allocate first),
        LoadFailed, InvalidRequest.
        """
        return drive(self._calls.publish(upto_blocks, keys, states=states))

    def recycle(
        self, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> Recycled:
        """Give back spares, and what no window needs once ``computed_tokens`` tokens are computed and verified.

        The pages may be another's at once, so launches under way (``lease.launch``) are waited for: a later call gives
        back what this one held. ``launch``: the one whose end makes the tokens computed (left out: the newest). Without
        launches, call it when no kernel that still uses the pages runs or will. ``dead``: by group with a window or
        states, the first block that is needed still, where the engine knows better. Raises InvalidRequest, NotFound.
        """
        return drive(self._calls.recycle(computed_tokens, launch=launch, dead=dead))

    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        """Add ``blocks`` private blocks to the tables without a round trip; the next step tells the daemon.

        ``positions``: as of ``allocate`` (left out: all of a window, none of a state).
        Raises StockEmpty (nothing is taken: allocate instead), Conflict (an allocate is under way), InvalidRequest (no
        step stream with a stock).
        """
        self._calls.grow_from_stock(blocks, positions=positions)

    def swap_out(self, *, launch: int | None = None) -> Swapped:
        """Start to take the sequence off the device; its pages must stay as they are until the tickets are done.

        ``launch``: the last that used the sequence (left out: the newest). Raises PoolExhausted (no room on the host),
        Conflict (that launch is not complete, or a swap runs), InvalidRequest (it never was).
        """
        return drive(self._calls.swap_out(launch=launch))

    def swap_in(self, *, short_suffix: bool = False) -> Swapped:
        """Start to bring the sequence back; ``tables`` are new, and ``tickets`` are what to wait for.

        ``short_suffix``: as of ``allocate``. Raises PoolExhausted, Conflict (on the device already, or on its way out).
        """
        return drive(self._calls.swap_in(short_suffix=short_suffix))

    def wait_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until all of ``tickets`` are done: the tables' pages have their bytes then. Raises LoadFailed, also when
        asked again, DeadlineExceeded, Conflict (swapped out, or an allocate without an answer)."""
        drive(self._calls.wait_loaded(timeout_s))

    def lost_tokens(self) -> range:
        """Positions of the tokens that this sequence's loads did not bring, because they failed or the daemon went:
        what is to be computed anew; all of them where it was swapped out at the loss. Empty when all came, and for
        loads that still run. No round trip. After the daemon has gone, let nothing use these pages before the pool
        is quiet (``AttachedPool.wait_quiet``): a copy that was on its way may still land there."""
        return self._calls.lost_tokens()

    def wait_swapped(self, timeout_s: float | None = None) -> None:
        """Wait until the last swap is done. Raises LoadFailed (it is where it was before), also when asked again,
        DeadlineExceeded."""
        drive(self._calls.wait_swapped(timeout_s))

    def release(self, *, launch: int | None = None, output_tokens: int | None = None) -> int:
        """End the sequence: unpin what it shares, free what is its own; device pages that came back.

        No kernel may write its pages any more, but for launches under way up to ``launch``, the last that used it (left
        out: the newest): the answer is 0 then, and ``lease.completed`` gives the pages back. Eviction learns from
        ``output_tokens``, what its request has put out. Raises AlreadyClosed when it was released before,
        InvalidRequest (no such launch).
        """
        return drive(self._calls.release(launch=launch, output_tokens=output_tokens))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drive(self._calls.__aexit__(kind, error, trace))


class PendingStep:
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
