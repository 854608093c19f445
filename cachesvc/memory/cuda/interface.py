"""Seam between the CUDA backend and a GPU. ``gpu_ops`` fills it on real hardware; it comes in through the composition
root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

PitchedCopies = npt.NDArray[np.int64]
"""``[copies, 6]``: source and destination address, width in bytes, height in rows, source and destination pitch."""


class GpuMemory(Protocol):
    """Device memory that other processes can map: by its 64-byte ``handle``, or by ``fd`` where that is empty."""

    @property
    def address(self) -> int:
        """Address of the first byte."""

    @property
    def size_bytes(self) -> int:
        """Allocated bytes: at least the requested ones."""

    @property
    def handle(self) -> bytes:
        """Legacy IPC handle, or nothing."""

    @property
    def fd(self) -> int | None:
        """The descriptor of a VMM allocation, open until ``close``."""

    def close(self) -> None:
        """Give it back, once; mappings of other processes stay valid."""


class GpuMark(Protocol):
    """Point on a queue."""

    def wait(self) -> None:
        """Sleep until the queue has come here. Raises RuntimeError for what broke on the way."""

    def close(self) -> None:
        """Release the mark."""


class GpuQueue(Protocol):
    """Copies by copy engines alone, and words and marks behind them. Copies may pass one another: none may need what
    another brings unless the caller has waited between them. Failures raise RuntimeError."""

    def start(self) -> None:
        """Make the stream."""

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> GpuMark:
        """Queue copies; once they and everything before are done, set each word (address, value) in order.

        When this raises, some of it may be on its way.
        """

    def synchronize(self) -> None:
        """Wait until everything is done."""

    def close(self) -> None:
        """Wait, and release the stream. Idempotent."""


class GpuDevice(Protocol):
    """One GPU in this process. Failures raise RuntimeError; memory that is not there, MemoryError."""

    @property
    def uuid(self) -> str:
        """Name of the GPU in every container and process."""

    @property
    def context_bytes(self) -> int:
        """Device memory that ``start`` took for this process."""

    def start(self) -> None:
        """Make its context."""

    def shrink(self) -> None:
        """Give back what the context keeps for kernels: this process runs none."""

    def close(self) -> None:
        """Leave its context. Idempotent."""

    def free_bytes(self) -> int:
        """Free device memory."""

    def allocate(self, size_bytes: int, *, vmm: bool) -> GpuMemory:
        """Zeroed memory. Raises MemoryError."""

    def open_memory(self, handle: bytes, fd: int | None, size_bytes: int) -> GpuMemory:
        """Map what another process allocated, on this GPU or one that it reaches: by ``fd``, or else by the handle."""

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory for the copies of every GPU of this process."""

    def unregister_host(self, address: int) -> None:
        """Unpin host memory."""

    def device_address(self, host_address: int) -> int:
        """Address at which the GPU sees pinned host memory."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Bytes of device memory, waited for."""

    def can_reach(self, other: Self) -> bool:
        """True where this GPU can copy from and to the other one's memory, not through the host."""

    def open_peer(self, other: Self) -> None:
        """Let what runs on this GPU reach the other one's memory; both are started. Again is fine."""

    def queue(self) -> GpuQueue:
        """A queue that is not started."""
