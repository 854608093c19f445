"""Memory for headers: slots of one size on borders that direct I/O asks for, used again and again."""

from __future__ import annotations

import mmap
import threading

from cachesvc.storage.header import HEADER_BYTES

SLAB_SLOTS = 64


class Heads:
    """Slots of ``slot_bytes``. Any thread. Memory is kept: as many slots as were ever out at a time."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = -(-max(slot_bytes, HEADER_BYTES) // HEADER_BYTES) * HEADER_BYTES
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> list[memoryview]:
        """``count`` slots; what is in them is left of others."""
        with self._lock:
            while len(self._free) < count:
                slab = memoryview(mmap.mmap(-1, self.slot_bytes * SLAB_SLOTS))
                self._free += [slab[at : at + self.slot_bytes] for at in range(0, len(slab), self.slot_bytes)]
            taken = self._free[-count:] if count else []
            del self._free[len(self._free) - count :]
        return taken

    def give_back(self, slot: memoryview) -> None:
        """Take back a slot that is written no more."""
        with self._lock:
            self._free.append(slot)
