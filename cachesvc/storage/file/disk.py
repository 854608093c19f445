"""Condition of the folder's disk: what may be done with it now, and why no more.

    WRITABLE    claimed: objects are read and written
    READABLE    full, or mounted for reading, when it was to be claimed: what is there is served
    GONE        not looked at yet, removed, not to be used, or something else's: nothing works

Whatever a folder is, it is looked after again, and claimed once it can be: a daemon serves from memory until then.

A full disk, or one that became read-only, refuses writes for a while and stays WRITABLE: it is tried again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from enum import Enum

from cachesvc.model.errors import InvalidRequest
from cachesvc.storage.file.direct import NO_ROOM, direct_flag
from cachesvc.storage.file.folder import Folder
from cachesvc.telemetry import events

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
    """See above."""

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
        """True where a write may succeed."""
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
        """A write has succeeded."""
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
