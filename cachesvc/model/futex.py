"""32-bit words in memory that several processes map: set one and wake its waiters; wait without polling.

The daemon's ``shm`` timeline and the client's waits are the two ends. Waiting is a shared futex, so a
waiter sleeps in the kernel, and the writer of a word wakes it from any process, container or namespace that maps the
same file.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.model.words import has_reached

WORD_BYTES = 4
FOREVER_S = 1e6
LATE_PART = 1 / 16
"""Share of a wait by which a waiter may be late to notice a word whose writer wakes none."""
Words = npt.NDArray[np.uint32]


class _Mapped(np.ndarray[Any, np.dtype[np.uint32]]):
    """Words that know where they lie, which NumPy takes a microsecond to say."""

    address: int

    def __array_finalize__(self, made_of: object) -> None:
        self.address = int(self.ctypes.data)


_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = (1 << 31) - 1
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_MACHINE = platform.machine()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., int]:
    if _MACHINE not in _FUTEX_NUMBERS or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise ImportError(f"no futex on {_MACHINE}: shared words need 64-bit Linux on x86-64 or aarch64")
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    return function


_call = _syscall()
_number = _FUTEX_NUMBERS[_MACHINE]


def words_of(buffer: memoryview) -> Words:
    """The words of a mapping; a read-only mapping will do for waiting. Keep the result no longer than the
    mapping."""
    return np.frombuffer(buffer, np.uint32).view(_Mapped)


def store_and_wake(words: Words, index: int, value: int) -> None:
    """Set a word and wake all its waiters. Earlier writes are visible to a reader that sees the word by ``load`` or
    ``wait_reached``."""
    store(words, index, value)
    wake(words, index)


def store(words: Words, index: int, value: int) -> None:
    """Set a word, like ``store_and_wake``, and wake no waiter."""
    fence()
    words[index] = value & 0xFFFFFFFF


def load(words: Words, index: int) -> int:
    """A word, before all that its reader looks at from here on."""
    value = int(words[index])
    fence()
    return value


def fence() -> None:
    """Order memory accesses: this thread's earlier ones come before its later ones, for all processes that share
    memory.

    x86 keeps loads in order, and stores. Elsewhere a semaphore does, which is what Python's lock is: giving it back and
    taking it again synchronize memory (POSIX.1-2017, XBD 4.12).
    """
    if _MACHINE != "x86_64":
        lock = threading.Lock()
        with lock:
            pass
        with lock:
            pass


def wake(words: Words, index: int) -> int:
    """Wake all waiters of a word that was set, such as by a GPU. Returns how many slept."""
    woken = _call(_number, _address(words, index), _FUTEX_WAKE, _EVERYBODY, None)
    if woken < 0:
        raise OSError(ctypes.get_errno(), f"FUTEX_WAKE of word {index} failed")
    return woken


def wait_reached(
    words: Words, index: int, target: int, deadline_s: float, *, poll_s: tuple[float, float] | None = None
) -> bool:
    """True once the word is at or past ``target``, cyclically; False when ``time.monotonic()`` passes
    ``deadline_s``.

    ``poll_s``: the shortest and the longest pause between looks at a word whose writer wakes no waiter, or late, such
    as a GPU. None: the writer wakes.
    """
    address, began = _address(words, index), time.monotonic()
    looks_s = (FOREVER_S, FOREVER_S) if poll_s is None else poll_s
    while True:
        value = load(words, index)
        if has_reached(value, target):
            return True
        now = time.monotonic()
        if now >= deadline_s:
            return False
        _sleep_while(address, value, min(deadline_s - now, pause_s(looks_s, now - began)))


def pause_s(poll_s: tuple[float, float], waited_s: float) -> float:
    """Pause until the next look of a waiter that has waited ``waited_s`` already."""
    shortest_s, longest_s = poll_s
    return min(max(shortest_s, LATE_PART * waited_s), longest_s)


def _sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep until woken, ``seconds`` have passed, there is a signal, or the word is not ``value``."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _call(_number, address, _FUTEX_WAIT, value, ctypes.addressof(limit)) < 0:
        why = ctypes.get_errno()
        if why not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(why, "FUTEX_WAIT failed")


def _address(words: Words, index: int) -> int:
    if not 0 <= index < len(words):
        raise IndexError(f"word {index} of {len(words)}")
    base = words.address if isinstance(words, _Mapped) else words.ctypes.data
    return base + WORD_BYTES * index
