"""Reads and writes whole objects: around the page cache where the filesystem lets us.

Direct I/O wants memory, lengths and offsets on borders. Pages that lie on them move without a copy; others go through
a buffer of the thread's own, which costs a memcpy (about 0.1 s of processor time a GB).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
ALIGN_BYTES = 4096
MOST_PIECES = 512
"""Pieces of one call: the kernel takes 1,024."""


def padded(size_bytes: int) -> int:
    """Round a size up to the next border."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def is_aligned(pieces: Sequence[memoryview]) -> bool:
    """True where direct I/O can move the pieces as they lie."""
    if len(pieces) > MOST_PIECES:
        return False
    lengths = all(len(piece) % ALIGN_BYTES == 0 for piece in pieces)
    return lengths and all(np.frombuffer(piece, np.uint8).ctypes.data % ALIGN_BYTES == 0 for piece in pieces)


class Mover:
    """One thread's way to files: it has a buffer of its own."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def read(self, fd: int, pieces: Sequence[memoryview]) -> bool:
        """Fill the pieces from the file's start; False where it is shorter than they are. Raises OSError."""
        wanted = sum(map(len, pieces))
        if is_aligned(pieces):
            return _read_all(fd, pieces) == wanted
        buffer = self._room(padded(wanted))
        got = _read_all(fd, [buffer])
        at = 0
        for piece in pieces:
            end = min(at + len(piece), got)
            piece[: max(0, end - at)] = buffer[at : max(at, end)]
            at += len(piece)
        return got >= wanted

    def write(self, fd: int, pieces: Sequence[memoryview]) -> None:
        """Write the pieces, and zeros up to the next border, from the file's start. Raises OSError."""
        wanted = sum(map(len, pieces))
        if is_aligned(pieces):
            done = os.pwritev(fd, pieces, 0)
        else:
            buffer = self._room(padded(wanted))
            at = 0
            for piece in pieces:
                buffer[at : at + len(piece)] = piece
                at += len(piece)
            buffer[at:] = bytes(len(buffer) - at)
            wanted = len(buffer)
            done = os.pwritev(fd, [buffer], 0)
        if done != wanted:
            raise OSError(errno.ENOSPC, f"{done} of {wanted} bytes were written")

    def _room(self, size_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._buffer = memoryview(mmap.mmap(-1, padded(size_bytes)))
        return self._buffer[:size_bytes]


def _read_all(fd: int, pieces: Sequence[memoryview]) -> int:
    """Fill the pieces from the file's start, as far as it goes: one call may read less (2 GiB at most, or a signal
    came). Returns the bytes."""
    left, got = list(pieces), 0
    while left and (count := os.preadv(fd, left, got)):
        got += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return got


def direct_flag(folder: str) -> int:
    """O_DIRECT where files of the folder can be read and written so, else 0. Raises OSError where no file can be
    written to try it with: a full filesystem."""
    path = f"{folder}/direct"
    page = memoryview(mmap.mmap(-1, ALIGN_BYTES))
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
        except OSError as error:
            if flag and error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                continue
            raise
        try:
            is_good = os.pwritev(fd, [page], 0) == ALIGN_BYTES == os.preadv(fd, [page], 0)
        except OSError as error:
            if not flag or error.errno in NO_ROOM:
                raise
            is_good = False
        finally:
            os.close(fd)
            os.unlink(path)
        if is_good:
            return flag
    return 0
