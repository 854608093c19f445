"""Outgoing bytes of a lane: sent at once while its peer reads, else kept until it does, up to a bound."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from cachesvc.wire.status import MAX_MESSAGE_BYTES

MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES
"""Bytes kept for a peer that does not read, before its lane ends: calls in flight may be answered meanwhile."""


class Outbox:
    """Used on the event loop. ``emptied``: all that was kept has gone out; ``broke(why)``: nothing will any more.
    ``kept``: what the peer has not taken yet."""

    def __init__(self, end: socket.socket, emptied: Callable[[], None], broke: Callable[[str], None]) -> None:
        self._socket = end
        self._emptied = emptied
        self._broke = broke
        self.kept = bytearray()

    def send(self, data: bytes) -> None:
        """Send bytes after those that are kept."""
        if self.kept:
            self.kept += data
            if len(self.kept) > MAX_UNREAD_BYTES:
                self._broke("its process does not read its answers")
            return
        sent = self._try(data)
        if 0 <= sent < len(data):
            self.kept += memoryview(data)[sent:]
            asyncio.get_running_loop().add_writer(self._socket, self._writable)

    def close(self) -> None:
        """Drop what is kept, and the callbacks: a lane and its outbox know each other, and their buffers would else
        wait for a full pass of the collector."""
        if self.kept:
            self.kept.clear()
            asyncio.get_running_loop().remove_writer(self._socket)
        self._emptied, self._broke = _nobody, _nobody_told

    def _writable(self) -> None:
        sent = self._try(self.kept)
        if sent < 0:
            return
        del self.kept[:sent]
        if not self.kept:
            asyncio.get_running_loop().remove_writer(self._socket)
            self._emptied()

    def _try(self, data: bytes | bytearray) -> int:
        """Bytes that the socket took; -1 where it broke."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._broke(f"it broke: {error.strerror}")
            return -1


def _nobody() -> None:
    """Do nothing: the outbox is closed."""


def _nobody_told(_: str) -> None:
    """Do nothing: the outbox is closed."""
