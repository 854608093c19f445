"""Errors that keep an engine from starting or going on, and how often its operator hears of a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable

REPEAT_S = 60.0
"""Time after which a refusal that goes on is a warning again, seconds."""


class ConnectorRefused(ValueError):
    """The engine is configured in a way that the connector cannot serve; the message says what works instead."""


STUCK = (
    "the daemon is gone or took this engine's lease, what is asked for needs pages that are not the engine's own, and "
    "its memory cannot be replaced: start it again; with --device-memory vmm the daemon's next memory takes its place"
)
"""Process exit of an engine that cannot serve any more; its supervisor restarts it."""


class News:
    """Decides which refusals are warnings: each of another kind than the last, and one that goes on every ``REPEAT_S``,
    for requests wait meanwhile and only an operator can end it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: object = None
        self._told_s = 0.0

    def is_new(self, refusal: object) -> bool:
        """True where this refusal is to be a warning."""
        now_s = self._clock()
        if refusal == self._last and now_s - self._told_s < REPEAT_S:
            return False
        self._last, self._told_s = refusal, now_s
        return True

    def end(self) -> None:
        """Note that the daemon does again what it refused."""
        self._last = None
