"""Condition of the folder's disk: what may be done with it now, and why no more.

    WRITABLE    claimed: objects are read and written
    READABLE    full, or mounted for reading, when it was to be claimed: what is there is served
    GONE        not looked at yet, removed, not to be used, or something else's: nothing works

Whatever a folder is, it is looked after again, and claimed once it can be: a daemon serves from memory until then.

A full disk, or one that became read-only, refuses writes for a while and stays WRITABLE: it is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cachesvc.model.errors import InvalidRequest
from cachesvc.storage.file.folder import Folder, write_durably
from cachesvc.telemetry import events

# The folder's clock: ages of objects do not follow steps of the wall clock.
#
# It advances with the machine's time since boot, also while no daemon runs, and goes on from what the last daemon has
# left in a file. Over a reboot the wall clock says how long the machine was down, ``MOST_DOWN_MS`` at most. A new
# folder begins at the wall clock's time, so that the file times that it sets look familiar.

MOST_DOWN_MS = 3_600_000
"""Upper bound on the time that a reboot adds to ages: the wall clock may be wrong by then."""
HEAD = "cachesvc clock 1"
MOST_MS = 1 << 43
"""Latest time that a folder's clock can have (in the year 2248): files take no later ones."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot() -> str:
    """Number of this boot of the machine; empty where the kernel does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Moments(NamedTuple):
    """Sources of time. ``boot``: which boot of the machine this is; empty where unknown."""

    since_boot_ms: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    boot: Callable[[], str] = read_boot


class FolderClock:
    """``began_ms``: its first time; no object is older."""

    def __init__(self, moments: Moments = Moments()) -> None:  # noqa: B008 - immutable
        self._moments = moments
        self._boot = ""
        self._ahead_ms = max(0, moments.wall_ms()) - moments.since_boot_ms()
        self.began_ms = self.now_ms()

    def now_ms(self) -> int:
        """Milliseconds. Never goes back while a daemon runs."""
        return self._moments.since_boot_ms() + self._ahead_ms

    def bounded(self, file_ms: int) -> int:
        """A file's time within this clock's own: it may come from elsewhere."""
        return max(self.began_ms, min(file_ms, self.now_ms()))

    def load(self, path: Path) -> None:
        """Go on from what a daemon has left; what cannot be read counts as nothing."""
        self._boot = self._moments.boot()
        try:
            head, _, rest = path.read_text(encoding="ascii").strip().rpartition(": ")
            boot, since_boot, wall, now, began = rest.split()
            before = int(since_boot), int(wall), int(now), int(began)
        except (OSError, ValueError):
            return
        since_boot_ms, wall_ms, now_ms, began_ms = before
        here_ms = self._moments.since_boot_ms()
        if head != HEAD or not 0 <= began_ms <= now_ms <= MOST_MS:
            return
        down_ms = here_ms - since_boot_ms
        if boot != self._boot or down_ms < 0:
            down_ms = max(0, min(self._moments.wall_ms() - wall_ms, MOST_DOWN_MS))
        self.began_ms, self._ahead_ms = began_ms, now_ms + down_ms - here_ms

    def save(self, path: Path, aside: Path) -> None:
        """Leave the time for the next daemon. ``aside``: where it is written first. A disk that takes nothing is left
        alone."""
        moments = self._moments
        times = moments.since_boot_ms(), max(0, moments.wall_ms()), self.now_ms(), self.began_ms
        with contextlib.suppress(OSError):
            write_durably(path, aside, f"{HEAD}: {self._boot or '-'} {' '.join(map(str, times))}\n")


# Reads and writes whole objects: around the page cache where the filesystem lets us.
#
# Direct I/O wants memory, lengths and offsets on borders. Pages that lie on them move without a copy; others go through
# a buffer of the thread's own, which costs a memcpy (about 0.1 s of processor time a GB).

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
ALIGN_BYTES = 4096
MOST_PIECES = 512
"""Pieces of one call: the kernel takes 1,024."""


def padded(size_bytes: int) -> int:
    """Round a size up to the next border."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def is_aligned(pieces: Sequence[memoryview]) -> bool:
    """True where direct I/O can move the pieces as they lie."""
    if len(pieces) > MOST_PIECES:
        return False
    lengths = all(len(piece) % ALIGN_BYTES == 0 for piece in pieces)
    return lengths and all(np.frombuffer(piece, np.uint8).ctypes.data % ALIGN_BYTES == 0 for piece in pieces)


