"""Writer of log lines to a descriptor that never waits for it: a line that cannot go now is lost, and counted.

A daemon's standard error may be a pipe without a reader, a terminal that was stopped, a full disk, or closed. A
blocking write to any of them would stop the event loop, and with it every engine.
"""

from __future__ import annotations

import errno
import os
import select

PIPE_BYTES = 4096
"""POSIX's PIPE_BUF on Linux: a pipe that polls as writable takes this many bytes at once."""


class LineWriter:
    """Lines to one descriptor. The caller sees to it that one thread writes at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._is_torn = False
        self.lost = 0

    def write(self, line: str) -> bool:
        """Write a line and its end; False where it is lost, or was cut short."""
        text = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._is_torn:  # the last line has no end
            text = b"\n" + text
        left = memoryview(text)
        try:
            while left and self._may_write():
                left = left[os.write(self._descriptor, left[:PIPE_BYTES]) :]
        except OSError as error:
            if error.errno == errno.EBADF:
                self._poll = select.poll()  # closed for good: whatever has the number next is not ours to write to
        if not left:
            self._is_torn = False
            return True
        self.lost += 1
        self._is_torn = self._is_torn or len(left) < len(text)
        return False

    def _may_write(self) -> bool:
        return any(flags & select.POLLOUT for _, flags in self._poll.poll(0))


def keep_standard_descriptors() -> None:
    """Open what is closed of standard input, output and error on /dev/null.

    Else the next socket gets its number, and what libraries print goes there.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
