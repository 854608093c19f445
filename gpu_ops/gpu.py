"""GPUs by their UUIDs, each with its primary context: the one that CuPy, torch and paddle use too."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_ops.driver import CudaError, CudaMissing, Driver, current, driver
from gpu_ops.memory import DeviceMemory, allocate_ipc, allocate_vmm, close_ipc, map_fd, open_ipc, unmap
from gpu_ops.streams import CopyQueue

COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76
MAX_PITCH = 11
VMM_SUPPORTED, DESCRIPTORS_SUPPORTED = 102, 103
PORTABLE, DEVICE_MAPPED = 1, 2
PEER_IS_OPEN = 704
STACK_LIMIT, SMALLEST_STACK = 0, 128


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Properties of a GPU. ``uuid``: as nvidia-smi prints it; ``pci`` such as ``0000:3b:00.0``. ``has_vmm``: its driver
    has virtual memory management, with descriptors that other processes can map."""

    uuid: str
    ordinal: int
    name: str
    pci: str
    total_bytes: int
    compute: tuple[int, int]
    max_pitch_bytes: int
    has_vmm: bool = True


class Gpu:
    """One GPU. ``start`` makes (or joins) its primary context in this process; ``close`` leaves it."""

    def __init__(self, facts: GpuFacts) -> None:
        self.facts = facts
        self.uuid = facts.uuid
        self.context_bytes = 0
        self._context = 0

    def start(self) -> None:
        """Make the context. Raises CudaError. ``context_bytes`` is then the device memory that it took, correct if no
        other process took or freed any meanwhile."""
        if self._context:
            return
        device = driver().number("cuDeviceGet", c_int, self.facts.ordinal)
        self._context = driver().number("cuDevicePrimaryCtxRetain", c_void_p, device)
        self.context_bytes = self.facts.total_bytes - self.free_bytes()

    def shrink(self) -> None:
        """Give back what the context keeps for kernels' stacks: of a process that runs none, 230 MiB on an H100.

        For a process that has the context to itself; ``context_bytes`` is what is left of it.
        """
        before = self.free_bytes()
        with self.current() as cuda:
            cuda.call("cuCtxSetLimit", STACK_LIMIT, SMALLEST_STACK)
        self.context_bytes -= self.free_bytes() - before

    def close(self) -> None:
        """Release the context; the driver destroys it with its last user in this process. Idempotent."""
        if self._context:
            self._context = 0
            driver().call("cuDevicePrimaryCtxRelease_v2", driver().number("cuDeviceGet", c_int, self.facts.ordinal))

    def current(self) -> AbstractContextManager[Driver]:
        """Make its context current on this thread, for a while. Raises CudaMissing before ``start``."""
        if not self._context:
            raise CudaMissing(f"GPU {self.uuid} is not started")
        return current(self._context)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        with self.current() as cuda:
            cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size_bytes: int, *, vmm: bool) -> DeviceMemory:
        """Zeroed device memory that other processes can map: by a legacy IPC handle, or (``vmm``) by a descriptor.

        Raises CudaOutOfMemory.
        """
        with self.current() as cuda:
            if vmm:
                memory = allocate_vmm(cuda, self._context, self.facts.ordinal, size_bytes)
            else:
                memory = allocate_ipc(cuda, self._context, size_bytes)
            try:
                cuda.call("cuMemsetD8_v2", memory.address, 0, memory.size_bytes)
                cuda.call("cuStreamSynchronize", 0)  # the driver does not wait by itself
            except CudaError:
                memory.close()
                raise
        return memory

    def open_memory(self, handle: bytes, fd: int | None, size_bytes: int) -> DeviceMemory:
        """Map what another process allocated, on this GPU or one that it reaches: VMM memory by ``fd``, which may be
        closed afterwards, else by its IPC handle. Raises CudaError."""
        with self.current() as cuda:
            if fd is None:
                address = open_ipc(cuda, handle)
                return DeviceMemory(address, size_bytes, handle, None, lambda go: close_ipc(go, address), self._context)
            address = map_fd(cuda, self.facts.ordinal, fd, size_bytes)
            return DeviceMemory(
                address, size_bytes, b"", None, lambda go: unmap(go, address, size_bytes), self._context
            )

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory for copies of every GPU of this process. Raises CudaError."""
        with self.current() as cuda:
            cuda.call("cuMemHostRegister_v2", address, size_bytes, PORTABLE | DEVICE_MAPPED)

    def unregister_host(self, address: int) -> None:
        with self.current() as cuda:
            cuda.call("cuMemHostUnregister", address)

    def device_address(self, host_address: int) -> int:
        with self.current() as cuda:
            return cuda.number("cuMemHostGetDevicePointer_v2", c_uint64, host_address, 0)

    def read(self, address: int, size_bytes: int) -> bytes:
        received: npt.NDArray[np.uint8] = np.empty(size_bytes, np.uint8)
        with self.current() as cuda:
            cuda.call("cuMemcpyDtoH_v2", received.ctypes.data, address, size_bytes)
        return received.tobytes()

    def queue(self) -> CopyQueue:
        with self.current():
            return CopyQueue(self._context)

    def can_reach(self, other: Gpu) -> bool:
        """True where copies go from one GPU to the other without passing through the host."""
        return bool(driver().number("cuDeviceCanAccessPeer", c_int, self.facts.ordinal, other.facts.ordinal))

    def open_peer(self, other: Gpu) -> None:
        """Let what runs here reach the other one's memory (but no VMM allocations). Again is fine. Raises CudaError."""
        with self.current() as cuda:
            try:
                cuda.call("cuCtxEnablePeerAccess", other._context, 0)
            except CudaError as error:
                if error.code != PEER_IS_OPEN:
                    raise

    def wait_word(self, stream: int, address: int, value: int) -> None:
        """Have a stream of this process wait until the word at ``address`` is at or past ``value``, cyclically.

        May be captured in a graph. The stream's device must be this one.
        """
        with self.current() as cuda:
            cuda.call("cuStreamWaitValue32_v2", stream, address, value & 0xFFFFFFFF, 0)


