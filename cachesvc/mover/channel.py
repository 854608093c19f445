"""What the daemon asks of a mover that is not urgent: one question at a time, an answer, descriptors beside them.

A message is 8 bytes (length of its head, length of its body), the head as JSON, the body as it is. Both sides are this
package at one version, which the first answer tells; a mover of another one is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cachesvc.model.errors import BY_CODE, CacheError, ErrorCode, Unavailable

log = logging.getLogger(__name__)

_SIZES = struct.Struct("<II")
MOST_HEAD_BYTES = 1 << 20
MOST_BODY_BYTES = 1 << 30
MOST_DESCRIPTORS = 4
_PIECE_BYTES = 1 << 20


class Message(NamedTuple):
    """Whoever receives one owns its descriptors."""

    head: dict[str, Any]
    body: bytes = b""
    descriptors: tuple[int, ...] = ()


class MoverFault(RuntimeError):
    """Something broke in a mover, with these words: a bug, or a driver's fault."""


class MoverGone(Unavailable):
    """The mover does not answer any more: what it had is gone, and a new one is started."""


class ChannelClosed(ConnectionError):
    """The other side has ended."""


def send(connection: socket.socket, message: Message) -> None:
    """Send a message with copies of its descriptors. Raises OSError."""
    head = json.dumps(message.head, separators=(",", ":")).encode()
    sizes = _SIZES.pack(len(head), len(message.body))
    socket.send_fds(connection, [sizes], list(message.descriptors))  # 8 bytes and descriptors go whole
    connection.sendall(head + message.body)


def receive(connection: socket.socket, until: float | None = None) -> Message:
    """The next message, whole by a time of the monotonic clock. Raises ChannelClosed, OSError."""
    _wait_at_most(connection, until)
    first, descriptors, _, _ = socket.recv_fds(connection, _SIZES.size, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not first:
            raise ChannelClosed("the other side has closed")
        head_bytes, body_bytes = _SIZES.unpack(first + _exactly(connection, _SIZES.size - len(first), until))
        if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
            raise ChannelClosed(f"a message of {head_bytes} and {body_bytes} bytes: this is no mover's connection")
        try:
            head = json.loads(_exactly(connection, head_bytes, until))
        except ValueError as other:
            raise ChannelClosed(f"a message that is not JSON: this is no mover's connection ({other})") from other
        if not isinstance(head, dict):
            raise ChannelClosed("a message without names: this is no mover's connection")
        return Message(head, _exactly(connection, body_bytes, until), tuple(descriptors))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(connection: socket.socket, size_bytes: int, until: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        _wait_at_most(connection, until)
        part = connection.recv(min(_PIECE_BYTES, size_bytes - len(parts)))
        if not part:
            raise ChannelClosed("the other side closed in the middle of a message")
        parts += part
    return bytes(parts)


def _wait_at_most(connection: socket.socket, until: float | None) -> None:
    if until is not None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)


class Channel:
    """The asking side. Any thread."""

    def __init__(self, connection: socket.socket, on_broken: Callable[[], None]) -> None:
        """``on_broken``: nothing more can be asked, and the other side is to end."""
        self._connection = connection
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._most_seconds = math.inf

    def ask(
        self, name: str, seconds: float, *, descriptors: Sequence[int] = (), body: bytes = b"", **fields: Any
    ) -> Message:
        """Ask, and wait for the whole answer. Raises what the mover refused with, MoverFault, and MoverGone."""
        with self._lock:
            try:
                seconds = min(seconds, self._most_seconds)
                until = time.monotonic() + seconds
                self._connection.settimeout(seconds)
                send(self._connection, Message({"ask": name} | fields, body, tuple(descriptors)))
                answer = receive(self._connection, until)
            except OSError as error:  # what comes late must not be taken for the answer to another question
                self._on_broken()
                raise MoverGone(f"the mover does not answer ({error}); it is started again by itself") from error
        if "refused" in answer.head:
            for descriptor in answer.descriptors:
                os.close(descriptor)
            raise error_again(answer.head["refused"], answer.head["said"])
        return answer

    def hurry(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` for what is asked now, and for any answer from now on: a side that has not
        answered by then is broken off."""
        self._most_seconds = seconds
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
        else:
            self._on_broken()

    def close(self) -> None:
        """Say that nothing more is asked, which is how a mover is told to end. Idempotent."""
        with contextlib.suppress(OSError):  # the other side went first
            self._connection.shutdown(socket.SHUT_WR)

    def break_off(self) -> None:
        """Wait for nothing more from the other side, which may never close its own. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def answer_all(connection: socket.socket, answer: Callable[[Message], Message]) -> None:
    """The answering side, until the other one hangs up. What ``answer`` raises is told."""
    while True:
        try:
            asked = receive(connection)
        except (ChannelClosed, ConnectionError):
            return
        try:
            told = answer(asked)
        except Exception as refused:
            if not isinstance(refused, CacheError):
                log.exception("mover_answer_broke question=%s", asked.head.get("ask"))
            code, said = told_as(refused)
            told = Message({"refused": code, "said": said})
        finally:
            for descriptor in asked.descriptors:
                os.close(descriptor)
        try:
            send(connection, told)
        except ConnectionError:
            return


def told_as(error: Exception) -> tuple[str, str]:
    """An error as the name of its code and its words; what is none of callers' has no code."""
    return error.code.value if isinstance(error, CacheError) else "", str(error) or type(error).__name__


def error_again(code: str, said: str) -> Exception:
    """The error that ``told_as`` told of; one without a code is a MoverFault."""
    return BY_CODE[ErrorCode(code)].from_message(said) if code else MoverFault(said)
