"""Page pairs sorted into runs: blocks that are contiguous on both sides, which one copy can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachesvc.memory.extents import ExtentTable, Int64s, PagePlaces
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.transfer import Direction


@dataclass(frozen=True, slots=True)
class Runs:
    """The pairs of a move, and where each lies (without a plane's own offset and stride). ``length``: of every run, or
    0 where they differ. ``lengths`` and ``starts``: of each run, but nothing where each is one pair."""

    length: int
    lengths: Int64s
    starts: Int64s
    device: PagePlaces
    host: PagePlaces

    @property
    def pages(self) -> int:
        """Pairs."""
        return len(self.device.page)

    def part(self, first: int, stop: int) -> Runs:
        """Pairs ``[first, stop)`` alone. A run that reaches beyond is cut."""
        if stop - first == self.pages:
            return self
        device, host = self.device.part(slice(first, stop)), self.host.part(slice(first, stop))
        if self.length == 1:
            return Runs(1, _NONE, _NONE, device, host)
        within = np.searchsorted(self.starts, first, "right"), np.searchsorted(self.starts, stop, "left")
        starts = np.concatenate(([first], self.starts[within[0] : within[1]])) - first
        return _of(starts, np.diff(starts, append=stop - first), device, host)

    def about(self) -> tuple[int, int]:
        """Number of runs, and their length, as powers of two."""
        count = self.pages if self.length == 1 else len(self.lengths)
        return (_power(count), _power(self.pages // count)) if count else (0, 0)


def runs_of(
    device: ExtentTable, host: ExtentTable, device_pages: Int64s, host_pages: Int64s, direction: Direction
) -> Runs:
    """Pairs sorted by device page: what is contiguous in both pools then lies side by side. Raises InvalidRequest where
    pages are unpaired, outside of their pool, or written to twice."""
    if len(device_pages) != len(host_pages):
        raise InvalidRequest(f"{len(device_pages)} device pages against {len(host_pages)} host pages")
    order = device_pages.argsort(kind="stable")
    ours, theirs = device_pages[order], host_pages[order]
    device_places, host_places = device.places(ours, "device", is_sorted=True), host.places(theirs, "host")
    step = ours[1:] - ours[:-1]
    least = int(np.minimum.reduce(step, initial=_FAR))
    is_twice = not least if direction is Direction.LOAD else not np.diff(np.sort(theirs)).all()
    if is_twice:
        raise InvalidRequest("a transfer names the same destination page twice")
    if least > 1:  # no two lie side by side
        return Runs(1, _NONE, _NONE, device_places, host_places)
    our_extent, their_extent = device.locate(ours, "device"), host.locate(theirs, "host")
    is_next = (step == 1) & (theirs[1:] - theirs[:-1] == 1)
    is_next &= (our_extent[1:] == our_extent[:-1]) & (their_extent[1:] == their_extent[:-1])
    starts = np.flatnonzero(np.concatenate((_FIRST, ~is_next)))
    return _of(starts, np.diff(starts, append=len(ours)), device_places, host_places)


_FAR = 1 << 62
_FIRST = np.array([True])
_NONE = np.empty(0, np.int64)


def _of(starts: Int64s, lengths: Int64s, device: PagePlaces, host: PagePlaces) -> Runs:
    length = int(lengths[0]) if (lengths == lengths[0]).all() else 0
    return Runs(1, _NONE, _NONE, device, host) if length == 1 else Runs(length, lengths, starts, device, host)


def _power(number: int) -> int:
    return 1 << number.bit_length() - 1
