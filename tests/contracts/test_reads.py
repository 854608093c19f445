"""A region that is read while its slab is closed: the bytes stay until they are read, and later reads fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from cachesvc.memory.backend import Holds
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.interface import Backend
from cachesvc.memory.memcpy import Region
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import LedgerBroken, NotFound
from tests.contracts.host_gpu import HostGpu

SLAB_BYTES = 1 << 16


class Gate:
    """The first call waits until it may go on."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def wait(self) -> None:
        if not self.has_begun.is_set():
            self.has_begun.set()
            self.may_go_on.wait()


class GatedGpu(HostGpu):
    """The first read waits behind the gate; how much memory was held when it went on is kept."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.held_while_read: list[int] = []

    def read(self, address: int, size_bytes: int) -> bytes:
        self.gate.wait()
        self.held_while_read.append(self.held["memory"])
        return super().read(address, size_bytes) if self.held["memory"] else b"freed"


class GatedShm(ShmBackend):
    """The first read waits behind the gate when it knows where the bytes are; what was taken then is kept."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(1, SLAB_BYTES, timeline_words=64)
        self.gate = gate
        self.taken_while_read: list[int] = []

    @property
    def taken(self) -> int:
        return sum(at.budget.used_bytes for at in self._devices.values())

    def _add_region(self, region: Region) -> int:
        def fetch(address: int, size_bytes: int) -> bytes:
            self.gate.wait()
            self.taken_while_read.append(self.taken)
            return region.read(address - region.address, size_bytes)

        return super()._add_region(replace(region, view=None, fetch=fetch))


def run(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def close_while_read(backend: Backend, gate: Gate) -> None:
    """Close a slab while a read of it is behind the gate; the read goes on once the slab is being closed."""
    slab = backend.create_slab(backend.devices()[0], SLAB_BYTES)
    got: list[bytes] = []

    def read() -> None:
        try:
            got.append(backend.read(slab.region, 0, SLAB_BYTES))
        finally:
            gate.has_begun.set()

    reader = run(read)
    gate.has_begun.wait()
    closer = run(slab.close)
    while is_readable(backend, slab.region):
        pass
    gate.may_go_on.set()
    reader.join()
    closer.join()
    assert got == [bytes(SLAB_BYTES)]


def is_readable(backend: Backend, region: int) -> bool:
    try:
        backend.read(region, 0, 0)
    except NotFound:
        return False
    return True


def test_memory_of_a_gpu_is_not_freed_under_a_read() -> None:
    """Found by reading: the address of a closed slab could be freed between its look-up and the copy from it."""
    gate = Gate()
    gpu = GatedGpu(gate)
    backend = CudaBackend((gpu,), SLAB_BYTES, timeline_words=64)
    backend.start()
    before = gpu.held["memory"]
    close_while_read(backend, gate)
    assert (gpu.held_while_read[-1], gpu.held["memory"]) == (before + 1, before)
    backend.close()
    assert gpu.is_whole()


def test_shared_memory_counts_as_taken_while_it_is_read() -> None:
    gate = Gate()
    backend = GatedShm(gate)
    backend.start()
    close_while_read(backend, gate)
    assert (backend.taken_while_read[-1], backend.taken) == (SLAB_BYTES, 0)
    backend.close()


def test_a_region_ends_once_and_holds_are_counted() -> None:
    holds = Holds()
    with pytest.raises(NotFound), holds.hold(1):
        pass
    holds.begin(1)
    with holds.hold(1), holds.hold(1):
        ending = run(lambda: holds.end(1))
    ending.join()
    for region in (1, 2):
        with pytest.raises(LedgerBroken):
            holds.end(region)
    with pytest.raises(NotFound, match="closed"), holds.hold(1):
        pass
