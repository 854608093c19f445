"""The awaited twin of ``cachesvc_client.stepping``: the same book of steps over an aio stream."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import grpc
import grpc.aio
from kvcache.v1 import cache_pb2

from cachesvc_client.aio.connection import AsyncConnection, is_cancelled
from cachesvc_client.aio.sequence import AsyncSequence
from cachesvc_client.errors import AlreadyClosed, CacheClientError, DeadlineExceeded, InvalidRequest
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.steps import SentStep, StepBatch, StepBook
from cachesvc_client.wire.attempts import Attempts
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import STEP

log = logging.getLogger(__name__)


class AsyncStepLease(Protocol):
    """What a step stream needs of its lease."""

    @property
    def record(self) -> LeaseRecord:
        """What is known of the lease."""

    def handle(self, record: SequenceRecord) -> AsyncSequence:
        """A handle for a sequence that a step opened."""

    async def settle(self, record: SequenceRecord) -> None:
        """Learn what became of a call whose answer never came."""

    async def end_step(self) -> None:
        """The stream was closed: give the stock back."""


class AsyncPendingStep:
    """A step that was sent."""

    def __init__(self, stream: AsyncStepStream, step: SentStep) -> None:
        self._stream = stream
        self._step = step

    async def results(self, timeout_s: float | None = None) -> list[Any]:
        """As ``PendingStep.results``."""
        return await self._stream.collect(self._step, timeout_s)


class AsyncStepStream:
    """A stream of steps under one lease; used from one task. As ``StepStream``."""

    def __init__(self, connection: AsyncConnection, lease: AsyncStepLease) -> None:
        self._connection = connection
        self._lease = lease
        self._book = StepBook(lease.record)
        self._line: _AsyncLine | None = None
        self._is_closed = False

    def batch(self) -> StepBatch[AsyncSequence]:
        """An empty batch."""
        return StepBatch(self._lease.record, self._lease.handle)

    async def submit(self, batch: StepBatch[AsyncSequence] | None = None, timeout_s: float | None = None) -> list[Any]:
        """As ``StepStream.submit``."""
        return await (await self.send(batch)).results(timeout_s)

    async def send(self, batch: StepBatch[AsyncSequence] | None = None) -> AsyncPendingStep:
        """As ``StepStream.send``."""
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")
        for operation in batch.operations if batch is not None else ():
            if isinstance(operation.owner, SequenceRecord):
                await self._lease.settle(operation.owner)
        await self._make_way()
        return AsyncPendingStep(self, self._enter(batch))

    async def tell(self) -> None:
        """As ``StepStream.tell``."""
        self._enter(None).is_quiet = True

    async def _make_way(self) -> None:
        """Where too many steps are under way, and nobody collects the first of them, take in their answers."""
        while self._book.is_full and self._book.under_way[0].is_quiet:
            try:
                await self.collect(self._book.under_way[0], None)
            except DeadlineExceeded:
                raise
            except CacheClientError as refusal:  # what it carried is sent again, or was lost with the lease
                log.debug("told_step_refused why=%s", refusal)

    def _enter(self, batch: StepBatch[AsyncSequence] | None) -> SentStep:
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")
        step = self._book.enter(batch)
        if self._line is None:
            self._open_line()
        else:
            self._line.put(step.request)
        return step

    async def collect(self, step: SentStep, timeout_s: float | None) -> list[Any]:
        """As ``StepStream.collect``."""
        limit_s = self._connection.timeouts.step_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        attempts = Attempts(self._connection.retries, deadline_s)
        while not step.is_answered:
            if self._line is None:
                raise InvalidRequest("this step was sent on a stream that was closed")
            answer = await self._line.get(deadline_s)
            if isinstance(answer, cache_pb2.StepResponse):
                self._book.answer(answer)
            elif answer is None:
                raise DeadlineExceeded(f"no answer to the step within {limit_s:g} s; ask again for its results")
            else:
                await self._renew(attempts, answer)
        return step.outcome()

    async def close(self) -> None:
        """As ``StepStream.close``."""
        if self._is_closed:
            return
        try:
            if self._book.under_way:
                await self.collect(self._book.under_way[-1], self._connection.timeouts.close_s)
            if self._book.has_untold:
                await self.submit(timeout_s=self._connection.timeouts.close_s)
        except CacheClientError as error:  # what it held goes with the lease
            log.debug("steps_closed_early why=%s", error)
        self._is_closed = True
        if self._line is not None:
            await self._line.close()
        self._book.refuse(AlreadyClosed("the step stream was closed before the answer was collected"))
        await self._lease.end_step()

    async def __aenter__(self) -> AsyncStepStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _renew(self, attempts: Attempts, failure: grpc.RpcError) -> None:
        """The stream broke: open it again and send what has no answer under the same ids, or give up."""
        assert self._line is not None
        used = self._line.metadata
        await self._line.close()
        self._line = None
        try:
            if self._connection.lost.is_set():
                raise self._connection.gone() from failure
            if not self._connection.proof.renew_stream(failure, used):
                await self._connection.pause(attempts.pause_after(failure, time.monotonic()))
            self._open_line()
        except CacheClientError as error:
            self._book.refuse(error)

    def _open_line(self) -> None:
        line = _AsyncLine(self._connection)
        for step in self._book.under_way:
            line.put(step.request)
        try:
            line.start()
        except CacheClientError as error:
            self._book.refuse(error)
            raise
        self._line = line


class _AsyncLine:
    """One gRPC stream, with a task that writes it and one that reads it: cancelling a read would end the call.

    ``metadata``: what it was opened with.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._requests: asyncio.Queue[cache_pb2.StepRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[cache_pb2.StepResponse | grpc.RpcError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.metadata: Metadata = ()

    def start(self) -> None:
        """Open the stream. Raises DaemonUnavailable."""
        self.metadata = self._connection.proof.metadata
        call = self._connection.open_stream(STEP)
        self._tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]

    def put(self, request: cache_pb2.StepRequest) -> None:
        """Send a request after those before it."""
        self._requests.put_nowait(request)

    async def get(self, deadline_s: float) -> cache_pb2.StepResponse | grpc.RpcError | None:
        """The next answer, how the stream ended, or None at the deadline."""
        try:
            return await asyncio.wait_for(self._answers.get(), max(deadline_s - time.monotonic(), 0))
        except TimeoutError:
            return None

    async def close(self) -> None:
        """End the stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await call.write(await self._requests.get())
        except (grpc.RpcError, asyncio.InvalidStateError) as failure:  # the reader tells how it ended
            log.debug("steps_unwritable why=%s", failure)

    async def _read(self, call: Any) -> None:
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                self._answers.put_nowait(answer)
        except grpc.RpcError as failure:
            log.debug("steps_ended why=%s", failure)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.debug("steps_ended with the connection")
        finally:
            call.cancel()
        self._answers.put_nowait(
            grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )
        )
