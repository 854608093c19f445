"""``file``: objects as files, moved by threads that the daemon's loop never waits for."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.direct import ALIGN_BYTES, NO_ROOM, Mover, direct_flag, padded
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.lane import CLOSE_SECONDS, Job, Lane
from cachesvc.storage.file.options import FileOptions
from cachesvc.storage.file.paths import object_path
from cachesvc.storage.file.space import Room, Space, remove
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    StoreStatus,
    Totals,
)
from cachesvc.storage.troubles import Troubles
from cachesvc.telemetry import events

TOUCH_SECONDS = 60
"""A use is written to the file no more often than that."""
FULL_SECONDS = 5.0
"""Time without writes after the filesystem had no room, seconds."""


class FileStorage:
    """The engine. ``clock``: monotonic seconds, for deadlines."""

    kind = "file"

    def __init__(self, options: FileOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.caps = Caps(is_shared=False, survives="daemon", head_bytes=ALIGN_BYTES)
        self._options = options
        self._clock = clock
        self._folder = Folder(options.root)
        self._catalogue = Catalogue()
        self._space = Space(self._catalogue, self._folder.objects, options.capacity, options.floor)
        self._readers = Lane("storage-read", options.readers, clock)
        self._writers = Lane("storage-write", options.writers, clock)
        self._keeper = threading.Thread(target=self._keep_house, name="storage-keeper", daemon=True)
        self._stopping = threading.Event()
        self._scanned = threading.Event()
        self._full_until = 0.0
        self._troubles = Troubles(clock)
        self._direct = 0

    def start(self) -> None:
        """Claim the folder and begin; what is there already is found behind it. Raises Unavailable, InvalidRequest."""
        self._folder.claim()
        self._space.mine = self._folder.mine
        self._direct = direct_flag(str(self._folder.mine)) if self._options.direct else 0
        if self._options.direct and not self._direct:
            events.event("storage_not_direct", folder=self._options.root)
        self._readers.start(self._direct)
        self._writers.start(self._direct)
        self._keeper.start()

    def register(self, chunk: memoryview) -> None:
        """No-op: any memory will do."""

    def describe(self, scope: Scope, label: str) -> None:
        """Kept beside the objects."""
        self._catalogue.describe(scope, label)
        self._writers.add([Job(lambda _: self._describe(scope, label), _nothing, float("inf"))])

    def watch(self, gone: Gone) -> None:
        """Report evicted objects to ``gone``."""
        self._catalogue.gone = gone

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Expect what was found; None until the folder was read whole."""
        return self._catalogue.expects(scope, keys, parts) if self._scanned.is_set() else None

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Asks the filesystem."""
        asked = list(names)
        paths = [object_path(self._folder.objects, name) for name in asked]
        nothing = [False] * len(asked)
        self._readers.add([Job(lambda _: found(list(map(os.path.exists, paths))), partial(found, nothing), deadline)])

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read in the order of ``items``, as many at a time as there are readers."""
        self._readers.add(
            [
                Job(partial(self._read, index, item, each), partial(each, index, Outcome.BUSY), deadline)
                for index, item in enumerate(items)
            ]
        )

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Write in the order of ``items``."""
        self._writers.add(
            [
                Job(partial(self._write, index, item, each), partial(each, index, Outcome.BUSY), deadline)
                for index, item in enumerate(items)
            ]
        )

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove at once, on the caller's thread: a file is some 20 us."""
        for name in names:
            self._catalogue.drop(name)
            remove(object_path(self._folder.objects, name))

    def purge(self, scope: Scope | None) -> int:
        """Looks through the folder: what other daemons have written goes too."""
        scopes = [scope] if scope is not None else list(self._folder.labels())
        return sum(self._folder.remove_scope(each, self._forget) for each in scopes)

    def check_all(self, check: Check) -> Checked:
        """File by file, on the caller's thread."""
        found, mover = Checked(), Mover(self._direct)
        buffer = memoryview(mmap.mmap(-1, ALIGN_BYTES))
        for name in self._catalogue.names():
            if self._stopping.is_set():
                break
            path = object_path(self._folder.objects, name)
            try:
                size_bytes = os.stat(path).st_size
                if len(buffer) < padded(size_bytes):
                    buffer = memoryview(mmap.mmap(-1, padded(size_bytes)))
                is_good = self._check_file(name, path, mover, buffer[:size_bytes], check)
            except FileNotFoundError:
                found.missing += 1
                self._catalogue.drop(name)
                continue
            except OSError as error:
                self._note_unread(error)
                found.unreadable += 1
                continue
            found.objects += 1
            found.size_bytes += size_bytes
            if not is_good:
                found.wrong += 1
                self.remove([name])
        return found

    def _check_file(self, name: ObjectName, path: str, mover: Mover, content: memoryview, check: Check) -> bool:
        """Raises FileNotFoundError also where it was evicted while it was read."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct)
        try:
            is_whole = mover.read(fd, [content])
            number = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        if os.stat(path).st_ino != number:
            raise FileNotFoundError(path)
        return is_whole and check(name, content)

    def _forget(self, name: ObjectName) -> None:
        self._catalogue.drop(name)

    def status(self) -> StoreStatus:
        """Status by the catalogue."""
        status = self._catalogue.status(int(time.time()))
        status.capacity_bytes = self._options.capacity
        status.evicted_objects = self._space.evicted_objects
        status.is_complete = self._scanned.is_set()
        status.errors, status.last_error = self._troubles.count, self._troubles.last
        return status

    def totals(self) -> Totals:
        """Totals by the catalogue."""
        known = self._catalogue
        return Totals(len(known), known.size_bytes, self._options.capacity, self._space.evicted_objects)

    def close(self) -> None:
        """Threads that hang in the filesystem are left behind."""
        self._stopping.set()
        self._readers.close()
        self._writers.close()
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        self._folder.release()

    def join_scan(self) -> None:
        """Wait until what was there at the start is known."""
        self._scanned.wait()

    # -- on threads ----------------------------------------------------------------------------------------------

    def _describe(self, scope: Scope, label: str) -> None:
        try:
            self._folder.describe(scope, label)
        except OSError as error:
            events.warning("storage_label_not_kept", reason=str(error))

    def _read(self, index: int, item: Item, each: Each, mover: Mover) -> None:
        """Root of an item: answers once."""
        self._catalogue.begin_read(item.name)
        try:
            outcome = self._read_file(item, mover)
        except OSError as error:
            self._note_unread(error)
            outcome = Outcome.FAILED
        finally:
            self._catalogue.end_read(item.name)
        if outcome is not Outcome.OK and outcome is not Outcome.FAILED:
            self._catalogue.drop(item.name)
        each(index, outcome)

    def _note_unread(self, error: OSError) -> None:
        if objects := self._troubles.note("read", str(error)):
            events.event("storage_read_failed", reason=str(error), objects=objects)

    def _read_file(self, item: Item, mover: Mover) -> Outcome:
        path = object_path(self._folder.objects, item.name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct)
        except FileNotFoundError:
            return Outcome.MISS
        try:
            is_whole = mover.read(fd, (item.head, *item.pages))
            facts = os.fstat(fd)
            try:
                is_there = os.stat(path).st_ino == facts.st_ino
            except FileNotFoundError:
                is_there = False
            if not is_there:  # another daemon has evicted it meanwhile, and may write over it
                return Outcome.MISS
            if not is_whole:
                remove(path)
                return Outcome.WRONG
            self._touch(item.name, fd, facts)
        finally:
            os.close(fd)
        return Outcome.OK

    def _touch(self, name: ObjectName, fd: int, facts: os.stat_result) -> None:
        """Note a use, for the order of eviction now and after a restart."""
        now = int(time.time())
        if self._catalogue.use(name, now) is None:
            self._catalogue.add(name, facts.st_size, now)  # another daemon's
        if now - facts.st_mtime > TOUCH_SECONDS:
            try:
                os.utime(fd)
            except OSError as error:  # a filesystem that is mounted for reading
                events.event("storage_not_touched", reason=str(error))

    def _write(self, index: int, item: Item, each: Each, mover: Mover) -> None:
        """Root of an item: answers once."""
        outcome, room = Outcome.OK, None
        size_bytes = padded(len(item.head)) + padded(item.payload_bytes)
        try:
            if self._catalogue.use(item.name, int(time.time())) is None:
                is_full = self._clock() < self._full_until
                room = None if is_full else self._space.take(size_bytes)
                if room is None:
                    outcome = Outcome.BUSY
                else:
                    self._write_file(item, room, mover)
                    self._catalogue.add(item.name, size_bytes, int(time.time()))
        except OSError as error:
            if objects := self._troubles.note("write", str(error)):
                events.event("storage_write_failed", reason=str(error), objects=objects)
            outcome = Outcome.FAILED
            if error.errno in NO_ROOM:
                self._full_until = self._clock() + FULL_SECONDS
                outcome = Outcome.BUSY
        finally:
            if room is not None:
                self._space.give_back(room)
        each(index, outcome)

    def _write_file(self, item: Item, room: Room, mover: Mover) -> None:
        """Write a nameless file, and give it its name when it is whole. Raises OSError."""
        path, temporary = object_path(self._folder.objects, item.name), room.spare or self._space.next_path()
        new = 0 if room.spare else os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | new | self._direct, 0o600)
            try:
                mover.write(fd, (item.head, *item.pages))
            finally:
                os.close(fd)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
        except OSError:
            remove(temporary)
            raise

    # -- the keeper ----------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Root of the thread that scans the folder, and evicts objects that are old or too many."""
        yield_to_callers()
        pause = 0.0
        while not self._stopping.wait(pause):
            began = time.monotonic()
            try:
                self._scan()
                self._shrink()
            except Exception:  # noqa: BLE001 - the root of a thread: the next round may be better
                events.failure("storage_scan_broke")
            self._scanned.set()
            pause = max(self._options.rescan, 20 * (time.monotonic() - began))

    def _scan(self) -> None:
        """Look through folders in which something has changed: all of them at first."""
        is_first = not self._scanned.is_set()
        if not is_first and self._folder.is_alone():
            return
        for scope, label in self._folder.labels().items():
            if label:
                self._catalogue.describe(scope, label)
        found: list[Entry] = []
        for scope, path in self._folder.changed():
            if self._stopping.is_set():
                return
            entries = self._folder.look(scope, path)
            found += entries if is_first else [entry for entry in entries if entry.name not in self._catalogue]
        # What another daemon removed stays known until it is asked for, or evicted.
        self._catalogue.add_all(sorted(found, key=lambda entry: entry.used))

    def _shrink(self) -> None:
        ttl = self._options.ttl
        before = int(time.time() - ttl) if ttl else 0
        while not self._stopping.is_set() and self._space.shrink(before):
            pass


def _nothing() -> None:
    """Do nothing: there is no waiter."""
