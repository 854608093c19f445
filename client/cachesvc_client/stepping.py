"""The step stream of a lease: one message for each engine iteration, and its answer when the engine wants it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import grpc
from kvcache.v1 import cache_pb2

from cachesvc_client.errors import AlreadyClosed, CacheClientError, DeadlineExceeded, InvalidRequest
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.steps import SentStep, StepBatch, StepBook
from cachesvc_client.sequence import Sequence
from cachesvc_client.wire.attempts import Attempts
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import STEP

log = logging.getLogger(__name__)


class StepLease(Protocol):
    """What a step stream needs of its lease."""

    @property
    def record(self) -> LeaseRecord:
        """What is known of the lease."""

    def handle(self, record: SequenceRecord) -> Sequence:
        """A handle for a sequence that a step opened."""

    def settle(self, record: SequenceRecord) -> None:
        """Learn what became of a call whose answer never came."""

    def end_step(self) -> None:
        """The stream was closed: give the stock back."""


class PendingStep:
    """A step that was sent."""

    def __init__(self, stream: StepStream, step: SentStep) -> None:
        self._stream = stream
        self._step = step

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """One entry for each operation of the batch, in order: its result, or a CacheClientError (not raised).

        Answers of steps sent before it are taken in first. Raises DeadlineExceeded (ask again for the same step),
        DaemonUnavailable, and what refused the step as a whole, such as LeaseLost.
        """
        return self._stream.collect(self._step, timeout_s)


class StepStream:
    """A stream of steps under one lease; used from one thread. The stock is filled up by every answer."""

    def __init__(self, connection: Connection, lease: StepLease) -> None:
        self._connection = connection
        self._lease = lease
        self._book = StepBook(lease.record)
        self._line: _Line | None = None
        self._is_closed = False

    def batch(self) -> StepBatch[Sequence]:
        """An empty batch."""
        return StepBatch(self._lease.record, self._lease.handle)

    def submit(self, batch: StepBatch[Sequence] | None = None, timeout_s: float | None = None) -> list[Any]:
        """Send a batch (None: growth and stock alone) and wait for its results; see ``PendingStep.results``."""
        return self.send(batch).results(timeout_s)

    def send(self, batch: StepBatch[Sequence] | None = None) -> PendingStep:
        """Send a batch and go on; collect its results later, in any order.

        Raises LimitExceeded (too many steps under way), LeaseLost, AlreadyClosed, DaemonUnavailable.
        """
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")
        for operation in batch.operations if batch is not None else ():
            if isinstance(operation.owner, SequenceRecord):
                self._lease.settle(operation.owner)
        self._make_way()
        return PendingStep(self, self._enter(batch))

    def tell(self) -> None:
        """Send growth, and releases that waited for launches, in a step that nobody collects. Raises as ``send``."""
        self._enter(None).is_quiet = True

    def _make_way(self) -> None:
        """Where too many steps are under way, and nobody collects the first of them, take in their answers."""
        while self._book.is_full and self._book.under_way[0].is_quiet:
            try:
                self.collect(self._book.under_way[0], None)
            except DeadlineExceeded:
                raise
            except CacheClientError as refusal:  # what it carried is sent again, or was lost with the lease
                log.debug("told_step_refused why=%s", refusal)

    def _enter(self, batch: StepBatch[Sequence] | None) -> SentStep:
        if self._is_closed:
            raise AlreadyClosed("the step stream was closed; open another one with lease.step()")
        step = self._book.enter(batch)
        if self._line is None:
            self._open_line()
        else:
            self._line.put(step.request)
        return step

    def collect(self, step: SentStep, timeout_s: float | None) -> list[Any]:
        """Take in answers until that of ``step`` has come; its results."""
        limit_s = self._connection.timeouts.step_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        attempts = Attempts(self._connection.retries, deadline_s)
        while not step.is_answered:
            if self._line is None:
                raise InvalidRequest("this step was sent on a stream that was closed")
            answer = self._line.get(deadline_s)
            if isinstance(answer, cache_pb2.StepResponse):
                self._book.answer(answer)
            elif answer is None:
                raise DeadlineExceeded(f"no answer to the step within {limit_s:g} s; ask again for its results")
            else:
                self._renew(attempts, answer)
        return step.outcome()

    def close(self) -> None:
        """Take in the answers that are still to come, end the stream and give the stock back. Idempotent."""
        if self._is_closed:
            return
        try:
            if self._book.under_way:
                self.collect(self._book.under_way[-1], self._connection.timeouts.close_s)
            if self._book.has_untold:
                self.submit(timeout_s=self._connection.timeouts.close_s)
        except CacheClientError as error:  # what it held goes with the lease
            log.debug("steps_closed_early why=%s", error)
        self._is_closed = True
        if self._line is not None:
            self._line.close()
        self._book.refuse(AlreadyClosed("the step stream was closed before the answer was collected"))
        self._lease.end_step()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renew(self, attempts: Attempts, failure: grpc.RpcError) -> None:
        """The stream broke: open it again and send what has no answer under the same ids, or give up."""
        used = self._line.metadata if self._line is not None else ()
        self._line = None
        try:
            if self._connection.lost.is_set():
                raise self._connection.gone() from failure
            if not self._connection.proof.renew_stream(failure, used):
                self._connection.lost.wait(attempts.pause_after(failure, time.monotonic()))
            self._open_line()
        except CacheClientError as error:
            self._book.refuse(error)

    def _open_line(self) -> None:
        line = _Line(self._connection)
        for step in self._book.under_way:
            line.put(step.request)
        try:
            line.start()
        except CacheClientError as error:
            self._book.refuse(error)
            raise
        self._line = line


class _Line:
    """One gRPC stream, and the thread that reads it. ``metadata``: what it was opened with."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[cache_pb2.StepRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[cache_pb2.StepResponse | grpc.RpcError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvcache-steps", daemon=True)
        self._call: Any = None
        self.metadata: Metadata = ()

    def start(self) -> None:
        """Open the stream. Raises DaemonUnavailable."""
        self.metadata = self._connection.proof.metadata
        self._call = self._connection.open_stream(STEP, self._take_requests())
        self._reader.start()

    def put(self, request: cache_pb2.StepRequest) -> None:
        """Send a request after those before it."""
        self._requests.put(request)

    def get(self, deadline_s: float) -> cache_pb2.StepResponse | grpc.RpcError | None:
        """The next answer, how the stream ended, or None at the deadline."""
        try:
            return self._answers.get(timeout=max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()

    def _take_requests(self) -> Iterator[cache_pb2.StepRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except grpc.RpcError as failure:
            log.debug("steps_ended why=%s", failure)
        self._requests.put(None)  # gRPC's own thread waits there
        self._answers.put(self._call)
