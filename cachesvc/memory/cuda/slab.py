"""A slab of a GPU's memory, and how other processes map it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from cachesvc.memory.cuda.interface import GpuMemory
from cachesvc.memory.interface import Handle
from cachesvc.memory.timeline import TOKEN_BYTES
from cachesvc.model.errors import LedgerBroken


class CudaSlab:
    """Device memory of one group on one rank."""

    def __init__(self, region: int, memory: GpuMemory, size_bytes: int, on_close: Callable[[CudaSlab], None]) -> None:
        """``on_close`` gives the memory back."""
        self.region = region
        self.memory = memory
        self.size_bytes = size_bytes
        self.handle = handle_of(memory, size_bytes)
        self.fd = memory.fd
        self._on_close = on_close
        self._is_open = True

    def close(self) -> None:
        """Free the memory once its readers have finished. Raises LedgerBroken when it was freed before."""
        if not self._is_open:
            raise LedgerBroken(f"slab of region {self.region} was closed before")
        self._is_open = False
        self._on_close(self)


def handle_of(memory: GpuMemory, size_bytes: int) -> Handle:
    """Handle by which another process maps the memory. A VMM allocation is mapped whole."""
    if memory.handle:
        return Handle("cuda_ipc", memory.handle, size_bytes)
    return Handle("cuda_fd", secrets.token_bytes(TOKEN_BYTES), memory.size_bytes)