def find_gpus() -> tuple[Gpu, ...]:
    """Every GPU that this process may see. Raises CudaMissing."""
    cuda = driver()
    found = tuple(Gpu(_facts(ordinal)) for ordinal in range(cuda.number("cuDeviceGetCount", c_int)))
    if not found:
        raise CudaMissing("the driver is there, but shows no GPU to this process (CUDA_VISIBLE_DEVICES?)")
    return found


def gpu_by_uuid(name: str) -> Gpu:
    """The GPU of that UUID. Raises CudaMissing that names those which are there."""
    gpus = find_gpus()
    for gpu in gpus:
        if gpu.uuid == name:
            return gpu
    raise CudaMissing(f"GPU {name} is not visible to this process; it sees {', '.join(gpu.uuid for gpu in gpus)}")


def driver_version() -> tuple[int, int]:
    """CUDA release that the driver supports. Raises CudaMissing."""
    number = driver().number("cuDriverGetVersion", c_int)
    return number // 1000, number % 1000 // 10


@contextmanager
def started(gpu: Gpu) -> Iterator[Gpu]:
    gpu.start()
    try:
        yield gpu
    finally:
        gpu.close()


def _facts(ordinal: int) -> GpuFacts:
    cuda = driver()
    device = cuda.number("cuDeviceGet", c_int, ordinal)
    name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    raw = (ctypes.c_ubyte * 16)()
    cuda.call("cuDeviceGetName", name, len(name), device)
    cuda.call("cuDeviceGetPCIBusId", pci, len(pci), device)
    cuda.call("cuDeviceGetUuid_v2", raw, device)

    def attribute(which: int) -> int:
        return cuda.number("cuDeviceGetAttribute", c_int, which, device)

    return GpuFacts(
        uuid=f"GPU-{uuid.UUID(bytes=bytes(raw))}",
        ordinal=ordinal,
        name=name.value.decode(),
        pci=pci.value.decode().lower(),
        total_bytes=cuda.number("cuDeviceTotalMem_v2", c_size_t, device),
        compute=(attribute(COMPUTE_MAJOR), attribute(COMPUTE_MINOR)),
        max_pitch_bytes=attribute(MAX_PITCH),
        has_vmm=bool(attribute(VMM_SUPPORTED) and attribute(DESCRIPTORS_SUPPORTED)),
    )
