"""The stream of bytes between two daemons, on a socket of its own.

    borrower    magic 8 | secret 32
                count u32 | count x (number u32)                            again and again
    lender      number u32 | status u32 | payload bytes u64 | header 256 | payload        for each, in this order

The status is OK: a lender that is asked for what it does not lend ends the stream, as either side does by closing it. A
loan is read by several streams at once. Sockets block, with time limits of the kernel's: a whole object takes one call.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable, Sequence

from cachesvc.storage.objects import HEADER_BYTES

MAGIC = b"cspeer\x02\n"
SECRET_BYTES = 32
HELLO = struct.Struct(f"<8s{SECRET_BYTES}s")
COUNT = struct.Struct("<I")
ANSWER = struct.Struct("<IIQ")
OK = 0
MOST_NUMBERS = 1 << 16
"""Most numbers in one request."""
STREAMS = 8
"""Most streams of one loan: each is limited by a processor on either side."""
LOOKS = 4
"""Calls in which a peer may take nothing, one after another, until it is given up: each has its part of the time."""
_MOST_PIECES = 512
"""Most pieces of one call; the kernel takes 1,024."""
_TIME = struct.Struct("@ll")


class StreamEnded(OSError):
    """The other side is not there any more, or does not speak as it should."""


def send_pieces(
    stream: socket.socket,
    pieces: Sequence[memoryview | bytes],
    seconds: float,
    taken: Callable[[], object] = lambda: None,
) -> None:
    """Send all pieces to a peer that takes something every ``seconds``. ``taken``: called when it has, several times in
    ``seconds`` where these are long. Raises OSError (TimeoutError)."""
    left, looks = [memoryview(piece) for piece in pieces], LOOKS
    _limit(stream, socket.SO_SNDTIMEO, seconds / LOOKS)
    while left:
        try:
            count = stream.sendmsg(left[:_MOST_PIECES])  # after its time it answers what it has sent
        except BlockingIOError as error:
            looks -= 1
            if not looks:
                raise TimeoutError("the peer takes nothing more") from error
            continue
        looks = LOOKS
        taken()
        _advance(left, count)


def receive_all(stream: socket.socket, left: list[memoryview], deadline: float) -> None:
    """Fill the pieces that are ``left`` by ``deadline``, monotonic seconds; what remains of them after an error is
    ``left``, too. Raises OSError (TimeoutError); nothing is written after."""
    left[:] = filter(len, left)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the peer was too slow")
        _limit(stream, socket.SO_RCVTIMEO, seconds)
        try:
            count = stream.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:
            raise TimeoutError("the peer was too slow") from error
        if not count:
            raise StreamEnded("the peer has closed the stream")
        _advance(left, count)


def _limit(stream: socket.socket, option: int, seconds: float) -> None:
    """Set a time limit of the kernel's, which wakes no interpreter for a part of an object. Zero would be none."""
    whole = max(1, math.ceil(seconds * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(whole // 1_000_000, whole % 1_000_000))


def _advance(left: list[memoryview], count: int) -> None:
    """Take ``count`` bytes off the front of some pieces."""
    whole = 0
    while whole < len(left) and count >= len(left[whole]):
        count -= len(left[whole])
        whole += 1
    del left[:whole]
    if count:
        left[0] = left[0][count:]


def receive(stream: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Receive some bytes. Raises OSError."""
    content = bytearray(size_bytes)
    receive_all(stream, [memoryview(content)], deadline)
    return bytes(content)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers)


def receive_numbers(stream: socket.socket, deadline: float) -> tuple[int, ...]:
    """Receive a request. Raises OSError."""
    (count,) = COUNT.unpack(receive(stream, COUNT.size, deadline))
    if not 0 < count <= MOST_NUMBERS:
        raise StreamEnded(f"a request for {count} objects")
    return struct.unpack(f"<{count}I", receive(stream, 4 * count, deadline))


__all__ = ["ANSWER", "HEADER_BYTES", "HELLO", "MAGIC", "OK", "SECRET_BYTES", "StreamEnded"]
