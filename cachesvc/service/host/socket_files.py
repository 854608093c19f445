"""The files of the daemon's sockets: their owner and mode, and the leftovers of a killed daemon.

An answer on a socket does not decide whether its files can be taken over: a daemon that ends has let go of
it, yet still has memory to give back, and would then remove the files of the next one. So a daemon holds a lock beside
its socket until nothing of it is left. Its movers hold the same lock: those of a killed daemon may have copies on their
way to its memory, so the lock is free when the last of them has ended. One that hangs holds the node up for
``MOVERS_SECONDS`` and no longer: a new daemon has memory of its own, which no earlier mover writes to.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import grp
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from cachesvc.model.errors import Unavailable
from cachesvc.model.text import one_line
from cachesvc.telemetry import events
from cachesvc.wire.status import LIFE_SUFFIX

GROUP_MODE = 0o660
LOCK_SUFFIX = ".lock"
TAKE_SECONDS = 30.0
"""Time that a daemon waits for one that is ending, seconds: to unpin a large host pool takes a while."""
MOVERS_SECONDS = 10.0
"""Time that a daemon waits for the movers of a killed one, seconds: until then their memory is not free."""
LOOK_SECONDS = 0.02
TELL_SECONDS = 0.5
"""Time after which a daemon that waits says for what, seconds."""
MOST_GROUP = (1 << 32) - 2
"""Highest group id: the number above it means no change."""


class SocketClaim:
    """The right to serve on the socket ``path``, held from ``take`` to ``release``."""

    def __init__(self, path: str, wait_seconds: float = TAKE_SECONDS, movers_seconds: float = MOVERS_SECONDS) -> None:
        self._socket = path
        self._path = path + LOCK_SUFFIX
        self._wait_seconds = wait_seconds
        self._movers_seconds = movers_seconds
        self._held: list[int] = []

    async def take(self) -> None:
        """Wait for a daemon that is ending, and remove what a killed one has left.

        Raises Unavailable where one runs, or the files cannot be had.
        """
        if not Path(self._path).parent.is_dir():
            raise Unavailable(
                f"the folder of the socket {self._socket} does not exist; make it (sudo install "
                "-d -m 0750 -o USER FOLDER, or RuntimeDirectory=cachesvc in a systemd unit) or choose another --socket"
            )
        began, has_told = time.monotonic(), False
        while not self._held and not self._try():
            if is_served(self._socket):
                raise Unavailable(
                    f"socket {self._socket} is in use by a running daemon; stop it or choose another --socket"
                )
            waited = time.monotonic() - began
            if waited > self._movers_seconds and self._take_from_movers():
                break
            if waited > self._wait_seconds:
                holders = _holders_of(self._path)
                raise Unavailable(
                    f"{self._path} is held for more than {self._wait_seconds:g} s by {holders}: a daemon that starts "
                    "or ends; end it (kill -9), or choose another --socket"
                )
            if waited > TELL_SECONDS and not has_told:
                has_told = True
                events.warning(
                    "start_waits", lock=self._path, holders=_holders_of(self._path), seconds=self._wait_seconds
                )
            await asyncio.sleep(LOOK_SECONDS)
        try:
            _make_way(self._socket)
            _make_way(self._socket + LIFE_SUFFIX, has_lock=True)
        except Unavailable:
            self.release()
            raise

    def held(self) -> tuple[int, ...]:
        """Descriptor of the lock, for processes that must end before the next daemon starts."""
        return tuple(self._held)

    def release(self) -> None:
        """Release the lock for the next daemon, where no mover holds it still. Idempotent."""
        if not self._held:
            return
        os.close(self._held.pop())
        with suppress(Unavailable):  # its folder has gone
            if self._try():  # a mover that cannot be ended keeps the file, by which the next daemon finds it
                Path(self._path).unlink(missing_ok=True)
                os.close(self._held.pop())

    def _take_from_movers(self) -> bool:
        """Replace a lock that only movers of a killed daemon hold. One daemon at a time looks and replaces: another one
        would remove the new lock for the old. True where it is ours."""
        folder = os.open(Path(self._path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not _is_orphaned(self._path):
                return False
            events.warning("start_beside_movers", lock=self._path, holders=_holders_of(self._path))
            remove_socket(self._path)
            return self._try()
        finally:
            os.close(folder)

    def _try(self) -> bool:
        try:
            descriptor = self._open()
        except FileExistsError:  # another daemon has just made it
            return False
        except OSError as error:
            raise Unavailable(f"cannot make the socket {self._socket}: {self._path}: {self._reason(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(descriptor), Path(self._path).stat())
        except (BlockingIOError, FileNotFoundError):  # held; or its holder has just removed it
            is_ours = False
        if is_ours:
            self._held.append(descriptor)
        else:
            os.close(descriptor)
        return is_ours

    def _open(self) -> int:
        """Open the lock's file, or make it. Not both in one: the kernel refuses root a file of another user in a folder
        such as /tmp where the call might make it. Raises OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, flags)
        except FileNotFoundError:
            return os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)

    def _reason(self, error: OSError) -> str:
        """Reason why there is no lock, and what to do."""
        try:
            owner = os.lstat(self._path).st_uid
        except OSError:
            owner = os.geteuid()
        if not isinstance(error, PermissionError) or owner == os.geteuid():
            return f"{error.strerror}; choose another --socket, or let the daemon write to its folder"
        return (
            f"it belongs to user {owner}, and this daemon is user {os.geteuid()}: a daemon of that user runs, or was "
            "killed and has left it; stop that daemon, or remove the file as that user or root, or choose another "
            "--socket"
        )


