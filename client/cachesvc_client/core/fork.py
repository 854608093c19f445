"""Handles belong to the process that made them: a child that was forked from it shares its sockets, and must neither
speak for it nor end what it holds."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from cachesvc_client.core.errors import UsedAfterFork


class Inherited(Protocol):
    """Resource that a child must not keep open."""

    def forget(self) -> None:
        """Close the child's copy, and nothing else."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def keep_from_children(handle: Inherited) -> None:
    """Close it in every child of this process: where no pidfd tells, the end of a connection is our own."""
    _inherited.add(handle)


def _forget_inherited() -> None:
    for handle in list(_inherited):
        handle.forget()


os.register_at_fork(after_in_child=_forget_inherited)


class Maker:
    """The process that made a handle."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """True in any other process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Check the process. Raises UsedAfterFork in any other one."""
        if os.getpid() != self._pid:
            raise UsedAfterFork(
                f"this handle of process {self._pid} was used in process {os.getpid()}, which was forked from it; "
                "connect after the fork, with a client of its own"
            )
