"""Threads that read or write files, in the order in which they were asked to."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.storage.file.direct import Mover
from cachesvc.telemetry import events

MOST_WAITING = 1 << 16
"""Items that wait for a thread; more are BUSY."""
CLOSE_SECONDS = 1.0
"""Threads that hang in the filesystem are left behind after so long."""


class Job(NamedTuple):
    """Something for a thread. ``run`` answers; ``refuse`` answers that it was not begun."""

    run: Callable[[Mover], None]
    refuse: Callable[[], None]
    deadline: float


class UnderWay:
    """Blocks that are being written. A block becomes an object after the one above it, so that a kill leaves no path
    without its beginning."""

    def __init__(self) -> None:
        self._keys: Counter[bytes] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def writing(self, key: bytes) -> Iterator[None]:
        """Note that a block is written within the context."""
        with self._changed:
            self._keys[key] += 1
        try:
            yield
        finally:
            with self._changed:
                self._keys[key] -= 1
                if not self._keys[key]:
                    del self._keys[key]
                self._changed.notify_all()

    def wait_for(self, key: bytes) -> None:
        """Wait until the block is not being written. Those above are written by threads that began before, so no two
        wait for each other."""
        with self._changed:
            while key in self._keys:
                self._changed.wait()


class Lane:
    """Threads that do jobs in the order in which they came."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float]) -> None:
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._clock = clock
        self._is_open = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        self._flag = 0

    def start(self, flag: int) -> None:
        """Begin; ``flag``: O_DIRECT, or 0."""
        self._flag = flag
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
        mover = Mover(self._flag)
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
