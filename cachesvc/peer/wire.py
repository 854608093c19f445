"""The stream of bytes between two daemons, on a socket of its own.

    borrower    magic 8 | secret 32
                count u32 | count x (number u32)                            again and again
    lender      number u32 | status u32 | payload bytes u64 | header 256 | payload        for each, in this order

A status that is not OK has neither header nor payload. Either side ends the stream by closing it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from cachesvc.storage.header import HEADER_BYTES

MAGIC = b"cspeer\x02\n"
SECRET_BYTES = 32
HELLO = struct.Struct(f"<8s{SECRET_BYTES}s")
COUNT = struct.Struct("<I")
ANSWER = struct.Struct("<IIQ")
OK, GONE = 0, 1
MOST_NUMBERS = 1 << 16
"""Most numbers in one request."""


class StreamEnded(OSError):
    """The other side is not there any more, or does not speak as it should."""


def send_pieces(stream: socket.socket, pieces: Sequence[memoryview | bytes]) -> None:
    """Send all pieces. Raises OSError."""
    for piece in pieces:
        stream.sendall(piece)


def receive_into(stream: socket.socket, piece: memoryview, deadline: float) -> None:
    """Fill ``piece`` by ``deadline``, monotonic seconds. Raises OSError (TimeoutError); nothing is written after."""
    at = 0
    while at < len(piece):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer was too slow")
        stream.settimeout(left)
        count = stream.recv_into(piece[at:])
        if not count:
            raise StreamEnded("the peer has closed the stream")
        at += count


def receive(stream: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Receive some bytes. Raises OSError."""
    content = bytearray(size_bytes)
    receive_into(stream, memoryview(content), deadline)
    return bytes(content)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Pack a request."""
    return COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers)


def receive_numbers(stream: socket.socket, deadline: float) -> tuple[int, ...]:
    """Receive a request. Raises OSError."""
    (count,) = COUNT.unpack(receive(stream, COUNT.size, deadline))
    if not 0 < count <= MOST_NUMBERS:
        raise StreamEnded(f"a request for {count} objects")
    return struct.unpack(f"<{count}I", receive(stream, 4 * count, deadline))


__all__ = ["ANSWER", "GONE", "HEADER_BYTES", "HELLO", "MAGIC", "OK", "SECRET_BYTES", "StreamEnded"]
