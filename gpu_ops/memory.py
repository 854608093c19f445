"""Device memory that other processes map: by legacy IPC handle (the rule), or by the descriptor of a VMM allocation.

A legacy handle names the whole allocation of the driver that holds an address, and the driver puts small ones together:
every size is rounded up to 2 MiB here, so that a handle never shows a neighbour's bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint64
from dataclasses import dataclass

from gpu_ops.driver import AccessRights, AllocationKind, CudaError, Driver, IpcHandle, Location, current

ALLOCATION_BYTES = 2 << 20
LAZY_PEER_ACCESS = 1
ON_DEVICE = 1
PINNED = 1
POSIX_DESCRIPTOR = 1
READ_AND_WRITE = 3
GRANULARITY_RECOMMENDED = 1


@dataclass(slots=True)
class DeviceMemory:
    """``size_bytes`` from ``address`` on. ``handle`` is the 64-byte IPC handle, empty where ``fd`` is what to pass."""

    address: int
    size_bytes: int
    handle: bytes
    fd: int | None
    undo: Callable[[Driver], None]
    context: int

    def close(self) -> None:
        """Give the memory back, once; mappings of other processes stay valid."""
        with current(self.context) as cuda:
            self.undo(cuda)


def rounded(size_bytes: int, unit: int = ALLOCATION_BYTES) -> int:
    return -(-size_bytes // unit) * unit


def allocate_ipc(cuda: Driver, context: int, size_bytes: int) -> DeviceMemory:
    """Plain device memory with a legacy IPC handle, in the current context. Raises CudaOutOfMemory."""
    size = rounded(size_bytes)
    address = cuda.number("cuMemAlloc_v2", c_uint64, size)
    handle = IpcHandle()
    try:
        cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except CudaError:
        cuda.call("cuMemFree_v2", address)
        raise
    return DeviceMemory(
        address, size, bytes(handle.reserved), None, lambda free: free.call("cuMemFree_v2", address), context
    )


def open_ipc(cuda: Driver, handle: bytes) -> int:
    """Map another process's memory by its handle; returns the address. Raises CudaError."""
    return cuda.number("cuIpcOpenMemHandle_v2", c_uint64, IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)


def close_ipc(cuda: Driver, address: int) -> None:
    cuda.call("cuIpcCloseMemHandle", address)


def allocate_vmm(cuda: Driver, context: int, ordinal: int, size_bytes: int) -> DeviceMemory:
    """VMM memory with a POSIX descriptor (``fd``), open until ``close``.

    Raises CudaOutOfMemory, and CudaError where the driver or the device cannot.
    """
    kind = AllocationKind(kind=PINNED, handles=POSIX_DESCRIPTOR, location=Location(ON_DEVICE, ordinal))
    unit = cuda.number("cuMemGetAllocationGranularity", c_size_t, ctypes.byref(kind), GRANULARITY_RECOMMENDED)
    size = rounded(size_bytes, unit)
    memory = cuda.number("cuMemCreate", c_uint64, size, ctypes.byref(kind), 0)
    fd = -1
    try:
        fd = cuda.number("cuMemExportToShareableHandle", c_int, memory, POSIX_DESCRIPTOR, 0)
        address = _map(cuda, ordinal, memory, size)
    except CudaError:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        cuda.call("cuMemRelease", memory)  # the mapping and the descriptor keep it

    def undo(driver: Driver) -> None:
        try:
            unmap(driver, address, size)
        finally:
            os.close(fd)

    return DeviceMemory(address, size, b"", fd, undo, context)


def map_fd(cuda: Driver, ordinal: int, fd: int, size_bytes: int) -> int:
    """Map another process's VMM memory of exactly ``size_bytes`` on the device that holds it; returns the address.

    The descriptor may be closed afterwards. Raises CudaError.
    """
    memory = cuda.number("cuMemImportFromShareableHandle", c_uint64, fd, POSIX_DESCRIPTOR)
    try:
        return _map(cuda, ordinal, memory, size_bytes)
    finally:
        cuda.call("cuMemRelease", memory)


def map_fd_over(cuda: Driver, ordinal: int, fd: int, address: int, size_bytes: int) -> None:
    """``map_fd`` at an address where as large a VMM memory is mapped, in its place. Nothing on the device uses that any
    more. Raises CudaError; nothing may be mapped there then.
    """
    memory = cuda.number("cuMemImportFromShareableHandle", c_uint64, fd, POSIX_DESCRIPTOR)
    try:
        cuda.call("cuMemUnmap", address, size_bytes)
        cuda.call("cuMemMap", address, size_bytes, 0, memory, 0)
        _let_use(cuda, ordinal, address, size_bytes)
    finally:
        cuda.call("cuMemRelease", memory)


def unmap(cuda: Driver, address: int, size_bytes: int) -> None:
    cuda.call("cuMemUnmap", address, size_bytes)
    cuda.call("cuMemAddressFree", address, size_bytes)


def _map(cuda: Driver, ordinal: int, memory: int, size_bytes: int) -> int:
    address = cuda.number("cuMemAddressReserve", c_uint64, size_bytes, 0, 0, 0)
    try:
        cuda.call("cuMemMap", address, size_bytes, 0, memory, 0)
    except CudaError:
        cuda.call("cuMemAddressFree", address, size_bytes)
        raise
    try:
        _let_use(cuda, ordinal, address, size_bytes)
    except CudaError:
        unmap(cuda, address, size_bytes)
        raise
    return address


def _let_use(cuda: Driver, ordinal: int, address: int, size_bytes: int) -> None:
    rights = AccessRights(Location(ON_DEVICE, ordinal), READ_AND_WRITE)
    cuda.call("cuMemSetAccess", address, size_bytes, ctypes.byref(rights), 1)
