"""Space of objects: a capacity, what the filesystem must keep free, and files to be written over.

Objects, and files on their way to be written over, are within the capacity at any time: room is reserved before a byte
is written. When it is short, what was used longest ago goes, a batch at a time, down to the lower watermark.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.paths import object_path
from cachesvc.telemetry import events

LOW_SHARE = 0.97
"""The lower watermark, of the capacity."""
BATCH = 64
"""Objects that one batch of evictions removes: some 2 ms."""
WARN_SECONDS = 60.0
"""Interval between two warnings about files that cannot be removed, seconds."""
FLOOR_EVERY = 32
"""Writes between two looks at what the filesystem has left."""


class Room(NamedTuple):
    """Room for one file; ``spare``: a file of this size to write over."""

    size_bytes: int
    spare: str | None


class Space:
    """Room in ``objects``; what is evicted lies in ``mine`` until it is written over. Any thread of the engine's."""

    def __init__(self, catalogue: Catalogue, objects: Path, capacity: int, floor: int) -> None:
        self.capacity = capacity
        self.evicted_objects = 0
        self.mine = objects
        self._catalogue = catalogue
        self._objects = objects
        self._floor = floor
        self._reserved = 0
        self._spares: dict[int, deque[str]] = defaultdict(deque)
        self._spare_bytes = 0
        self._numbers = itertools.count(1)
        self._until_look = 0
        self._warn_at = 0.0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of objects, of objects to come, and of files to be written over."""
        return self._catalogue.size_bytes + self._reserved + self._spare_bytes

    def take(self, size_bytes: int) -> Room | None:
        """Room for a file, evicting where need be; None where there is none. Ends by ``give_back``. Raises OSError
        where the filesystem or the folder is gone."""
        with self._lock:
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
        """Give reserved room back: its file is an object now, or there is none."""
        with self._lock:
            self._reserved -= room.size_bytes

    def next_path(self) -> str:
        """Reserve a name among the daemon's own files."""
        return f"{self.mine}/{next(self._numbers)}"

    def shrink(self, before: int) -> int:
        """Remove a batch of objects not used since ``before`` (seconds since 1970), and more where the capacity or the
        floor is passed; how many went."""
        with self._lock:
            try:
                is_low = not self._has_floor(0, look=True)
            except OSError:  # the folder is gone: the next write fails
                is_low = False
            over = 0 if is_low else self.capacity - self._spare_bytes - self._reserved
            victims = self._catalogue.take_oldest(BATCH, max(0, over), before)
            if is_low:
                self._free_spares()
        gone = sum(self._remove(entry) for entry in victims)
        self.evicted_objects += gone
        return gone

    def _make_room(self, size_bytes: int) -> bool:
        """Under the lock: evict objects until ``size_bytes`` more fit."""
        while self.used_bytes + size_bytes > self.capacity:
            target = int(self.capacity * LOW_SHARE) - self._reserved - self._spare_bytes - size_bytes
            victims = self._catalogue.take_oldest(BATCH, max(0, target))
            gone = sum(self._set_aside(entry, size_bytes) for entry in victims)
            self.evicted_objects += gone
            if self._spares.get(size_bytes):
                return True
            if not gone and not self._free_spares():
                return False
        return True

    def _set_aside(self, entry: Entry, size_bytes: int) -> bool:
        """An evicted object's file is to be written over, where it has the size; else it is freed. False where it
        stays."""
        path = object_path(self._objects, entry.name)
        if entry.size_bytes != size_bytes:
            return self._remove(entry)
        spare = self.next_path()
        try:
            os.rename(path, spare)
        except FileNotFoundError:  # another daemon was there first
            return True
        except OSError as error:
            self._keep(entry, error)
            return False
        self._spares[size_bytes].append(spare)
        self._spare_bytes += size_bytes
        return True

    def _remove(self, entry: Entry) -> bool:
        """Unlink an evicted object's file; False where it stays."""
        try:
            os.unlink(object_path(self._objects, entry.name))
        except FileNotFoundError:
            return True
        except OSError as error:
            self._keep(entry, error)
            return False
        return True

    def _keep(self, entry: Entry, why: OSError) -> None:
        """Keep an entry whose file cannot be removed: its bytes still count, and it is still a hit. Others are evicted
        before it."""
        self._catalogue.add(entry.name, entry.size_bytes, int(time.time()))
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            events.warning("storage_not_removed", reason=str(why))

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
        for spares in self._spares.values():
            while spares:
                remove(spares.popleft())
        self._spare_bytes = 0
        return had

    def _has_floor(self, size_bytes: int, *, look: bool = False) -> bool:
        """Under the lock: is enough left on the filesystem? Looked at now and then. Raises OSError."""
        self._until_look -= 1
        if not look and self._until_look > 0:
            return True
        facts = os.statvfs(self._objects)
        left = facts.f_bavail * facts.f_frsize - size_bytes - self._reserved
        self._until_look = FLOOR_EVERY if left > self._floor + FLOOR_EVERY * max(size_bytes, 1) else 0
        return left >= self._floor


def remove(path: str) -> None:
    """Unlink a file that may be gone."""
    with contextlib.suppress(OSError):
        os.unlink(path)
