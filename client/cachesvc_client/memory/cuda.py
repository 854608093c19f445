"""A GPU by ``gpu_ops``, and its failures in the client's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cachesvc_client.core.errors import GpuFailed, InvalidRequest, NotSupported
from cachesvc_client.memory.device import DevicePlane
from gpu_ops.driver import CudaError, CudaMissing, CudaOutOfMemory
from gpu_ops.gpu import Gpu, gpu_by_uuid
from gpu_ops.memory import DeviceMemory, map_fd_over

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
    """One GPU in this process; tests have one of their own. Where nothing else is said, calls raise GpuFailed.

    ``ordinal``: number of the GPU in this process."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.ordinal = gpu.facts.ordinal

    def start(self) -> None:
        """Join the context that the engine's frameworks use."""
        with failures(f"{self._gpu.uuid} could not be joined"):
            self._gpu.start()

    def close(self) -> None:
        with failures(f"{self._gpu.uuid} could not be left"):
            self._gpu.close()

    def open_memory(self, handle: bytes, descriptor: int | None, size_bytes: int) -> DeviceMemory:
        """Map memory by its descriptor, which may be closed afterwards, else by its handle. Raises NotSupported that
        says what to do."""
        with self._mapping():
            return self._gpu.open_memory(handle, descriptor, size_bytes)

    def close_memory(self, opened: DeviceMemory) -> None:
        with failures("memory could not be unmapped"):
            opened.close()

    def map_fd_over(self, descriptor: int, address: int, size_bytes: int) -> None:
        """Map memory by its descriptor at ``address``, where ``open_memory`` mapped as much that nothing uses any more.
        Raises NotSupported that says what to do."""
        with self._mapping(), self._gpu.current() as cuda:
            map_fd_over(cuda, self.ordinal, descriptor, address, size_bytes)

    def array(self, plane: DevicePlane) -> Any:
        """A CuPy array, which holds the plane's owner. Raises NotSupported without CuPy."""
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
        """Have a stream wait until the word is at or past ``target``, cyclically. Raises InvalidRequest (stream)."""
        try:
            self._gpu.wait_word(stream, address, target)
        except CudaError as error:
            if error.code in WRONG_STREAM:
                raise InvalidRequest(
                    f"stream {stream:#x} cannot wait on {self._gpu.uuid} ({error}); pass a living stream of that GPU"
                ) from error
            raise GpuFailed(f"{self._gpu.uuid} took no wait: {error}", error.code) from error

    def pin(self, address: int, size_bytes: int) -> int:
        """Let streams reach host memory of this process; the address at which they do."""
        with failures("the timeline could not be pinned"):
            self._gpu.register_host(address, size_bytes)
            try:
                return self._gpu.device_address(address)
            except CudaError:
                self._gpu.unregister_host(address)
                raise

    def unpin(self, address: int) -> None:
        """Undo ``pin``; no stream waits there any more."""
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


def open_device(name: str) -> CudaDevice:
    """The GPU of that UUID. Raises NotSupported that says what to do."""
    try:
        return CudaDevice(gpu_by_uuid(name))
    except CudaMissing as error:
        raise NotSupported(
            f"the pool lies on {name}, which this process cannot use: {error}; give the container that whole GPU (no "
            "MIG slice of it) and look at CUDA_VISIBLE_DEVICES"
        ) from error
    except CudaError as error:
        raise GpuFailed(f"the GPUs of this process could not be listed: {error}", error.code) from error
