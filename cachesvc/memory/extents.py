"""Places of a pool's page ids: extents of consecutive pages, each inside one region."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import InvalidRequest

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Pages ``[first_page, first_page + pages)``; the first one begins at ``offset`` of ``region``."""

    first_page: int
    pages: int
    region: int
    offset: int


class PagePlaces(NamedTuple):
    """Places of pages: each one's number in its extent, and the extent's own place, as one number where all lie in one
    extent."""

    page: Int64s
    offset: Int64s | int
    region: Int64s | int

    def part(self, which: Int64s | slice) -> PagePlaces:
        if isinstance(self.offset, int) or isinstance(self.region, int):
            return PagePlaces(self.page[which], self.offset, self.region)
        return PagePlaces(self.page[which], self.offset[which], self.region[which])


class ExtentTable:
    """An immutable set of extents as columns, sorted by first page. Pages that no extent holds are not
    usable (yet)."""

    __slots__ = ("ends", "extents", "firsts", "offsets", "regions")

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = tuple(sorted(extents))
        columns = np.array(
            [(e.first_page, e.first_page + e.pages, e.region, e.offset) for e in self.extents], np.int64
        ).reshape(-1, 4)
        self.firsts, self.ends, self.regions, self.offsets = (np.ascontiguousarray(column) for column in columns.T)

    @classmethod
    def whole(cls, region: int, pages: int) -> ExtentTable:
        """Table of one extent from offset 0 on: a device slab."""
        return cls([Extent(0, pages, region, 0)])

    @property
    def pages(self) -> int:
        return int((self.ends - self.firsts).sum())

    def places(self, pages: Int64s, what: str, *, is_sorted: bool = False) -> PagePlaces:
        """Places of pages. Raises InvalidRequest as ``locate``."""
        if self._is_one_for(pages, is_sorted=is_sorted):
            only = self.extents[0]
            return PagePlaces(pages - only.first_page if only.first_page else pages, int(only.offset), int(only.region))
        found = self.locate(pages, what)
        return PagePlaces(pages - self.firsts[found], self.offsets[found], self.regions[found])

    def locate(self, pages: Int64s, what: str) -> Int64s:
        """Index of each page's extent. Raises InvalidRequest that names the first page that lies in none."""
        if self._is_one_for(pages):
            return np.zeros(len(pages), np.int64)
        found = self.firsts.searchsorted(pages, side="right") - 1
        if len(self.ends) and (pages < self.ends[found]).all() and found.min(initial=0) >= 0:
            return found
        bad = found < 0
        if not bad.all():
            bad |= pages >= self.ends[found]
        if bad.any():
            page = int(pages[int(np.argmax(bad))])
            raise InvalidRequest(f"{what}: page {page} is not in the pool, which has {self.pages} usable pages")
        return found.astype(np.int64, copy=False)

    def _is_one_for(self, pages: Int64s, *, is_sorted: bool = False) -> bool:
        """True where all of some pages lie in the only extent."""
        if len(self.extents) != 1 or not len(pages):
            return False
        only = self.extents[0]
        if is_sorted:
            return bool(pages[0] >= only.first_page and pages[-1] < only.first_page + only.pages)
        is_inside = np.minimum.reduce(pages) >= only.first_page  # ``min`` of an array goes through Python first
        return bool(is_inside and np.maximum.reduce(pages) < only.first_page + only.pages)


BACKGROUND_NICENESS = 10
HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MADV_COLLAPSE = 25  # Linux 6.1 and later
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_RETRY = (errno.EINTR, errno.EAGAIN)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h, from Linux 5.1 on: mappings that are there may write, later ones may not."""


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A zeroed memory file that can neither shrink nor grow: a process that maps it gets no SIGBUS for its size."""
    with ExitStack() as undo:
        fd = new_memfd(name, size_bytes)
        undo.callback(os.close, fd)
        seal_memfd(fd, is_shared=True)
        undo.pop_all()
    return fd


