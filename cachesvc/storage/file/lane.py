"""Threads that read or write files, in the order in which they were asked to."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.storage.file.direct import Mover
from cachesvc.storage.seam import Scope
from cachesvc.telemetry import events

MOST_WAITING = 1 << 16
"""Items that wait for a thread; more are BUSY."""
CLOSE_SECONDS = 1.0
"""Threads that hang in the filesystem are left behind after so long."""
PARENT_SECONDS = 5.0
"""Longest wait for the block above to be written, seconds."""


class Job(NamedTuple):
    """Something for a thread. ``run`` answers; ``refuse`` answers that it was not begun."""

    run: Callable[[Mover], None]
    refuse: Callable[[], None]
    deadline: float


class UnderWay:
    """Blocks that are being written. A block becomes an object after the one above it, so that a kill leaves no path
    without its beginning."""

    def __init__(self) -> None:
        self._blocks: Counter[tuple[Scope, bytes]] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def writing(self, scope: Scope, key: bytes) -> Iterator[None]:
        """Note that a block is written within the context."""
        block = scope, key
        with self._changed:
            self._blocks[block] += 1
        try:
            yield
        finally:
            with self._changed:
                self._blocks[block] -= 1
                if not self._blocks[block]:
                    del self._blocks[block]
                self._changed.notify_all()

    def wait_for(self, scope: Scope, key: bytes, seconds: float = PARENT_SECONDS) -> None:
        """Wait until the block is not being written. Raises TimeoutError: two callers that name each other's block as
        the one above may not hold threads."""
        with self._changed:
            if not self._changed.wait_for(lambda: (scope, key) not in self._blocks, seconds):
                raise TimeoutError(errno.ETIMEDOUT, "the block above it is being written still")


class Lane:
    """Threads that do jobs in the order in which they came."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float]) -> None:
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._clock = clock
        self._is_open = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Begin."""
        self._is_open = True
        for thread in self._threads:
            thread.start()

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those that cannot be are refused."""
        with self._changed:
            room = MOST_WAITING - len(self._waiting) if self._is_open else 0
            self._waiting.extend(jobs[:room])
            self._changed.notify(min(len(jobs), len(self._threads)))
        for job in jobs[room:]:
            job.refuse()

    def close(self) -> None:
        """Refuse what waits, and wait a while for what runs. Idempotent."""
        with self._changed:
            self._is_open = False
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for job in waiting:
            job.refuse()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Root of a thread."""
        yield_to_callers()
        mover = Mover()
        while True:
            with self._changed:
                while not self._waiting and self._is_open:
                    self._changed.wait()
                if not self._is_open:
                    return
                job = self._waiting.popleft()
            try:
                if job.deadline <= self._clock():
                    job.refuse()
                else:
                    job.run(mover)
            except Exception:  # noqa: BLE001 - the root of a thread: the next job is another's
                events.failure("storage_job_broke")
