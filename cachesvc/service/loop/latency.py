"""Watch of the event loop: longest rounds, and longest holds by flow; all other calls waited that long.

A round is all that the loop runs between two looks at its sockets. ``begin`` stands where work comes in: messages
before they are parsed, turns, slices of questions, events to send. The first of them has the loop call back in its next
round, which ends the round. Where it took a while, the next one is watched too: more may follow. A call back costs
some microseconds, so a short call has one.

Each figure is the longest of the last one to two minutes, to any number of readers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

WINDOW_SECONDS = 60.0
LONG_ROUND_SECONDS = 0.002
"""Length of a round above which it is counted."""
SHORT_ROUND_SECONDS = 0.0003
"""Length of a round up to which nothing long is taken to follow."""
ROUND = "round"


class Loop(Protocol):
    """An event loop."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...


class Longest:
    """Longest times by name, in this window and the one before it."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._until = time.perf_counter() + WINDOW_SECONDS

    def note(self, what: str, seconds: float, now: float) -> None:
        """Note a time. ``now``: ``time.perf_counter``."""
        if now >= self._until:
            self._turn_over(now)
        if seconds > self._longest.get(what, 0.0):
            self._longest[what] = seconds

    def get(self) -> dict[str, float]:
        """Seconds by name."""
        now = time.perf_counter()
        if now >= self._until:
            self._turn_over(now)
        both = self._before | self._longest
        return {what: max(seconds, self._before.get(what, 0.0)) for what, seconds in both.items()}

    def _turn_over(self, now: float) -> None:
        self._before = self._longest if now < self._until + WINDOW_SECONDS else {}
        self._longest = {}
        self._until = now + WINDOW_SECONDS


class LoopLine(NamedTuple):
    """Longest round of the event loop lately, rounds above 2 ms since the start, and the flow that held it longest."""

    longest_round_ms: float
    long_rounds: int
    longest_flow: str
    longest_flow_ms: float


class LoopWatch:
    """Used on the loop alone. ``long_rounds``: rounds above ``LONG_ROUND_SECONDS`` since the start."""

    def __init__(self) -> None:
        self.long_rounds = 0
        self._flows = Longest()
        self._rounds = Longest()
        self._loop: Loop | None = None
        self._is_watching = False
        self._round_began = 0.0

    def start(self, loop: Loop) -> None:
        """Watch the rounds of a loop."""
        self._loop = loop

    def begin(self) -> float:
        """Begin some work; returns ``time.perf_counter``, for ``note``."""
        now = time.perf_counter()
        if not self._is_watching and self._loop is not None:
            self._is_watching = True
            self._begin_round(self._loop, now)
        return now

    def note(self, what: str, began: float) -> float:
        """Note that ``what`` held the loop since ``began`` (``time.perf_counter``); returns the seconds."""
        now = time.perf_counter()
        held = now - began
        self._flows.note(what, held, now)
        return held

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Count the time for which ``what`` holds the loop."""
        began = self.begin()
        try:
            yield
        finally:
            self.note(what, began)

    def longest(self) -> dict[str, float]:
        """Seconds of the longest hold by each flow."""
        return self._flows.get()

    def longest_round(self) -> float:
        """Seconds of the longest round."""
        return self._rounds.get().get(ROUND, 0.0)

    def line(self) -> LoopLine:
        """The longest times, for status."""
        flows = self.longest()
        flow = max(flows, key=flows.__getitem__, default="")
        return LoopLine(self.longest_round() * 1e3, self.long_rounds, flow, flows.get(flow, 0.0) * 1e3)

    def _begin_round(self, loop: Loop, now: float) -> None:
        self._round_began = now
        loop.call_soon(self._end_round, loop)

    def _end_round(self, loop: Loop) -> None:
        now = time.perf_counter()
        took = now - self._round_began
        self._rounds.note(ROUND, took, now)
        self.long_rounds += took > LONG_ROUND_SECONDS
        self._is_watching = took > SHORT_ROUND_SECONDS
        if self._is_watching:
            self._begin_round(loop, now)
