"""Handles belong to the process that made them: a child that was forked from it shares its sockets, and must neither
speak for it nor end what it holds."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Protocol

from cachesvc_client.core.errors import UsedAfterFork


class Inherited(Protocol):
    """Resource that a child must not keep open."""

    def forget(self) -> None:
        """Close the child's copy, and nothing else."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_this = SimpleNamespace(pid=os.getpid())


def keep_from_children(handle: Inherited) -> None:
    """Close it in every child of this process: where no pidfd tells, the end of a connection is our own."""
    _inherited.add(handle)


def _begin_child() -> None:
    _this.pid = os.getpid()
    for handle in list(_inherited):
        handle.forget()


os.register_at_fork(after_in_child=_begin_child)


class Maker:
    """The process that made a handle. Each call of each handle asks: a comparison, where getpid is a system call."""

    def __init__(self) -> None:
        self._pid: int = _this.pid

    @property
    def is_elsewhere(self) -> bool:
        """True in any other process."""
        return bool(_this.pid != self._pid)

    def check(self) -> None:
        """Check the process. Raises UsedAfterFork in any other one."""
        if _this.pid != self._pid:
            raise UsedAfterFork(
                f"this handle of process {self._pid} was used in process {_this.pid}, which was forked from it; "
                "connect after the fork, with a client of its own"
            )
