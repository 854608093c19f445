"""The frames of a lane, for both of its ends. ``docs/lane.md`` says what they mean.

u32 length of the body | u8 method | u8 flags | u16 deadline in 10 ms, 0: none | u64 tag | body
little-endian, 16 bytes before the body, which is a message of ``kvcache.v1``
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cachesvc.model.errors import LimitExceeded
from cachesvc.wire.status import MAX_MESSAGE_BYTES

VERSION = 1
LANE_QUESTION = b"LN"
"""Request of a process on its life connection; ``OK`` brings its end of the lane along."""

HEADER = struct.Struct("<IBBHQ")
NO_ANSWER, ERROR, TRACED = 1, 2, 4
"""Flags: the caller wants no answer (Release alone); the body is an OperationError; a traceparent comes before it."""
TRACE_BYTES = 55
DEADLINE_UNIT_S = 0.01
MOST_DEADLINE = 0xFFFF

CANCEL, HELLO, PING = 10, 11, 12
METHODS = {
    "Step": 1,
    "Match": 2,
    "Allocate": 3,
    "Publish": 4,
    "Release": 5,
    "Recycle": 6,
    "Swap": 7,
    "Prefetch": 8,
    "WaitTickets": 9,
}
"""Numbers of the calls of CacheService."""

MAX_UNANSWERED_FRAMES = 16
MAX_UNANSWERED_BYTES = 1 << 20
"""Unanswered bytes above which the daemon reads no further from a lane."""
READ_BYTES = 256 << 10
"""Bytes of one read: as much as a socket holds, so one read takes all that has come."""


HELLO_BYTES = 8 << 10
"""No HELLO is longer, and nothing else comes before it."""


class Frame(NamedTuple):
    """One frame. ``deadline``: in units of 10 ms; 0: none. ``body``: without the traceparent."""

    method: int
    flags: int
    deadline: int
    tag: int
    body: bytes
    traceparent: str = ""


def encode(method: int, flags: int, deadline: int, tag: int, body: bytes, traceparent: str = "") -> bytes:
    if traceparent:
        body, flags = traceparent.encode("ascii") + body, flags | TRACED
    return HEADER.pack(len(body), method, flags, deadline, tag) + body


class FrameReader:
    """Cuts what a socket gives into frames: ``recv_into(room())``, ``add(count)``, then ``next()`` until None.

    ``end``: where the bytes end that have come; 0 where all of them were in frames that were taken. Unless it
    ``is_welcome`` it has room for little, and takes short frames alone, until ``welcome``. Room for a long frame grows
    with what has come of it.
    """

    def __init__(self, *, is_welcome: bool = True) -> None:
        self._least = READ_BYTES if is_welcome else HELLO_BYTES
        self._most = MAX_MESSAGE_BYTES if is_welcome else HELLO_BYTES
        self._bytes = bytearray(self._least)
        self._view = memoryview(self._bytes)
        self._first = 0
        self.end = 0

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    def welcome(self) -> None:
        """Frames of any length may come from now on."""
        self._least, self._most = READ_BYTES, MAX_MESSAGE_BYTES

    def room(self) -> memoryview:
        """Buffer for the next bytes; never empty. Frames that have come must have been taken."""
        if self.end == len(self._bytes):
            self._make_room()
        return self._view[self.end :]

    def add(self, count: int) -> None:
        """Count bytes that were put into ``room()``."""
        self.end += count

    def next(self) -> Frame | None:
        """The next whole frame. Raises LimitExceeded for one that is too long: nothing after it can be read."""
        start, held = self._first + HEADER.size, self.end
        if held < start:
            return None
        length, method, flags, deadline, tag = HEADER.unpack_from(self._bytes, self._first)
        if length > self._most:
            raise LimitExceeded("bytes of a frame", length, self._most)
        end = start + length
        if held < end:
            return None
        body = bytes(self._view[start:end])
        self._first = end
        if held == end:
            self._begin_anew()
        if not flags & TRACED:
            return Frame(method, flags, deadline, tag, body)
        parent = body[:TRACE_BYTES].decode("ascii", errors="replace")
        return Frame(method, flags, deadline, tag, body[TRACE_BYTES:], parent)

    def _begin_anew(self) -> None:
        """Begin at the front, and keep no large frame's room, after all frames were taken."""
        self._first = self.end = 0
        if len(self._bytes) != self._least:
            self._view, self._bytes = memoryview(b""), bytearray(self._least)
            self._view = memoryview(self._bytes)

    def _make_room(self) -> None:
        """Move what is left to the front, into as much as its frame needs, and at most twice what has come of it."""
        kept = bytes(self._view[self._first : self.end])
        length = HEADER.unpack_from(kept)[0] if len(kept) >= HEADER.size else 0
        wanted = HEADER.size + min(length, self._most)
        self._bytes = bytearray(max(self._least, min(wanted, 2 * len(kept)), len(kept) + HEADER.size))
        self._view = memoryview(self._bytes)
        self._view[: len(kept)] = kept
        self._first, self.end = 0, len(kept)
