"""Work of a call, whatever else the machine does: the interpreter's steps, instead of time.

What C code loops over counts as one step, so the loops in question must be Python's.
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
    """Count the instructions of the ``with`` block's calls. Tracing is off for an outer tracer."""
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