class Mover:
    """One thread's way to files: it has a buffer of its own."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def read(self, fd: int, pieces: Sequence[memoryview]) -> bool:
        """Fill the pieces from the file's start; False where it is shorter than they are. Raises OSError."""
        wanted = sum(map(len, pieces))
        if is_aligned(pieces):
            return _read_all(fd, pieces) == wanted
        buffer = self._room(padded(wanted))
        got = _read_all(fd, [buffer])
        at = 0
        for piece in pieces:
            end = min(at + len(piece), got)
            piece[: max(0, end - at)] = buffer[at : max(at, end)]
            at += len(piece)
        return got >= wanted

    def write(self, fd: int, pieces: Sequence[memoryview]) -> None:
        """Write the pieces, and zeros up to the next border, from the file's start. Raises OSError."""
        wanted = sum(map(len, pieces))
        if is_aligned(pieces):
            done = os.pwritev(fd, pieces, 0)
        else:
            buffer = self._room(padded(wanted))
            at = 0
            for piece in pieces:
                buffer[at : at + len(piece)] = piece
                at += len(piece)
            buffer[at:] = bytes(len(buffer) - at)
            wanted = len(buffer)
            done = os.pwritev(fd, [buffer], 0)
        if done != wanted:
            raise OSError(errno.ENOSPC, f"{done} of {wanted} bytes were written")

    def _room(self, size_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < size_bytes:
            memory = mmap.mmap(-1, padded(size_bytes))
            memory.madvise(mmap.MADV_DONTDUMP)
            self._buffer = memoryview(memory)
        return self._buffer[:size_bytes]


def _read_all(fd: int, pieces: Sequence[memoryview]) -> int:
    """Fill the pieces from the file's start, as far as it goes: one call may read less (2 GiB at most, or a signal
    came). Returns the bytes."""
    left, got = list(pieces), 0
    while left and (count := os.preadv(fd, left, got)):
        got += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return got


def direct_flag(folder: str) -> int:
    """O_DIRECT where files of the folder can be read and written so, else 0. Raises OSError where no file can be
    written to try it with: a full filesystem."""
    path = f"{folder}/direct"
    page = memoryview(mmap.mmap(-1, ALIGN_BYTES))
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
        except OSError as error:
            if flag and error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                continue
            raise
        try:
            is_good = os.pwritev(fd, [page], 0) == ALIGN_BYTES == os.preadv(fd, [page], 0)
        except OSError as error:
            if not flag or error.errno in NO_ROOM:
                raise
            is_good = False
        finally:
            os.close(fd)
            os.unlink(path)
        if is_good:
            return flag
    return 0


REFUSED = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM}
"""Error numbers of a disk that takes no writes, and can be read."""
AWAY = frozenset(
    (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.ENOENT, errno.ETIMEDOUT, errno.ESHUTDOWN)
)
"""Error numbers of a folder, or a disk, that is not there."""
REFUSED_SECONDS = 5.0
"""Time without writes after the disk has refused one, seconds."""

ROOM_AGAIN = 2
"""Writes like the refused one that a disk must have room for before it is said to take them again."""


class Condition(Enum):
    WRITABLE = "writable"
    READABLE = "readable"
    GONE = "gone"


