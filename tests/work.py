"""How much work a call is, whatever else the machine does: the interpreter's steps, instead of time.

What C code loops over counts as one step, so whoever uses this sees to it that the loops in question are Python's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Work:
    """Instructions that were executed so far."""

    def __init__(self) -> None:
        self.steps = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Count the instructions of the ``with`` block's calls. Tracing is off for whoever traced before."""
    work = Work()

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        work.steps += event == "opcode"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield work
    finally:
        sys.settrace(before)


def steps_of(call: Callable[[], object]) -> int:
    """Instructions of one call."""
    with counted() as work:
        call()
    return work.steps
