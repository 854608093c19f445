"""The host pool as memory files: what others map is what the daemon fills."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import pytest

from cachesvc.memory.extents import HUGE_BYTES, address_of, map_memfd, populate_file, sealed_memfd
from cachesvc.memory.host_pool import HostPool
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


def chunk_files() -> set[int]:
    """Inodes of the chunks that this process has open, of every pool."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own, and what others close meanwhile
            if "kvcache-host" in link.readlink().name:
                found.add(link.stat().st_ino)
    return found


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
    before = chunk_files()
    backend = Keeper()
    pool = HostPool(4 * MIB, MIB, 1, None, backend, in_files=True)
    pool.start()
    pool.join_filling()
    pool.close()
    backend.close()
    for fd in backend.files:
        os.close(fd)
    assert chunk_files() <= before


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


@pytest.mark.parametrize("size", [HUGE_BYTES, HUGE_BYTES + 1, 3 * HUGE_BYTES + 4096])
def test_a_file_is_mapped_where_huge_pages_fit_until_its_last_view_goes(size: int) -> None:
    fd = sealed_memfd("mapped-until", size)
    other, view = map_memfd(fd, size), map_memfd(fd, size)
    os.close(fd)
    address = address_of(view)
    assert address % HUGE_BYTES == 0
    assert len(view) == size
    view[size - 1] = 7
    assert other[size - 1] == 7
    piece = view[size - 1 :]
    del view
    assert piece[0] == 7
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()
    del piece
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
    assert Path("/proc/self/maps").read_text().count("mapped-until") == 1
    assert other[0] == 0


def test_a_file_is_not_mapped_beyond_its_end() -> None:
    fd = sealed_memfd("short", HUGE_BYTES)
    for fd_size in (2 * HUGE_BYTES, HUGE_BYTES + 1):
        with pytest.raises(OSError, match=str(HUGE_BYTES)):
            map_memfd(fd, fd_size)
    os.close(fd)


def test_a_file_that_may_not_be_written_is_not_mapped_and_keeps_no_addresses() -> None:
    fd = sealed_memfd("read-only", 2 * HUGE_BYTES)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(PermissionError):
        map_memfd(reading, 2 * HUGE_BYTES)
    assert Path("/proc/self/maps").read_text().count("---p") == before
    os.close(reading)
    os.close(fd)
