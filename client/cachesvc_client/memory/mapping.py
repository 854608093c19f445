"""Memory of the daemon, mapped into this process by its handle: a memory file, or memory on a GPU by a legacy IPC
handle or by the descriptor of a VMM allocation.

Unmapping GPU memory is said to the driver and never left to a destructor: the last array may go on any thread, at any
time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcache.v1 import common_pb2

from cachesvc_client.core.errors import AlreadyClosed, DaemonFault, NotSupported
from cachesvc_client.memory.cuda import CudaDevice
from cachesvc_client.memory.device import DevicePlane, PlaneView

FdSource = Callable[[bytes], int]
"""Fetches the descriptor behind a handle's token."""

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
DEVICE_KINDS = ("cuda_ipc", "cuda_fd")
IPC_HANDLE_BYTES = 64
OWN_REFERENCES = 2
"""References to a counted object that are not arrays: the local name, and the argument of the count."""


class Memory(ABC):
    """Mapping of any kind. Its arrays hold an owner of its own, so that it is known whether any is left."""

    def __init__(self, handle: common_pb2.MemoryHandle, fetch_fd: FdSource) -> None:
        self.size_bytes = handle.size_bytes
        self._handle = handle
        self._fetch_fd = fetch_fd
        self._address = 0
        self._owner: Any = None
        self._left: weakref.ref[Any] | None = None

    @abstractmethod
    def _map(self) -> tuple[int, object]:
        """Map it; returns the address and the owner."""

    @abstractmethod
    def _unmap(self) -> None:
        """Unmap it once its owner has gone."""

    @abstractmethod
    def plane(self, view: PlaneView) -> Any:
        """A plane of the mapping, which stays mapped while the plane is held. Raises AlreadyClosed."""

    @property
    @abstractmethod
    def can_map_over(self) -> bool:
        """True where it may take the place of other memory."""

    @abstractmethod
    def map_over(self, address: int) -> None:
        """Map it at ``address`` too, in the place of memory of its kind and size that nothing uses any more: what
        points there sees this one. Raises NotSupported, OSError, GpuFailed; and what fetching a descriptor raises."""

    @property
    def address(self) -> int:
        """First byte, as this process and its device know it. Raises AlreadyClosed."""
        self._require_mapped()
        return self._address

    def start(self) -> None:
        """Map it. Raises NotSupported, NotFound, DaemonFault, DaemonUnavailable, DeadlineExceeded, GpuFailed."""
        self._address, self._owner = self._map()

    def close(self) -> bool:
        """Unmap; True when it is unmapped now, False while planes or arrays of it are held. Ask again then."""
        if self._owner is not None:
            self._left, self._owner = weakref.ref(self._owner), None
        if self._left is not None:
            if self._left() is not None:
                return False
            self._unmap()
            self._left = None
        return True

    @property
    def held(self) -> int:
        """Number of arrays or tensors, views included, that still keep it mapped after ``close``."""
        owner = None if self._left is None else self._left()
        return 0 if owner is None else sys.getrefcount(owner) - OWN_REFERENCES

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        descriptor = self._fetch_fd(self._handle.token)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _require_mapped(self) -> Any:
        if self._owner is None:
            raise AlreadyClosed("this memory is not mapped any more; attach again")
        return self._owner


class MappedMemory(Memory):
    """A memfd. Its owner is the array of all its bytes: the last array of it unmaps, so none ever dangles. (Of an array
    made by ``np.ndarray(buffer=mapping)`` the mapping knows nothing.)"""

    can_map_over = True

    def __init__(self, handle: common_pb2.MemoryHandle, fetch_fd: FdSource, *, protection: int) -> None:
        super().__init__(handle, fetch_fd)
        self._protection = protection

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All bytes of the mapping. Raises AlreadyClosed."""
        all_bytes: npt.NDArray[np.uint8] = self._require_mapped()
        return all_bytes

    def plane(self, view: PlaneView) -> npt.NDArray[Any]:
        return np.ndarray(view.shape, view.dtype, buffer=self.bytes, offset=view.offset, strides=view.strides)

    def map_over(self, address: int) -> None:
        map_over(address, self.address, self.size_bytes)

    def _map(self) -> tuple[int, object]:
        with self._descriptor() as descriptor:
            try:
                there = os.fstat(descriptor).st_size
                if there < self.size_bytes:
                    raise DaemonFault(f"a slab of {self.size_bytes} bytes came as a file of {there}")
                mapping = mmap.mmap(descriptor, self.size_bytes, prot=self._protection)
            except OSError as error:
                raise NotSupported(
                    f"this process cannot map {self.size_bytes} bytes of the daemon's memory ({error}); look at "
                    "its limits (ulimit -v)"
                ) from error
        all_bytes = np.frombuffer(memoryview(mapping), np.uint8)
        return int(all_bytes.ctypes.data), all_bytes

    def _unmap(self) -> None:
        """No-op: it is unmapped with its owner."""


class ArrayOwner:
    __slots__ = ("__weakref__",)


class DeviceMapping(Memory):
    """Memory on a GPU. The driver counts the openings of one IPC handle in a process, and so may two pools."""

    def __init__(self, handle: common_pb2.MemoryHandle, fetch_fd: FdSource, device: CudaDevice) -> None:
        super().__init__(handle, fetch_fd)
        self._device = device

    def plane(self, view: PlaneView) -> DevicePlane:
        return DevicePlane(self.address, self.size_bytes, view, self._device.ordinal, self._owner)

    @property
    def can_map_over(self) -> bool:
        return self._handle.kind == "cuda_fd"

    def map_over(self, address: int) -> None:
        if not self.can_map_over:
            raise NotSupported(
                f"memory of kind {self._handle.kind!r} cannot be mapped at {address:#x}, in the place of other memory: "
                "run the daemon with --device-memory vmm"
            )
        with self._descriptor() as descriptor:
            self._device.map_fd_over(descriptor, address, self.size_bytes)

    def _map(self) -> tuple[int, object]:
        token = self._handle.token
        if self.can_map_over:
            with self._descriptor() as descriptor:
                self._opened = self._device.open_memory(b"", descriptor, self.size_bytes)
        elif len(token) != IPC_HANDLE_BYTES:
            raise DaemonFault(f"an IPC handle of {len(token)} bytes came, of {IPC_HANDLE_BYTES}")
        else:
            self._opened = self._device.open_memory(token, None, self.size_bytes)
        return self._opened.address, ArrayOwner()

    def _unmap(self) -> None:
        self._device.close_memory(self._opened)


def memory_of(handle: common_pb2.MemoryHandle, fetch_fd: FdSource, device: CudaDevice | None) -> Memory:
    """The mapping for a kind of handle, writable. Raises NotSupported for a kind that this client does not know."""
    if handle.kind in DEVICE_KINDS:
        assert device is not None
        return DeviceMapping(handle, fetch_fd, device)
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
