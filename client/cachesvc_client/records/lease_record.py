"""One lease in a client: its name, its ids, its stock, its pools, whether it still lives, and the calls under it."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar

import grpc
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.model.answers import NO_POSITIONS, Positions, Prefetched, TicketView
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    Maker,
    NotFound,
    QuotaExceeded,
    Registration,
    Unauthenticated,
    error_of,
    is_refusal,
)
from cachesvc_client.core.keys import PackedKeys, as_bytes
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.entries import Stock, UntoldGrowth
from cachesvc_client.records.sequence_record import Launches, Operation, SequenceRecord, no_action
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.life import GONE
from cachesvc_client.wire.messages import build_recycle, parse_recycle, parse_tickets
from cachesvc_client.wire.methods import CLOSE, PREFETCH, RECYCLE, WAIT_TICKETS

BEATS_WITHIN_SILENCE = 3
"""A beat may be late or lost twice before the daemon takes the engine for silent."""

LONGEST_PAUSE_S = 1.0
"""The daemon refuses to pause write-backs for longer at a time."""

LONGEST_WAIT_S = 10.0
"""Longest WaitTickets, seconds: it holds a slot of the daemon's; longer waits ask again."""

ANSWER_MARGIN_S = 1.0
"""Time that an answer may take beyond the wait that was asked for, seconds."""


