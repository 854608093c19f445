"""A copy stream made of one thread: jobs in order, steps in order, the timeline word after each step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.memory.seam import CopyBatch, CopyJob
from cachesvc.model.errors import LimitExceeded, Unavailable

log = logging.getLogger(__name__)


class CopyThread:
    """FIFO of at most ``limit`` waiting jobs. ``copy`` moves one batch; ``write_word`` sets a timeline
    word."""

    def __init__(
        self, name: str, copy: Callable[[CopyBatch], None], write_word: Callable[[int, int], None], limit: int
    ) -> None:
        self.name = name
        self._copy = copy
        self._write_word = write_word
        self._limit = limit
        self._jobs: deque[CopyJob] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start serving; what was queued before is served first."""
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Raises Unavailable after ``close`` and LimitExceeded when the queue is full."""
        with self._changed:
            if self._closed:
                raise Unavailable(f"copy stream {self.name} is closed")
            if len(self._jobs) >= self._limit:
                raise LimitExceeded(f"jobs waiting on copy stream {self.name}", len(self._jobs) + 1, self._limit)
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Fail what is queued, finish what runs, and end. Idempotent; from a ``done`` callback it does not
        wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        yield_to_callers()
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                closed = self._closed
            if closed:
                end_job(job, Unavailable(f"copy stream {self.name} was closed first"), self._write_word)
            else:
                self._run(job)
            del job  # a job holds its plan: do not keep it while waiting

    def _run(self, job: CopyJob) -> None:
        error: Exception | None = None
        try:
            for step in job.steps:
                if len(step.copies):
                    self._copy(step.copies)
                if step.word_value is not None and job.word is not None:
                    self._write_word(job.word, step.word_value)
        except Exception as failure:  # noqa: BLE001 - a thread's root: the job tells it
            error = failure
        end_job(job, error, self._write_word)


def end_job(job: CopyJob, error: Exception | None, write_word: Callable[[int, int], None]) -> None:
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
