"""Waits for tests of movers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Heard(logging.Handler):
    """Waits for what the daemon's side logs."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self._said.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, name: str, count: int = 1) -> None:
        with self._changed:
            self._changed.wait_for(lambda: sum(said.startswith(name) for said in self._said) >= count)


@contextmanager
def heard_from(name: str) -> Iterator[Heard]:
    """Listener of a logger, for a while."""
    handler, log = Heard(), logging.getLogger(name)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
