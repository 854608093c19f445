"""The host pool as memory files: what others map is what the daemon fills."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.mapped import HUGE_BYTES, map_memfd, populate_file, sealed_memfd
from tests.sim.stepped_backend import SteppedBackend

MIB = 1 << 20


class Keeper(SteppedBackend):
    """Keeps a descriptor of each chunk of its own."""

    def __init__(self) -> None:
        super().__init__(1, MIB)
        self.files: list[int] = []
        self.start()

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        if fd is not None:
            self.files.append(os.dup(fd))
        return super().register_host(buffer)


def test_a_chunk_is_a_file_that_others_map() -> None:
    backend = Keeper()
    pool = HostPool(5 * MIB, 2 * MIB, 1, None, backend, in_files=True)
    pool.start()
    pool.join_filling()
    assert pool.failure is None
    assert len(backend.files) == 3
    slab = pool.reserve(4096, 100)
    pool.view(slab, 7)[:] = bytes(range(256)) * 16
    with mmap.mmap(backend.files[0], 0) as there:
        at = slab.extents[0].place.offset + 7 * 4096
        assert there[at : at + 4096] == bytes(range(256)) * 16
    pool.close()
    pool.close()
    for fd in backend.files:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)


def test_files_are_closed_with_the_pool() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    backend = Keeper()
    pool = HostPool(4 * MIB, MIB, 1, None, backend, in_files=True)
    pool.start()
    pool.join_filling()
    pool.close()
    backend.close()
    for fd in backend.files:
        os.close(fd)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("size", "start", "count"), [(8 * MIB, 0, 8 * MIB), (6 * MIB, HUGE_BYTES, MIB), (12288, 4096, 4096)]
)
def test_what_is_populated_is_there_and_zero(size: int, start: int, count: int) -> None:
    fd = sealed_memfd("host", size)
    view = map_memfd(fd, size)
    populate_file(view, start, count)
    assert os.fstat(fd).st_blocks * 512 >= count
    assert bytes(view) == bytes(size)
    os.close(fd)
