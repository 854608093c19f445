"""Reads the objects of a loan from one stream, several of them with one call of the kernel's where they come quickly.

Each call costs a turn at the interpreter, which the streams of all loans and the ledger share.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from cachesvc.peer.fleet.control import Loan
from cachesvc.peer.wire import (
    ANSWER,
    HELLO,
    MAGIC,
    OK,
    StreamEnded,
    pack_numbers,
    receive,
    receive_all,
    send_pieces,
)
from cachesvc.storage.header import HEADER_BYTES
from cachesvc.storage.seam import Item

CONNECT_SECONDS = 3.5
"""Time limit for a connection, seconds: its first packet, where it is lost, is sent again after 1 and after 3 s."""
GROUP_BYTES = 8 << 20
"""Bytes that one call brings: fewer objects have come when it fails, and a call for more saves nothing."""
QUICK_SECONDS = 0.005
"""Time of a call after which the next one is for twice as many objects, seconds; after a longer one it is for one."""

Came = Callable[[Sequence[int], int], None]
"""``(indexes, bytes)``: objects that have come, and are not written to any more."""


Asked = tuple[int, Item, int]
"""An object that has been asked for: its index, item, and number."""


class LoanStream:
    """One stream of a loan. ``left``: objects that have not come. ``came``: see Came."""

    def __init__(self, loan: Loan, left: deque[Asked], deadline: float, came: Came) -> None:
        self._loan = loan
        self._left = left
        self._deadline = deadline
        self._came = came
        self._most = 1

    def read(self) -> None:
        """Read all of them. Raises OSError; what is left then has not come."""
        limit = min(self._deadline - time.monotonic(), CONNECT_SECONDS)
        if limit <= 0:
            raise TimeoutError("there is no time left")
        with socket.create_connection((self._loan.host, self._loan.port), timeout=limit) as stream:
            stream.settimeout(None)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            numbers = pack_numbers([number for _, _, number in self._left])
            send_pieces(stream, [HELLO.pack(MAGIC, self._loan.secret) + numbers], limit)
            answer = receive(stream, ANSWER.size, self._deadline)
            while self._left:
                answer = self._read_some(stream, answer)

    def _read_some(self, stream: socket.socket, answer: bytes) -> bytes:
        """Read the next few objects, the first of which is behind ``answer``; return the answer behind the last one.
        Those that have come whole are reported, whatever befalls the others."""
        group = self._next_group()
        self._check(answer, group[0])
        behind = [bytearray(ANSWER.size) for _ in range(min(len(group), len(self._left) - 1))]
        pieces: list[memoryview] = []
        for at, (_, item, _) in enumerate(group):
            pieces += (item.head[:HEADER_BYTES], *item.pages, *(memoryview(answer) for answer in behind[at : at + 1]))
        whole, began = sum(map(len, pieces)), time.monotonic()
        try:
            receive_all(stream, pieces, self._deadline)
            is_quick = time.monotonic() - began < QUICK_SECONDS
            self._most = min(2 * self._most, len(self._left)) if is_quick else 1
        finally:
            self._report(group, [answer, *behind], whole - sum(map(len, pieces)))
        return bytes(behind[-1]) if behind else b""

    def _next_group(self) -> list[Asked]:
        group, size_bytes = [self._left[0]], self._left[0][1].payload_bytes
        for each in itertools.islice(self._left, 1, self._most):
            size_bytes += each[1].payload_bytes
            if size_bytes > GROUP_BYTES:
                break
            group.append(each)
        return group

    def _report(self, group: Sequence[Asked], answers: Sequence[bytes | bytearray], received: int) -> None:
        """Report the objects that are whole after ``received`` bytes. Raises StreamEnded for an answer that is wrong:
        what lies behind it is not what it was read as."""
        indexes, size_bytes = list[int](), 0
        try:
            for each, answer in zip(group, answers, strict=False):
                received -= HEADER_BYTES + each[1].payload_bytes
                if received < 0:
                    break
                if indexes:
                    self._check(answer, each)
                received -= ANSWER.size
                indexes.append(each[0])
                size_bytes += each[1].payload_bytes
        finally:
            for _ in indexes:
                self._left.popleft()
            self._came(indexes, size_bytes)

    def _check(self, answer: bytes | bytearray, asked: Asked) -> None:
        """Raises StreamEnded for another answer than that the object follows."""
        _, item, number = asked
        if ANSWER.unpack(answer) != (number, OK, item.payload_bytes):
            raise StreamEnded("the peer answered something else")
