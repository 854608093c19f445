"""Records from one process to another through shared memory, in order, with a futex in place of a socket.

    word 0    position of the writer    (in units of 8 bytes, cyclic over 32 bits)
    word 16   position of the reader    (in a cache line of its own)
    page 1 .. the bytes, as a circle

A record is cut into frames: 8 bytes (length, and whether more of the record follows), then the bytes, filled up to 8.
The side that moves a word wakes its waiter; a wake without a waiter costs a microsecond. One process writes and one
reads. Each side trusts memory that the other can write: both ends are the daemon's own.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachesvc.memory.mapped import map_memfd, sealed_memfd
from cachesvc.model.futex import fence, store, store_and_wake, wait_reached, wake, words_of

HEAD_BYTES = 4096
UNIT = 8
WRITTEN, READ = 0, 16
_FRAME = struct.Struct("<II")
_MORE = 1
CYCLE = 0xFFFFFFFF
LOOK_S = 0.25
"""Longest delay after which a writer notices that it was closed, or a reader that it was stopped, seconds."""
Part = bytes | npt.NDArray[np.int64]


class Ring:
    """The shared memory of one ring. ``size_bytes``: of the circle, a power of two from 4096 on."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the ring; takes over ``fd``."""
        assert size_bytes >= HEAD_BYTES
        assert not size_bytes & (size_bytes - 1)
        self.fd = fd
        self.size_bytes = size_bytes
        self._view = map_memfd(fd, HEAD_BYTES + size_bytes)
        self.words = words_of(self._view[:HEAD_BYTES])
        self._marks = self._view[:HEAD_BYTES].cast("I")
        self._circle = self._view[HEAD_BYTES:]

    @classmethod
    def make(cls, name: str, size_bytes: int) -> Ring:
        """Make an empty ring. Raises OSError."""
        return cls(sealed_memfd(name, HEAD_BYTES + size_bytes), size_bytes)

    def mark(self, word: int) -> int:
        """Position of a side: ``WRITTEN`` or ``READ``. What it did before is seen from here on."""
        come = self._marks[word]
        fence()
        return come

    def put_bytes(self, at: int, content: bytes | memoryview) -> None:
        """Copy into the circle, around its end."""
        at %= self.size_bytes
        first = min(len(content), self.size_bytes - at)
        if first == len(content):
            self._circle[at : at + first] = content
            return
        self._circle[at:] = content[:first]
        self._circle[: len(content) - first] = content[first:]

    def get_bytes(self, at: int, size_bytes: int) -> bytes:
        """Copy out of the circle, around its end."""
        at %= self.size_bytes
        first = min(size_bytes, self.size_bytes - at)
        if first == size_bytes:
            return bytes(self._circle[at : at + first])
        return bytes(self._circle[at:]) + bytes(self._circle[: size_bytes - first])

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last reference. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Writer:
    """Writes records, from any thread. What finds no room waits here, in order, until the reader has come further."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = ring.mark(WRITTEN)
        self._most = ring.size_bytes // 4
        self._waiting: deque[tuple[memoryview, bool]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_pumped = False

    def put(self, parts: Sequence[Part], *, wakes: bool = True) -> None:
        """Write one record of these parts, one after another; returns at once. Nothing after ``close``. ``wakes``:
        False lets the reader sleep until the next record, or for ``LOOK_S``."""
        content = memoryview(b"".join(part if isinstance(part, bytes) else part.data for part in parts))
        with self._lock:
            if self._is_closed:
                return
            wakes = wakes or bool(self._waiting)  # some of these wake
            for first in range(0, len(content) or 1, self._most):
                piece = content[first : first + self._most]
                self._waiting.append((piece, first + self._most < len(content)))
            self._write(wakes=wakes)
            if self._waiting and not self._is_pumped:
                self._is_pumped = True
                threading.Thread(target=self._pump, name="ring-pump", daemon=True).start()

    def close(self) -> None:
        """Drop records that found no room. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            wake(self._ring.words, READ)  # the word is the reader's

    def _pump(self) -> None:
        """Root of a thread that is there while something waits for room."""
        ring = self._ring
        while True:
            with self._lock:
                reached = ring.mark(READ)  # first: the reader may come further meanwhile
                self._write()
                if not self._waiting:
                    self._is_pumped = False
                    return
            wait_reached(ring.words, READ, reached + 1, time.monotonic() + LOOK_S)

    def _write(self, *, wakes: bool = True) -> None:
        ring, written = self._ring, self._at
        while self._waiting:
            piece, has_more = self._waiting[0]
            units = -(-(_FRAME.size + len(piece)) // UNIT)
            if ((self._at + units - ring.mark(READ)) & CYCLE) * UNIT > ring.size_bytes:
                break
            ring.put_bytes(self._at * UNIT, _FRAME.pack(len(piece), _MORE * has_more))
            ring.put_bytes(self._at * UNIT + _FRAME.size, piece)
            self._at = (self._at + units) & CYCLE
            self._waiting.popleft()
        if self._at == written:
            return
        if wakes or self._waiting:
            store_and_wake(ring.words, WRITTEN, self._at)
        else:
            store(ring.words, WRITTEN, self._at)


class Reader:
    """Reads records, on one thread."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = ring.mark(READ)
        self._parts: list[bytes] = []
        self._is_stopped = False

    def wait(self) -> bool:
        """Sleep until something is there that was not read; False once it was stopped. What was taken before is done
        with now: the writer learns it here, and not before it is carried out, which begins at once."""
        words, target = self._ring.words, self._at + 1
        if self._ring.mark(READ) != self._at:
            store_and_wake(words, READ, self._at)
        while not self._is_stopped and not wait_reached(words, WRITTEN, target, time.monotonic() + LOOK_S):
            pass
        return not self._is_stopped

    def stop(self) -> None:
        """Wait for nothing more: the writer may have died in the middle of a record. Any thread."""
        self._is_stopped = True
        wake(self._ring.words, WRITTEN)

    def take(self) -> list[bytes]:
        """Take all whole records, in order."""
        ring, found = self._ring, []
        written = ring.mark(WRITTEN)
        while self._at != written:
            size_bytes, flags = _FRAME.unpack(ring.get_bytes(self._at * UNIT, _FRAME.size))
            self._parts.append(ring.get_bytes(self._at * UNIT + _FRAME.size, size_bytes))
            self._at = (self._at + -(-(_FRAME.size + size_bytes) // UNIT)) & CYCLE
            if not flags & _MORE:
                found.append(b"".join(self._parts))
                self._parts.clear()
        return found
