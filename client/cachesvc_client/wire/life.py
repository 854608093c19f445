"""The connection by which the daemon and a process know that the other one lives.

A SOCK_SEQPACKET connection beside the gRPC socket. The daemon greets with a process token and its epoch; a process asks
over it for memory descriptors (``FD`` + handle token) and for lanes (``LN``), and gets ``OK`` with a descriptor, or
``NO`` + reason. Nothing else is said. Its end is the end of the other side, so one thread reads it while it is open.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cachesvc.model.text import Address
from cachesvc.wire.lane import LANE_QUESTION
from cachesvc.wire.status import LIFE_BUSY, LIFE_GREETING, LIFE_SUFFIX
from cachesvc_client.core.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    UntrustedDaemon,
    keep_from_children,
)

TOKEN_BYTES = 16
_EPOCH = struct.Struct("<Q")
_PEER = struct.Struct("iII")
_TIMEVAL = struct.Struct("@ll")
_GREETING_BYTES = len(LIFE_GREETING) + TOKEN_BYTES + _EPOCH.size
_MESSAGE_BYTES = 4096
BUSY_PAUSE_S = 0.02
"""Pause before a busy daemon is asked again, seconds."""
_FD_BYTES = struct.calcsize("i")
GONE = "the daemon went away; go on without the cache, reconnect and recompute"
NOBODY_LISTENS = (errno.ENOENT, errno.ECONNREFUSED)

log = logging.getLogger(__name__)


class LifeConnection:
    """One process's life connection. ``lost`` is set for good once the daemon has ended it, or this side gave it up.

    Waits on the daemon's memory depend on the daemon's end, after which no process writes there; ``watch`` reports that
    alone. While there is a watcher, giving up keeps the connection open to notice it. ``daemon_uid``: the user whose
    process listens.
    """

    def __init__(self, socket_path: str, timeout_s: float, on_lost: Callable[[], None]) -> None:
        """``on_lost`` is called once, at the daemon's end or at ``give_up``; never after ``close``."""
        self.process_token = b""
        self.epoch = 0
        self.daemon_uid = -1
        self.lost = threading.Event()
        self._path = socket_path
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._watchers: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._answers: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._unanswered = 0
        self._asking = threading.Lock()
        self._state = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="kvcache-life", daemon=True)

    def start(self) -> None:
        """Connect and take the greeting. Raises DaemonUnavailable."""
        path = self.path
        try:
            connection, greeting = _greeted(path, self._timeout_s)
        except OSError as error:
            raise DaemonUnavailable(
                f"no daemon at {self._path} ({error.strerror or error}); start cachesvcd or name its socket in "
                "CACHESVC_SOCKET; until then go on without the cache"
            ) from error
        if greeting is None:
            connection.close()
            raise DaemonUnavailable(f"{path} greets like no daemon that this client knows")
        self.process_token, self.epoch = greeting
        self._socket = connection
        self.daemon_uid = listener_uid(connection)
        keep_from_children(self)
        self._reader.start()

    @property
    def path(self) -> str:
        return self._path + LIFE_SUFFIX

    def is_replaced(self) -> bool:
        """True when the daemon of this connection serves no more: no process listens at its sockets, or another life of
        it does. Asks the sockets; False where they do not answer."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                if probe.connect_ex(self._path) in NOBODY_LISTENS:
                    return True
            connection, greeting = _greeted(self.path, self._timeout_s)
        except OSError as error:
            return error.errno in NOBODY_LISTENS
        connection.close()
        return greeting is not None and greeting[1] != self.epoch

    def fetch_fd(self, token: bytes) -> int:
        """A descriptor of the memory behind a handle; the caller closes it.

        Raises NotFound (the daemon does not give it), DaemonUnavailable, DeadlineExceeded.
        """
        return self._ask(b"FD" + token, "memory for this handle")

    def fetch_lane(self) -> socket.socket:
        """Get this process's end of a new lane; the caller closes it. Raises as ``fetch_fd``."""
        return socket.socket(fileno=self._ask(LANE_QUESTION, "lane"))

    def _ask(self, question: bytes, what: str) -> int:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            message, descriptors = self._question(question, what, deadline_s)
            if message == b"OK" and len(descriptors) == 1:
                return descriptors[0]
            _close_all(descriptors)
            if message != LIFE_BUSY:
                raise NotFound.from_message(f"the daemon gives no {what}: {message[2:].decode(errors='replace')}")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"the daemon passes no descriptors just now, and so no {what}; ask again")
            self.lost.wait(BUSY_PAUSE_S)

    def _question(self, question: bytes, what: str, deadline_s: float) -> tuple[bytes, list[int]]:
        with self._asking:
            connection = self._socket
            if connection is None or self.lost.is_set():
                raise DaemonUnavailable("the daemon went away; go on without the cache and reconnect later")
            try:
                connection.send(question)
                self._unanswered += 1
                answer = self._take_answer(deadline_s)
            except OSError as error:
                raise DaemonUnavailable(f"the daemon went away while it was asked for {what} ({error})") from error
            except queue.Empty:
                raise DeadlineExceeded(f"no descriptor within {self._timeout_s} s for {what}") from None
        if answer is None:
            raise DaemonUnavailable(f"the daemon went away while it was asked for {what}")
        return answer

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher()`` when the daemon has ended the connection, before calls under way end. A later watcher is
        not called: look at ``lost`` afterwards."""
        with self._state:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Do not call it any more; it may be running now. Idempotent."""
        with self._state:
            self._watchers = [each for each in self._watchers if each != watcher]
            is_needless = self.lost.is_set() and not self._watchers
        if is_needless:
            self._hang_up()

    def give_up(self) -> None:
        """Note that the daemon serves no more, though its end has not come yet: ``lost`` is set, and callbacks run.
        Idempotent."""
        if self._leave():
            self._call([self._on_lost])

    def close(self) -> None:
        """Ask nothing any more, and end the connection unless there is a watcher: to the daemon this process is gone
        then. Idempotent."""
        self._leave()
        if not self._watchers:
            self.join()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the connection has ended and the watchers were called; False when the time passes first."""
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def forget(self) -> None:
        """In a child of this process: the connection is the parent's."""
        if self._socket is not None:
            self._socket.close()

    def _leave(self) -> bool:
        """True for the first to say that it is over."""
        with self._state:
            is_first = not self.lost.is_set()
            self.lost.set()
            is_needless = not self._watchers
        if is_needless:
            self._hang_up()
        return is_first

    def _take_answer(self, deadline_s: float) -> tuple[bytes, list[int]] | None:
        """The answer to the last question; those to earlier ones, whose callers gave up, come before it."""
        while True:
            answer = self._answers.get(timeout=max(deadline_s - time.monotonic(), 0))
            if answer is None:
                return None
            self._unanswered -= 1
            if not self._unanswered:
                return answer
            _close_all(answer[1])

    def _hang_up(self) -> None:
        if self._socket is None:
            return
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
        with self._state:
            is_first = not self.lost.is_set()
            self.lost.set()
            callbacks = list(self._watchers)
        self._answers.put(None)
        self._socket.close()
        if is_first:
            log.warning("daemon_lost path=%s", self._path)
            callbacks.append(self._on_lost)
        self._call(callbacks)

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("on_lost_failed path=%s", self._path)


