"""The folder on disk: made, claimed by a daemon, looked through, and freed of what dead daemons left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text.printable import one_line
from cachesvc.storage.file.catalogue import Entry
from cachesvc.storage.file.paths import FORMAT_TEXT, LABEL, object_of, object_path, scope_folder, scope_of
from cachesvc.storage.seam import ObjectName, Scope

MOST_LABEL_BYTES = 256
NEW = "claim."
FURNITURE = re.compile(
    r"lost\+found|\.snapshots?|\.zfs|\.Trash.*|\$RECYCLE\.BIN|System Volume Information|\.nfs.*|\.fuse_hidden.*"
    r"|\.glusterfs|a?quota\.(user|group|project)(\.new)?|\.journal|\.autorelabel|\.(lustre|mmSharedTmpDir|fscrypt|DS_Store)"
)
"""Names in the root of a mounted filesystem that are its own; nothing of it is touched."""


class Folder:
    """``objects``: where objects lie. ``mine``: this daemon's own files, once ``claim`` was called."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.objects = self.root / "objects"
        self.mine = self.root / "daemons"
        self._lock_fd: int | None = None
        self._seen: dict[str, int] = {}

    def claim(self) -> None:
        """Make the folder and a place of one's own in it; what dead daemons were writing goes.

        Raises Unavailable where it cannot be written, InvalidRequest for a folder that is something else's.
        """
        daemons = self.root / "daemons"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_format()
            self.objects.mkdir(mode=0o700, exist_ok=True)
            daemons.mkdir(mode=0o700, exist_ok=True)
            for folder in daemons.iterdir():
                _remove_dead(folder)
            name = secrets.token_hex(8)
            new = self.root / f"{NEW}{name}"  # locked before anybody takes it for that of a dead daemon
            new.mkdir(mode=0o700)
            self._lock_fd = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.mine = new.rename(daemons / name)
        except OSError as error:
            raise Unavailable(
                f"storage: {self.root} cannot be used: {error}{_whose(error)}; make it writable for the daemon's user"
            ) from error

    def release(self) -> None:
        """Release the lock: this daemon writes no more."""
        if self._lock_fd is not None:
            shutil.rmtree(self.mine, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _check_format(self) -> None:
        path = self.root / "format"
        if not path.exists():
            strange = [each.name for each in self.root.iterdir() if not _is_expected(each.name)]
            if strange and not path.exists():  # else another daemon has just begun here, too
                raise InvalidRequest(
                    f"storage: {self.root} is not empty, and not ours (it has {one_line(min(strange))!r}); give the "
                    "cache a folder of its own"
                )
            new = self.root / f"format.{secrets.token_hex(4)}"
            new.write_text(FORMAT_TEXT)
            new.rename(path)
        found = path.read_text()
        if found != FORMAT_TEXT:
            raise InvalidRequest(f"storage: {self.root} has another format ({found.strip()!r}); give another folder")

    def is_alone(self) -> bool:
        """True where no other daemon has claimed the folder."""
        return len(_folders(self.root / "daemons")) == 1

    def labels(self) -> dict[Scope, str]:
        """Labels of scopes."""
        found: dict[Scope, str] = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.objects):
                scope = scope_of(entry.name)
                if scope is not None:
                    label = Path(entry.path) / LABEL
                    found[scope] = (
                        one_line(label.read_text(errors="replace")[:MOST_LABEL_BYTES]) if label.exists() else ""
                    )
        return found

    def describe(self, scope: Scope, label: str) -> None:
        """Call a scope so. Raises OSError."""
        folder = self.objects / scope_folder(scope)
        folder.mkdir(mode=0o700, exist_ok=True)
        new = self.mine / f"label.{secrets.token_hex(4)}"
        new.write_text(label[:MOST_LABEL_BYTES])
        new.rename(folder / LABEL)

    def changed(self) -> Iterator[tuple[Scope, str]]:
        """Folders of objects in which something came or went since they were ``look``ed through; all at first."""
        for folder in _folders(self.objects):
            scope = scope_of(folder.name)
            for fan in _folders(Path(folder.path)) if scope is not None else ():
                with contextlib.suppress(FileNotFoundError):
                    if self._seen.get(fan.path) != os.stat(fan.path).st_mtime_ns and scope is not None:
                        yield scope, fan.path

    def look(self, scope: Scope, path: str) -> list[Entry]:
        """The objects of one folder, with the time of their last use; what is none of ours is left alone."""
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError):
            self._seen[path] = os.stat(path).st_mtime_ns
            for file in os.scandir(path):
                name = object_of(scope, file.name)
                if name is not None:
                    with contextlib.suppress(FileNotFoundError):
                        facts = file.stat(follow_symlinks=False)
                        found.append(Entry(name, facts.st_size, int(facts.st_mtime)))
        return found

    def remove_scope(self, scope: Scope, is_gone: Callable[[ObjectName], None]) -> int:
        """Remove all objects of a scope, known or not: how many there were."""
        folder, count = self.objects / scope_folder(scope), 0
        for fan in _folders(folder):
            for entry in self.look(scope, fan.path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(object_path(self.objects, entry.name))
                    count += 1
                is_gone(entry.name)
        return count


def _is_expected(name: str) -> bool:
    return name.startswith(("format", NEW)) or FURNITURE.fullmatch(name) is not None


def _whose(error: OSError) -> str:
    """Owner of what a permission was denied for, where that is another user."""
    path = str(error.filename or "")
    owners = [os.lstat(each).st_uid for each in (path, os.path.dirname(path)) if os.path.lexists(each)]
    if not isinstance(error, PermissionError) or owners[:1] in ([], [os.geteuid()]):
        return ""
    return f", which belongs to user {owners[0]} (this daemon is user {os.geteuid()})"


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_dead(folder: Path) -> None:
    """Remove what a dead daemon left: its lock is free."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # it is being removed by another one
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # it lives
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
