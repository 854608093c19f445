"""Memory of the daemon on a GPU, mapped into this process: by a legacy IPC handle, or by the descriptor of a VMM
allocation.

Unmapping is said to the driver and never left to a destructor: the last array may go on any thread, at any time.
"""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvcache.v1 import common_pb2

from cachesvc_client.core.errors import AlreadyClosed, DaemonFault, NotSupported
from cachesvc_client.memory.device import Device, DevicePlane
from cachesvc_client.memory.placement import PlaneView

IPC_HANDLE_BYTES = 64
OWN_REFERENCES = 2
"""References to a counted object that are not arrays: the local name, and the argument of the count."""


class ArrayOwner:
    """Object that the arrays of a mapping hold, so that it is known whether any is left."""

    __slots__ = ("__weakref__",)


class DeviceMapping(ABC):
    """One mapping on a started device."""

    def __init__(self, handle: common_pb2.MemoryHandle, device: Device) -> None:
        self._handle = handle
        self._device = device
        self._address = 0
        self._owner: ArrayOwner | None = None
        self._left: weakref.ref[ArrayOwner] | None = None

    @property
    def size_bytes(self) -> int:
        """Usable bytes."""
        return self._handle.size_bytes

    @property
    def address(self) -> int:
        """First byte. Raises AlreadyClosed."""
        if self._owner is None:
            raise AlreadyClosed("this memory is not mapped any more; attach again")
        return self._address

    def start(self) -> None:
        """Map it. Raises NotSupported, GpuFailed, DaemonFault; and what fetching a descriptor raises."""
        self._address = self._map(self._handle)
        self._owner = ArrayOwner()

    def plane(self, view: PlaneView) -> DevicePlane:
        """A plane of it. Raises AlreadyClosed."""
        return DevicePlane(self.address, self.size_bytes, view, self._device.ordinal, self._owner)

    @property
    def can_map_over(self) -> bool:
        """True where ``map_over`` can be."""
        return False

    def map_over(self, address: int) -> None:
        """See ``Memory``."""
        raise NotSupported(
            f"memory of kind {self._handle.kind!r} cannot be mapped at {address:#x}, in the place of other memory: run "
            "the daemon with --device-memory vmm"
        )

    def close(self) -> bool:
        """Unmap; True when it is unmapped now, False while planes or arrays of it are held: call it again then. Raises
        GpuFailed."""
        if self._owner is not None:
            self._left, self._owner = weakref.ref(self._owner), None
        if self._left is not None and self._left() is not None:
            return False
        if self._left is not None:
            self._unmap(self._address)
            self._left = None
        return True

    @property
    def held(self) -> int:
        """Number of its planes and arrays that exist."""
        owner = None if self._left is None else self._left()
        return 0 if owner is None else sys.getrefcount(owner) - OWN_REFERENCES

    @abstractmethod
    def _map(self, handle: common_pb2.MemoryHandle) -> int: ...

    @abstractmethod
    def _unmap(self, address: int) -> None: ...


class IpcMemory(DeviceMapping):
    """Mapping by a legacy handle. The driver counts the openings of one handle in a process, and so may two pools."""

    def _map(self, handle: common_pb2.MemoryHandle) -> int:
        if len(handle.token) != IPC_HANDLE_BYTES:
            raise DaemonFault(f"an IPC handle of {len(handle.token)} bytes came, of {IPC_HANDLE_BYTES}")
        return self._device.open_ipc(handle.token)

    def _unmap(self, address: int) -> None:
        self._device.close_ipc(address)


class FdMemory(DeviceMapping):
    """Mapping by a descriptor that comes over the life connection."""

    def __init__(self, handle: common_pb2.MemoryHandle, device: Device, fetch_fd: Callable[[bytes], int]) -> None:
        super().__init__(handle, device)
        self._fetch_fd = fetch_fd

    def _map(self, handle: common_pb2.MemoryHandle) -> int:
        descriptor = self._fetch_fd(handle.token)
        try:
            return self._device.map_fd(descriptor, handle.size_bytes)
        finally:
            os.close(descriptor)

    @property
    def can_map_over(self) -> bool:
        """True where ``map_over`` can be."""
        return True

    def map_over(self, address: int) -> None:
        """See ``Memory``."""
        descriptor = self._fetch_fd(self._handle.token)
        try:
            self._device.map_fd_over(descriptor, address, self.size_bytes)
        finally:
            os.close(descriptor)

    def _unmap(self, address: int) -> None:
        self._device.unmap(address, self.size_bytes)
