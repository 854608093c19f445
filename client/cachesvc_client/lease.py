"""Lease of one engine on a model's replica, kept alive, with the sequences opened under it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import TracebackType

from cachesvc.model.answers import Expected, Prefetched, TicketView
from cachesvc_client.aio.lease import AsyncLease
from cachesvc_client.core.hints import Retention
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.views import LeaseView
from cachesvc_client.sequence import Sequence
from cachesvc_client.stepping import StepStream
from cachesvc_client.wire.transports.blocking import drive


class Lease(LeaseView):
    """Made by ``CacheClient.open_lease``. Safe to use from several threads; each sequence and step stream from one.

    Every call may raise LeaseLost, DaemonUnavailable, DeadlineExceeded and AlreadyClosed.
    """

    def __init__(self, calls: AsyncLease) -> None:
        super().__init__(calls.record)
        self._calls = calls

    def attach(self, rank: int = 0) -> AttachedPool:
        """Map one rank's device pool into this process. Raises InvalidRequest (rank), NotSupported (kind of memory)."""
        return drive(self._calls.attach(rank))

    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
    ) -> Sequence:
        """Open a sequence on the longest hit of ``keys`` (packed, 32 bytes each, root to leaf), pinned.

        ``max_blocks`` limits the hit (0: no limit): a caller that must compute the last token leaves its block out.
        ``waited_seconds``: how long the request has waited in the engine already; eviction learns from it.
        ``expected``: what another node computes of it; ``coming_blocks`` says how much is still on its way.
        ``retention``: what the engine expects of these blocks, a hint for eviction. Raises DaemonDraining,
        InvalidRequest, LimitExceeded, Conflict (``sequence_id`` is open).
        """
        return Sequence(
            drive(
                self._calls.match(
                    keys,
                    max_blocks=max_blocks,
                    sequence_id=sequence_id,
                    waited_seconds=waited_seconds,
                    expected=expected,
                    retention=retention,
                )
            )
        )

    def prefetch(self, keys: PackedKeys) -> Prefetched:
        """Start to load a prefix towards the device; holds nothing once it is there. Raises PoolExhausted."""
        return drive(self._calls.prefetch(keys))

    def pause_write_backs(self, seconds: float) -> None:
        """Report that decode suffers: the daemon copies no backups off this lease's devices for ``seconds``. At most 1
        at a time; call again for longer. Returns at once. Swaps and evictions that callers wait for go on. Raises
        InvalidRequest (more than 1 s).
        """
        drive(self._calls.pause_write_backs(seconds))

    def make_sure(self, timeout_s: float) -> None:
        """Validate all reads of the lease's pages up to now. While ``is_sure`` this asks nothing; else it asks the
        daemon, which knows whether it revoked the lease as silent and granted its pages to others.

        Raises LeaseLost (it did: nothing that was computed from them since may be used), DaemonUnavailable (unknown:
        the same), DeadlineExceeded.
        """
        drive(self._calls.make_sure(timeout_s))

    def step(self, stock_pages: int | Seq[int] = 0) -> StepStream:
        """Open the lease's step stream. ``stock_pages``: pages to keep in stock, for every group or for each.

        Raises Conflict while the last one is open, NotSupported (the daemon is of release 0.1, which knows no columns).
        """
        return StepStream(self._calls.step(stock_pages), self._calls.calls)

    def completed(self, launch: int) -> None:
        """Note that the kernels of ``launch`` and of all earlier launches have ended, and send the releases that
        waited.

        With an open step stream they go in a step without a waiter, so call it where that stream is used. Raises
        InvalidRequest (no such launch), DeadlineExceeded (the next ``match`` sees to it).
        """
        drive(self._calls.completed(launch))

    def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended, done or failed; their views say which.

        Raises DeadlineExceeded while one still runs, NotFound for one that never was or ended long ago.
        """
        return drive(self._calls.wait_tickets(tickets, timeout_s))

    def close(self, *, quiesced: bool | None = None, for_all: bool = False) -> None:
        """End the lease with all that it holds, unmap its pools, stop beating. Idempotent. That of an instance ends
        with its last process, and what the others hold stays; ``for_all``: it ends now, for all of them.

        ``quiesced``: no kernel of this engine uses the pool any more, so its private pages come back at once. Say False
        where that is not sure: they come back when the process ends, and a pool on a GPU stays mapped until then. Left
        out, it is so unless a launch is under way. Raises UsedAfterFork.
        """
        drive(self._calls.close(quiesced=quiesced, for_all=for_all))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiesced=None if kind is None else False)
