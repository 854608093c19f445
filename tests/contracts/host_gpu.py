"""A GPU at the backend's seam in host memory: it copies when told to, and calls break where a test wants them to."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachesvc.memory.memcpy import PitchedCopies

UNIT_BYTES = 64 << 10
"""Allocations are rounded up to this."""


class HostGpu:
    """``breaks``: calls that fail; ``breaks_after``: how often a call goes well before; ``is_dead``: everything fails.
    ``hangs``: calls that do not return before ``goes_on`` is set; ``hung`` is given a permit for each.

    ``held``: what was taken and not given back. What is given back to a dead one still counts as given back.
    """

    def __init__(self, number: int = 0, free: int = 1 << 30) -> None:
        self.uuid = f"GPU-host-{number}"
        self.context_bytes = 0
        self.free = free
        self.breaks: set[str] = set()
        self.breaks_after: dict[str, int] = {}
        self.is_dead = False
        self.hangs: set[str] = set()
        self.hung = threading.Semaphore(0)
        self.goes_on = threading.Event()
        self.held: Counter[str] = Counter()
        self.is_started = False
        self.told: Counter[str] = Counter()

    def call(self, name: str) -> None:
        """Start a call: count it, and fail where that is planned."""
        self.told[name] += 1
        if name in self.hangs:
            self.hung.release()
            self.goes_on.wait()
        allowed = self.breaks_after.get(name, self.told[name])
        if self.is_dead or name in self.breaks or self.told[name] > allowed:
            raise RuntimeError(f"{name} broke")

    def start(self) -> None:
        self.call("start")
        self.is_started = True

    def shrink(self) -> None:
        self.call("shrink")

    def close(self) -> None:
        self.is_started = False
        self.call("close")

    def free_bytes(self) -> int:
        self.call("free_bytes")
        return self.free

    def allocate(self, size_bytes: int, *, vmm: bool) -> HostMemory:
        self.call("allocate")
        return HostMemory(self, -(-size_bytes // UNIT_BYTES) * UNIT_BYTES, vmm=vmm)

    def open_memory(self, handle: bytes, fd: int | None, size_bytes: int) -> HostMemory:
        raise RuntimeError("memory of this process opens in no other one")

    def register_host(self, address: int, size_bytes: int) -> None:
        assert size_bytes
        self.call("register_host")
        self.held[f"pin {address}"] += 1

    def unregister_host(self, address: int) -> None:
        self.held[f"pin {address}"] -= 1
        self.call("unregister_host")

    def device_address(self, host_address: int) -> int:
        self.call("device_address")
        return host_address

    def read(self, address: int, size_bytes: int) -> bytes:
        self.call("read")
        return ctypes.string_at(address, size_bytes)

    def can_reach(self, other: HostGpu) -> bool:
        return other is not self

    def open_peer(self, other: HostGpu) -> None:
        assert other.is_started
        self.call("open_peer")

    def queue(self) -> HostQueue:
        return HostQueue(self)

    def pins(self) -> int:
        """Number of pinned ranges of host memory."""
        return sum(count for name, count in self.held.items() if name.startswith("pin"))

    def is_whole(self) -> bool:
        """Nothing is held any more."""
        return not self.is_started and not any(self.held.values())


class HostMemory:
    """Zeroed, with a handle or a descriptor that opens nothing."""

    def __init__(self, gpu: HostGpu, size_bytes: int, *, vmm: bool) -> None:
        self.size_bytes = size_bytes
        self._gpu = gpu
        self._bytes: npt.NDArray[np.uint8] = np.zeros(size_bytes, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self.handle = b"" if vmm else self.address.to_bytes(64, "little")
        self.fd = os.memfd_create("host-gpu") if vmm else None
        gpu.held["memory"] += 1

    def close(self) -> None:
        self._gpu.held["memory"] -= 1
        if self.fd is not None:
            os.close(self.fd)
        self._gpu.call("free")


class HostQueue:
    """Copy queue that carries out each entry at once."""

    def __init__(self, gpu: HostGpu) -> None:
        self._gpu = gpu
        self._is_open = False

    def start(self) -> None:
        self._gpu.call("queue")
        self._is_open = True
        self._gpu.held["queue"] += 1

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> HostMark:
        self._gpu.call("submit")
        for src, dst, width, height, src_pitch, dst_pitch in copies.tolist():
            for row in range(height):
                ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)
        for address, value in words:
            ctypes.c_uint32.from_address(address).value = value
        self._gpu.held["mark"] += 1
        return HostMark(self._gpu)

    def synchronize(self) -> None:
        self._gpu.call("synchronize")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._gpu.held["queue"] -= 1
            self._gpu.call("queue_close")


class HostMark:
    """A point that has been reached."""

    def __init__(self, gpu: HostGpu) -> None:
        self._gpu = gpu

    def wait(self) -> None:
        self._gpu.call("wait")

    def close(self) -> None:
        self._gpu.held["mark"] -= 1