def new_memfd(name: str, size_bytes: int) -> int:
    """A zeroed memory file of fixed size, which can still be sealed. Raises OSError."""
    with ExitStack() as undo:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, fd)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        undo.pop_all()
    return fd


def seal_memfd(fd: int, *, is_shared: bool) -> None:
    """Seal the file against any change of its nature; and of its bytes, unless ``is_shared``, but through mappings that
    are there. Raises OSError (Linux before 5.1)."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | (0 if is_shared else F_SEAL_FUTURE_WRITE))


def map_memfd(fd: int, size_bytes: int) -> memoryview:
    """A shared mapping, unmapped when the last view of it goes. One that can hold huge pages begins where one fits, or
    the kernel would never make any. Left out of core dumps, as prompts are nearly in it. Raises OSError."""
    if (there := os.fstat(fd).st_size) < size_bytes:
        raise OSError(errno.EINVAL, f"a memory file of {there} bytes cannot be mapped as {size_bytes}")
    if size_bytes < HUGE_BYTES:
        small = mmap.mmap(fd, size_bytes)
        small.madvise(mmap.MADV_DONTDUMP)
        return memoryview(small)
    room_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE_BYTES
    room = _map(None, room_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-room // HUGE_BYTES) * HUGE_BYTES
    try:
        _map(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(room, room_bytes)
        raise
    _libc.madvise(address, size_bytes, mmap.MADV_DONTDUMP)
    if before := address - room:
        _libc.munmap(room, before)
    _libc.munmap(room + before + room_bytes - HUGE_BYTES, HUGE_BYTES - before)
    held = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(held, _libc.munmap, address, size_bytes).atexit = False
    return memoryview(held).cast("B")


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    there: int = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if there == _MAP_FAILED:
        why = ctypes.get_errno()
        raise OSError(why, f"mapping {size_bytes} bytes: {os.strerror(why)}")
    return there


def map_anonymous(size_bytes: int) -> memoryview:
    """Zeroed memory of this process alone, in huge pages where the kernel has them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def address_of(view: memoryview) -> int:
    """Address of the first byte; good for as long as the view is held."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def populate(view: memoryview, start: int, size_bytes: int) -> None:
    """Give bytes of a fresh mapping their pages. Raises OSError where memory has run out."""
    while _libc.madvise(_address(view, start, size_bytes), size_bytes, _MADV_POPULATE_WRITE):
        why = ctypes.get_errno()
        if why == errno.EINVAL:  # an older kernel
            zero(view, start, size_bytes)
            return
        if why not in _RETRY:
            raise OSError(why, f"populating {size_bytes} bytes of host memory: {os.strerror(why)}")


def populate_file(view: memoryview, start: int, size_bytes: int) -> None:
    """Populate a memory file, in huge pages where the kernel makes them (Linux 6.1 and later): a page of each is
    touched and the kernel fills the rest, which needs no setting of the machine's. Raises OSError."""
    address = _address(view, start, size_bytes)
    if address % HUGE_BYTES or size_bytes % HUGE_BYTES:
        populate(view, start, size_bytes)
        return
    for at in range(start, start + size_bytes, HUGE_BYTES):
        populate(view, at, mmap.PAGESIZE)
    if _libc.madvise(address, size_bytes, _MADV_COLLAPSE):  # small pages are as good, but slower to pin and to map
        populate(view, start, size_bytes)


def zero(view: memoryview, start: int, size_bytes: int) -> None:
    """Write zeros; lets go of the GIL."""
    ctypes.memset(_address(view, start, size_bytes), 0, size_bytes)


def _address(view: memoryview, start: int, size_bytes: int) -> int:
    assert 0 <= start <= start + size_bytes <= view.nbytes
    return address_of(view) + start


def yield_to_callers() -> None:
    """Let this thread run only on processor time that no call waits for: copies are many, calls are short.

    Linux counts niceness by thread. Best effort: where it is refused the thread keeps its priority.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
