"""A device's copy streams, each a thread that starts the slices which the arbiter gives it, and sees them land."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from cachesvc.memory.arbiter import Arbiter, CopyRules, Queued
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import CopyJob, Slice, SliceRunner
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import CopiesHang, Direction

log = logging.getLogger(__name__)

Clock = Callable[[], float]
WriteWord = Callable[[int, int], None]


# Watchdog for copies: a hung GPU reports no error, so waits need a time limit.
#
# Only time in which this process runs and looks is counted: one that was stopped for an hour has waited a moment.

PATIENCE_S = 30.0
"""Time limit of a slice, seconds. It takes a millisecond; a driver that is busy with pinning may hold it for
seconds."""
SLOWEST_BYTES_PER_S = 100e6
"""Slowest rate beside the patience. Slices are small, so no link's own figure is needed: the narrowest rows go at 1
GB/s."""
MOST_COUNTED_S = 5.0
"""Between two looks, which come every two seconds."""


@dataclass(slots=True, eq=False)
class CopyTask:
    """Work that a copy thread asks of its GPU: to start a slice, or to report that it has landed. ``waited_s``: time
    counted so far."""

    piece: Slice
    waited_s: float = 0.0


class CopyThread:
    """One direction. ``changed`` is held around the arbiter; its lock is both directions', and waking is this one's.
    ``write_word`` sets a timeline word of a job that failed. ``wake_other``: the other direction may go on; the lock is
    held. ``task``: what the thread waits for now, for a watch."""

    def __init__(
        self,
        name: str,
        direction: Direction,
        arbiter: Arbiter,
        changed: threading.Condition,
        runner: SliceRunner,
        write_word: WriteWord,
        wake_other: Callable[[], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self._direction = direction
        self._arbiter = arbiter
        self._changed = changed
        self._runner = runner
        self._write_word = write_word
        self._wake_other = wake_other
        self._clock = clock
        self._on_way: deque[tuple[Slice, object]] = deque()
        self._errors: dict[int, Exception] = {}
        self._jobs: dict[int, CopyJob] = {}
        self._begun: set[int] = set()  # those of which slices may be on their way
        self._fresh: deque[tuple[CopyJob, float]] = deque()  # begun, and when; not reported yet
        self._is_idle = False  # the thread sleeps, and nothing is on its way
        self._guest: threading.Thread | None = None  # thread that does its work for once
        self._guest_broke: Exception | None = None
        self.task: CopyTask | None = None
        self._hangs = ""
        self._over = threading.Event()
        self._broken: Exception | None = None
        self._closed = False
        self._drained = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start serving; what was queued before is served first."""
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Raises Unavailable after ``close`` and LimitExceeded when the queue is full."""
        with self._changed:
            self._push(job)
            self._changed.notify_all()

    def submit_here(self, job: CopyJob) -> None:
        """Implement ``CopyStream``. The arbiter chooses the slice to start."""
        with self._changed:
            self._push(job)
            if not self._is_idle or not self._runner.only_queues:
                self._changed.notify_all()
                return
            self._is_idle, self._guest = False, threading.current_thread()
        try:
            self._start_next()
        except Exception as failure:  # noqa: BLE001 - a fault of our own: the thread ends of it, and tells every job
            self._guest_broke = failure
        with self._changed:
            self._guest = None
            self._changed.notify_all()

    def _push(self, job: CopyJob) -> None:
        if self._hangs:
            raise Unavailable(f"copy stream {self.name} hangs ({self._hangs}); restart the daemon")
        if self._closed:
            raise Unavailable(f"copy stream {self.name} is closed")
        self._arbiter.push(self._direction, job, self._clock())
        self._jobs[id(job)] = job

    def _start_next(self) -> None:
        """Cut and start one slice, if one may go now."""
        while True:
            with self._changed:
                now = self._clock()
                queued = self._arbiter.next_up(self._direction, now)
                is_cut = queued is None or queued.head is not None
                piece = self._pop(now) if is_cut else None
            if queued is None or is_cut:
                break
            self._cut(queued)
        if piece is not None:
            self._start(piece)

    def expedite(self, ticket: int) -> None:
        """Make a ticket's jobs awaited, here and wherever else its arbiter rules."""
        with self._changed:
            self._arbiter.expedite(ticket)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the end of all jobs. Idempotent; from a ``done`` callback it does not wait, nor for a
        thread that hangs."""
        self.stop()
        if self._thread.is_alive() and threading.current_thread() not in (self._thread, self._guest):
            self._over.wait()
            if not self._hangs:
                self._thread.join()

    def abandon(self, why: str) -> None:
        """The device hangs: every job ends now, those that have begun as ones that may still write."""
        with self._changed:
            self._hangs = why
            self._closed = self._drained = True
            jobs = list(self._jobs.values())
            for job in jobs:
                self._arbiter.fail(job)
            self._changed.notify_all()
        for job in jobs:
            kind = CopiesHang if id(job) in self._begun else Unavailable
            self._end(job, kind(f"copy stream {self.name} hangs ({why}); recompute, and restart the daemon"))
        self._over.set()

    def _serve(self) -> None:
        try:
            self._runner.begin()
        except Exception as failure:  # noqa: BLE001 - a thread's root: every job tells it
            self._broken = failure
        try:
            self._serve_slices()
        except Exception as failure:
            log.exception("copy_stream_broken name=%s", self.name)
            self._give_up(failure)
        finally:
            self._over.set()

    def _serve_slices(self) -> None:
        while True:
            piece, uncut, refused = self._next()
            for job in refused:
                self._end_failed(job, Unavailable(f"copy stream {self.name} was closed first"))
            if piece is not None:
                self._start(piece)
            elif uncut is not None:
                self._cut(uncut)
            elif self._on_way:
                self._land_oldest()
            elif not refused:
                return
            del piece, uncut, refused  # a job holds its plan: do not keep it while waiting

    def _give_up(self, failure: Exception) -> None:
        """The thread ends with jobs under way, which only a fault of our own can cause: each of them fails, after what
        has begun has landed, and no further one is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._on_way:
            _, started = self._on_way.popleft()
            try:
                self._runner.wait(started)
            except Exception:
                log.exception("copy_slice_failed name=%s", self.name)
        reason = Unavailable(f"copy stream {self.name} broke ({failure}); restart the daemon")
        for job in list(self._jobs.values()):
            try:
                self._end(job, reason)
            except Exception:
                log.exception("copy_waiters_not_released ticket=%d", job.ticket)

    def _end(self, job: CopyJob, error: Exception | None) -> None:
        with self._changed:
            if self._jobs.pop(id(job), None) is None:
                return  # abandoned before
            self._begun.discard(id(job))
        end_job(job, error, self._write_word)

    def _next(self) -> tuple[Slice | None, Queued | None, list[CopyJob]]:
        """A slice to start, or a job whose slice is to be cut first, or the jobs that ``stop`` came before; nothing:
        see to what is on its way, or end."""
        with self._changed:
            while True:
                self._is_idle = False
                if self._guest is not None:
                    self._changed.wait()
                    continue
                if self._guest_broke is not None:
                    raise self._guest_broke
                if self._closed and not self._drained:
                    self._drained = True
                    if refused := self._arbiter.drain(self._direction):
                        return None, None, refused
                now = self._clock()
                queued = self._arbiter.next_up(self._direction, now)
                if queued is not None and queued.head is None:
                    return None, queued, []
                if len(self._on_way) >= self._runner.depth:
                    return None, None, []
                piece = self._pop(now)
                if piece is not None or self._on_way:
                    return piece, None, []
                until = self._arbiter.next_time(self._direction, now)
                if until is None and self._closed:
                    return None, None, []
                self._is_idle = True
                self._changed.wait(None if until is None else max(until - now, 0.0))

    def _pop(self, now: float) -> Slice | None:
        """The slice to start now, if any; the lock is held."""
        piece = self._arbiter.pop(self._direction, now)
        if piece is not None and id(piece.job) not in self._begun:
            self._begun.add(id(piece.job))
            self._fresh.append((piece.job, now))
        return piece

    def _cut(self, queued: Queued) -> None:
        """Cut a slice, and plan it: without the lock, and while others are on their way."""
        try:
            queued.cut()
        except Exception as failure:  # noqa: BLE001 - a thread's root: the job tells it
            with self._changed:
                self._arbiter.fail(queued.job)
                self._wake_other()
            self._end_failed(queued.job, failure)

    def _start(self, piece: Slice) -> None:
        if self._broken is not None:  # not raised again: each time its traceback would grow, and keep a slice
            self._settle(piece, self._broken)
            return
        self.task = CopyTask(piece)
        try:
            started = self._runner.submit(piece)
        except Exception as failure:  # noqa: BLE001 - a thread's root: the job tells it
            self.task = None
            self._settle(piece, failure)
        else:
            self.task = None
            self._on_way.append((piece, started))

    def _tell_begun(self) -> None:
        """Report that a job has begun, once all was started that may be and before any of it ends: the callback may
        wake other processes, and the link must not wait for that."""
        while self._fresh:
            job, began = self._fresh.popleft()
            if job.begun is not None:
                job.begun(began)

    def _land_oldest(self) -> None:
        self._tell_begun()
        piece, started = self._on_way.popleft()
        error: Exception | None = None
        self.task = CopyTask(piece)
        try:
            self._runner.wait(started)
        except Exception as failure:  # noqa: BLE001 - a thread's root: the job tells it
            error = failure
        self.task = None
        self._settle(piece, error)

    def _settle(self, piece: Slice, error: Exception | None) -> None:
        """A slice has landed or broken: its job ends with its last one, or when the rest of a broken job has
        landed."""
        self._tell_begun()
        job = piece.job
        with self._changed:
            if error is not None:
                self._arbiter.fail(job)
            if self._arbiter.landed(self._direction, piece):
                self._wake_other()
        if error is not None or id(job) in self._errors:
            self._end_failed(job, error)
        elif piece.is_last:
            self._end(job, None)

    def _end_failed(self, job: CopyJob, error: Exception | None) -> None:
        """A job that has broken ends once nothing of it is on its way, by what broke first."""
        if error is not None:
            self._errors.setdefault(id(job), error)
        if not any(other.job is job for other, _ in self._on_way):
            self._end(job, self._errors.pop(id(job)))


