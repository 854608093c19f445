"""The folder's clock: ages of objects do not follow steps of the wall clock.

It advances with the machine's time since boot, also while no daemon runs, and goes on from what the last daemon has
left in a file. Over a reboot the wall clock says how long the machine was down, ``MOST_DOWN_MS`` at most. A new folder
begins at the wall clock's time, so that the file times that it sets look familiar.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cachesvc.storage.file.folder import write_durably

MOST_DOWN_MS = 3_600_000
"""Upper bound on the time that a reboot adds to ages: the wall clock may be wrong by then."""
HEAD = "cachesvc clock 1"
MOST_MS = 1 << 43
"""Latest time that a folder's clock can have (in the year 2248): files take no later ones."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot() -> str:
    """Number of this boot of the machine; empty where the kernel does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Moments(NamedTuple):
    """Sources of time. ``boot``: which boot of the machine this is; empty where unknown."""

    since_boot_ms: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    boot: Callable[[], str] = read_boot


class FolderClock:
    """``began_ms``: its first time; no object is older."""

    def __init__(self, moments: Moments = Moments()) -> None:  # noqa: B008 - immutable
        self._moments = moments
        self._boot = ""
        self._ahead_ms = max(0, moments.wall_ms()) - moments.since_boot_ms()
        self.began_ms = self.now_ms()

    def now_ms(self) -> int:
        """Milliseconds. Never goes back while a daemon runs."""
        return self._moments.since_boot_ms() + self._ahead_ms

    def bounded(self, file_ms: int) -> int:
        """A file's time within this clock's own: it may come from elsewhere."""
        return max(self.began_ms, min(file_ms, self.now_ms()))

    def load(self, path: Path) -> None:
        """Go on from what a daemon has left; what cannot be read counts as nothing."""
        self._boot = self._moments.boot()
        try:
            head, _, rest = path.read_text(encoding="ascii").strip().rpartition(": ")
            boot, since_boot, wall, now, began = rest.split()
            before = int(since_boot), int(wall), int(now), int(began)
        except (OSError, ValueError):
            return
        since_boot_ms, wall_ms, now_ms, began_ms = before
        here_ms = self._moments.since_boot_ms()
        if head != HEAD or not 0 <= began_ms <= now_ms <= MOST_MS:
            return
        down_ms = here_ms - since_boot_ms
        if boot != self._boot or down_ms < 0:
            down_ms = max(0, min(self._moments.wall_ms() - wall_ms, MOST_DOWN_MS))
        self.began_ms, self._ahead_ms = began_ms, now_ms + down_ms - here_ms

    def save(self, path: Path, aside: Path) -> None:
        """Leave the time for the next daemon. ``aside``: where it is written first. A disk that takes nothing is left
        alone."""
        moments = self._moments
        times = moments.since_boot_ms(), max(0, moments.wall_ms()), self.now_ms(), self.began_ms
        with contextlib.suppress(OSError):
            write_durably(path, aside, f"{HEAD}: {self._boot or '-'} {' '.join(map(str, times))}\n")