LATER = (DeadlineExceeded, LimitExceeded, QuotaExceeded, Unauthenticated)
"""Errors of a release that must be tried again: the daemon may still hold the sequence."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class LeaseRecord:
    """Ids rise, because the daemon tells a repeated request from a new one by them. Safe to use from several threads.

    ``instance``: the name under which processes share it, empty where none do; ``joined``: another one had opened it.
    Ids begin behind ``first_id``, which each process of it has for itself. ``process_token``: by which it was opened.

    ``blocks_per_sequence``: the most that a sequence may have, ``most_stock_pages`` those of a stock, all groups
    together; 0 where the daemon does not tell.
    ``growing``: growth from stock since the last step; ``answered_step``: number of the last step that has ended, and
    all before it have. ``orphans``: sequences whose Match or Release
    never got an answer, or whose Release has to be tried again; they are looked after before the next Match.
    ``clock_seconds``: what new sequences say of the time in a trace that is replayed.
    ``ending``: sequences that were released while launches used them, each of which goes once those are complete; and
    those whose release a step was refused. ``pools``: those that it attached in this process. ``has_columns``: the
    daemon takes steps by columns. ``tenure``: until when it surely lives. ``flush``: sends growth from stock now, while
    a step stream is open.
    """

    def __init__(
        self,
        opened: lease_pb2.OpenResponse,
        registration: Registration,
        connection: Connection,
        asked_s: float = -math.inf,
    ) -> None:
        """``asked_s``: monotonic, when the daemon was asked for it."""
        self.maker = Maker()
        self.connection = connection
        self.id = opened.lease_id
        self.instance = opened.instance_id
        self.joined = opened.joined
        self.first_id = opened.first_id
        self.process_token = connection.life.process_token
        self.epoch = opened.epoch
        self.has_columns = opened.step_columns
        self.blocks_per_sequence = opened.blocks_per_sequence
        self.most_stock_pages = opened.stock_pages
        self.silence_limit_s = opened.silence_limit_ms / 1000
        self.registration = registration
        self.stock: Stock | None = None
        self.flush: Callable[[], object] | None = None
        self.growing = UntoldGrowth(registration.layout)
        self.answered_step = 0
        self.orphans: list[SequenceRecord] = []
        self.launches = Launches()
        self.ending: list[SequenceRecord] = []
        self.is_draining = False
        self.is_closed = False
        self.loss: LeaseLost | DaemonUnavailable | None = None
        self.tenure = Tenure(self.silence_limit_s, asked_s)
        self._was_sure = False
        self.pools: list[AttachedPool] = []
        self.clock_seconds: float | None = None
        self._daemon_lost = connection.lost
        self._callbacks: list[Callable[[CacheClientError], None]] = []
        self._pause_ms = 0
        self._request_ids = itertools.count(self.first_id + 1)
        self._sequence_ids = itertools.count(self.first_id + 1)
        self._used_ids: set[int] = set()
        self._lock = threading.Lock()

    @property
    def beat_interval_s(self) -> float:
        """Seconds from one beat to the next."""
        return self.silence_limit_s / BEATS_WITHIN_SILENCE

    @property
    def is_lost(self) -> bool:
        """True once the daemon took the lease away, or went away itself before it was closed."""
        return self.loss is not None or (self._daemon_lost.is_set() and not self.is_closed)

    @property
    def is_sure(self) -> bool:
        """True where no other engine can have a page of this lease's: it lives, or was not lost by silence, for it did
        until its loss was noticed. Then its daemon or its memory has gone, and those pages are not granted again."""
        if self.maker.is_elsewhere:  # a child of the process that opened it: no heartbeat of the child's was answered
            return False
        if self.loss is not None:
            return self._was_sure
        return not self.is_closed and self.tenure.is_sure

    def check(self) -> None:
        """Raises AlreadyClosed, LeaseLost or DaemonUnavailable once the lease is over, UsedAfterFork in a child."""
        self.maker.check()
        if self.is_closed:
            raise AlreadyClosed(f"lease {self.id} was closed; open another one")
        if self.loss is None and self._daemon_lost.is_set():
            self.lose(DaemonUnavailable(GONE))
        if self.loss is not None:
            raise copy(self.loss)

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        """Call ``callback(error)`` once when the lease is lost; at once if it is."""
        with self._lock:
            loss = self.loss
            if loss is None:
                self._callbacks.append(callback)
        if loss is not None:
            callback(loss)

    def lose(self, error: CacheClientError) -> None:
        """The lease is over for the daemon: the first to say so tells the callbacks."""
        with self._lock:
            if self.loss is not None or self.is_closed:
                return
            if not isinstance(error, LeaseLost | DaemonUnavailable):
                error = LeaseLost.from_message(str(error))
            self._was_sure = self.tenure.is_sure  # before anybody sees the loss
            self.loss = error
            callbacks, self._callbacks = self._callbacks, []
        log.warning("lease_lost lease=%s why=%s", self.id, error)
        for callback in callbacks:
            callback(error)

    def ask_pause(self, seconds: float) -> None:
        """The next beat tells the daemon to pause write-backs. Raises InvalidRequest, and what ``check`` raises."""
        if not 0 < seconds <= LONGEST_PAUSE_S:
            raise InvalidRequest(f"write-backs pause for at most {LONGEST_PAUSE_S:g} s at a time, not {seconds:g}")
        self.check()
        with self._lock:
            self._pause_ms = max(self._pause_ms, math.ceil(seconds * 1000))

    def build_beat(self) -> lease_pb2.KeepAliveRequest:
        """Build a heartbeat, with the pending reports: each is sent once."""
        with self._lock:
            pause_ms, self._pause_ms = self._pause_ms, 0
        return lease_pb2.KeepAliveRequest(lease_id=self.id, pause_write_backs_ms=pause_ms)

    def judge_silence(self, failure: grpc.RpcError | None, silent_s: float) -> CacheClientError | None:
        """The beats ended ``silent_s`` seconds after the last answer: why the lease is over, or None to try again."""
        error = error_of(failure) if failure is not None else None
        if failure is not None and is_refusal(failure) and isinstance(error, LeaseLost | NotFound):
            return error
        if silent_s > self.silence_limit_s:
            return LeaseLost.from_message(f"lease {self.id}: no beat was answered for {silent_s:.1f} s ({error})")
        return None

    def next_request_id(self) -> int:
        return next(self._request_ids)  # in one step, of whichever thread

    def run(self, operation: Operation[T]) -> T:
        """Send an operation under a fresh request_id and take in its answer."""
        try:
            self.check()
        except CacheClientError as error:
            operation.end_with(error)
            raise
        operation.request.lease_id = self.id
        operation.request.request_id = next(self._request_ids)
        return self._send(operation)

    def settle(self, sequence: SequenceRecord) -> None:
        """Ask again for an answer that never came, under its own request_id."""
        operation = sequence.unanswered
        if operation is None:
            return
        sequence.unanswered = None
        try:
            self._send(operation)
        except (DeadlineExceeded, DaemonUnavailable, LeaseLost):
            raise
        except CacheClientError as refusal:  # it was refused: nothing happened, and its caller has moved on
            log.debug("unanswered_was_refused sequence=%s why=%s", sequence.id, refusal)

    def _send(self, operation: Operation[T]) -> T:
        connection = self.connection
        try:
            limit_s = connection.timeouts.call_s + operation.waits_s
            answer: Any = connection.ask(operation.method, operation.request, limit_s)
        except CacheClientError as error:
            operation.end_with(error)
            is_gone = isinstance(error, DaemonUnavailable) and connection.lost.is_set()
            if is_gone or isinstance(error, LeaseLost):
                self.lose(error)
            raise
        except KeyboardInterrupt:  # the call may have been carried out: the next one asks
            if operation.owner is not None:
                operation.owner.unanswered = operation
            raise
        return operation.apply(answer)

    def wait_tickets(self, tickets: Sequence[int], timeout_s: float | None) -> tuple[TicketView, ...]:
        """Wait until all transfers have ended. Raises DeadlineExceeded, NotFound."""
        limit_s = self.connection.timeouts.wait_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self.check()
            slice_s = min(max(deadline_s - time.monotonic(), 0), LONGEST_WAIT_S)
            request = cache_pb2.WaitTicketsRequest(lease_id=self.id, tickets=tickets, wait_ms=int(slice_s * 1000))
            views = parse_tickets(self.connection.ask(WAIT_TICKETS, request, slice_s + ANSWER_MARGIN_S).tickets)
            running = [view.id for view in views if view.state == "running"]
            if not running:
                return views
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"tickets {running} still run after {limit_s:g} s", was_answered=True)

    def release_abandoned(self) -> None:
        """Release abandoned sequences, and those whose Match or Release got no answer: they may hold pins. Without a
        step stream, also those whose launches are complete."""
        if self.stock is None:
            ended = self.take_ended()
            with self._lock:
                self.orphans += ended
        while True:
            with self._lock:
                if not self.orphans:
                    return
                sequence = self.orphans.pop()
            try:
                self.settle(sequence)
                if not sequence.is_released:
                    self.run(sequence.release())
            except NotFound as gone:  # nothing is held, which is what was wanted
                log.debug("release_needless lease=%s why=%s", self.id, gone)
            except BaseException:
                self.orphans.append(sequence)
                raise
            self.end(sequence)

    def end_stream(self) -> None:
        """The step stream was closed: its stock goes back."""
        stock, self.stock, self.flush = self.stock, None, None
        pages = stock.drain() if stock is not None else ()
        if not pages:
            return
        try:
            self.run(Operation(RECYCLE, build_recycle(0, 0, pages), parse_recycle, no_action))
        except CacheClientError as error:  # the stock goes back with the lease
            log.debug("stock_not_returned lease=%s why=%s", self.id, error)

    def close(self, *, quiesced: bool, for_all: bool = False) -> None:
        """End the lease at the daemon, of an instance for this process unless ``for_all``; an end that cannot be sent
        now waits for the next connection."""
        leaver = self.process_token if self.instance and not for_all else b""
        request = lease_pb2.CloseRequest(lease_id=self.id, quiesced=quiesced, process_token=leaver)
        try:
            self.connection.insist(CLOSE, request, self.connection.timeouts.close_s)
        except (LeaseLost, NotFound) as over:
            log.debug("close_needless lease=%s why=%s", self.id, over)
        except (AlreadyClosed, DaemonUnavailable, DeadlineExceeded, Unauthenticated) as gone:
            log.debug("close_unreported lease=%s why=%s", self.id, gone)
            self.connection.unreported.append(request)

    def move(self, connection: Connection) -> None:
        """Move a lost lease to ``connection``, over which its end will be reported: the same daemon was found again."""
        self.lose(self.connection.gone())
        self.connection = connection

    def new_sequence(self, sequence_id: int | None) -> SequenceRecord:
        """A sequence under the caller's id (positive; ``first_id`` is added), or under the next one that is free."""
        with self._lock:
            if sequence_id is None:
                sequence_id = next(self._sequence_ids)
                while sequence_id in self._used_ids:
                    sequence_id = next(self._sequence_ids)
            elif sequence_id < 1:
                raise InvalidRequest(f"a sequence_id is positive, got {sequence_id}")
            else:
                sequence_id += self.first_id
                self._used_ids.add(sequence_id)
        sequence = SequenceRecord(sequence_id, self.registration.layout, self.launches)
        sequence.clock_seconds = self.clock_seconds
        return sequence

    def grow(
        self, sequences: Sequence[SequenceRecord], counts: Sequence[int], positions: Positions = NO_POSITIONS
    ) -> None:
        """Take stock pages as the next cells of sequences, see ``UntoldGrowth.grow``. Raises InvalidRequest without a
        stock, and what ``check`` raises: pages of a lease that is over may be another engine's."""
        self.check()
        if self.stock is None:
            raise InvalidRequest("growing from stock needs a step stream: open one with lease.step(stock_pages=...)")
        self.growing.grow(self.stock, sequences, counts, positions)

    def require_no_steps(self, sequence: SequenceRecord) -> None:
        """Raises Conflict while operations of the sequence are under way in a step."""
        if sequence.last_step > self.answered_step:
            raise Conflict(
                f"sequence {sequence.id} has operations under way in a step; collect the step's results first"
            )

    def end(self, sequence: SequenceRecord) -> None:
        """Note the end of a sequence: stock pages that the daemon did not have in it are in stock again."""
        self.growing.withdraw((sequence,))
        if sequence.stranded and self.stock is not None:
            self.stock.add(sequence.stranded)
        sequence.stranded = []
        with self._lock:
            self._used_ids.discard(sequence.id)

    @property
    def has_ended(self) -> bool:
        """True when a release that had to wait for a launch can go."""
        return any(sequence.ends_after <= self.launches.completed for sequence in self.ending)

    def hold(self, sequence: SequenceRecord) -> None:
        """Keep a sequence whose release waits for a launch."""
        with self._lock:
            self.ending.append(sequence)

    def take_ended(self, but_for: Iterable[object] = (), most: int | None = None) -> list[SequenceRecord]:
        """Sequences whose release waits for no launch any more, ``most`` at most, but for some; they are forgotten
        here.

        Those that owe an answer become orphans: it has to be asked for first.
        """
        if not self.ending:
            return []
        kept = {id(each) for each in but_for}
        with self._lock:
            completed = self.launches.completed
            ended = [each for each in self.ending if each.ends_after <= completed and id(each) not in kept][:most]
            taken = set(map(id, ended))
            self.ending = [each for each in self.ending if id(each) not in taken]
            self.orphans += [each for each in ended if each.unanswered is not None or each.is_released]
        return [each for each in ended if each.unanswered is None and not each.is_released]

    def prefetch(self, keys: PackedKeys) -> Operation[Prefetched]:
        self.check()
        request = cache_pb2.PrefetchRequest(keys=as_bytes(keys))
        return Operation(
            PREFETCH,
            request,
            lambda answer: Prefetched(answer.device_blocks, parse_tickets(answer.tickets)),
            no_action,
        )