def _is_orphaned(path: str) -> bool:
    """True where the process that took the lock ``path`` has ended: its movers hold it. False where that is unknown,
    as with one in another PID namespace."""
    with suppress(FileNotFoundError):
        found = Path(path).stat()
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for words in map(str.split, Path("/proc/locks").read_text(encoding="ascii").splitlines()):
            if words[1] == "FLOCK" and words[5] == place:
                return int(words[4]) > 0 and not Path(f"/proc/{words[4]}").exists()
    return False


def _holders_of(path: str) -> str:
    """Processes that hold the lock ``path``, with their names, as far as this one may look."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(_is_lock(fd, path) for fd in (process / "fd").iterdir()):
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                found.append(f"process {process.name} ({one_line(name)})")
    return ", ".join(sorted(found)) or "a process of another user or another PID namespace"


def _is_lock(fd: Path, path: str) -> bool:
    """True for a descriptor by which the file is locked; others wait for it with theirs."""
    with suppress(OSError):
        is_there = fd.readlink().name == Path(path).name and os.path.samestat(fd.stat(), Path(path).stat())
        return is_there and "FLOCK" in (fd.parent.parent / "fdinfo" / fd.name).read_text(encoding="utf-8")
    return False


def remove_socket(path: str) -> None:
    """Remove the file of a socket or of its lock, if it is still there."""
    Path(path).unlink(missing_ok=True)


def open_to_group(path: str, group: str) -> None:
    """Let ``group``, a name or a number, connect; an empty one changes nothing.

    The file was made with mode 0600, so no other user could connect before. Raises Unavailable for a group that is
    unknown, or that this process may not give the file to.
    """
    if not group:
        return
    number = group_number(group)
    try:
        os.chown(path, -1, number)
        Path(path).chmod(GROUP_MODE)
    except OSError as error:
        raise Unavailable(
            f"cannot give the socket {path} to group {group}: {error.strerror}; the daemon must run as root or be a "
            "member of that group"
        ) from error


def group_number(group: str) -> int:
    """The number of a group that is named, or given by its number. Raises Unavailable."""
    try:
        number = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        number = MOST_GROUP + 1
    if number > MOST_GROUP:
        raise Unavailable(f"socket_group: there is no group {group!r} here; name another or give its number")
    return number


def is_served(path: str) -> bool:
    """True where a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _make_way(path: str, *, has_lock: bool = False) -> None:
    """Remove a socket file without a listener. ``has_lock``: the lock of a daemon's other socket says that it has none.

    Raises Unavailable when a process listens, or when the file is not a socket: that has another owner and is not ours
    to remove.
    """
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise Unavailable(f"{path} exists and is not a socket; move it away or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        result = errno.ECONNREFUSED if has_lock else probe.connect_ex(path)
    if result == 0:
        raise Unavailable(f"socket {path} is in use by a running daemon; stop it or choose another --socket")
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise Unavailable(f"{path} exists and is not a socket of ours ({os.strerror(result)}); choose another --socket")
    remove_socket(path)
