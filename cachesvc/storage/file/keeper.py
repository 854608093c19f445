"""The thread that looks after the folder: finds what is there, keeps uses over restarts, evicts, and sees it return."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import one_line
from cachesvc.storage.file.catalogue import NO_ROW, Catalogue, FoundObjects
from cachesvc.storage.file.disk import Condition, Disk, FolderClock
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.space import Space, object_path
from cachesvc.storage.objects import HEADER_BYTES, is_newer, parent_in
from cachesvc.storage.seam import ObjectName
from cachesvc.storage.spec import StorageSpec, count_option, option, seconds_option, size_option
from cachesvc.telemetry import events

AWAY_SECONDS = 1.0
"""Interval between two looks at a folder that takes no writes, or is gone, seconds."""
SAVED_A_ROUND = 4096
"""Blocks whose last use is written to their files in one round: some 20 ms."""
HUNG_SECONDS = 10.0
"""Time without an answer of the disk after which it is said to hang, seconds."""
CLOSE_SECONDS = 1.0
"""A thread that hangs in the filesystem is left behind after so long, seconds."""


class Keeper:
    """``looked``: set once the disk has answered for the first time, ``counted``: once the bytes of what was there are
    known, ``found``: once all of it is."""

    def __init__(
        self,
        options: FileOptions,
        folder: Folder,
        disk: Disk,
        catalogue: Catalogue,
        space: Space,
        clock: FolderClock,
    ) -> None:
        self.looked, self.counted, self.found = threading.Event(), threading.Event(), threading.Event()
        self._options = options
        self._folder = folder
        self._disk = disk
        self._catalogue = catalogue
        self._space = space
        self._clock = clock
        self._save_until = 0.0
        self._asked: float | None = None
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._work, name="storage-keeper", daemon=True)

    @property
    def hung_seconds(self) -> float:
        """Time for which the disk has not answered, seconds; 0 where that is not long."""
        asked = self._asked
        seconds = 0.0 if asked is None else time.monotonic() - asked
        return seconds if seconds >= HUNG_SECONDS else 0.0

    def start(self) -> None:
        """Begin to claim the folder, and to find what is there."""
        self._thread.start()

    def hurry(self) -> None:
        """Look after the folder now: something is wrong with it."""
        self._due.set()

    def close(self) -> None:
        """Write what a restart needs to know. Idempotent."""
        self._save_until = time.monotonic() + CLOSE_SECONDS
        self._stopping.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        yield_to_callers()
        while not self._stopping.is_set():
            began = time.monotonic()
            self._answered()
            try:
                self._round()
            except Exception:  # noqa: BLE001 - the root of a thread: the next round may be better
                events.failure("storage_scan_broke")
            self._asked = None
            pause = max(self._options.rescan, 20 * (time.monotonic() - began))
            self._due.wait(pause if self._disk.condition is Condition.WRITABLE else min(pause, AWAY_SECONDS))
            self._due.clear()
        while self._disk.condition is Condition.WRITABLE and self._save() and time.monotonic() < self._save_until:
            pass

    def _round(self) -> None:
        is_another = self._disk.look()
        if is_another:
            self._find_anew()
        self.looked.set()
        if self._disk.condition is Condition.GONE:
            if self.counted.is_set():
                self._lose()
            return
        self._scan()
        self.counted.set()
        self._read_headers()
        if self._disk.condition is Condition.WRITABLE:
            self._save()
            self._shrink()
        self.found.set()

    def _answered(self) -> None:
        """The disk is asked for something now, and has answered what it was asked for before."""
        self._asked = time.monotonic()

    def _find_anew(self) -> None:
        """The folder is another one, or is back."""
        self._lose()
        self._space.mine = self._folder.mine
        self._clock.load(self._folder.clock)
        if self._disk.condition is Condition.WRITABLE:
            for scope, label in self._catalogue.labels.items():
                self._folder.keep_label(scope, label)

    def _lose(self) -> None:
        """Nothing that is known of the folder counts."""
        self.found.clear()
        self.counted.clear()
        self._space.lose()
        self._catalogue.clear()

    def _scan(self) -> None:
        """Look through folders in which something has changed: all of them at first."""
        is_first = not self.counted.is_set()
        if not is_first and self._folder.is_alone():
            self._space.others_bytes = 0
            return
        if self._disk.condition is Condition.WRITABLE:
            self._folder.clear_dead()
        others_bytes = 0
        for path, size_bytes, is_dead in self._folder.others_files():
            if is_dead:
                self._space.discard(path, size_bytes)
            else:
                others_bytes += size_bytes
        self._space.others_bytes = others_bytes
        for scope, label in self._folder.labels().items():
            if label:
                self._catalogue.describe(scope, label)
        found = FoundObjects()
        for scope, path in self._folder.changed(anew=is_first):
            if self._stopping.is_set():
                return
            try:
                entries = self._folder.look(scope, path, self._answered)
            except OSError as error:
                events.warning("storage_folder_unread", folder=path, reason=str(error))
                continue
            found.add(entries)
        # What another daemon removed stays known until it is asked for, or evicted. Of times that are out of bounds the
        # order counts.
        self._catalogue.add_all(each._replace(used=self._clock.bounded(each.used)) for each in found.in_order())

    def _read_headers(self) -> None:
        """Find the parents of what was found: eviction is leaf-first after a restart, too. The last used blocks are
        read first, each with all above it: so what is known at any moment are ends of paths, and these can go while the
        rest is read."""
        rows = self._catalogue.unlinked_rows()
        if not rows:
            return
        while rows:
            row = rows.pop()
            while row != NO_ROW and (name := self._catalogue.unlinked_at(row)) is not None:
                if self._stopping.is_set():
                    return
                self._answered()
                row = self._link(name)
        self._catalogue.demote_detached()

    def _link(self, name: ObjectName) -> int:
        header = self._header_of(object_path(self._folder.objects, name))
        if is_newer(header):
            self._catalogue.set_aside(name)
        return self._catalogue.link(name, parent_in(header, name.key) or b"")

    @staticmethod
    def _header_of(path: str) -> bytes:
        """A file's header; empty where it cannot be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return b""
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return os.pread(fd, HEADER_BYTES, 0)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _shrink(self) -> None:
        ttl_ms = int(self._options.ttl * 1000)
        before = self._clock.now_ms() - ttl_ms if ttl_ms else None
        while not self._stopping.is_set() and self._space.shrink(before):
            self._answered()

    def _save(self) -> int:
        """Write last uses to files' times, and the time itself: one write for many uses. Returns how many were
        written."""
        self._clock.save(self._folder.clock, self._folder.mine / "clock")
        unsaved = self._catalogue.take_unsaved(SAVED_A_ROUND)
        for entry in unsaved:
            set_used(object_path(self._folder.objects, entry.name), entry.used)
        return len(unsaved)