def _greeted(path: str, timeout_s: float) -> tuple[socket.socket, tuple[bytes, int] | None]:
    """A connection and its greeting, process token and epoch; None for what greets otherwise. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connect(connection, path, timeout_s)
        connection.settimeout(timeout_s)
        greeting = connection.recv(_MESSAGE_BYTES)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    if len(greeting) != _GREETING_BYTES or not greeting.startswith(LIFE_GREETING):
        return connection, None
    (epoch,) = _EPOCH.unpack(greeting[-_EPOCH.size :])
    return connection, (greeting[len(LIFE_GREETING) : -_EPOCH.size], epoch)


def connect(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect, waiting where many do at once: on a unix socket Python's own timeout would fail at a full queue. Raises
    OSError."""
    seconds, rest = divmod(timeout_s, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))
    connection.connect(path)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))


def listener_uid(connection: socket.socket) -> int:
    """The user whose process made the socket that ``connection`` reached."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(raw)[1])


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message with its descriptors; an empty one at the end."""
    message, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += struct.unpack(f"{len(raw) // _FD_BYTES}i", raw[: len(raw) // _FD_BYTES * _FD_BYTES])
    return message, descriptors


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# Rules for sending a token: never in plain text off this machine, and on a unix socket only to the daemon's own user.
#
# The kernel names the user that serves a socket. The daemon's user is the one that CACHESVC_DAEMON_UID names; where it
# names none, one's own, or the owner of the socket's folder, if no other user could have made that folder or can put
# something into it. Root may be the daemon in any case.

DAEMON_UID_VARIABLE = "CACHESVC_DAEMON_UID"
PROBE_S = 1.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_loopback(address: str) -> bool:
    """True for a HOST:PORT that does not leave this machine; other forms of gRPC's addresses are not."""
    return Address(address.rpartition(":")[0].strip("[]"), 0).is_loopback


def require_private(address: str) -> None:
    """Check HOST:PORT before a token goes there without TLS. Raises InvalidRequest unless it is loopback."""
    if not is_loopback(address):
        raise InvalidRequest(
            f"a token is not sent to {address} in plain text: name the roots that sign the daemon's certificate "
            "(root_ca=, --tls-ca FILE, CACHESVC_TLS_CA; 'system' for this machine's own), or leave the token out"
        )


def may_show(address: str) -> bool:
    """True where a token may go to ``address`` now; False where no process serves that unix socket: send none then.

    Raises UntrustedDaemon for a socket that another user serves.
    """
    if not address.startswith(("/", ".")):
        return True  # ``require_private`` is what TCP is asked
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            connect(probe, address, PROBE_S)
            uid = listener_uid(probe)
    except OSError:  # gRPC says why, as it would without a token
        return False
    require_daemon(address, uid)
    return True


def require_daemon(path: str, uid: int, environment: Mapping[str, str] = os.environ) -> None:
    """``uid`` serves the socket at ``path``: is that the daemon's user? Raises UntrustedDaemon, InvalidRequest."""
    said = environment.get(DAEMON_UID_VARIABLE, "")
    if said and not said.isdecimal():
        raise InvalidRequest(f"{DAEMON_UID_VARIABLE} is {said!r}; it is the number of the daemon's user")
    if uid == 0 or (uid == int(said) if said else uid in (os.geteuid(), folder_owner(path))):
        return
    raise UntrustedDaemon(
        f"user {uid} serves {path}, and nothing says that this is the daemon: no token is sent there. If it is, set "
        f"{DAEMON_UID_VARIABLE}={uid}"
    )


def folder_owner(path: str) -> int | None:
    """The owner of a socket's folder, if it is his or root's doing alone that it is there, and what lies in it."""
    named, real = Path(path).absolute().parent, Path(path).resolve().parent
    try:
        owner = real.stat().st_uid
        above = [each.stat() for each in {named, *named.parents, real, *real.parents}]
    except OSError:
        return None
    is_his = all(each.st_uid in (0, owner) and not each.st_mode & _OTHERS_WRITE for each in above)
    return owner if is_his else None
