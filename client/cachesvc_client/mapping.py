"""Memory of the daemon, mapped into this process by its handle."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from kvcache.v1 import common_pb2

from cachesvc_client.errors import AlreadyClosed, DaemonFault, NotSupported

FdSource = Callable[[bytes], int]
"""Fetches the descriptor behind a handle's token."""


class MappedMemory:
    """One mapping. Arrays made of ``bytes`` keep the memory mapped for as long as they are held, so they never dangle:
    NumPy holds the memoryview for that. (Of an array made by ``np.ndarray(buffer=mapping)`` the mapping knows nothing.)
    """

    def __init__(self, handle: common_pb2.MemoryHandle, fetch_fd: FdSource, *, protection: int) -> None:
        self._handle = handle
        self._fetch_fd = fetch_fd
        self._protection = protection
        self._mapping: mmap.mmap | None = None

    def start(self) -> None:
        """Map it. Raises NotSupported for a kind of handle that this client cannot open, NotFound, DaemonUnavailable,
        DeadlineExceeded."""
        if self._handle.kind != "memfd":
            raise NotSupported(
                f"the daemon's memory is of kind {self._handle.kind!r}, which this client cannot map; it maps memfd"
            )
        descriptor = self._fetch_fd(self._handle.token)
        try:
            there = os.fstat(descriptor).st_size
            if there < self._handle.size_bytes:
                raise DaemonFault(f"a slab of {self._handle.size_bytes} bytes came as a file of {there}")
            self._mapping = mmap.mmap(descriptor, self._handle.size_bytes, prot=self._protection)
        finally:
            os.close(descriptor)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of it. Raises AlreadyClosed."""
        if self._mapping is None:
            raise AlreadyClosed("this memory is not mapped any more; attach again")
        return np.frombuffer(memoryview(self._mapping), np.uint8)

    def close(self) -> bool:
        """Unmap; True when the memory is unmapped now, False while arrays of it are still held. Idempotent."""
        if self._mapping is None:
            return True
        mapping, self._mapping = self._mapping, None
        try:
            mapping.close()
        except BufferError:
            return False
        return True
