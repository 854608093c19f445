"""Handles of sequences: what a request holds in the cache, from Match to release."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

from cachesvc.model.answers import Allocated, Published, Recycled, Swapped, TicketView
from cachesvc_client.errors import Conflict, DaemonUnavailable, InvalidRequest, LeaseLost
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import LATER, LeaseRecord
from cachesvc_client.records.losses import lost_tokens
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.tables import Pages
from cachesvc_client.wire.methods import Operation

T = TypeVar("T")

log = logging.getLogger(__name__)


class SequenceView:
    """What can be read of a sequence without asking; as of its last call or step. One thread uses it at a time."""

    def __init__(self, record: SequenceRecord) -> None:
        self.record = record

    @property
    def id(self) -> int:
        """The sequence_id, unique within the lease."""
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
    def hit_blocks(self) -> int:
        """``device_blocks + host_blocks``: what need not be computed."""
        return self.device_blocks + self.host_blocks

    @property
    def computing_blocks(self) -> int:
        """Blocks after the hit that another engine was computing at Match: waiting and matching again may pay."""
        return self.record.matched.computing_blocks

    @property
    def blocks(self) -> int:
        """Length of the block tables."""
        return self.record.blocks

    @property
    def sealed_blocks(self) -> int:
        """Leading blocks that are shared and immutable: never write into their pages."""
        return self.record.sealed_blocks

    @property
    def tables(self) -> tuple[Pages, ...]:
        """For each group of the layout the page of each block: int32 ``[blocks]``, -1 where there is none.

        Read-only views, good until the sequence's next call. Raises Conflict while the sequence is swapped out.
        """
        if self.record.is_swapped_out:
            raise Conflict(f"sequence {self.id} is swapped out and has no pages; swap it in first")
        return tuple(table.pages for table in self.record.tables)

    @property
    def tickets(self) -> tuple[TicketView, ...]:
        """Loads that the tables rely on: wait for their layers in ``AttachedPool``, or for all in ``wait_loaded``."""
        return self.record.tickets

    @property
    def is_swapped_out(self) -> bool:
        """True from ``swap_out`` to ``swap_in``."""
        return self.record.is_swapped_out

    @property
    def is_released(self) -> bool:
        """True once ``release`` was called: nothing else can be done with the sequence."""
        return self.record.is_released or self.record.ends_after > 0

    def grow(self, lease: LeaseRecord, blocks: int) -> None:
        """Take ``blocks`` blocks of the lease's stock as the next cells. Raises StockEmpty, InvalidRequest."""
        if lease.stock is None:
            raise InvalidRequest("growing from stock needs a step stream: open one with lease.step(stock_pages=...)")
        self.record.grow(lease.stock, blocks)
        lease.growing[self.id] = self.record

    def require_no_steps(self) -> None:
        """Raises Conflict while operations of the sequence are under way in a step."""
        if self.record.steps:
            raise Conflict(f"sequence {self.id} has operations under way in a step; collect the step's results first")


