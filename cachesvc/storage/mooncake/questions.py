"""A thread that asks the master, one question after another: each may take seconds where the master is gone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.telemetry import events

MOST_WAITING = 1024
CLOSE_SECONDS = 1.0


class Question(NamedTuple):
    """``ask`` asks, and answers; ``give_up`` answers where that raised, or is not done any more."""

    ask: Callable[[], None]
    give_up: Callable[[], None]


class Questions:
    """Asked in their order. At the end those that wait are asked still, as long as none hangs."""

    def __init__(self) -> None:
        self._waiting: deque[Question] = deque()
        self._changed = threading.Condition()
        self._is_open = False
        self._is_busy = False
        self._thread = threading.Thread(target=self._work, name="mooncake-ask", daemon=True)

    @property
    def is_idle(self) -> bool:
        """True where nothing waits and nothing is asked."""
        with self._changed:
            return not self._waiting and not self._is_busy

    def start(self) -> None:
        """Begin."""
        self._is_open = True
        self._thread.start()

    def add(self, ask: Callable[[], None], give_up: Callable[[], None]) -> None:
        """See ``Question``: one of both answers, unless the question hangs."""
        with self._changed:
            is_taken = self._is_open and len(self._waiting) < MOST_WAITING
            if is_taken:
                self._waiting.append(Question(ask, give_up))
                self._changed.notify()
        if not is_taken:
            give_up()

    def close(self) -> bool:
        """False where one hangs still; those behind it are given up."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.give_up()
        return not self._thread.is_alive()

    def _work(self) -> None:
        """Root of the thread."""
        yield_to_callers()
        while True:
            with self._changed:
                self._is_busy = False
                while not self._waiting and self._is_open:
                    self._changed.wait()
                if not self._waiting:
                    return
                question = self._waiting.popleft()
                self._is_busy = True
            for step in question:
                try:
                    step()
                    break
                except Exception:  # noqa: BLE001 - the root of a thread: the next question is another's
                    events.failure("storage_question_broke")