def set_used(file: str | int, used_ms: int) -> None:
    """Set a file's times to its last use."""
    try:
        os.utime(file, ns=(used_ms * 1_000_000, used_ms * 1_000_000))
    except OSError:  # it is gone, or mounted for reading: the order of eviction is a little off after a restart
        return


MIN_CAPACITY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileOptions:
    """``capacity``: bytes of all objects, of all daemons on the folder. ``floor``: bytes that are left free on the
    filesystem. ``ttl``: seconds without use after which objects go; 0: never. ``readers``, ``writers``: threads.
    ``rescan``: seconds between looks for what other daemons have done. ``direct``: 1 goes around the page cache where
    the filesystem lets us, 0 does not."""

    root: str
    capacity: int = option(size_option, 0)
    floor: int = option(size_option, 1 << 30)
    ttl: float = option(seconds_option, 0.0)
    readers: int = option(count_option, 4)
    writers: int = option(count_option, 2)
    rescan: float = option(seconds_option, 10.0)
    direct: int = option(count_option, 1)


def file_options(spec: StorageSpec) -> FileOptions:
    """Parse the options. Raises InvalidRequest."""
    made = spec.read_options(FileOptions, root=spec.where)
    if not spec.where.startswith("/") or "\0" in spec.where:
        raise InvalidRequest(
            f"storage: file:{one_line(spec.where)} is not an absolute path, such as file:/var/cache/cachesvc"
        )
    if "capacity" not in spec.options:
        raise InvalidRequest("storage: file needs capacity=SIZE, what all objects may take, such as capacity=200GiB")
    if made.capacity < MIN_CAPACITY_BYTES:
        raise InvalidRequest(f"storage: capacity must be at least {MIN_CAPACITY_BYTES} (1 MiB), got {made.capacity}")
    if not 1 <= made.readers <= 64 or not 1 <= made.writers <= 64 or made.direct not in (0, 1):
        raise InvalidRequest("storage: readers and writers are 1 to 64 threads, and direct is 0 or 1")
    if made.rescan <= 0:
        raise InvalidRequest("storage: rescan must be more than 0 seconds")
    return made
