"""A pipe without writes, by which engines learn that no copy comes into their pools any more.

One end goes to the engines of a model. Movers that copy into the model's slabs on a device hold the other one, and
close it once their copies have landed; where a mover dies, the kernel closes it.
"""

from __future__ import annotations

import os
import secrets

from cachesvc.memory.interface import Handle

TOKEN_BYTES = 16


class Writers:
    """``fd``: for engines, by ``handle``; it hangs up once ``held`` is closed in every process."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.handle = Handle("pipe", secrets.token_bytes(TOKEN_BYTES), 0)
        self.fd, self.held = os.pipe2(os.O_CLOEXEC)

    def hand_over(self) -> None:
        """Another process holds the other end now, and this one does not. Idempotent."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        """Close what is held here. Idempotent."""
        self.hand_over()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