class SequenceLease(Protocol):
    """What a sequence needs of its lease."""

    @property
    def record(self) -> LeaseRecord:
        """What is known of the lease."""

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """The pools that it attached in this process."""

    @property
    def is_lost(self) -> bool:
        """True once it is over for the daemon, or the daemon is gone."""

    def settle(self, record: SequenceRecord) -> None:
        """Learn what became of a call whose answer never came."""

    def flush(self) -> None:
        """Tell the daemon of growth from stock."""

    def run(self, operation: Operation[T]) -> T:
        """Send an operation and take in its answer."""

    def wait_tickets(self, tickets: tuple[int, ...], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait for transfers to end."""


class Sequence(SequenceView):
    """An open sequence. Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.

    After a DeadlineExceeded the next call first asks again, under the same request_id, what became of the last one.
    """

    def __init__(self, record: SequenceRecord, lease: SequenceLease) -> None:
        super().__init__(record)
        self._lease = lease

    def allocate(self, blocks: int) -> Allocated:
        """Make the block tables ``blocks`` long, all or nothing; blocks of the hit on the host start to load.

        ``loading_blocks`` of the answer says how many of the new blocks are loads; the rest is fresh and this
        sequence's alone. Raises PoolExhausted, LimitExceeded, LoadFailed, InvalidRequest (shorter than now or the hit).
        """
        return self._run(lambda: self.record.allocate(blocks))

    def publish(self, upto_blocks: int, keys: bytes = b"") -> Published:
        """Seal the computed blocks up to ``upto_blocks``; from then on they are shared and immutable.

        ``keys``: packed keys of the sequence from its root on (``BlockHasher.keys``), at least up to there; leave them
        out for blocks whose keys Match was told. Where a key was sealed before, the table gets that page, and the
        sequence's own page becomes a spare, which ``recycle`` gives back once no launch under way uses it. ``pending``
        in the answer: publish the rest later. Raises Conflict, NotOwned (allocate first), LoadFailed, InvalidRequest.
        """
        return self._run(lambda: self.record.publish(upto_blocks, keys))

    def recycle(self, computed_tokens: int, *, launch: int | None = None) -> Recycled:
        """Give back spares, and what no window needs once ``computed_tokens`` tokens are computed and verified.

        The pages may be another's at once, so launches under way (``lease.launch``) are waited for: a later call gives
        back what this one held. ``launch``: the one whose end makes the tokens computed (left out: the newest). Without
        launches, call it when no kernel that still uses the pages runs or will. Raises InvalidRequest, NotFound.
        """
        return self._run(lambda: self.record.recycle(computed_tokens, launch))

    def grow_from_stock(self, blocks: int = 1) -> None:
        """Add ``blocks`` private blocks to the tables without a round trip; the next step tells the daemon.

        Raises StockEmpty (nothing is taken: allocate instead), Conflict (an allocate is under way), InvalidRequest (no
        step stream with a stock).
        """
        self.grow(self._lease.record, blocks)

    def swap_out(self, *, launch: int | None = None) -> Swapped:
        """Start to take the sequence off the device; its pages must stay as they are until the tickets are done.

        ``launch``: the last that used the sequence (left out: the newest). Raises PoolExhausted (no room on the host),
        Conflict (that launch is not complete, or a swap runs), InvalidRequest (it never was).
        """
        return self._run(lambda: self.record.swap_out(launch))

    def swap_in(self) -> Swapped:
        """Start to bring the sequence back; ``tables`` are new, and ``tickets`` are what to wait for.

        Raises PoolExhausted, Conflict (on the device already, or still on its way out).
        """
        return self._run(self.record.swap_in)

    def wait_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until all of ``tickets`` are done. Raises LoadFailed, DeadlineExceeded."""
        if self.record.tickets:
            self.record.end_loads(self._lease.wait_tickets(_ids(self.record.tickets), timeout_s))

    def lost_tokens(self) -> range:
        """Positions of the tokens that this sequence's loads did not bring, because they failed or the daemon went:
        what is to be computed anew; all of them where it was swapped out at the loss. Empty when all came, and for
        loads that still run. No round trip."""
        return lost_tokens(self.record, self._lease.pools, self._lease.is_lost)

    def wait_swapped(self, timeout_s: float | None = None) -> None:
        """Wait until the last swap is done. Raises LoadFailed (it is where it was before), DeadlineExceeded."""
        if self.record.swap_tickets:
            self.record.end_swap(self._lease.wait_tickets(_ids(self.record.swap_tickets), timeout_s))

    def release(self, *, launch: int | None = None) -> int:
        """End the sequence: unpin what it shares, free what is its own; device pages that came back.

        No kernel may write its pages any more, but for launches under way up to ``launch``, the last that used it (left
        out: the newest): the answer is 0 then, and ``lease.completed`` gives the pages back. Raises AlreadyClosed when
        it was released before, InvalidRequest (no such launch).
        """
        self.require_no_steps()
        if not self.record.is_released and self.record.end_later(launch):
            self._lease.record.hold(self.record)
            return 0
        is_asked_again = self.record.unanswered is not None
        try:
            self._lease.settle(self.record)
            if not (is_asked_again and self.is_released):
                self._lease.run(self.record.release(self._lease.record.stock))
        except LATER:
            self._lease.record.orphans.append(self.record)
            raise
        self._lease.record.forget(self.record)
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

    def _run(self, build: Callable[[], Operation[T]]) -> T:
        self.require_no_steps()
        self._lease.settle(self.record)
        if self.record.growth:
            self._lease.flush()
        return self._lease.run(build())


def _ids(tickets: tuple[TicketView, ...]) -> tuple[int, ...]:
    return tuple(ticket.id for ticket in tickets)
