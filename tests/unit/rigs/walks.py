"""Length of a call's way through the daemon: Python functions that it enters, files, and changes from file to file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

import cachesvc

HOME = cachesvc.__path__[0]


class Walk(NamedTuple):
    """Functions of the daemon that a call entered, in order, each entry of it."""

    entered: list[CodeType]

    @property
    def functions(self) -> int:
        return len(set(self.entered))

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.entered})

    @property
    def moves(self) -> int:
        names = [code.co_filename for code in self.entered]
        return sum(one != other for one, other in pairwise(names))

    def before(self, name: str) -> int:
        """Functions that were entered before the first one of this name."""
        return len(set(self.entered[: [code.co_qualname for code in self.entered].index(name)]))

    def entries(self, name: str) -> int:
        return [code.co_qualname for code in self.entered].count(name)


def walk(call: Callable[[], Any]) -> Walk:
    """Profile one call."""
    entered: list[CodeType] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            entered.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Walk(entered)
