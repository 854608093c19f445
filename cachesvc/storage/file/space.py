"""Space of objects: a capacity, what the filesystem must keep free, and files to be written over.

Everything of ours on the disk is within the capacity at any time, in allocated bytes: objects, files on their way to be
written over, files that cannot be removed. Room is reserved before a byte is written. When it is short, blocks go by
the order of eviction, a batch at a time, down to the lower watermark.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.seam import LAYOUT_ID_BYTES, BackOff, Gone, ObjectName, Part, Scope
from cachesvc.storage.workers import nothing
from cachesvc.telemetry import events

LOW_SHARE = 0.97
"""The lower watermark, of the capacity."""
BATCH = 64
"""Objects that one batch of evictions removes: some 2 ms."""
FLOOR_EVERY = 32
"""Writes between two looks at what the filesystem has left."""
BLOCK_BYTES = 512
"""Unit of ``st_blocks``."""


class Room(NamedTuple):
    """Room for one file; ``spare``: a file of this size to write over."""

    size_bytes: int
    spare: str | None


FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 600.0
WARN_SECONDS = 60.0
"""Interval between two warnings, seconds."""
TRIED_AT_ONCE = 64


@dataclass(slots=True)
class Stuck:
    """``entry``: an object that is still there, and still a hit; None for what is no object."""

    size_bytes: int
    entry: Entry | None
    back_off: BackOff


class Space:
    """Room in ``objects``; what is evicted lies in ``mine`` until it is written over. ``gone``: called with objects
    that were evicted. ``stuck``: files that cannot be removed, by path. ``lacks_floor``: the filesystem had less left
    than it must keep. ``others_bytes``: of files of other daemons on the folder that are no objects. Any thread of the
    engine's."""

    def __init__(
        self,
        catalogue: Catalogue,
        objects: Path,
        capacity: int,
        floor: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.evicted_objects = 0
        self.mine = objects
        self.others_bytes = 0
        self.gone: Gone = nothing
        self.lacks_floor = False
        self.stuck: dict[str, Stuck] = {}
        self._clock = clock
        self._warn_at = 0.0
        self._stuck_bytes = 0  # of those that are no objects: the catalogue counts the others
        self._catalogue = catalogue
        self._objects = objects
        self._floor = floor
        self._reserved = 0
        self._spares: dict[int, deque[str]] = defaultdict(deque)
        self._spare_bytes = 0
        self._allocated: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._until_look = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of objects, of objects to come, of files to be written over, and of those that cannot be removed;
        other daemons' too."""
        mine = self._catalogue.size_bytes + self._reserved + self._spare_bytes + self._stuck_bytes
        return mine + self.others_bytes

    @property
    def stuck_bytes(self) -> int:
        """Bytes of all files that cannot be removed, objects too."""
        return sum(each.size_bytes for each in self.stuck.copy().values())

    def take(self, size_bytes: int) -> Room | None:
        """Room for a file of that length, evicting where need be; None where there is none. Ends by ``placed`` or
        ``give_back``. Raises OSError where the filesystem or the folder is gone."""
        with self._lock:
            size_bytes = self._allocated.get(size_bytes, size_bytes)
            if size_bytes > self.capacity:
                return None
            if spare := self._take_spare(size_bytes):
                return Room(size_bytes, spare)
            if not self._make_room(size_bytes):
                return None
            if spare := self._take_spare(size_bytes):
                return Room(size_bytes, spare)
            if not self._has_floor(size_bytes):
                return None
            self._reserved += size_bytes
            return Room(size_bytes, None)

    def give_back(self, room: Room) -> None:
        """Give reserved room back: its file did not become an object."""
        with self._lock:
            self._reserved -= room.size_bytes

    def placed(self, room: Room, path: str, length: int, entry: Entry) -> None:
        """A file of that length has come to its room: it is an object now. The next one of its length gets as much room
        as it takes here."""
        with self._lock:
            self._reserved -= room.size_bytes
            self._free(path)  # another file has taken its place
            self._catalogue.add(*entry)
            if entry.size_bytes != length:
                self._allocated[length] = entry.size_bytes
            self._make_room(0)

    def next_path(self) -> str:
        """Reserve a name among the daemon's own files."""
        return f"{self.mine}/{next(self._numbers)}"

    def discard(self, path: str, size_bytes: int) -> None:
        """Remove a file that is no object, or none any more; where it stays, it counts."""
        with self._lock:
            self._unlink(path, size_bytes)

    def forget(self, name: ObjectName) -> None:
        path = object_path(self._objects, name)
        with self._lock:
            size_bytes = size_of(path) if self._catalogue.drop(name) or os.path.lexists(path) else 0
            self._unlink(path, size_bytes)

    def shrink(self, before: int | None) -> int:
        """Remove a batch of objects not used since ``before`` (ms of the folder's clock), and more where the capacity
        or the floor is passed; how many went."""
        with self._lock:
            try:
                is_low = not self._has_floor(0, look=True)
            except OSError:  # the folder is gone: the next write fails
                is_low = False
            self._retry(is_short=False)
            if self.used_bytes > self.capacity or is_low:
                self._free_spares()
            over = 0 if is_low else self.capacity - (self.used_bytes - self._catalogue.size_bytes)
            return self._evict(self._catalogue.take_oldest(BATCH, max(0, over), before), 0)

    def lose(self) -> None:
        """The folder is gone: nothing of it counts."""
        with self._lock:
            self._spares.clear()
            self._spare_bytes = 0
            stuck, self.stuck, self._stuck_bytes = self.stuck, {}, 0
            for each in stuck.values():
                if each.entry is not None:
                    self._catalogue.let_go(each.entry.name)

    def _make_room(self, size_bytes: int) -> bool:
        """Under the lock: evict objects until ``size_bytes`` more fit."""
        while self.used_bytes + size_bytes > self.capacity:
            target = int(self.capacity * LOW_SHARE) - (self.used_bytes - self._catalogue.size_bytes) - size_bytes
            victims = self._catalogue.take_oldest(BATCH, max(0, target))
            gone = self._evict(victims, size_bytes)
            if self._spares.get(size_bytes):
                return True
            if not gone and not self._free_spares() and not self._retry(is_short=True):
                return False
        return True

    def _evict(self, victims: Sequence[Entry], size_bytes: int) -> int:
        """Under the lock: remove the files of victims, leaves first; how many went. A block above one that stays
        stays."""
        gone: list[Entry] = []
        kept: set[tuple[Scope, bytes | None]] = set()
        for entry in victims:
            is_above = (entry.name.scope, entry.name.key) in kept
            if not is_above and self._set_aside(entry, size_bytes):
                gone.append(entry)
                continue
            kept.add((entry.name.scope, entry.parent))
            self._catalogue.add(*entry)
        return self._note_gone(gone)

    def _note_gone(self, entries: Sequence[Entry]) -> int:
        self.evicted_objects += len(entries)
        if entries:
            self.gone([entry.name for entry in entries])
        return len(entries)

    def _retry(self, *, is_short: bool) -> int:
        """Under the lock: try again to remove files that could not be, those whose time has come. ``is_short``: room is
        wanted, so one is tried before its time, and the others if that one can go. Returns how many went."""
        gone: list[Stuck] = []
        now = self._clock()
        due = sorted(self.stuck, key=lambda path: self.stuck[path].back_off.until)[:TRIED_AT_ONCE]
        for number, path in enumerate(due):
            each = self.stuck[path]
            if each.back_off.until > now and not (is_short and number == len(gone)):
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                each.back_off.failed(now)
                continue
            self._free(path)
            gone.append(each)
        entries = [each.entry for each in gone if each.entry is not None]
        for entry in entries:
            self._catalogue.let_go(entry.name)
            self._catalogue.drop(entry.name)
        self._note_gone(entries)
        return len(gone)

    def _free(self, path: str) -> None:
        """Under the lock: a file is not stuck, or is no more."""
        each = self.stuck.pop(path, None)
        if each is not None and each.entry is None:
            self._stuck_bytes -= each.size_bytes

    def _unlink(self, path: str, size_bytes: int, entry: Entry | None = None) -> bool:
        """Under the lock: remove a file, which may be gone; False where it stays, and is known from now on, which is
        logged once a minute."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if path not in self.stuck:
                self.stuck[path] = Stuck(size_bytes, entry, BackOff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
                self.stuck[path].back_off.failed(self._clock())
                self._stuck_bytes += size_bytes if entry is None else 0
            if self._clock() >= self._warn_at:
                self._warn_at = self._clock() + WARN_SECONDS
                files = len(self.stuck)
                events.warning("storage_not_removed", reason=str(error), files=files, size_bytes=self.stuck_bytes)
            return False
        return True

    def _set_aside(self, entry: Entry, size_bytes: int) -> bool:
        """An evicted object's file is to be written over, where it has the size; else it is freed. False where it
        stays."""
        if entry.size_bytes != size_bytes:
            return self._remove(entry)
        path, spare = object_path(self._objects, entry.name), self.next_path()
        try:
            os.rename(path, spare)
        except FileNotFoundError:  # another daemon was there first
            return True
        except OSError:
            return self._remove(entry)
        self._spares[size_bytes].append(spare)
        self._spare_bytes += size_bytes
        return True

    def _remove(self, entry: Entry) -> bool:
        """Unlink an evicted object's file. False where it stays: it is still a hit then, its bytes count, and others
        are evicted."""
        if self._unlink(object_path(self._objects, entry.name), entry.size_bytes, entry):
            return True
        self._catalogue.hold(entry.name)
        return False

    def _take_spare(self, size_bytes: int) -> str | None:
        spares = self._spares.get(size_bytes)
        if not spares:
            return None
        self._spare_bytes -= size_bytes
        self._reserved += size_bytes
        return spares.popleft()

    def _free_spares(self) -> bool:
        """Under the lock: give all spares' blocks back; False where there were none."""
        had = self._spare_bytes > 0
        for size_bytes, spares in self._spares.items():
            while spares:
                self._unlink(spares.popleft(), size_bytes)
        self._spare_bytes = 0
        return had

    def _has_floor(self, size_bytes: int, *, look: bool = False) -> bool:
        """Under the lock: is enough left on the filesystem? Looked at now and then. Raises OSError."""
        self._until_look -= 1
        if not look and self._until_look > 0:
            return True
        facts = os.statvfs(self._objects)
        left = facts.f_bavail * facts.f_frsize - size_bytes - self._reserved
        self.lacks_floor = left < self._floor
        is_far = size_bytes > 0 and left > self._floor + FLOOR_EVERY * size_bytes
        self._until_look = FLOOR_EVERY if is_far else 0
        return left >= self._floor


def allocated_bytes(facts: os.stat_result) -> int:
    """Bytes that a file takes on its disk; its length where the filesystem does not say."""
    return facts.st_blocks * BLOCK_BYTES or facts.st_size


def size_of(path: str) -> int:
    """Allocated bytes of a file; 0 where it is not there."""
    try:
        return allocated_bytes(os.lstat(path))
    except OSError:
        return 0


FORMAT_TEXT = "cachesvc storage, files, format 1\n"
FAN_DIGITS = 3
"""4,096 folders a scope: a million objects are some 250 files in each."""
LABEL = "label"
_SCOPE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{{2 * LAYOUT_ID_BYTES}}})")
_OBJECT = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.([0-9]{{1,5}})\.([0-9]{{1,5}})of([0-9]{{1,5}})")


def scope_folder(scope: Scope) -> str:
    return f"{scope.namespace.hex()}-{scope.layout.hex()}"


def scope_of(folder: str) -> Scope | None:
    """The scope that a folder is of; None for one that is none's."""
    found = _SCOPE.fullmatch(folder)
    return None if found is None else Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def object_path(objects: Path, name: ObjectName) -> str:
    key, (group, rank, ranks) = name.key.hex(), name.part
    return f"{objects}/{scope_folder(name.scope)}/{key[:FAN_DIGITS]}/{key}.{group}.{rank}of{ranks}"


def object_of(scope: Scope, file: str) -> ObjectName | None:
    """The object that a file is; None for one that is none."""
    found = _OBJECT.fullmatch(file)
    if found is None:
        return None
    part = Part(int(found[2]), int(found[3]), int(found[4]))
    return ObjectName(scope, bytes.fromhex(found[1]), part) if max(part) <= 0xFFFF else None
