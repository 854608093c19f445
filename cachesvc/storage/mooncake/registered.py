"""Memory registered with the library's client: transfers can use no other."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

from cachesvc.memory.mapped import address_of
from cachesvc.storage.mooncake.native import OK, Library
from cachesvc.telemetry import events


class Registered:
    """Chunks, which the client gets as soon as there is one. Thread-safe; what is here stays mapped."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._known: list[tuple[int, int]] = []
        self._library: Library | None = None
        self._lock = threading.Lock()

    def add(self, chunk: memoryview) -> None:
        """May block where the client is one of RDMA."""
        with self._lock:
            self._chunks.append(chunk)
            if self._library is not None:
                self._tell(self._library, chunk)

    def connect(self, library: Library) -> None:
        """Set a new client of the library, and register all chunks with it."""
        with self._lock:
            self._library = library
            for chunk in self._chunks:
                self._tell(library, chunk)

    def disconnect(self) -> None:
        """The client ends: it must not be called any more."""
        with self._lock:
            self._library = None
            self._known = []

    def has(self, pages: Sequence[memoryview]) -> bool:
        """True where the client knows all of this memory."""
        known = self._known
        for page in pages:
            address = address_of(page) if len(page) else 0
            at = bisect_right(known, (address, 1 << 62)) - 1
            if len(page) and (at < 0 or address + len(page) > known[at][1]):
                return False
        return True

    def _tell(self, library: Library, chunk: memoryview) -> None:
        address, size_bytes = address_of(chunk), len(chunk)
        code = library.register_buffer(address, size_bytes)
        if code == OK:
            self._known = sorted([*self._known, (address, address + size_bytes)])
        else:
            events.warning("storage_memory_refused", storage="mooncake", size_bytes=size_bytes, code=code)
