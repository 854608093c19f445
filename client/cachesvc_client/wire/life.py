"""The connection by which the daemon and a process know that the other one lives.

A SOCK_SEQPACKET connection beside the gRPC socket. The daemon greets with a process token and its epoch; a process asks
for memory descriptors over it (``FD`` + handle token -> ``OK`` with a descriptor, or ``NO`` + reason). Nothing else is
said. Its end is the end of the other side, so one thread reads it for as long as it is open.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable

from cachesvc.wire.status import LIFE_GREETING, LIFE_SUFFIX
from cachesvc_client.errors import DaemonUnavailable, DeadlineExceeded, NotFound

TOKEN_BYTES = 16
_EPOCH = struct.Struct("<Q")
_TIMEVAL = struct.Struct("@ll")
_GREETING_BYTES = len(LIFE_GREETING) + TOKEN_BYTES + _EPOCH.size
_MESSAGE_BYTES = 4096
_FD_BYTES = struct.calcsize("i")

log = logging.getLogger(__name__)


class LifeConnection:
    """One process's life connection. ``lost`` is set for good once either side has ended it.

    ``start`` connects. At the loss every watcher and then ``on_lost`` are called once, from the reading thread, unless
    ``close`` was called first.
    """

    def __init__(self, socket_path: str, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self.process_token = b""
        self.epoch = 0
        self.lost = threading.Event()
        self._path = socket_path + LIFE_SUFFIX
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._watchers: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._answers: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._watching = threading.Lock()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="kvcache-life", daemon=True)

    def start(self) -> None:
        """Connect and take the greeting. Raises DaemonUnavailable."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _connect(connection, self._path, self._timeout_s)
            connection.settimeout(self._timeout_s)
            greeting = connection.recv(_MESSAGE_BYTES)
        except OSError as error:
            connection.close()
            raise DaemonUnavailable(
                f"no daemon at {self._path} ({error}); go on without the cache and reconnect later"
            ) from error
        if len(greeting) != _GREETING_BYTES or not greeting.startswith(LIFE_GREETING):
            connection.close()
            raise DaemonUnavailable(f"{self._path} greets like no daemon that this client knows: {greeting[:8]!r}")
        connection.settimeout(None)
        self.process_token = greeting[len(LIFE_GREETING) : -_EPOCH.size]
        (self.epoch,) = _EPOCH.unpack(greeting[-_EPOCH.size :])
        self._socket = connection
        self._reader.start()

    def fetch_fd(self, token: bytes) -> int:
        """A descriptor of the memory behind a handle; the caller closes it.

        Raises NotFound (the daemon does not give it), DaemonUnavailable, DeadlineExceeded.
        """
        with self._asking:
            connection = self._socket
            if connection is None or self.lost.is_set():
                raise DaemonUnavailable("the daemon went away; go on without the cache and reconnect later")
            try:
                connection.send(b"FD" + token)
                answer = self._answers.get(timeout=self._timeout_s)
            except OSError as error:
                raise DaemonUnavailable(f"the daemon went away while memory was asked for ({error})") from error
            except queue.Empty:
                self._hang_up()  # a late answer must not be taken for the next one
                raise DeadlineExceeded(f"no descriptor within {self._timeout_s} s; the connection was ended") from None
        if answer is None:
            raise DaemonUnavailable("the daemon went away while memory was asked for")
        message, descriptors = answer
        if message == b"OK" and len(descriptors) == 1:
            return descriptors[0]
        _close_all(descriptors)
        raise NotFound.from_message(
            f"the daemon gives no memory for this handle: {message[2:].decode(errors='replace')}"
        )

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher()`` when the daemon goes, before calls under way end, or this connection is closed: from then
        on nobody would notice. Whoever comes after that is not called: look at ``lost`` afterwards."""
        with self._watching:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Do not call it any more; it may be running now. Idempotent."""
        with self._watching:
            self._watchers = [each for each in self._watchers if each != watcher]

    def close(self) -> None:
        """End the connection: to the daemon this process is gone. The watchers have been called when this returns,
        unless one of them calls it. Idempotent."""
        self._closing = True
        if self._socket is None:
            self.lost.set()
            return
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _hang_up(self) -> None:
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already, which is what was wanted
            log.debug("life_shutdown_late path=%s", self._path)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            while True:
                message, descriptors = _receive(self._socket)
                if not message:
                    break
                self._answers.put((message, descriptors))
        except OSError as error:
            log.debug("life_broken path=%s error=%s", self._path, error)
        self.lost.set()
        self._answers.put(None)
        self._socket.close()
        with self._watching:
            watchers = list(self._watchers)
        if not self._closing:
            log.warning("daemon_lost path=%s", self._path)
            watchers.append(self._on_lost)
        for told in watchers:
            try:
                told()
            except Exception:
                log.exception("on_lost_failed path=%s", self._path)


def _connect(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect, waiting where many do at once: on a unix socket Python's own timeout would fail at a full queue."""
    seconds, rest = divmod(timeout_s, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))
    connection.connect(path)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message with the descriptors that came along; an empty one at the end."""
    message, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += struct.unpack(f"{len(raw) // _FD_BYTES}i", raw[: len(raw) // _FD_BYTES * _FD_BYTES])
    return message, descriptors


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