# Time until which a lease surely lives, as a process knows it without asking.
#
# The daemon revokes a lease once it has listened for longer than the silence limit without a heartbeat. So a lease
# lives for that long after the sending of a heartbeat that was answered. Where a daemon hangs and answers none, it
# lives while one heartbeat follows the other: a daemon that does not listen counts no silence. A process that was
# stopped for longer than its lease has sent none meanwhile, and looks at a clock that went on: then nothing is sure
# before the daemon has answered.


class Tenure:
    """Validity of a lease that was asked for at ``asked_s`` and that the daemon gave. ``clock``: one that goes on while
    the process is stopped. Safe to use from several threads."""

    def __init__(self, silence_limit_s: float, asked_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_limit_s = silence_limit_s
        self._follows_s = silence_limit_s / 2
        self._clock = clock
        self._answered_s = asked_s
        self._sent_s = asked_s
        self._lock = threading.Lock()

    @property
    def is_sure(self) -> bool:
        """True while the lease surely lives. False where it may not: ask."""
        return self._clock() < max(self._answered_s + self._silence_limit_s, self._sent_s + self._follows_s)

    def begin_beat(self) -> float:
        """A beat is about to be sent: the time, for its answer. It may never have left where the process is stopped
        now; but the one before it has, so it counts for half of the limit, and only where it follows that closely."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._sent_s <= self._follows_s:
                self._sent_s = now_s
            return now_s

    def end_beat(self, sent_s: float) -> None:
        """The beat that was sent then was answered: the lease has lived all the time."""
        with self._lock:
            self._answered_s = max(self._answered_s, sent_s)
            self._sent_s = max(self._sent_s, sent_s)

    def break_off(self) -> None:
        """Beats do not come through: what was sent and not answered counts for nothing."""
        with self._lock:
            self._sent_s = self._answered_s
