"""``file``: objects as files, moved by threads that the daemon's loop never waits for."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import one_line
from cachesvc.storage.file.catalogue import NO_ROW, Catalogue, Entry, FoundObjects
from cachesvc.storage.file.disk import ALIGN_BYTES, Condition, Disk, FolderClock, Moments, Mover, padded
from cachesvc.storage.file.folder import Folder
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
from cachesvc.storage.spec import StorageSpec, count_option, option, seconds_option, size_option
from cachesvc.storage.workers import CLOSE_SECONDS, Job, UnderWay, Workers, jobs_of
from cachesvc.telemetry import events

PARENT_END = 120
LOOK_SECONDS = 1.0
"""Time that a start waits for the disk to answer, seconds; where it does not, the daemon serves from memory."""
AWAY_SECONDS = 1.0
"""Interval between two looks at a folder that takes no writes, or is gone, seconds."""
SAVED_A_ROUND = 4096
"""Blocks whose last use is written to their files in one round: some 20 ms."""
HUNG_SECONDS = 10.0
"""Time without an answer of the disk after which it is said to hang, seconds."""
SCAN_SECONDS = 0.25
"""Time that a start waits for the scan of a folder, seconds: of a small one all is known then."""


class FileStorage(StorageBackend):
    """The engine. ``clock``: monotonic seconds, for deadlines.

    A thread of its own looks after the folder: it finds what is there, keeps uses over restarts, evicts, and sees it
    return. ``_looked``: set once the disk has answered for the first time, ``_counted``: once the bytes of what was
    there are known, ``_found``: once all of it is. ``_asked``: since when the disk has not answered."""

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
        self._looked, self._counted, self._found = threading.Event(), threading.Event(), threading.Event()
        self._asked: float | None = None
        self._save_until = 0.0
        self._stopping, self._due = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._look_after, name="storage-keeper", daemon=True)
        self._under_way = UnderWay[tuple[Scope, bytes]]()
        self._is_open = True
        self._troubles = Troubles(clock)

    def start(self) -> None:
        """Begin; the folder is claimed, and what is there found, by a thread. Whatever the folder or its disk is, that
        is no reason not to: a hung one is not waited for, and what cannot be used now is used once it can be."""
        self._readers.start()
        self._writers.start()
        self._keeper.start()
        if self._looked.wait(LOOK_SECONDS) and self._disk.condition is not Condition.GONE:
            self._found.wait(SCAN_SECONDS)

    def describe(self, scope: Scope, label: str) -> None:
        self._catalogue.labels[scope] = label
        self._writers.add([Job(lambda _: self._describe(scope, label))])

    def watch(self, gone: Gone) -> None:
        self._space.gone = gone

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """No I/O: the keeper writes the times of many uses at once."""
        self._catalogue.use_blocks(scope, uses, chooser, self._age.now_ms())

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Expect what was found; None until the folder was read whole."""
        return self._catalogue.expects(scope, keys, parts) if self._counted.is_set() else None

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        asked = list(names)
        paths = [object_path(self._folder.objects, name) for name in asked]
        nothing = [False] * len(asked)
        self._readers.add([Job(lambda _: found(list(map(os.path.exists, paths))), partial(found, nothing), deadline)])

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read in the order of ``items``, as many at a time as there are readers."""
        self._readers.add(jobs_of(items, deadline, each, self._read))

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        self._writers.add(jobs_of(items, deadline, each, self._write))

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
                self._troubles.note("read", error)
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
        status.is_complete = self._found.is_set()
        status.stuck_objects, status.stuck_bytes = len(self._space.stuck), self._space.stuck_bytes
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
            disk.condition is not Condition.GONE and not self._hung_seconds(),
            disk.losses,
            len(space.stuck),
        )

    def _hung_seconds(self) -> float:
        """Time for which the disk has not answered, seconds; 0 where that is not long."""
        asked = self._asked
        seconds = 0.0 if asked is None else time.monotonic() - asked
        return seconds if seconds >= HUNG_SECONDS else 0.0

    def _problem(self) -> str:
        floor = f"the disk of {self._options.root} is full: less than floor={self._options.floor} bytes would be left"
        hung = self._hung_seconds()
        if hung:
            return f"the disk of {self._options.root} has not answered for {hung:.0f} s"
        return self._disk.problem or (floor if self._space.lacks_floor else "")

    def close(self) -> None:
        """Threads that hang in the filesystem are left behind."""
        self._is_open = False
        self._readers.close()
        self._writers.close()
        self._save_until = time.monotonic() + CLOSE_SECONDS
        self._stopping.set()
        self._due.set()
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        releaser = threading.Thread(target=self._release, name="storage-release", daemon=True)
        releaser.start()
        releaser.join(CLOSE_SECONDS)

    @property
    def others_bytes(self) -> int:
        """Bytes of files of other daemons on the folder that are no objects."""
        return self._space.others_bytes

    def join_scan(self) -> None:
        """Wait until what was there at the start is known."""
        self._found.wait()

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

    def _read(self, item: Item, mover: Mover) -> Outcome:
        self._catalogue.hold(item.name)
        try:
            outcome = self._read_file(item, mover)
        except OSError as error:
            self._troubles.note("read", error)
            outcome = Outcome.FAILED
        finally:
            self._catalogue.let_go(item.name)
        if outcome is not Outcome.OK and outcome is not Outcome.FAILED:
            self._catalogue.drop(item.name)
        return outcome

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
            self._due.set()
        return is_there

    def _write(self, item: Item, mover: Mover) -> Outcome:
        room: Room | None = None
        outcome = Outcome.FAILED if self._disk.condition is Condition.GONE else Outcome.BUSY
        size_bytes = padded(len(item.head)) + padded(item.payload_bytes)
        try:
            if self._catalogue.use(item.name, self._age.now_ms()) is not None:
                outcome = Outcome.OK
            elif self._catalogue.is_aside(item.name) and not self._folder.is_alone():
                outcome = Outcome.BUSY  # a newer release's, which may be in use beside this one
            elif self._disk.takes_writes and self._counted.is_set():
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
        return outcome

    def _failed(self, error: OSError) -> Outcome:
        self._troubles.note("write", error)
        if not self._folder.is_claimed:
            self._due.set()
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

    # -- on the keeper's thread ------------------------------------------------------------------------------------

    def _look_after(self) -> None:
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
        self._looked.set()
        if self._disk.condition is Condition.GONE:
            if self._counted.is_set():
                self._lose()
            return
        self._scan()
        self._counted.set()
        self._read_headers()
        if self._disk.condition is Condition.WRITABLE:
            self._save()
            self._shrink()
        self._found.set()

    def _answered(self) -> None:
        """The disk is asked for something now, and has answered what it was asked for before."""
        self._asked = time.monotonic()

    def _find_anew(self) -> None:
        """The folder is another one, or is back."""
        self._lose()
        self._space.mine = self._folder.mine
        self._age.load(self._folder.clock)
        if self._disk.condition is Condition.WRITABLE:
            for scope, label in dict(self._catalogue.labels).items():
                self._folder.keep_label(scope, label)

    def _lose(self) -> None:
        """Nothing that is known of the folder counts."""
        self._found.clear()
        self._counted.clear()
        self._space.lose()
        self._catalogue.clear()

    def _scan(self) -> None:
        """Look through folders in which something has changed: all of them at first."""
        is_first = not self._counted.is_set()
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
                self._catalogue.labels[scope] = label
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
        self._catalogue.add_all(each._replace(used=self._age.bounded(each.used)) for each in found.in_order())

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
        before = self._age.now_ms() - ttl_ms if ttl_ms else None
        while not self._stopping.is_set() and self._space.shrink(before):
            self._answered()

    def _save(self) -> int:
        """Write last uses to files' times, and the time itself: one write for many uses. Returns how many were
        written."""
        self._age.save(self._folder.clock, self._folder.mine / "clock")
        unsaved = self._catalogue.take_unsaved(SAVED_A_ROUND)
        for entry in unsaved:
            set_used(object_path(self._folder.objects, entry.name), entry.used)
        return len(unsaved)


PARENT_SECONDS = 5.0
"""Longest wait for the block above to be written, seconds. It becomes an object first, so that a kill leaves no path
without its beginning; but two callers that name each other's block as the one above may not hold threads."""


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
