"""Memory on both sides of the link for tests, filled with poison, and copies between its pages."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from gpu_ops.gpu import Gpu
from gpu_ops.memory import DeviceMemory
from gpu_ops.streams import PITCHED_FIELDS, CopyQueue, PitchedCopies

BOUND_SECONDS = 60.0
Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int64]


class LoopQueue(CopyQueue):
    """The queue of drivers older than CUDA 12.8, on any driver: one call for each copy."""

    def start(self) -> None:
        """Make the stream."""
        super().start()
        self._batched = self._takes_singles = False


class Side:
    """``size_bytes`` of memory at ``address``; ``put`` and ``get`` go around every stream."""

    def __init__(self, address: int, put: Callable[[Bytes], None], get: Callable[[], Bytes]) -> None:
        self.address = address
        self.put = put
        self.get = get


@contextmanager
def pinned(gpu: Gpu, size_bytes: int) -> Iterator[tuple[int, Bytes]]:
    """Pinned host memory: its address, and its bytes."""
    memory = mmap.mmap(-1, size_bytes)
    view = np.frombuffer(memory, np.uint8)
    view[:: mmap.PAGESIZE] = 1  # its own pages
    view[:] = 0
    address = int(view.ctypes.data)
    gpu.register_host(address, size_bytes)
    try:
        yield address, view
    finally:
        gpu.unregister_host(address)


def write_device(gpu: Gpu, address: int, content: bytes) -> None:
    """Write device memory around every stream, and wait for it."""
    with gpu.current() as cuda:
        cuda.call("cuMemcpyHtoD_v2", address, content, len(content))


@contextmanager
def allocated(gpu: Gpu, size_bytes: int, *, vmm: bool = False) -> Iterator[DeviceMemory]:
    """Device memory for a while."""
    memory = gpu.allocate(size_bytes, vmm=vmm)
    try:
        yield memory
    finally:
        memory.close()


@contextmanager
def sides(gpu: Gpu, host_bytes: int, device_bytes: int) -> Iterator[tuple[Side, Side]]:
    """A pinned host side and a device side."""
    with ExitStack() as stack:
        address, view = stack.enter_context(pinned(gpu, host_bytes))
        memory = stack.enter_context(allocated(gpu, device_bytes))

        def put_host(content: Bytes) -> None:
            view[:] = content

        def put_device(content: Bytes) -> None:
            write_device(gpu, memory.address, content.tobytes())

        def get_device() -> Bytes:
            return np.frombuffer(gpu.read(memory.address, device_bytes), np.uint8)

        yield Side(address, put_host, view.copy), Side(memory.address, put_device, get_device)


@contextmanager
def queue_of(gpu: Gpu, kind: type[CopyQueue] = CopyQueue) -> Iterator[CopyQueue]:
    """A started queue."""
    with allocated(gpu, 1) as any_memory:
        queue = kind(any_memory.context)
    queue.start()
    try:
        yield queue
    finally:
        queue.close()


def load_copies(host: int, device: int, planes: int, width: int, plane_stride: int, pairs: Pages) -> PitchedCopies:
    """Block-major host pages to plane-major device pages; ``pairs`` is ``[n, (host page, device page)]``."""
    copies = np.empty((len(pairs), len(PITCHED_FIELDS)), np.int64)
    copies[:, 0] = host + pairs[:, 0] * planes * width
    copies[:, 1] = device + pairs[:, 1] * width
    copies[:, 2:] = (width, planes, width, plane_stride)
    return copies


def in_rows(copies: PitchedCopies) -> PitchedCopies:
    """The same bytes as copies of one row each."""
    rows = np.repeat(copies, copies[:, 3], axis=0)
    number = np.concatenate([np.arange(height) for height in copies[:, 3]])
    rows[:, 0] += number * rows[:, 4]
    rows[:, 1] += number * rows[:, 5]
    rows[:, 3] = 1
    rows[:, 4] = rows[:, 5] = rows[:, 2]
    return rows


def turned(copies: PitchedCopies) -> PitchedCopies:
    """The same copies the other way."""
    return np.ascontiguousarray(copies[:, [1, 0, 2, 3, 5, 4]])


def scrambled(rng: np.random.Generator, count: int, of: int) -> npt.NDArray[np.int64]:
    """``count`` different pages out of ``of``, in no order."""
    while True:
        pages = rng.permutation(of)[:count].astype(np.int64)
        if count < 2 or not np.array_equal(pages, np.arange(count)):
            return pages


def spin_until(holds: Callable[[], bool], what: str) -> None:
    """Look without a pause until ``holds``."""
    until = time.monotonic() + BOUND_SECONDS
    while not holds():
        assert time.monotonic() < until, f"still not so: {what}"
