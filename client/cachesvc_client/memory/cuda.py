"""A GPU by ``gpu_ops``, and its failures in the client's words. Imported only where the daemon's memory is on a GPU."""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcache.v1 import common_pb2

from cachesvc_client.core.errors import AlreadyClosed, DaemonFault, GpuFailed, InvalidRequest, NotSupported
from cachesvc_client.memory.device import Device, DevicePlane, PlaneView
from gpu_ops.driver import CudaError, CudaMissing, CudaOutOfMemory
from gpu_ops.gpu import Gpu, gpu_by_uuid
from gpu_ops.memory import close_ipc, map_fd, map_fd_over, open_ipc, unmap

WRONG_STREAM = {1, 400, 709}
"""Invalid value, invalid handle, context is destroyed: the driver's words for a stream that is none of the device's."""

CANNOT_MAP = {
    1: "the handle is of another machine or container boundary, or the memory is gone: attach again",
    101: "the GPU is another one in this container: give it the daemon's GPU, and check CUDA_VISIBLE_DEVICES",
    201: "a process cannot open memory that it made itself: attach from another process than the daemon's",
    205: "the mapping was refused: this process must see the whole GPU, no MIG slice of it, and the daemon's /proc",
    217: "this process sees another GPU as its own: check CUDA_VISIBLE_DEVICES and the container's devices",
    400: "the handle is of another machine or container boundary, or the memory is gone: attach again",
    711: "too many processes have it mapped",
    801: "this GPU or its driver shares no memory between processes in this way (MIG, vGPU, WSL): run the daemon with "
    "the other kind of handle, or without the GPU",
}
"""Errors by the driver's code."""


