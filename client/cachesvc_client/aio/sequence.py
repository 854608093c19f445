"""Handles of sequences on an event loop: what a request holds in the cache, from Match to release."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

from cachesvc.model.answers import Allocated, Published, Recycled, Swapped, TicketView
from cachesvc.model.columns import NO_POSITIONS, Positions
from cachesvc_client.aio.lease_calls import LeaseCalls
from cachesvc_client.core.arguments import explains_arguments, renamed
from cachesvc_client.core.errors import DaemonUnavailable, LeaseLost
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.records.lease_record import LATER
from cachesvc_client.records.losses import lost_tokens
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.tables import NO_DEAD, NO_STATES, States
from cachesvc_client.records.views import SequenceView
from cachesvc_client.wire.methods import Operation
from cachesvc_client.wire.port import INTERRUPTS

T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncSequence(SequenceView):
    """An open sequence. Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.

    One task uses it at a time. After a DeadlineExceeded, or a call that was cancelled, the next call first asks again,
    under the same request_id, what became of the last one.
    """

    def __init__(self, record: SequenceRecord, calls: LeaseCalls) -> None:
        super().__init__(record)
        self._calls = calls

    @renamed(blocks="upto_blocks")
    @explains_arguments
    async def allocate(
        self, upto_blocks: int, *, short_suffix: bool = False, positions: Positions = NO_POSITIONS
    ) -> Allocated:
        """Make the block tables ``upto_blocks`` long, all or nothing; blocks of the hit on the host start to load.

        ``loading_blocks`` of the answer says how many of the new blocks are loads; the rest is fresh and this
        sequence's alone. ``short_suffix``: what is to be computed takes less time than the load, or nothing waits layer
        by layer; then the first layer comes by itself and all others together, which takes the link least time.
        ``positions``: by group with a window or states, the new blocks that get a page (left out: all of a window, the
        last of a state). Raises PoolExhausted, LimitExceeded, LoadFailed, InvalidRequest (shorter than now or the hit).
        """
        return await self._run(
            lambda: self.record.allocate(upto_blocks, short_suffix=short_suffix, positions=positions)
        )

    @explains_arguments
    async def publish(self, upto_blocks: int, keys: PackedKeys = b"", *, states: States = NO_STATES) -> Published:
        """Seal the computed blocks up to ``upto_blocks``; from then on they are shared and immutable.

        ``keys``: packed keys of the sequence from its root on (``BlockHasher.keys``), at least up to there; leave them
        out for blocks whose keys Match got. Where a key was sealed before, the table gets that page, and the sequence's
        own page becomes a spare, which ``recycle`` gives back once no launch under way uses it. ``pending`` in the
        answer: publish the rest later. ``states``: by group and position, this sequence's own page that holds the state
        at the end of that block; earlier blocks may be named too. Raises Conflict, NotOwned (allocate first),
        LoadFailed, InvalidRequest.
        """
        return await self._run(lambda: self.record.publish(upto_blocks, keys, states=states))

    @explains_arguments
    async def recycle(
        self, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> Recycled:
        """Give back spares, and what no window needs once ``computed_tokens`` tokens are computed and verified.

        The pages may be another's at once, so launches under way (``lease.launch``) are waited for: a later call gives
        back what this one held. ``launch``: the one whose end makes the tokens computed (left out: the newest). Without
        launches, call it when no kernel that still uses the pages runs or will. ``dead``: by group with a window or
        states, the first block that is needed still, where the engine knows better. Raises InvalidRequest, NotFound.
        """
        return await self._run(lambda: self.record.recycle(computed_tokens, launch, dead))

    @explains_arguments
    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        """Add ``blocks`` private blocks to the tables without a round trip; the next step tells the daemon.

        ``positions``: as of ``allocate`` (left out: all of a window, none of a state).
        Raises StockEmpty (nothing is taken: allocate instead), Conflict (an allocate is under way), InvalidRequest (no
        step stream with a stock).
        """
        self._calls.record.grow((self.record,), (blocks,), positions)

    @explains_arguments
    async def swap_out(self, *, launch: int | None = None) -> Swapped:
        """Start to take the sequence off the device; its pages must stay as they are until the tickets are done.

        ``launch``: the last that used the sequence (left out: the newest). Raises PoolExhausted (no room on the host),
        Conflict (that launch is not complete, or a swap runs), InvalidRequest (it never was).
        """
        return await self._run(lambda: self.record.swap_out(launch))

    @explains_arguments
    async def swap_in(self, *, short_suffix: bool = False) -> Swapped:
        """Start to bring the sequence back; ``tables`` are new, and ``tickets`` are what to wait for.

        ``short_suffix``: as of ``allocate``. Raises PoolExhausted, Conflict (on the device already, or on its way out).
        """
        return await self._run(lambda: self.record.swap_in(short_suffix=short_suffix))

    @explains_arguments
    async def wait_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until all of ``tickets`` are done: the tables' pages have their bytes then. Raises LoadFailed, also when
        asked again, DeadlineExceeded, Conflict (swapped out, or an allocate without an answer)."""
        await self._require_answered()
        if tickets := self.record.tickets:
            self.record.end_loads(await self._calls.wait_tickets(_ids(tickets), timeout_s))
        self.record.require_loaded()
        self._calls.record.check()

    def lost_tokens(self) -> range:
        """Positions of the tokens that this sequence's loads did not bring, because they failed or the daemon went:
        what is to be computed anew; all of them where it was swapped out at the loss. Empty when all came, and for
        loads that still run. No round trip. After the daemon has gone, let nothing use these pages before the pool
        is quiet (``AttachedPool.wait_quiet``): a copy that was on its way may still land there."""
        return lost_tokens(self.record, self._calls.record.pools, self._calls.record.is_lost)

    @explains_arguments
    async def wait_swapped(self, timeout_s: float | None = None) -> None:
        """Wait until the last swap is done. Raises LoadFailed (it is where it was before), also when asked again,
        DeadlineExceeded."""
        await self._require_answered()
        if tickets := self.record.swap_tickets:
            self.record.end_swap(await self._calls.wait_tickets(_ids(tickets), timeout_s))
        self.record.require_swapped()
        self._calls.record.check()

    @explains_arguments
    async def release(self, *, launch: int | None = None, output_tokens: int | None = None) -> int:
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
            await self._calls.settle(self.record)
            if not (is_asked_again and self.is_released):
                lease.growing.withdraw((self.record,))
                await self._calls.run(self.record.release())
        except (*LATER, *INTERRUPTS):
            lease.orphans.append(self.record)
            raise
        lease.end(self.record)
        return self.record.freed_pages

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_released:
            return
        try:
            await self.release()
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

    async def _require_answered(self) -> None:
        """Ask for what a call without an answer has begun, which tickets there are to wait for. Raises what the state
        says: a wait finds it out before it asks the daemon."""
        self.record.require_usable()
        self._calls.record.check()
        await self._calls.settle(self.record)

    async def _run(self, build: Callable[[], Operation[T]]) -> T:
        lease = self._calls.record
        lease.require_no_steps(self.record)
        await self._calls.settle(self.record)
        if lease.growing.has(self.record):
            await self._calls.flush()
        return await self._calls.run(build())


def _ids(tickets: tuple[TicketView, ...]) -> tuple[int, ...]:
    return tuple(ticket.id for ticket in tickets)
