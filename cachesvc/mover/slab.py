"""Device memory that a mover's process holds, as the daemon has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.memory.interface import Handle
from cachesvc.model.errors import LedgerBroken


@dataclass(slots=True)
class SlabOfMover:
    """Device memory in a mover's process. ``fd`` is ours."""

    region: int
    handle: Handle
    fd: int | None
    on_close: Callable[[SlabOfMover], None]
    is_open: bool = True

    def close(self) -> None:
        """Give the memory back; nothing but the descriptor where its mover has died. Raises LedgerBroken the second
        time."""
        if not self.is_open:
            raise LedgerBroken(f"slab of region {self.region} was closed before")
        self.is_open = False
        self.on_close(self)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
