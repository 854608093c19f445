"""A thread that asks the master, one question after another: each may take seconds where the master is gone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.telemetry import events

MOST_WAITING = 1024
CLOSE_SECONDS = 1.0


class Questions:
    """Asked in their order. At the end those that wait are asked still, as long as none hangs."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
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

    def add(self, ask: Callable[[], None]) -> bool:
        """False where it will not be asked."""
        with self._changed:
            if not self._is_open or len(self._waiting) >= MOST_WAITING:
                return False
            self._waiting.append(ask)
            self._changed.notify()
            return True

    def close(self) -> bool:
        """False where one hangs still."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
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
                ask = self._waiting.popleft()
                self._is_busy = True
            try:
                ask()
            except Exception:  # noqa: BLE001 - the root of a thread: the next question is another's
                events.failure("storage_question_broke")
