"""Memory of the daemon, mapped into this process by its handle."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from kvcache.v1 import common_pb2

from cachesvc_client.core.errors import AlreadyClosed, DaemonFault, NotSupported
from cachesvc_client.memory.cuda import OWN_REFERENCES, FdMemory, IpcMemory
from cachesvc_client.memory.device import Device, PlaneView

FdSource = Callable[[bytes], int]
"""Fetches the descriptor behind a handle's token."""

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
DEVICE_KINDS = ("cuda_ipc", "cuda_fd")


class Memory(Protocol):
    """Mapping of any kind."""

    @property
    def size_bytes(self) -> int:
        """Usable bytes."""

    @property
    def address(self) -> int:
        """First byte, as this process and its device know it. Raises AlreadyClosed."""

    @property
    def can_map_over(self) -> bool:
        """True where it may take the place of other memory."""

    def map_over(self, address: int) -> None:
        """Map it at ``address`` too, in the place of memory of its kind and size that nothing uses any more: what
        points there sees this one. Raises NotSupported, OSError, GpuFailed; and what fetching a descriptor raises."""

    def start(self) -> None:
        """Map it. Raises NotSupported, NotFound, DaemonFault, DaemonUnavailable, DeadlineExceeded, GpuFailed."""

    def plane(self, view: PlaneView) -> Any:
        """A plane of the mapping, which stays mapped while the plane is held. Raises AlreadyClosed."""

    def close(self) -> bool:
        """Unmap; True when it is unmapped now, False while planes or arrays of it are held. Ask again then."""

    @property
    def held(self) -> int:
        """Number of arrays or tensors, views included, that still keep it mapped after ``close``."""


class MappedMemory:
    """A memfd. Arrays made of ``bytes`` keep it mapped for as long as they are held, so they never dangle: NumPy holds
    the memoryview for that. (Of an array made by ``np.ndarray(buffer=mapping)`` the mapping knows nothing.)
    """

    def __init__(self, handle: common_pb2.MemoryHandle, fetch_fd: FdSource, *, protection: int) -> None:
        self._handle = handle
        self._fetch_fd = fetch_fd
        self._protection = protection
        self._mapping: mmap.mmap | None = None
        self._bytes: npt.NDArray[np.uint8] | None = None
        self._left: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def size_bytes(self) -> int:
        return self._handle.size_bytes

    def start(self) -> None:
        """Map it. Raises NotSupported, NotFound, DaemonFault, DaemonUnavailable, DeadlineExceeded."""
        descriptor = self._fetch_fd(self._handle.token)
        try:
            there = os.fstat(descriptor).st_size
            if there < self._handle.size_bytes:
                raise DaemonFault(f"a slab of {self._handle.size_bytes} bytes came as a file of {there}")
            self._mapping = mmap.mmap(descriptor, self._handle.size_bytes, prot=self._protection)
            self._bytes = np.frombuffer(memoryview(self._mapping), np.uint8)
        except OSError as error:
            raise NotSupported(
                f"this process cannot map {self._handle.size_bytes} bytes of the daemon's memory ({error}); look at "
                "its limits (ulimit -v)"
            ) from error
        finally:
            os.close(descriptor)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All bytes of the mapping. Raises AlreadyClosed."""
        if self._bytes is None:
            raise AlreadyClosed("this memory is not mapped any more; attach again")
        return self._bytes

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def can_map_over(self) -> bool:
        return True

    def map_over(self, address: int) -> None:
        map_over(address, self.address, self.size_bytes)

    def plane(self, view: PlaneView) -> npt.NDArray[Any]:
        """A NumPy array over a plane. Raises AlreadyClosed."""
        return np.ndarray(view.shape, view.dtype, buffer=self.bytes, offset=view.offset, strides=view.strides)

    def close(self) -> bool:
        """Unmap; True when the memory is unmapped now, False while arrays of it are still held: the last one unmaps."""
        if self._bytes is not None:
            self._left = weakref.ref(self._bytes)
            self._bytes = self._mapping = None  # the last array of it unmaps
        return self._left is None or self._left() is None

    @property
    def held(self) -> int:
        array = None if self._left is None else self._left()
        return 0 if array is None else sys.getrefcount(array) - OWN_REFERENCES


def open_device(name: str) -> Device:
    """The GPU of that UUID, on real hardware. Raises NotSupported that says what to do."""
    from cachesvc_client.memory.cuda import open_cuda_device

    return open_cuda_device(name)


def memory_of(handle: common_pb2.MemoryHandle, fetch_fd: FdSource, device: Device | None) -> Memory:
    """The mapping for a kind of handle, writable. Raises NotSupported for a kind that this client does not know."""
    if handle.kind in DEVICE_KINDS:
        assert device is not None
        return IpcMemory(handle, device) if handle.kind == "cuda_ipc" else FdMemory(handle, device, fetch_fd)
    if handle.kind == "memfd":
        return MappedMemory(handle, fetch_fd, protection=mmap.PROT_READ | mmap.PROT_WRITE)
    raise NotSupported(
        f"the daemon's memory is of kind {handle.kind!r}, which this client cannot map; it maps memfd, "
        f"{', '.join(DEVICE_KINDS)}: update it"
    )


def map_over(address: int, source: int, size_bytes: int) -> None:
    """Map the shared memory at ``source`` at ``address`` too, so that what points there sees it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if libc.mremap(source, 0, size_bytes, flags, address) != address:  # of length 0: the old mapping stays too
        raise OSError(ctypes.get_errno(), f"mapping {size_bytes} bytes of {source:#x} at {address:#x}")
