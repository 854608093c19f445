"""``file``: objects as files, moved by threads that the daemon's loop never waits for."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.disk import ALIGN_BYTES, Condition, Disk, FolderClock, Moments, Mover, padded
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.keeper import FileOptions, Keeper, set_used
from cachesvc.storage.file.space import Room, Space, allocated_bytes, object_path
from cachesvc.storage.objects import HEADER_BYTES, is_newer, parent_in
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Outcome,
    Part,
    Rank,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    Troubles,
    Use,
    no_step,
    oldest_first,
)
from cachesvc.storage.workers import CLOSE_SECONDS, Job, UnderWay, Workers
from cachesvc.telemetry import events

PARENT_END = 120
LOOK_SECONDS = 1.0
"""Time that a start waits for the disk to answer, seconds; where it does not, the daemon serves from memory."""
SCAN_SECONDS = 0.25
"""Time that a start waits for the scan of a folder, seconds: of a small one all is known then."""


class FileStorage(StorageBackend):
    """The engine. ``clock``: monotonic seconds, for deadlines."""

    kind = "file"

    def __init__(
        self,
        options: FileOptions,
        clock: Callable[[], float] = time.monotonic,
        rank: Rank = oldest_first,
        moments: Moments = Moments(),  # noqa: B008 - immutable
        folder: Callable[[str], Folder] = Folder,
    ) -> None:
        self.caps = Caps(is_shared=False, survives="daemon", head_bytes=ALIGN_BYTES, follows_use=True)
        self._options = options
        self._clock = clock
        self._folder = folder(options.root)
        self._age = FolderClock(moments)
        self._disk = Disk(self._folder, clock, wants_direct=bool(options.direct))
        self._catalogue = Catalogue(rank, self._age.now_ms)
        self._space = Space(self._catalogue, self._folder.objects, options.capacity, options.floor, clock)
        self._readers = Workers("storage-read", options.readers, Mover, clock)
        self._writers = Workers("storage-write", options.writers, Mover, clock)
        self._keeper = Keeper(options, self._folder, self._disk, self._catalogue, self._space, self._age)
        self._under_way = UnderWay[tuple[Scope, bytes]]()
        self._is_open = True
        self._troubles = Troubles(clock)

    def start(self) -> None:
        """Begin; the folder is claimed, and what is there found, by a thread. Whatever the folder or its disk is, that
        is no reason not to: a hung one is not waited for, and what cannot be used now is used once it can be."""
        self._readers.start()
        self._writers.start()
        self._keeper.start()
        if self._keeper.looked.wait(LOOK_SECONDS) and self._disk.condition is not Condition.GONE:
            self._keeper.found.wait(SCAN_SECONDS)

    def describe(self, scope: Scope, label: str) -> None:
        self._catalogue.describe(scope, label)
        self._writers.add([Job(lambda _: self._describe(scope, label))])

    def watch(self, gone: Gone) -> None:
        self._space.gone = gone

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """No I/O: the keeper writes the times of many uses at once."""
        self._catalogue.use_blocks(scope, uses, chooser, self._age.now_ms())

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Expect what was found; None until the folder was read whole."""
        return self._catalogue.expects(scope, keys, parts) if self._keeper.counted.is_set() else None

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
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
        self._writers.add(
            [
                Job(partial(self._write, index, item, each), partial(each, index, Outcome.BUSY), deadline)
                for index, item in enumerate(items)
            ]
        )

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove at once, on the caller's thread: a file is some 20 us. Nothing is removed once it is closed: who
        closes waits for no disk."""
        for name in names if self._is_open else ():
            self._space.forget(name)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        for name in names if self._is_open else ():
            try:
                with open(object_path(self._folder.objects, name), "rb", buffering=0) as file:
                    is_kept = is_newer(file.read(HEADER_BYTES))
            except OSError:
                is_kept = False
            if is_kept:
                self._catalogue.set_aside(name)
            else:
                self._space.forget(name)

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        """Looks through the folder: what other daemons have written goes too."""
        scopes = [scope] if scope is not None else list(self._folder.labels())

        def forget(name: ObjectName) -> None:
            step()
            self._space.forget(name)

        return sum(self._folder.remove_scope(each, forget) for each in scopes)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        """File by file, on the caller's thread."""
        found, mover = Checked(), Mover()
        buffer = memoryview(mmap.mmap(-1, ALIGN_BYTES))
        for name in self._catalogue.names():
            step()
            path = object_path(self._folder.objects, name)
            try:
                size_bytes = os.stat(path).st_size
                if len(buffer) < padded(size_bytes):
                    buffer = memoryview(mmap.mmap(-1, padded(size_bytes)))
                content = buffer[:size_bytes]
                verdict = self._check_file(name, path, mover, content, check)
            except FileNotFoundError:
                found.missing += 1
                self._catalogue.drop(name)
                continue
            except OSError as error:
                self._note_unread(error)
                found.unreadable += 1
                continue
            if not found.note(verdict, size_bytes):
                self.doubt([name], check)
        return found

    def _check_file(self, name: ObjectName, path: str, mover: Mover, content: memoryview, check: Check) -> Outcome:
        """Raises FileNotFoundError also where it was evicted while it was read."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._disk.flag)
        try:
            is_whole = mover.read(fd, [content])
            number = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        if os.stat(path).st_ino != number:
            raise FileNotFoundError(path)
        return check(name, content) if is_whole else Outcome.WRONG

    def status(self) -> StoreStatus:
        status = self._catalogue.status(self._age.now_ms())
        status.capacity_bytes = self._options.capacity
        status.evicted_objects = self._space.evicted_objects
        status.is_complete = self._keeper.found.is_set()
        status.stuck_objects, status.stuck_bytes = len(self._space.stuck), self._space.stuck.all_bytes
        status.problem = self._problem()
        status.errors, status.last_error = self._troubles.count, self._troubles.last
        return status

    def totals(self) -> Totals:
        known, space, disk = self._catalogue, self._space, self._disk
        return Totals(
            len(known),
            known.size_bytes,
            self._options.capacity,
            space.evicted_objects,
            self._problem(),
            disk.condition is not Condition.GONE and not self._keeper.hung_seconds,
            disk.losses,
            len(space.stuck),
        )

    def _problem(self) -> str:
        floor = f"the disk of {self._options.root} is full: less than floor={self._options.floor} bytes would be left"
        hung = self._keeper.hung_seconds
        if hung:
            return f"the disk of {self._options.root} has not answered for {hung:.0f} s"
        return self._disk.problem or (floor if self._space.lacks_floor else "")

    def close(self) -> None:
        """Threads that hang in the filesystem are left behind."""
        self._is_open = False
        self._readers.close()
        self._writers.close()
        self._keeper.close()
        releaser = threading.Thread(target=self._release, name="storage-release", daemon=True)
        releaser.start()
        releaser.join(CLOSE_SECONDS)

    @property
    def others_bytes(self) -> int:
        """Bytes of files of other daemons on the folder that are no objects."""
        return self._space.others_bytes

    def join_scan(self) -> None:
        """Wait until what was there at the start is known."""
        self._keeper.found.wait()

    def _release(self) -> None:
        """Root of a thread: it removes files, and may hang in the filesystem as others do."""
        try:
            self._folder.release()
        except OSError:
            return  # the lock ends with the process

    # -- on threads ----------------------------------------------------------------------------------------------

    def _describe(self, scope: Scope, label: str) -> None:
        if self._disk.condition is not Condition.WRITABLE:
            return  # the keeper does it once the folder is claimed
        self._folder.keep_label(scope, label)

    def _read(self, index: int, item: Item, each: Each, mover: Mover) -> None:
        self._catalogue.hold(item.name)
        try:
            outcome = self._read_file(item, mover)
        except OSError as error:
            self._note_unread(error)
            outcome = Outcome.FAILED
        finally:
            self._catalogue.let_go(item.name)
        if outcome is not Outcome.OK and outcome is not Outcome.FAILED:
            self._catalogue.drop(item.name)
        each(index, outcome)

    def _note_unread(self, error: OSError) -> None:
        if objects := self._troubles.note("read", str(error)):
            events.event("storage_read_failed", reason=str(error), objects=objects)

    def _read_file(self, item: Item, mover: Mover) -> Outcome:
        path = object_path(self._folder.objects, item.name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._disk.flag)
        except FileNotFoundError:
            return Outcome.MISS if self._is_there() else Outcome.FAILED
        try:
            is_whole = mover.read(fd, (item.head, *item.pages))
            facts = os.fstat(fd)
            try:
                is_there = os.stat(path).st_ino == facts.st_ino
            except FileNotFoundError:
                is_there = False
            if not is_there:  # another daemon has evicted it meanwhile, and may write over it
                return Outcome.MISS
            if not is_whole and not is_newer(item.head):
                self._space.forget(item.name)
                return Outcome.WRONG
            self._note_use(item, facts)
        finally:
            os.close(fd)
        return Outcome.OK

    def _note_use(self, item: Item, facts: os.stat_result) -> None:
        """Note a use, for the order of eviction; the keeper writes it to the file later."""
        now = self._age.now_ms()
        if self._catalogue.use(item.name, now) is None:  # another daemon's
            parent = parent_in(bytes(item.head[:PARENT_END]), item.name.key)
            self._catalogue.add(item.name, allocated_bytes(facts), now, parent or b"")

    def _is_there(self) -> bool:
        """False where the folder itself is gone; the keeper looks after it then."""
        is_there = os.path.isdir(self._folder.objects)
        if not is_there:
            self._keeper.hurry()
        return is_there

    def _write(self, index: int, item: Item, each: Each, mover: Mover) -> None:
        room: Room | None = None
        outcome = Outcome.FAILED if self._disk.condition is Condition.GONE else Outcome.BUSY
        size_bytes = padded(len(item.head)) + padded(item.payload_bytes)
        try:
            if self._catalogue.use(item.name, self._age.now_ms()) is not None:
                outcome = Outcome.OK
            elif self._catalogue.is_aside(item.name) and not self._folder.is_alone():
                outcome = Outcome.BUSY  # a newer release's, which may be in use beside this one
            elif self._disk.takes_writes and self._keeper.counted.is_set():
                with self._under_way.noted((item.name.scope, item.name.key)):
                    room = self._space.take(size_bytes)
                    if room is not None:
                        self._write_file(item, room, mover, size_bytes)
                        self._disk.took()
                        outcome, room = Outcome.OK, None
        except OSError as error:
            outcome = Outcome.BUSY if self._disk.refuse(error, size_bytes) else self._failed(error)
        finally:
            if room is not None:
                self._space.give_back(room)
        each(index, outcome)

    def _failed(self, error: OSError) -> Outcome:
        if objects := self._troubles.note("write", str(error)):
            events.event("storage_write_failed", reason=str(error), objects=objects)
        if not self._folder.is_claimed:
            self._keeper.hurry()
        return Outcome.FAILED

    def _write_file(self, item: Item, room: Room, mover: Mover, size_bytes: int) -> None:
        """Write a nameless file, and give it its name when it is whole, and the block above is not being written: a
        kill leaves no path without its beginning. Raises OSError."""
        path, temporary = object_path(self._folder.objects, item.name), room.spare or self._space.next_path()
        new = 0 if room.spare else os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | new | self._disk.flag, 0o600)
            try:
                mover.write(fd, (item.head, *item.pages))
                allocated, now = allocated_bytes(os.fstat(fd)), self._age.now_ms()
                set_used(fd, now)
            finally:
                os.close(fd)
            above = [(item.name.scope, item.parent)] if item.parent != item.name.key else []
            if not self._under_way.wait_for(above, PARENT_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, "the block above it is being written still")
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
        except OSError:
            self._space.discard(temporary, room.size_bytes)
            raise
        self._space.placed(room, path, size_bytes, Entry(item.name, allocated, now, item.parent))


PARENT_SECONDS = 5.0
"""Longest wait for the block above to be written, seconds. It becomes an object first, so that a kill leaves no path
without its beginning; but two callers that name each other's block as the one above may not hold threads."""
