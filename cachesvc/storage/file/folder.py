"""The folder on disk: made, claimed by a daemon, looked through, and freed of what dead daemons left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import one_line
from cachesvc.storage.file.catalogue import Entry
from cachesvc.storage.file.space import FORMAT_TEXT, LABEL, allocated_bytes, object_of, scope_folder, scope_of
from cachesvc.storage.seam import ObjectName, Scope
from cachesvc.telemetry import events

MOST_LABEL_BYTES = 256
NEW = "claim."
CLAIM_TRIES = 16
FURNITURE = re.compile(
    r"lost\+found|\.snapshots?|\.zfs|\.Trash.*|\$RECYCLE\.BIN|System Volume Information|\.nfs.*|\.fuse_hidden.*"
    r"|\.glusterfs|a?quota\.(user|group|project)(\.new)?|\.journal|\.autorelabel|\.(lustre|mmSharedTmpDir|fscrypt|DS_Store)"
)
"""Names in the root of a mounted filesystem that are its own; nothing of it is touched."""
MOST_FORMAT_BYTES = 4096
DAEMON = re.compile("[0-9a-f]{16}")
"""Name of a daemon's own folder."""
UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
"""Error numbers of filesystems that cannot sync a folder."""


class Folder:
    """``objects``: where objects lie. ``mine``: this daemon's own files, once ``claim`` was called. ``clock``: file of
    the folder's time."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.objects = self.root / "objects"
        self.mine = self.root / "daemons"
        self.clock = self.root / "clock"
        self._lock_fd: int | None = None
        self._device: int | None = None
        self._seen: dict[str, int] = {}

    def claim(self) -> None:
        """Make the folder and a place of one's own in it; what dead daemons were writing goes.

        Raises OSError where it cannot be written, InvalidRequest for a folder that is something else's.
        """
        self.release()
        self._seen.clear()
        for left in reversed(range(CLAIM_TRIES)):
            try:
                self._claim()
                return
            except (FileNotFoundError, BlockingIOError):  # another daemon that starts has taken it for a dead one's
                if not left:
                    raise

    def _claim(self) -> None:
        daemons = self.root / "daemons"
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_format()
        self.objects.mkdir(mode=0o700, exist_ok=True)
        daemons.mkdir(mode=0o700, exist_ok=True)
        self.clear_dead()
        for part in self.root.glob("format.*"):
            part.unlink(missing_ok=True)
        name = secrets.token_hex(8)
        new = self.root / f"{NEW}{name}"  # locked before anybody takes it for that of a dead daemon
        new.mkdir(mode=0o700)
        try:
            self._lock_fd = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.mine = new.rename(daemons / name)
            self._device = os.stat(self.root).st_dev
        except OSError:
            self._unlock()
            shutil.rmtree(new, ignore_errors=True)
            raise

    def release(self) -> None:
        """Release the lock: this daemon writes no more. Idempotent."""
        if self._lock_fd is not None:
            shutil.rmtree(self.mine, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)

    @property
    def is_claimed(self) -> bool:
        """True while the place that was claimed is where it was."""
        try:
            return self._lock_fd is not None and os.path.samestat(os.fstat(self._lock_fd), os.stat(self.mine / "lock"))
        except OSError:
            return False

    @property
    def is_ours(self) -> bool:
        """True where the folder is there, and of our format."""
        try:
            return self._format() == FORMAT_TEXT.encode()
        except OSError:
            return False

    @property
    def may_claim(self) -> bool:
        """True where a claim writes to the filesystem that was meant. A folder that is gone may have been a mount
        point, or below one: one that was claimed before is not made anew, and an empty one is taken on the filesystem
        of before alone."""
        if self._device is None or self.is_ours:
            return True
        try:
            return os.stat(self.root).st_dev == self._device and not _strange(self.root)
        except OSError:
            return False

    def _format(self) -> bytes:
        """Content of the file ``format``; empty where there is none. Raises OSError."""
        try:
            fd = os.open(self.root / "format", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return b""
        try:
            return os.read(fd, MOST_FORMAT_BYTES)
        finally:
            os.close(fd)

    def _check_format(self) -> None:
        """Say whose the folder is, where nothing does: an empty or torn ``format`` beside files of ours is what a power
        cut leaves. Raises OSError, InvalidRequest for a folder that is something else's."""
        found = self._format()
        if found == FORMAT_TEXT.encode():
            return
        if not FORMAT_TEXT.encode().startswith(found.rstrip(b"\0")):
            said = one_line(found.decode(errors="replace").strip())
            raise InvalidRequest(f"storage: {self.root} has another format ({said!r}); give another folder")
        if strange := _strange(self.root):
            raise InvalidRequest(
                f"storage: {self.root} is not empty, and not ours (it has {one_line(min(strange))!r}); give the cache "
                "a folder of its own"
            )
        write_durably(self.root / "format", self.root / f"format.{secrets.token_hex(4)}", FORMAT_TEXT)

    def is_alone(self) -> bool:
        """True where no other daemon has claimed the folder."""
        return len(_folders(self.root / "daemons")) == 1

    def clear_dead(self) -> None:
        """Remove what dead daemons were writing, or were about to write over."""
        claimed = (Path(each.path) for each in _folders(self.root / "daemons"))
        for folder in (*claimed, *self.root.glob(f"{NEW}*")):
            if _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def others_files(self) -> Iterator[tuple[str, int, bool]]:
        """Files of other daemons that are no objects: the path, the bytes, and True for those of a dead one, which
        could not be removed."""
        for folder in _folders(self.root / "daemons"):
            if folder.path != str(self.mine):
                is_dead = _is_dead(Path(folder.path))
                for each in _files(folder.path):
                    with contextlib.suppress(FileNotFoundError):
                        yield each.path, allocated_bytes(each.stat(follow_symlinks=False)), is_dead

    def labels(self) -> dict[Scope, str]:
        found: dict[Scope, str] = {}
        for folder in _folders(self.objects):
            scope = scope_of(folder.name)
            if scope is not None:
                found[scope] = ""
                with contextlib.suppress(OSError):
                    text = (Path(folder.path) / LABEL).read_text(errors="replace")
                    found[scope] = one_line(text[:MOST_LABEL_BYTES])
        return found

    def describe(self, scope: Scope, label: str) -> None:
        """Call a scope so. Raises OSError."""
        folder = self.objects / scope_folder(scope)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_durably(folder / LABEL, self.mine / f"label.{secrets.token_hex(4)}", label[:MOST_LABEL_BYTES])

    def keep_label(self, scope: Scope, label: str) -> None:
        """Call a scope so, as far as the disk takes it: a label is for operators alone."""
        try:
            self.describe(scope, label)
        except OSError as error:
            events.warning("storage_label_not_kept", reason=str(error))

    def changed(self, *, anew: bool) -> Iterator[tuple[Scope, str]]:
        """Folders of objects in which something came or went since they were ``look``ed through; all where ``anew``, as
        after a scan that did not come to its end."""
        if anew:
            self._seen.clear()
        for folder in _folders(self.objects):
            scope = scope_of(folder.name)
            for fan in _folders(Path(folder.path)) if scope is not None else ():
                changed_ns = _changed_ns(fan.path)
                if scope is not None and (changed_ns is None or self._seen.get(fan.path) != changed_ns):
                    yield scope, fan.path

    def look(self, scope: Scope, path: str, seen: Callable[[], None] = lambda: None) -> list[Entry]:
        """The objects of one folder, each with its file's time in ms; what is none of ours is left alone. ``seen``:
        called for each file."""
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError):
            self._seen[path] = os.stat(path).st_mtime_ns
            for file in os.scandir(path):
                seen()
                name = object_of(scope, file.name)
                if name is not None:
                    with contextlib.suppress(FileNotFoundError):
                        facts = file.stat(follow_symlinks=False)
                        found.append(Entry(name, allocated_bytes(facts), facts.st_mtime_ns // 1_000_000, None))
        return found

    def remove_scope(self, scope: Scope, remove: Callable[[ObjectName], None]) -> int:
        """Have all objects of a scope removed, known or not: how many there were."""
        folder, count = self.objects / scope_folder(scope), 0
        for fan in _folders(folder):
            for entry in self.look(scope, fan.path):
                remove(entry.name)
                count += 1
        return count


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(path: str) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []


def _changed_ns(path: str) -> int | None:
    """Time of a folder's last change; None where it cannot be asked for: a look at it says why."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _strange(root: Path) -> list[str]:
    """Names in a folder that are not ours, nor its filesystem's. Raises OSError."""
    ours: dict[str, Callable[[str], object]] = {"objects": scope_of, "daemons": DAEMON.fullmatch}
    strange: list[str] = []
    for each in os.scandir(root):
        if each.name in ours and each.is_dir(follow_symlinks=False):
            strange += [
                f"{each.name}/{name}"
                for name in os.listdir(each.path)
                if not ours[each.name](name) and FURNITURE.fullmatch(name) is None
            ]
        elif each.name != "clock" and not each.name.startswith(("format", NEW)) and not FURNITURE.fullmatch(each.name):
            strange.append(each.name)
    return strange


def write_durably(path: Path, aside: Path, content: str) -> None:
    """Write a small file of ours, so that a power cut at any moment leaves the whole of what was there before, or the
    whole of this. ``aside``: where it is written first; nothing is left there. Raises OSError."""
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, content.encode()) != len(content.encode()):
                raise OSError(errno.ENOSPC, "the disk took a part of it", str(aside))
            os.fsync(fd)
        finally:
            os.close(fd)
        aside.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have a folder's names survive a power cut, where its filesystem can promise that. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSYNCED:
            raise
    finally:
        os.close(fd)


def _is_dead(folder: Path) -> bool:
    """True where no daemon holds the folder's lock. One without a lock is dead, too: a daemon makes the lock first."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # it lives
    else:
        return True
    finally:
        os.close(fd)