class CudaDevice:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @property
    def ordinal(self) -> int:
        return self._gpu.facts.ordinal

    def start(self) -> None:
        with failures(f"{self._gpu.uuid} could not be joined"):
            self._gpu.start()

    def close(self) -> None:
        with failures(f"{self._gpu.uuid} could not be left"):
            self._gpu.close()

    def open_ipc(self, handle: bytes) -> int:
        with self._mapping(), self._gpu.current() as cuda:
            return open_ipc(cuda, handle)

    def close_ipc(self, address: int) -> None:
        with failures("memory could not be unmapped"), self._gpu.current() as cuda:
            close_ipc(cuda, address)

    def map_fd(self, descriptor: int, size_bytes: int) -> int:
        with self._mapping(), self._gpu.current() as cuda:
            return map_fd(cuda, self.ordinal, descriptor, size_bytes)

    def map_fd_over(self, descriptor: int, address: int, size_bytes: int) -> None:
        """Map memory by its descriptor in the place of older memory."""
        with self._mapping(), self._gpu.current() as cuda:
            map_fd_over(cuda, self.ordinal, descriptor, address, size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        with failures("memory could not be unmapped"), self._gpu.current() as cuda:
            unmap(cuda, address, size_bytes)

    def array(self, plane: DevicePlane) -> Any:
        """A CuPy array, which holds the plane's owner."""
        try:
            import cupy
        except ImportError as missing:
            raise NotSupported(
                "planes on a GPU are CuPy arrays, and there is no CuPy here: install the extra cuda12 or cuda13, or "
                "take to_torch, which needs none"
            ) from missing
        placed = plane.placed
        with cupy.cuda.Device(plane.ordinal):
            memory = cupy.cuda.UnownedMemory(plane.address, plane.size_bytes, plane.owner, plane.ordinal)
            start = cupy.cuda.MemoryPointer(memory, placed.offset)
            return cupy.ndarray(placed.shape, placed.dtype, memptr=start, strides=placed.strides)

    def wait_word(self, stream: int, address: int, target: int) -> None:
        try:
            self._gpu.wait_word(stream, address, target)
        except CudaError as error:
            if error.code in WRONG_STREAM:
                raise InvalidRequest(
                    f"stream {stream:#x} cannot wait on {self._gpu.uuid} ({error}); pass a living stream of that GPU"
                ) from error
            raise GpuFailed(f"{self._gpu.uuid} took no wait: {error}", error.code) from error

    def pin(self, address: int, size_bytes: int) -> int:
        with failures("the timeline could not be pinned"):
            self._gpu.register_host(address, size_bytes)
            try:
                return self._gpu.device_address(address)
            except CudaError:
                self._gpu.unregister_host(address)
                raise

    def unpin(self, address: int) -> None:
        with failures("the timeline could not be unpinned"):
            self._gpu.unregister_host(address)

    @contextmanager
    def _mapping(self) -> Iterator[None]:
        try:
            yield
        except CudaOutOfMemory as error:
            raise GpuFailed(f"{self._gpu.uuid} has no room for a mapping: {error}", error.code) from error
        except CudaError as error:
            if error.code not in CANNOT_MAP:
                raise GpuFailed(f"the daemon's memory on {self._gpu.uuid}: {error}", error.code) from error
            raise NotSupported(
                f"this process cannot map the daemon's memory on {self._gpu.uuid}: {error}; {CANNOT_MAP[error.code]}"
            ) from error


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Failures of the driver, with what they prevented. Raises GpuFailed."""
    try:
        yield
    except CudaError as error:
        raise GpuFailed(f"{what}: {error}", error.code) from error
    except CudaMissing as error:
        raise NotSupported(f"{what}: {error}") from error


def open_cuda_device(name: str) -> CudaDevice:
    """The GPU of that UUID. Raises NotSupported."""
    try:
        return CudaDevice(gpu_by_uuid(name))
    except CudaMissing as error:
        raise NotSupported(
            f"the pool lies on {name}, which this process cannot use: {error}; give the container that whole GPU (no "
            "MIG slice of it) and look at CUDA_VISIBLE_DEVICES"
        ) from error
    except CudaError as error:
        raise GpuFailed(f"the GPUs of this process could not be listed: {error}", error.code) from error


# Memory of the daemon on a GPU, mapped into this process: by a legacy IPC handle, or by the descriptor of a VMM
# allocation.
#
# Unmapping is said to the driver and never left to a destructor: the last array may go on any thread, at any time.

IPC_HANDLE_BYTES = 64
OWN_REFERENCES = 2
"""References to a counted object that are not arrays: the local name, and the argument of the count."""


class ArrayOwner:
    """Object that the arrays of a mapping hold, so that it is known whether any is left."""

    __slots__ = ("__weakref__",)


class DeviceMapping(ABC):
    def __init__(self, handle: common_pb2.MemoryHandle, device: Device) -> None:
        self._handle = handle
        self._device = device
        self._address = 0
        self._owner: ArrayOwner | None = None
        self._left: weakref.ref[ArrayOwner] | None = None

    @property
    def size_bytes(self) -> int:
        return self._handle.size_bytes

    @property
    def address(self) -> int:
        if self._owner is None:
            raise AlreadyClosed("this memory is not mapped any more; attach again")
        return self._address

    def start(self) -> None:
        self._address = self._map(self._handle)
        self._owner = ArrayOwner()

    def plane(self, view: PlaneView) -> DevicePlane:
        return DevicePlane(self.address, self.size_bytes, view, self._device.ordinal, self._owner)

    @property
    def can_map_over(self) -> bool:
        return False

    def map_over(self, address: int) -> None:
        raise NotSupported(
            f"memory of kind {self._handle.kind!r} cannot be mapped at {address:#x}, in the place of other memory: run "
            "the daemon with --device-memory vmm"
        )

    def close(self) -> bool:
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
        return True

    def map_over(self, address: int) -> None:
        descriptor = self._fetch_fd(self._handle.token)
        try:
            self._device.map_fd_over(descriptor, address, self.size_bytes)
        finally:
            os.close(descriptor)

    def _unmap(self, address: int) -> None:
        self._device.unmap(address, self.size_bytes)