class Disk:
    """``flag``: O_DIRECT where files are read and written so, else 0. ``losses``: how often the folder was lost.
    ``clock``: monotonic seconds."""

    def __init__(self, folder: Folder, clock: Callable[[], float], *, wants_direct: bool) -> None:
        self.condition = Condition.GONE
        self.flag = 0
        self.losses = 0
        self._folder = folder
        self._clock = clock
        self._wants_direct = wants_direct
        self._is_flag_known = False
        self._told: tuple[object, ...] = ()
        self._why = f"the disk of {folder.root} has not answered yet"
        self._refused, self._refused_bytes = "", 0
        self._refused_until = 0.0

    @property
    def takes_writes(self) -> bool:
        return self.condition is Condition.WRITABLE and self._clock() >= self._refused_until

    @property
    def problem(self) -> str:
        """Reason why it takes no writes, or is gone; empty where there is none."""
        if self.condition is not Condition.WRITABLE:
            return self._why
        return f"the disk of {self._folder.root} takes no writes: {self._refused}" if self._refused else ""

    def look(self) -> bool:
        """Claim the folder, or look after it; True where it is another one than before, so that its objects are to be
        found anew. Raises nothing of what a folder can be."""
        if self.condition is Condition.WRITABLE and self._folder.is_claimed:
            self._find_flag()
            self._try_again()
            return False
        was = self.condition
        if was is Condition.WRITABLE:
            self.lost("it was removed, or its disk was")
        try:
            if not self._folder.may_claim:
                raise FileNotFoundError(errno.ENOENT, "there is no folder of ours", str(self._folder.root))
            self._claim()
        except (OSError, InvalidRequest) as error:
            self._degrade(error)
        is_another = was is Condition.WRITABLE or was is not self.condition
        return is_another and self.condition is not Condition.GONE

    def refuse(self, error: OSError, size_bytes: int) -> bool:
        """A write of that size has failed; False where that is no refusal, but a fault of the disk."""
        if error.errno not in REFUSED:
            return False
        if not self._refused:
            events.warning("storage_disk_refuses", reason=str(error))
        self._refused, self._refused_bytes = str(error), size_bytes
        self._refused_until = self._clock() + REFUSED_SECONDS
        return True

    def took(self) -> None:
        if self._refused:
            self._refused = ""
            events.event("storage_disk_takes_writes", folder=str(self._folder.root))

    def lost(self, why: str) -> None:
        """The folder is not there any more."""
        if self.condition is not Condition.GONE:
            self.condition, self._why = Condition.GONE, f"the folder {self._folder.root} is gone: {why}"
            self.losses += 1
            self._told = (Condition.GONE, True)
            events.warning("storage_folder_gone", folder=str(self._folder.root), reason=why)

    def _try_again(self) -> None:
        """See whether a disk takes writes again that has refused one, while no engine has anything to write."""
        if not self._refused or self._clock() < self._refused_until:
            return
        try:
            facts = os.statvfs(self._folder.objects)
            if facts.f_bavail * facts.f_frsize > ROOM_AGAIN * self._refused_bytes:
                direct_flag(str(self._folder.mine))
                self.took()
        except OSError:
            return

    def _claim(self) -> None:
        self._folder.claim()
        if self._told:
            events.event("storage_disk_takes_writes", folder=str(self._folder.root))
        self._told = ()
        self.condition, self._why, self._refused, self._is_flag_known = Condition.WRITABLE, "", "", False
        self._find_flag()

    def _degrade(self, error: OSError | InvalidRequest) -> None:
        """Serve what can be read, if anything; logged where it is another reason than before."""
        root, number = self._folder.root, error.errno if isinstance(error, OSError) else None
        is_there = self._folder.is_ours and os.access(self._folder.objects, os.R_OK | os.X_OK)
        condition = Condition.READABLE if is_there and number in REFUSED else Condition.GONE
        told: tuple[object, ...] = (condition, number in AWAY)
        if condition is Condition.READABLE:
            why = f"the folder {root} takes no writes: {error}"
        elif number in AWAY:
            why = f"the folder {root} is gone: {error}"
        elif isinstance(error, OSError):
            why = f"{root} cannot be used: {error}{_whose(error)}; make it a folder that the daemon's user may write to"
            told = (*told, number)  # the text has names in it that change from try to try
        else:
            why = str(error).removeprefix("storage: ")
            told = (*told, why)
        if told == self._told:
            pass
        elif condition is Condition.READABLE:
            events.warning("storage_disk_refuses", reason=why)
        elif number in AWAY:
            events.warning("storage_folder_gone", folder=str(root), reason=why)
        else:
            events.warning("storage_folder_refused", folder=str(root), reason=why)
        self.losses += condition is Condition.GONE and self.condition is Condition.READABLE
        self.condition, self._why, self._told, self.flag = condition, why, told, 0

    def _find_flag(self) -> None:
        """Find out whether files can go around the page cache; later, where the disk has no room for the trial."""
        if self._is_flag_known or not self._wants_direct:
            return
        try:
            self.flag = direct_flag(str(self._folder.mine))
        except OSError:
            return
        self._is_flag_known = True
        if not self.flag:
            events.event("storage_not_direct", folder=str(self._folder.root))


def _whose(error: OSError) -> str:
    """Owner of what a permission was denied for, where that is another user."""
    path = str(error.filename or "")
    owners = [os.lstat(each).st_uid for each in (path, os.path.dirname(path)) if os.path.lexists(each)]
    if not isinstance(error, PermissionError) or owners[:1] in ([], [os.geteuid()]):
        return ""
    return f", which belongs to user {owners[0]} (this daemon is user {os.geteuid()})"
