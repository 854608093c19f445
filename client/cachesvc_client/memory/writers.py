"""The end of a pipe by which a daemon's movers tell that they copy into this process's pools no more."""

from __future__ import annotations

import os
import select
import threading


class Writers:
    """Takes over ``fd``, a pipe's end. Any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._is_over = False

    def wait_over(self, timeout_s: float) -> bool:
        """True once the other end is closed in every process that copied; False where the time passes first, or this
        end was closed before that was seen."""
        with self._lock:  # so that none looks at a number that is another file's by now
            if self._is_over or self._fd < 0:
                return self._is_over
            mine = os.dup(self._fd)
        try:
            poll = select.poll()
            poll.register(mine, 0)  # a hang-up is always told
            is_over = bool(poll.poll(max(timeout_s, 0.0) * 1e3))
        finally:
            os.close(mine)
        if is_over:
            self._is_over = True
        return is_over

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
