"""Lines of requests that go on with one another, as conversations do, and where prompts part: by block keys, bounded.

``ends``: of each request the last full block, as the end of a line that the next request may go on with. ``children``:
how many known children a block has, kept where that is not 1. ``hubs``: how often the known beginning of new lines is
used, as the smoothed logarithm of the seconds between uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import exp, log
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
LOOK_BACK_BLOCKS = 64
PARTING = 3
"""Number of known children from which on lines part at a block: no line goes on across it."""


class Line(NamedTuple):
    """State as of its last request: arrival (seconds), requests, smoothed logarithm of the seconds between them."""

    arrived: float
    turns: int
    gap: float


class Found(NamedTuple):
    """The line that a request is part of, and the smoothed seconds of its own gap, or of its beginning's."""

    line: Line
    line_gap: float | None
    hub_gap: float | None


class Bounded(Generic[Value]):
    """The last ``most`` keys that were written."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Value] = OrderedDict()
        self.get = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def put(self, key: bytes, value: Value) -> None:
        """Write a key; the one that was written longest ago is forgotten where there are too many."""
        known = self._known
        known[key] = value
        known.move_to_end(key)
        if len(known) > self._most:
            known.popitem(last=False)


class Lines:
    """``most``: keys of each kind that are kept. ``children_of``: as ``children``, with what it is where nothing is
    known."""

    def __init__(self, most: int) -> None:
        self._ends: Bounded[Line] = Bounded(most)
        self._children: Bounded[int] = Bounded(most)
        self._hubs: Bounded[float] = Bounded(most)
        self.children_of = self._children.get

    def __len__(self) -> int:
        return len(self._ends) + len(self._children) + len(self._hubs)

    def children(self, key: bytes) -> int:
        """Known children of a block; 1 where nothing is known of it."""
        return self._children.get(key, 1)

    def part(self, key: bytes) -> int:
        """A block has a child that was not known; returns how many it has now."""
        now = self.children(key) + 1
        self._children.put(key, now)
        return now

    def find(self, key: Callable[[int], bytes], known: int, since: float, now: float) -> Found:
        """The line of a request of which ``known`` blocks are known, the last one used ``since`` (seconds)."""
        for at in range(known - 1, max(0, known - LOOK_BACK_BLOCKS) - 1, -1):
            each = key(at)
            if self.children(each) >= PARTING:
                break
            line = self._ends.get(each)
            if line is not None:
                gap = log(1 + max(0.0, now - line.arrived))
                if line.turns > 1:
                    gap = (line.gap + gap) / 2
                return Found(Line(now, line.turns + 1, gap), exp(gap) - 1, None)
        if not known:
            return Found(Line(now, 1, 0.0), None, None)
        hub, gap = key(known - 1), log(1 + max(0.0, now - since))
        before = self._hubs.get(hub)
        if before is not None:
            gap = (before + gap) / 2
        self._hubs.put(hub, gap)
        return Found(Line(now, 1, 0.0), None, exp(gap) - 1)

    def end(self, key: bytes, line: Line, *, is_new: bool) -> None:
        """A request of a line ends at the block of ``key``; ``is_new``: nothing is known below it."""
        self._ends.put(key, line)
        if is_new:
            self._children.put(key, 0)

    def go_on(self, key: bytes) -> None:
        """The request that had ended at ``key`` goes on below it after all."""
        if self._children.get(key) == 0:
            self._children.put(key, 1)
