"""The process of a mover: a child of this one, or one that was started by hand and is found at a socket.

Either can be ended from here: a mover that hangs would else be waited for, for it may still write to the host's pages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from cachesvc.model.text import module_command

SO_PEERPIDFD = 77
"""asm-generic/socket.h, from Linux 6.5 on."""


class MoverProcess(Protocol):
    """``is_child``: it serves this process alone, and ends with it."""

    is_child: bool

    def kill(self) -> None:
        """End the process. No-op where it has ended."""

    def has_ended(self, seconds: float | None) -> bool:
        """Wait so long for its end (None: for as long as it takes)."""

    def close(self) -> None:
        """Forget the process. Idempotent."""


Begin = Callable[[], tuple[socket.socket, MoverProcess | None]]
"""Gives a connection to a mover, and its process where it has one of its own. Raises OSError."""


class Child:
    is_child = True

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def has_ended(self, seconds: float | None) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Forget a process that has ended."""


class FoundProcess:
    """A process by its ``pidfd``, which it takes over."""

    is_child = False

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._lock = threading.Lock()

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def has_ended(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1e3))

    def close(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def child(device: str) -> tuple[socket.socket, MoverProcess | None]:
    """Start a device's mover as a child of this process, which ends with it. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = module_command("cachesvc.mover", "--connected", str(theirs.fileno()), "--gpu", device)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])  # noqa: S603
    return ours, Child(process)


def found(path: str) -> tuple[socket.socket, MoverProcess | None]:
    """Connect to a mover that listens at ``path``, of this user or root. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # where too many wait already this would wait too
        connection.connect(path)
        connection.setblocking(True)
        pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()):
            raise PermissionError(f"the mover there is of user {uid}")
        return connection, _killable(connection, pid)
    except OSError as refused:
        connection.close()
        is_busy = isinstance(refused, BlockingIOError)
        why = "others wait for it already" if is_busy else refused.strerror or str(refused)
        raise OSError(f"{path}: {why}") from refused


def _killable(connection: socket.socket, pid: int) -> FoundProcess:
    """The process at the other end. Raises OSError where it could not be ended."""
    try:
        pidfd = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
    except OSError:  # an older kernel
        pidfd = os.pidfd_open(pid)
    process = FoundProcess(pidfd)
    try:
        signal.pidfd_send_signal(pidfd, 0)  # none is sent: whether one may be
    except OSError as refused:
        process.close()
        raise PermissionError(
            f"the mover there could not be ended, were it to hang ({refused.strerror}): run it as this user, in "
            "this PID namespace"
        ) from refused
    return process
