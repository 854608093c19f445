"""The life socket: processes that are there, as the kernel reports them, and file descriptors for those that may map
memory.

What one user or process does here costs that one: connections are shared out by user and process, and a peer that
leaves an answer unread is disconnected, since descriptors on their way are the daemon's until they are read.

gRPC for Python does not tell the peer of a unix socket, so every process that attaches also connects here. A process
counts as gone when the kernel says that it has ended. Where the kernel cannot name the process itself, but at best its
number, it counts as gone too some time after its connection has ended: else the pages of a lost lease might wait
without end for a process that is not theirs.

Greeting to the peer: ``KVL1``, 16-byte process token, epoch as little-endian u64. Then the peer may ask
``FD`` + 16-byte handle token for memory, or ``LN`` for a lane, and gets ``OK`` with one descriptor, or ``NO`` and the
reason.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import select
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.model.numbers import share_of
from cachesvc.service.host.socket_files import open_to_group, remove_socket
from cachesvc.telemetry import events
from cachesvc.wire.lane import LANE_QUESTION
from cachesvc.wire.status import LIFE_BUSY, LIFE_GREETING

# Process at the other end of a unix socket, and a descriptor that reports its end.
#
# Since Linux 6.5 the kernel gives a pidfd of the very process that connected (SO_PEERPIDFD), also across pid
# namespaces. Before that there is its number alone, which may have passed to another process by the time it is looked
# up:
#
#     connect             accept      pidfd_open(number)      look
#     ───┬───────────────────┬──────────────┬──────────────────┬──▶
#        the number is the peer's           whose is it now?   the peer's, if the process of the pidfd still runs,
#                                                              began before we accepted, and the peer has not hung up
#
# Where that does not hold, or the number is 0 (another pid namespace), the process is unknown.

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77
MOST_GROUPS = 256
PROC = Path("/proc")
_START_TIME = 19
"""Index of the start time in /proc/PID/stat, counted from the field after the command's name."""


class PeerProcess(NamedTuple):
    """Process that connected. ``pidfd``: readable once the process has ended; -1: it is unknown. ``is_certain``: the
    kernel has named the process itself, not its number."""

    pid: int
    uid: int
    gids: frozenset[int]
    pidfd: int
    is_certain: bool


def peer_process(connection: socket.socket) -> PeerProcess:
    """Find the process that connected, from the kernel. The caller closes the ``pidfd``."""
    accepted = time.clock_gettime(time.CLOCK_BOOTTIME)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("iII", raw)
    gids = _groups_of(connection, gid)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
    except OSError:  # an older kernel
        return PeerProcess(pid, uid, gids, pidfd_by_number(connection, pid, accepted), is_certain=False)
    return PeerProcess(pid, uid, gids, int(struct.unpack("i", raw)[0]), is_certain=True)


def pidfd_by_number(connection: socket.socket, pid: int, accepted: float, proc: Path = PROC) -> int:
    """A pidfd of the process that connected, or -1 where that cannot be known.

    ``accepted``: when the connection was accepted, in seconds since the machine's boot.
    """
    try:
        pidfd = os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
    if pidfd >= 0 and not _is_peer(connection, pidfd, pid, accepted, proc):
        os.close(pidfd)
        return -1
    return pidfd


def _is_peer(connection: socket.socket, pidfd: int, pid: int, accepted: float, proc: Path) -> bool:
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[_START_TIME])
    except (OSError, ValueError, IndexError):
        return False
    if _is_ready(pidfd, select.POLLIN):  # it has ended: what was read may be of its successor
        return False
    began_before = (ticks + 1) / os.sysconf("SC_CLK_TCK") <= accepted
    return began_before and not _is_ready(connection.fileno(), select.POLLHUP)


def _is_ready(descriptor: int, what: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, what)
    return any(events & what for _, events in poll.poll(0))


def _groups_of(connection: socket.socket, gid: int) -> frozenset[int]:
    """All groups of the peer; only its first one where there are too many, or the kernel (before 4.13) cannot tell."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * MOST_GROUPS)
    except OSError:
        raw = b""
    return frozenset((gid, *struct.unpack(f"{len(raw) // 4}I", raw)))


TOKEN_BYTES = 16
MAX_CONNECTIONS = 4096
MAX_OF_PROCESS = 256
IDLE_SECONDS = 30.0
"""Time after which a connection without lease or lane is closed where its user's share is used up, seconds."""
ACCEPT_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    token: bytes
    process: PeerProcess
    since: float
    is_connected: bool = True


