"""Threads that carry out items in batches, in the order in which they came."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.storage.seam import Each, Item, Outcome
from cachesvc.telemetry import events

MOST_WAITING = 1 << 16
"""Items that wait for a thread; more are BUSY."""
BATCH_ITEMS = 32
BATCH_BYTES = 4 << 20
"""Bytes of one call to the library: a batch is worth 5 to 10 times at 64 KiB and nothing from 4 MiB on."""
CLOSE_SECONDS = 1.0


@dataclass(slots=True)
class Task:
    """An item to carry out by ``deadline`` (monotonic seconds). ``tries``: how often it was before."""

    item: Item
    deadline: float
    index: int
    each: Each
    tries: int = 0
    is_ended: bool = False
    is_aside: bool = False

    def end(self, outcome: Outcome) -> None:
        """End a task, none of whose bytes move any more. The first end counts."""
        if not self.is_ended:
            self.is_ended = True
            self.each(self.index, outcome)

    def set_aside(self) -> bool:
        """Set aside a task of which bytes may still move. True the first time."""
        is_first = not self.is_ended and not self.is_aside
        if is_first:
            self.is_aside, self.deadline = True, float("-inf")
            self.each(self.index, Outcome.LATE)
        return is_first


Carry = Callable[[list[Task]], None]
"""Ends every task that it is given, or gives it back to the lane for later. Blocks."""


class Lane:
    """``make``: called on each thread for what carries its batches out; it may block until there is an engine.
    ``broke``: ends a task whose batch broke on its way."""

    def __init__(self, name: str, threads: int, make: Callable[[], Carry], broke: Callable[[Task], None]) -> None:
        self._make = make
        self._broke = broke
        self._waiting: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []
        self._number = 0
        self._changed = threading.Condition()
        self._is_open = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Begin."""
        self._is_open = True
        for thread in self._threads:
            thread.start()

    def add(self, tasks: Sequence[Task]) -> None:
        """Queue tasks. Those that find no room are BUSY."""
        with self._changed:
            room = MOST_WAITING - len(self._waiting) if self._is_open else 0
            self._waiting.extend(tasks[:room])
            self._changed.notify(min(len(tasks), len(self._threads)))
        for task in tasks[room:]:
            task.end(Outcome.BUSY)

    def put_off(self, task: Task, until: float) -> None:
        """Carry it out at ``until``, monotonic seconds."""
        with self._changed:
            if self._is_open:
                self._number += 1
                heapq.heappush(self._later, (until, self._number, task))
                self._changed.notify()
                return
        task.end(Outcome.BUSY)

    def close(self) -> bool:
        """Refuse waiting calls as BUSY and give running ones a second. False where a thread hangs still."""
        with self._changed:
            self._is_open = False
            waiting = [*self._waiting, *(task for _, _, task in self._later)]
            self._waiting.clear()
            self._later.clear()
            self._changed.notify_all()
        for task in waiting:
            task.end(Outcome.BUSY)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        """Root of a thread."""
        yield_to_callers()
        carry = self._make()
        while (batch := self._next()) is not None:
            try:
                carry(batch)
            except Exception:  # noqa: BLE001 - the root of a thread: the next batch is another's
                events.failure("storage_batch_broke")
                for task in batch:
                    self._broke(task)

    def _next(self) -> list[Task] | None:
        """A batch; None at the end. What is over its deadline is BUSY."""
        while True:
            with self._changed:
                while self._is_open and not self._is_due():
                    self._changed.wait(self._later[0][0] - time.monotonic() if self._later else None)
                if not self._is_open:
                    return None
                batch, over = self._take(time.monotonic())
            for task in over:
                task.end(Outcome.BUSY)
            if batch:
                return batch

    def _is_due(self) -> bool:
        return bool(self._waiting) or (bool(self._later) and self._later[0][0] <= time.monotonic())

    def _take(self, now: float) -> tuple[list[Task], list[Task]]:
        """Under the lock: what is to be done now, and what is over."""
        while self._later and self._later[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._later)[2])
        batch: list[Task] = []
        over: list[Task] = []
        size_bytes = 0
        while self._waiting and len(batch) < BATCH_ITEMS:
            size_bytes += self._waiting[0].item.payload_bytes
            if batch and size_bytes > BATCH_BYTES:
                break
            task = self._waiting.popleft()
            if not task.is_ended:
                (batch if task.deadline > now else over).append(task)
        return batch, over
