"""A GPU by ``gpu_ops``, and its failures in the client's words. Imported only where the daemon's memory is on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cachesvc_client.core.errors import GpuFailed, InvalidRequest, NotSupported
from cachesvc_client.memory.device import DevicePlane
from gpu_ops.errors import CudaError, CudaMissing, CudaOutOfMemory
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
    """``cachesvc_client.memory.device.Device`` on real hardware."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @property
    def ordinal(self) -> int:
        """Number of the GPU in this process."""
        return self._gpu.facts.ordinal

    def start(self) -> None:
        """Join the primary context."""
        with failures(f"{self._gpu.uuid} could not be joined"):
            self._gpu.start()

    def close(self) -> None:
        """Leave it. Idempotent."""
        with failures(f"{self._gpu.uuid} could not be left"):
            self._gpu.close()

    def open_ipc(self, handle: bytes) -> int:
        """Map memory by its handle."""
        with self._mapping(), self._gpu.current() as cuda:
            return open_ipc(cuda, handle)

    def close_ipc(self, address: int) -> None:
        """Unmap it."""
        with failures("memory could not be unmapped"), self._gpu.current() as cuda:
            close_ipc(cuda, address)

    def map_fd(self, descriptor: int, size_bytes: int) -> int:
        """Map memory by its descriptor."""
        with self._mapping(), self._gpu.current() as cuda:
            return map_fd(cuda, self.ordinal, descriptor, size_bytes)

    def map_fd_over(self, descriptor: int, address: int, size_bytes: int) -> None:
        """Map memory by its descriptor in the place of older memory."""
        with self._mapping(), self._gpu.current() as cuda:
            map_fd_over(cuda, self.ordinal, descriptor, address, size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap it."""
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
        """Have a stream wait."""
        try:
            self._gpu.wait_word(stream, address, target)
        except CudaError as error:
            if error.code in WRONG_STREAM:
                raise InvalidRequest(
                    f"stream {stream:#x} cannot wait on {self._gpu.uuid} ({error}); pass a living stream of that GPU"
                ) from error
            raise GpuFailed(f"{self._gpu.uuid} took no wait: {error}", error.code) from error

    def pin(self, address: int, size_bytes: int) -> int:
        """Let streams reach host memory."""
        with failures("the timeline could not be pinned"):
            self._gpu.register_host(address, size_bytes)
            try:
                return self._gpu.device_address(address)
            except CudaError:
                self._gpu.unregister_host(address)
                raise

    def unpin(self, address: int) -> None:
        """Undo it."""
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