class LaneMaker(Protocol):
    """Maker of lanes for processes, by their tokens."""

    def open(self, process: bytes) -> socket.socket:
        """The process's end. Raises NotSupported, LimitExceeded."""

    def end(self, process: bytes) -> None:
        """End all lanes of the process."""


class LifeServer:
    """Runs on the event loop; calls ``arrived(token, pid, uid, gids)`` and ``gone(token)``.

    ``descriptor(process, token)`` finds the fd of a handle that the process has attached. ``lanes`` end with the
    connection over which they were asked for. ``holds(token)``: whether it matters when the process ends, even if it
    has hung up. Users of ``allowed_uids`` and members of ``allowed_gids`` may connect; others are turned away.
    ``group``: group that may open the socket beside its owner. ``grace_seconds``: how long a process that is not known
    for certain counts as there after its connection has ended. ``identify``: finds the process that connected.
    ``connections``: at a time, of which a user gets its share.
    """

    def __init__(
        self,
        path: str,
        *,
        epoch: int,
        allowed_uids: frozenset[int],
        allowed_gids: frozenset[int] = frozenset(),
        group: str = "",
        grace_seconds: float,
        arrived: Callable[[bytes, int, int, frozenset[int]], None],
        gone: Callable[[bytes], None],
        descriptor: Callable[[bytes, bytes], int | None],
        holds: Callable[[bytes], bool],
        lanes: LaneMaker,
        identify: Callable[[socket.socket], PeerProcess] = peer_process,
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._path = path
        self._epoch = epoch
        self._allowed = allowed_uids
        self._allowed_gids = allowed_gids
        self._grace_seconds = grace_seconds
        self._arrived = arrived
        self._gone = gone
        self._descriptor = descriptor
        self._holds = holds
        self._lanes = lanes
        self._group = group
        self._identify = identify
        self._connections = connections
        self._peers: dict[bytes, _Peer] = {}
        self._hung_up: dict[bytes, _Peer] = {}  # of these, those that wait for their process's end
        self._of_pid = Counter[int]()  # connections
        self._of_uid = Counter[int]()
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Listen; without a group the socket file has mode 0600. Raises Unavailable where no socket can be made."""
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)
        try:
            listener.bind(self._path)
        except OSError as error:
            listener.close()
            raise Unavailable(
                f"cannot make the socket {self._path}: {error.strerror}; choose another --socket, or let the daemon "
                "write to its folder"
            ) from error
        finally:
            os.umask(mask)
        self._listener = listener
        try:
            open_to_group(self._path, self._group)
        except Unavailable:
            self.close()
            raise
        listener.listen(MAX_CONNECTIONS)  # a restart brings all engines at once
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """End all connections, which tells every engine at once that the daemon is gone. Idempotent."""
        if self._listener is None or self._loop is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for peer in list(self._peers.values()):
            self._forget(peer)
        remove_socket(self._path)

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._loop is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left: the waiting connection would be reported again and again
            events.warning("life_not_accepting", reason=str(error), seconds=ACCEPT_PAUSE_SECONDS)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._accept_again)
            return
        connection.setblocking(False)
        process = self._identify(connection)
        self._forget_idle()
        if (reason := self._refusal(process)) is not None:
            uid = process.uid
            events.limited("life_connection_refused", uid, uid=uid, pid=process.pid, reason=reason)
            connection.close()
            if process.pidfd >= 0:
                os.close(process.pidfd)
            return
        peer = _Peer(connection, secrets.token_bytes(TOKEN_BYTES), process, self._loop.time())
        self._peers[peer.token] = peer
        self._of_pid[process.pid] += 1
        self._of_uid[process.uid] += 1
        self._arrived(peer.token, process.pid, process.uid, process.gids)
        self._loop.add_reader(connection, partial(self._serve, peer))
        if process.pidfd >= 0:
            self._loop.add_reader(process.pidfd, partial(self._ended, peer, "process_ended"))
        try:
            connection.send(LIFE_GREETING + peer.token + struct.pack("<Q", self._epoch))
        except OSError:
            self._hang_up(peer)

    def _refusal(self, process: PeerProcess) -> str | None:
        """Reason why a process may not connect; None where it may."""
        if process.uid not in self._allowed and not process.gids & self._allowed_gids:
            return "its user may not attach"
        most = min(MAX_OF_PROCESS, self._connections // 4)
        if process.pid and self._of_pid[process.pid] >= most:
            return f"it has {most} connections"
        share = share_of(self._connections, len(self._of_uid) + (process.uid not in self._of_uid))
        if self._of_uid[process.uid] >= share and not self._drop_idle(process.uid):
            return f"its user has its share of {share} connections"
        if (connected := len(self._peers) - len(self._hung_up)) >= self._connections:
            return f"there are {connected} connections"
        return None

    def _drop_idle(self, uid: int) -> bool:
        """Close the connection that has been idle for longest; False where there is none."""
        assert self._loop is not None
        before = self._loop.time() - IDLE_SECONDS
        for peer in self._peers.values():  # in the order of their coming
            if peer.since > before:
                return False
            if peer.is_connected and peer.process.uid == uid and not self._holds(peer.token):
                events.limited("life_connection_dropped", uid, pid=peer.process.pid, uid=uid)
                self._hang_up(peer)
                return True
        return False

    def _forget_idle(self) -> None:
        """Disconnected clients without leases: else a process that reconnects again and again would take every
        descriptor."""
        for peer in list(self._hung_up.values()):
            if not self._holds(peer.token):
                self._forget(peer)
                self._gone(peer.token)

    def _accept_again(self) -> None:
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _serve(self, peer: _Peer) -> None:
        try:
            message = peer.connection.recv(256)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            try:
                self._answer(peer, message)
            except OSError as error:
                events.limited("life_connection_broke", peer.process.uid, pid=peer.process.pid, reason=str(error))
            else:
                return
        self._hang_up(peer)

    def _answer(self, peer: _Peer, message: bytes) -> None:
        """Raises OSError for a peer that is gone, or that does not read."""
        if _has_unread(peer.connection):
            raise BlockingIOError(errno.EAGAIN, "an answer lies there unread")
        if message == LANE_QUESTION:
            self._give_lane(peer)
            return
        if len(message) != 2 + TOKEN_BYTES or not message.startswith(b"FD"):
            peer.connection.send(b"NO: ask FD and a 16-byte token")
            return
        descriptor = self._descriptor(peer.token, message[2:])
        if descriptor is None:
            peer.connection.send(b"NO: this process has attached no memory that has this token; attach again")
            return
        _send_descriptor(peer.connection, descriptor)

    def _give_lane(self, peer: _Peer) -> None:
        try:
            end = self._lanes.open(peer.token)
        except CacheError as refusal:
            peer.connection.send(f"NO: {refusal}".encode())
            return
        with end:
            _send_descriptor(peer.connection, end.fileno())

    def _hang_up(self, peer: _Peer) -> None:
        """The connection ended, though the process may still run; only the kernel's own word for that is waited for."""
        assert self._loop is not None
        if not peer.is_connected:
            return
        self._disconnect(peer)
        self._hung_up[peer.token] = peer
        if not peer.process.is_certain:
            self._loop.call_later(self._grace_seconds, self._ended, peer, "connection_ended")

    def _ended(self, peer: _Peer, why: str) -> None:
        if peer.token in self._peers:
            events.limited(why, peer.process.uid, pid=peer.process.pid)
            self._forget(peer)
            self._gone(peer.token)

    def _forget(self, peer: _Peer) -> None:
        assert self._loop is not None
        self._peers.pop(peer.token, None)
        self._hung_up.pop(peer.token, None)
        if peer.is_connected:
            self._disconnect(peer)
        if peer.process.pidfd >= 0:
            self._loop.remove_reader(peer.process.pidfd)
            os.close(peer.process.pidfd)

    def _disconnect(self, peer: _Peer) -> None:
        assert self._loop is not None
        peer.is_connected = False
        for held, key in ((self._of_pid, peer.process.pid), (self._of_uid, peer.process.uid)):
            held[key] -= 1
            if not held[key]:
                del held[key]
        self._lanes.end(peer.token)
        self._loop.remove_reader(peer.connection)
        peer.connection.close()


def _has_unread(connection: socket.socket) -> bool:
    """True while the peer has not read all that was sent to it."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(struct.calcsize("i"))))
    return bool(count)


def _send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """Send a descriptor. Raises OSError. Where the kernel passes no more of the daemon's descriptors, which is no fault
    of the peer, the peer gets an error."""
    try:
        socket.send_fds(connection, [b"OK"], [descriptor])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        connection.send(LIFE_BUSY)
