"""A GPU at the client's seam: host memory in its place, streams that only note what they were told."""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from cachesvc_client.memory.cuda import CudaDevice
from cachesvc_client.memory.device import DevicePlane
from cachesvc_client.memory.mapping import map_over
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.wire.life import LifeConnection
from kvcache.v1 import engine_pb2

from cachesvc.model.futex import WORD_BYTES
from cachesvc.model.layout import Layout
from gpu_ops.memory import DeviceMemory
from tests.unit.rigs.client_rig import FakeDaemon

UUID = "GPU-00000000-0000-0000-0000-000000000000"


class _Shown:
    """Object that NumPy makes an array of; it holds the plane, and so its owner."""

    def __init__(self, plane: DevicePlane) -> None:
        self._plane = plane
        self.__array_interface__ = {**plane.__cuda_array_interface__, "version": 3}


class FakeGpu(CudaDevice):
    """``waits`` are what streams were told to wait for: (stream, word, target), of the words pinned last."""

    def __init__(self) -> None:
        self.ordinal = 0
        self.memory: dict[bytes, Any] = {}
        self.pinned: Counter[int] = Counter()
        self.mapped: Counter[int] = Counter()
        self.waits: list[tuple[int, int, int]] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.is_started = False
        self._views: dict[int, Any] = {}
        self._words = 0

    def open(self, name: str) -> FakeGpu:
        assert name == UUID
        return self

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_started = False

    def open_memory(self, handle: bytes, descriptor: int | None, size_bytes: int) -> DeviceMemory:
        if descriptor is None:
            return self._map(self.memory[handle])
        return self._map(np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8))

    def close_memory(self, opened: DeviceMemory) -> None:
        assert opened.size_bytes == self._views[opened.address].nbytes
        self.mapped[opened.address] -= 1

    def map_fd_over(self, descriptor: int, address: int, size_bytes: int) -> None:
        assert self.mapped[address] > 0
        assert size_bytes == self._views[address].nbytes
        map_over(address, self.open_memory(b"", descriptor, size_bytes).address, size_bytes)
        self.mapped.subtract([int(self._views.popitem()[0])])

    def array(self, plane: DevicePlane) -> Any:
        assert self.is_started
        return np.asarray(_Shown(plane))

    def wait_word(self, stream: int, address: int, target: int) -> None:
        self.on_wait()
        self.waits.append((stream, self.word_at(address), target))

    def pin(self, address: int, size_bytes: int) -> int:
        assert self.is_started
        self.pinned[address] += 1
        self._words = address
        return address

    def unpin(self, address: int) -> None:
        self.pinned[address] -= 1

    def word_at(self, address: int) -> int:
        word, odd = divmod(address - self._words, WORD_BYTES)
        assert not odd
        return word

    def is_whole(self) -> bool:
        """Nothing is mapped or held any more."""
        return not self.is_started and not any(self.mapped.values()) and not any(self.pinned.values())

    def _map(self, memory: Any) -> DeviceMemory:
        address = int(memory.ctypes.data)
        self._views[address] = memory
        self.mapped[address] += 1
        return DeviceMemory(address, memory.nbytes, b"", None, lambda _: None, 0)


class GpuRig:
    """A daemon whose memory is on a fake GPU, and pools of it. ``told`` counts what Detach would have said."""

    def __init__(self, daemon: FakeDaemon, layout: Layout, kind: str = "cuda_ipc", *, timeout_s: float = 5) -> None:
        daemon.layout = layout
        daemon.memory_kind = kind
        self.daemon = daemon
        self.layout = layout
        self.gpu = FakeGpu()
        self.told = 0
        self.life = LifeConnection(daemon.path, timeout_s, lambda: None)
        self.life.start()
        self.attached = self._on_gpu(daemon.attached())

    def pool(self) -> AttachedPool:
        pool = AttachedPool(self.layout, 0, self.attached, self.life, self._tell, self.gpu.open)
        pool.start()
        return pool

    def write(self, word: int, value: int) -> None:
        """Write a word like the daemon's GPU does."""
        self.daemon.timeline.write(word, value)

    def lose(self) -> None:
        """The daemon goes; returns once what pools do then is done."""
        done = threading.Event()
        self.life.watch(done.set)
        self.daemon.hang_up()
        assert done.wait(60)

    def _tell(self) -> None:
        self.told += 1

    def _on_gpu(self, attached: engine_pb2.AttachResponse) -> engine_pb2.AttachResponse:
        attached.device = UUID
        for slab in attached.slabs:
            if slab.handle.kind == "cuda_ipc":
                slab.handle.token = bytes([slab.group]) * 64
                self.gpu.memory[slab.handle.token] = np.zeros(slab.handle.size_bytes, np.uint8)
        return attached
