"""Threads that run jobs of a bounded queue, in their order. Every job that raises, or is not begun, is refused."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from cachesvc.memory.extents import yield_to_callers
from cachesvc.storage.seam import Each, Item, Outcome
from cachesvc.telemetry import events

Context = TypeVar("Context")
Name = TypeVar("Name", bound=Hashable)

MOST_WAITING = 1 << 16
"""Jobs that wait for a thread; more are refused."""
CLOSE_SECONDS = 1.0
"""Threads that hang, in a filesystem or a library, are left behind after so long, seconds."""


def nothing(*_: object) -> None:
    """Do nothing: there is no waiter, or no context."""


class Job(NamedTuple, Generic[Context]):
    """``run`` does the work and answers. ``refuse`` answers where ``run`` raised, or was not begun by ``deadline``,
    monotonic seconds."""

    run: Callable[[Context], None]
    refuse: Callable[[], None] = nothing
    deadline: float = float("inf")


class Workers(Generic[Context]):
    """``make``: gives each thread a context of its own, such as a buffer; it may block. ``clock``: monotonic seconds,
    of deadlines."""

    def __init__(
        self,
        name: str,
        threads: int,
        make: Callable[[], Context],
        clock: Callable[[], float] = time.monotonic,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._make = make
        self._clock = clock
        self._most = most_waiting
        self._waiting: deque[Job[Context]] = deque()
        self._later: list[tuple[float, int, Job[Context]]] = []
        self._put_off = 0
        self._changed = threading.Condition()
        self._is_open = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        self._is_open = True
        for thread in self._threads:
            thread.start()

    def add(self, jobs: Sequence[Job[Context]]) -> None:
        """Queue jobs; refuse those for which there is no room."""
        with self._changed:
            room = max(0, self._most - len(self._waiting)) if self._is_open else 0
            self._waiting.extend(jobs[:room])
            self._changed.notify(min(len(jobs), len(self._threads)))
        for job in jobs[room:]:
            job.refuse()

    def put_off(self, job: Job[Context], until: float) -> None:
        """Queue a job at ``until``, monotonic seconds, before all others."""
        with self._changed:
            if is_open := self._is_open:
                self._put_off += 1
                heapq.heappush(self._later, (until, self._put_off, job))
                self._changed.notify()
        if not is_open:
            job.refuse()

    def finish(self) -> bool:
        """Close once what waits has run, or a thread has hung for a while, as ``close``."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._join()
        return self.close()

    def close(self) -> bool:
        """Refuse what waits, and wait a while for what runs; False where a thread hangs still. Idempotent."""
        with self._changed:
            self._is_open = False
            waiting = [*self._waiting, *(job for _, _, job in self._later)]
            self._waiting.clear()
            self._later.clear()
            self._changed.notify_all()
        for job in waiting:
            job.refuse()
        return self._join()

    def _join(self) -> bool:
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        yield_to_callers()
        context = self._make()
        while (job := self._next()) is not None:
            run_job(job, context, self._clock())

    def _next(self) -> Job[Context] | None:
        """The next job, once there is one; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    self._waiting.appendleft(heapq.heappop(self._later)[2])
                if self._waiting:
                    return self._waiting.popleft()
                if not self._is_open:
                    return None
                self._changed.wait(self._later[0][0] - now if self._later else None)


def run_job(job: Job[Context], context: Context, now: float) -> None:
    """Run or refuse a job, the root of what it raises: others follow it."""
    steps: tuple[Callable[[], None], ...] = (partial(job.run, context), job.refuse)
    for step in steps[job.deadline <= now :]:
        try:
            step()
            return
        except Exception:  # noqa: BLE001 - as the docstring says
            events.failure("storage_job_broke")


def jobs_of(
    items: Sequence[Item], deadline: float, each: Each, move: Callable[[Item, Context], Outcome]
) -> list[Job[Context]]:
    """A job for each item, which ends it by what ``move`` returns, or as BUSY where it is not begun in time."""

    def job(index: int, item: Item) -> Job[Context]:
        return Job(lambda context: each(index, move(item, context)), partial(each, index, Outcome.BUSY), deadline)

    return [job(index, item) for index, item in enumerate(items)]


class UnderWay(Generic[Name]):
    """Names of what is being written, or removed. Counted. Any thread."""

    def __init__(self) -> None:
        self._names: Counter[Name] = Counter()
        self._changed = threading.Condition()
        self._is_closed = False

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def begin(self, names: Iterable[Name]) -> None:
        with self._changed:
            self._names.update(names)

    def end(self, names: Iterable[Name]) -> None:
        """Note the end of what has begun. No-op for other names."""
        with self._changed:
            for name in names:
                if self._names[name] <= 1:
                    del self._names[name]
                else:
                    self._names[name] -= 1
            self._changed.notify_all()

    @contextmanager
    def noted(self, name: Name) -> Iterator[None]:
        """Note that something is under way within the context."""
        self.begin((name,))
        try:
            yield
        finally:
            self.end((name,))

    def wait_for(self, names: Iterable[Name], seconds: float) -> bool:
        """Wait until nothing is under way for the names; False where something is still after ``seconds``, or at the
        end."""
        asked = frozenset(names)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or asked.isdisjoint(self._names), min(seconds, threading.TIMEOUT_MAX)
            )
            return asked.isdisjoint(self._names)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
