"""Files that cannot be removed: they lie on the disk, so they count. They are tried again, less and less often."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.storage.file.blocks.catalogue import Entry
from cachesvc.telemetry import events

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
    pause: float
    until: float


class StuckFiles:
    """By path. ``size_bytes``: of those that are no objects: the catalogue counts the others. Under its user's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.size_bytes = 0
        self._clock = clock
        self._files: dict[str, Stuck] = {}
        self._warn_at = 0.0

    def __len__(self) -> int:
        return len(self._files)

    @property
    def all_bytes(self) -> int:
        """Bytes of all of them, objects too."""
        return sum(each.size_bytes for each in self._files.values())

    def remove(self, path: str, size_bytes: int, entry: Entry | None = None) -> bool:
        """Unlink a file, which may be gone; False where it stays, and is known from now on."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.keep(path, size_bytes, entry, str(error))
            return False
        return True

    def keep(self, path: str, size_bytes: int, entry: Entry | None, why: str) -> None:
        """A file stays. Logged once a minute."""
        if path not in self._files:
            pause = FIRST_PAUSE_SECONDS
            self._files[path] = Stuck(size_bytes, entry, pause, self._clock() + pause)
            self.size_bytes += size_bytes if entry is None else 0
        if self._clock() >= self._warn_at:
            self._warn_at = self._clock() + WARN_SECONDS
            events.warning("storage_not_removed", reason=why, files=len(self._files), size_bytes=self.all_bytes)

    def replaced(self, path: str) -> None:
        """Another file has taken its place, and counts by itself."""
        each = self._files.pop(path, None)
        if each is not None and each.entry is None:
            self.size_bytes -= each.size_bytes

    def retry(self, *, is_short: bool) -> list[Stuck]:
        """Try those again whose time has come. ``is_short``: room is wanted, so one is tried before its time, and the
        others if that one can go. Returns what has gone."""
        gone: list[Stuck] = []
        now = self._clock()
        due = sorted(self._files, key=lambda path: self._files[path].until)[:TRIED_AT_ONCE]
        for number, path in enumerate(due):
            each = self._files[path]
            is_probe = is_short and number == len(gone)
            if each.until > now and not is_probe:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                each.pause = min(2 * each.pause, LONGEST_PAUSE_SECONDS)
                each.until = now + each.pause
                continue
            del self._files[path]
            self.size_bytes -= each.size_bytes if each.entry is None else 0
            gone.append(each)
        return gone

    def forget(self) -> list[Stuck]:
        """The folder is gone, and all with it."""
        files, self._files, self.size_bytes = list(self._files.values()), {}, 0
        return files