class CopyThreads:
    """The streams of one device: two of its link to the host, under one arbiter; and one for what comes from other
    devices, by links of their own, with an arbiter to itself. ``runners``: one for each direction; ``peers``: of those
    copies, where there can be any. ``neighbours``: devices that share the host's memory."""

    def __init__(
        self,
        device: str,
        rules: CopyRules,
        runners: Mapping[Direction, SliceRunner],
        write_word: WriteWord,
        clock: Clock = time.monotonic,
        *,
        peers: SliceRunner | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._arbiter = Arbiter(device, rules, neighbours)
        self._lock = threading.RLock()
        changes = {direction: threading.Condition(self._lock) for direction in runners}
        self._wake_all = partial(_wake, tuple(changes.values()))  # no way back from the streams to here
        self._clock = clock

        def stream(name: str, way: Direction, changed: threading.Condition, runner: SliceRunner) -> CopyThread:
            return CopyThread(
                f"{name}-{device}", way, self._arbiter, changed, runner, write_word, self._wake_all, clock
            )

        self.streams = {way: stream(way.value, way, changed, runners[way]) for way, changed in changes.items()}
        self._every = list(self.streams.values())
        if peers is not None:
            free = replace(rules, load_bytes_per_second=0, store_bytes_per_second=0)  # budgets are for the host
            alone = threading.Condition(threading.RLock())
            self.peers = CopyThread(
                f"peers-{device}", Direction.LOAD, Arbiter(device, free), alone, peers, write_word, lambda: None, clock
            )
            self._every.append(self.peers)
        self._seen_at = clock()

    def start(self) -> None:
        for stream in self._every:
            stream.start()

    def expedite(self, ticket: int) -> None:
        for stream in self._every:
            stream.expedite(ticket)

    def pause_background(self, seconds: float) -> None:
        with self._lock:
            self._arbiter.pause_background(Direction.STORE, self._clock() + seconds)

    def limit(self, direction: Direction, bytes_per_second: int) -> None:
        with self._lock:
            self._arbiter.limit(direction, bytes_per_second, self._clock())
            self._wake_all()

    def close(self) -> None:
        for stream in self._every:
            stream.stop()
        for stream in self._every:
            stream.close()

    def overdue(self) -> str:
        """Count the time since the last look; says what has taken longer than it can, or nothing. Call it repeatedly,
        by one thread at a time."""
        now = self._clock()
        passed, self._seen_at = min(now - self._seen_at, MOST_COUNTED_S), now
        overdue = ""
        for stream in self._every:
            if (task := stream.task) is not None:
                task.waited_s += passed
                size_bytes = task.piece.size_bytes
                if task.waited_s > PATIENCE_S + size_bytes / SLOWEST_BYTES_PER_S:
                    overdue = f"{size_bytes} bytes were not copied in {task.waited_s:.0f} s on {stream.name}"
        return overdue

    def abandon(self, why: str) -> None:
        """The device hangs: end every job, and take no more."""
        for stream in self._every:
            stream.abandon(why)


def _wake(changes: Iterable[threading.Condition]) -> None:
    for changed in changes:
        changed.notify_all()


def end_job(job: CopyJob, error: Exception | None, write_word: WriteWord) -> None:
    """Release a failed job's waiters and tell its owner how it ended; an owner that raises is logged,
    once."""
    if error is not None:
        if job.failed_word is not None:
            write_word(job.failed_word, job.end_value)
        if job.word is not None:
            write_word(job.word, job.end_value)
    try:
        job.done(error)
    except Exception:
        log.exception("copy_done_callback_failed ticket=%d", job.ticket)
