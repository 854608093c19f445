"""Process at the other end of a unix socket, and a descriptor that reports its end.

Since Linux 6.5 the kernel gives a pidfd of the very process that connected (SO_PEERPIDFD), also across pid namespaces.
Before that there is its number alone, which may have passed to another process by the time it is looked up:

    connect             accept      pidfd_open(number)      look
    ───┬───────────────────┬──────────────┬──────────────────┬──▶
       the number is the peer's           whose is it now?   the peer's, if the process of the pidfd still runs,
                                                             began before we accepted, and the peer has not hung up

Where that does not hold, or the number is 0 (another pid namespace), the process is unknown.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

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
