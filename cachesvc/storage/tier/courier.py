"""A thread that carries out what the ledger thread has no time for: names, checksums, calls to an engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.telemetry import events

CLOSE_SECONDS = 1.0


class Carrier(Protocol):
    """Carries out calls, later and in their order."""

    def start(self) -> None:
        """Begin."""

    def add(self, call: Callable[[], None], fail: Callable[[], None]) -> None:
        """Carry it out; ``fail`` where it raises."""

    def close(self) -> None:
        """Carry out nothing more. Idempotent."""


class StorageTask(NamedTuple):
    """Job: a call, and what is called where it raises."""

    call: Callable[[], None]
    fail: Callable[[], None]


def run_task(task: StorageTask) -> None:
    """Run a task, the root of what it raises: others follow it."""
    for step in task:
        try:
            step()
            return
        except Exception:  # noqa: BLE001 - as the docstring says
            events.failure("storage_call_broke")


class Courier:
    """One thread. Its callers bound what they give it."""

    def __init__(self, name: str) -> None:
        self._calls: deque[StorageTask] = deque()
        self._changed = threading.Condition()
        self._is_open = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._is_open = True
        self._thread.start()

    def add(self, call: Callable[[], None], fail: Callable[[], None]) -> None:
        """Carry it out, behind what was given before."""
        with self._changed:
            self._calls.append(StorageTask(call, fail))
            self._changed.notify()

    def close(self) -> None:
        """Drop what waits, and wait a while for what runs. Idempotent."""
        with self._changed:
            self._is_open = False
            self._calls.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        """Root of the thread."""
        yield_to_callers()
        while True:
            with self._changed:
                while not self._calls and self._is_open:
                    self._changed.wait()
                if not self._is_open:
                    return
                task = self._calls.popleft()
            run_task(task)
