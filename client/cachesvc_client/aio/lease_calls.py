"""Operations under one lease, each under its own id, and the fate of those without an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

from kvcache.v1 import lease_pb2

from cachesvc.model.answers import TicketView
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    NotFound,
    Unauthenticated,
)
from cachesvc_client.records.lease_record import ANSWER_MARGIN_S, LONGEST_WAIT_S, LeaseRecord, list_running
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.messages import build_recycle, build_wait_tickets, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import CLOSE, RECYCLE, WAIT_TICKETS, Operation, no_action
from cachesvc_client.wire.port import INTERRUPTS

T = TypeVar("T")

log = logging.getLogger(__name__)


class Submitting(Protocol):
    """A step stream, as those see it whose growth it tells."""

    async def submit(self) -> list[Any]:
        """Send growth and stock alone."""

    async def tell(self) -> None:
        """Send them in a step whose results are not collected."""

    async def close(self) -> None:
        """Close the stream."""


class LeaseCalls:
    """The calls of one lease's handles. ``stream``: its step stream, while one is open."""

    def __init__(self, connection: Connection, record: LeaseRecord) -> None:
        self.connection = connection
        self.record = record
        self.stream: Submitting | None = None

    async def run(self, operation: Operation[T]) -> T:
        """Send an operation under a fresh request_id and take in its answer."""
        try:
            self.record.address(operation)
        except CacheClientError as error:
            operation.end_with(error)
            raise
        return await self._send(operation)

    async def settle(self, record: SequenceRecord) -> None:
        """Ask again for an answer that never came, under its own request_id."""
        operation = record.unanswered
        if operation is None:
            return
        record.unanswered = None
        try:
            await self._send(operation)
        except (DeadlineExceeded, DaemonUnavailable, LeaseLost):
            raise
        except CacheClientError as refusal:  # it was refused: nothing happened, and its caller has moved on
            log.debug("unanswered_was_refused sequence=%s why=%s", record.id, refusal)

    async def flush(self) -> None:
        """Tell the daemon of growth from stock now, by a step of its own."""
        if self.stream is not None:
            await self.stream.submit()

    async def wait_tickets(self, tickets: Seq[int], timeout_s: float | None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended. Raises DeadlineExceeded, NotFound."""
        limit_s = self.connection.timeouts.wait_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self.record.check()
            slice_s = min(max(deadline_s - time.monotonic(), 0), LONGEST_WAIT_S)
            request = build_wait_tickets(self.record.id, tickets, int(slice_s * 1000))
            answer = await self.connection.ask(WAIT_TICKETS, request, slice_s + ANSWER_MARGIN_S)
            views = parse_tickets(answer.tickets)
            running = list_running(views)
            if not running:
                return views
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"tickets {running} still run after {limit_s:g} s", was_answered=True)

    async def release_abandoned(self) -> None:
        """Release abandoned sequences, and those whose Match or Release got no answer: they may hold pins."""
        while (record := self.record.take_orphan(and_ended=self.stream is None)) is not None:
            try:
                await self.settle(record)
                if not record.is_released:
                    await self.run(record.release())
            except NotFound as gone:  # nothing is held, which is what was wanted
                log.debug("release_needless lease=%s why=%s", self.record.id, gone)
            except BaseException:
                self.record.orphans.append(record)
                raise
            self.record.end(record)

    async def end_stream(self) -> None:
        """The step stream was closed: its stock goes back."""
        self.stream = None
        stock, self.record.stock = self.record.stock, None
        pages = stock.drain() if stock is not None else ()
        if not pages:
            return
        try:
            await self.run(Operation(RECYCLE, build_recycle(0, 0, pages), parse_recycle, no_action))
        except CacheClientError as error:  # the stock goes back with the lease
            log.debug("stock_not_returned lease=%s why=%s", self.record.id, error)

    async def end(self, *, quiesced: bool, for_all: bool = False) -> None:
        """End the lease at the daemon, of an instance for this process unless ``for_all``; an end that cannot be sent
        now waits for the next connection."""
        leaver = self.record.process_token if self.record.instance and not for_all else b""
        request = lease_pb2.CloseRequest(lease_id=self.record.id, quiesced=quiesced, process_token=leaver)
        try:
            await self.connection.insist(CLOSE, request, self.connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", self.record.id, over)
        except (AlreadyClosed, DaemonUnavailable, DeadlineExceeded, Unauthenticated) as gone:
            log.debug("close_untold lease=%s why=%s", self.record.id, gone)
            self.connection.untold.append(request)

    def move(self, connection: Connection) -> None:
        """Move a lost lease to ``connection``, over which its end will be reported: the same daemon was found again."""
        self.record.lose(self.connection.gone())
        self.connection = connection

    async def _send(self, operation: Operation[T]) -> T:
        try:
            limit_s = self.connection.timeouts.call_s + operation.waits_s
            answer: Any = await self.connection.ask(operation.method, operation.request, limit_s)
        except CacheClientError as error:
            operation.end_with(error)
            is_gone = isinstance(error, DaemonUnavailable) and self.connection.lost.is_set()
            if is_gone or isinstance(error, LeaseLost):
                self.record.lose(error)
            raise
        except INTERRUPTS:  # the call may have been carried out: the next one asks
            if operation.owner is not None:
                operation.owner.unanswered = operation
            raise
        return operation.apply(answer)
