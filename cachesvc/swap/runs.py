"""Page pairs sorted into runs: blocks that are contiguous on both sides, which one copy can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachesvc.memory.extents import ExtentTable, Int64s, Places
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.transfer import Direction


@dataclass(frozen=True, slots=True)
class Runs:
    """The pairs of a move, and where each lies (without a plane's own offset and stride). ``length``: of every run, or
    0 where they differ."""

    length: int
    lengths: Int64s
    starts: Int64s
    device: Places
    host: Places

    @property
    def pages(self) -> int:
        """Pairs."""
        return len(self.device.page)

    def part(self, first: int, stop: int) -> Runs:
        """Pairs ``[first, stop)`` alone. A run that reaches beyond is cut."""
        if stop - first == self.pages:
            return self
        if self.length == 1:
            starts, lengths = self.starts[: stop - first], self.lengths[: stop - first]
        else:
            within = np.searchsorted(self.starts, first, "right"), np.searchsorted(self.starts, stop, "left")
            starts = np.concatenate(([first], self.starts[within[0] : within[1]])) - first
            lengths = np.diff(starts, append=stop - first)
        stretch = slice(first, stop)
        return Runs(_common(lengths), lengths, starts, self.device.part(stretch), self.host.part(stretch))

    def about(self) -> tuple[int, int]:
        """How many runs, and how long they are, as powers of two."""
        count = len(self.lengths)
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
    places = device.places(ours, "device"), host.places(theirs, "host")
    step = ours[1:] - ours[:-1]
    least = int(step.min(initial=_FAR))
    is_twice = not least if direction is Direction.LOAD else not np.diff(np.sort(theirs)).all()
    if is_twice:
        raise InvalidRequest("a transfer names the same destination page twice")
    if least > 1:  # no two lie side by side
        return Runs(int(len(ours) > 0), np.ones(len(ours), np.int64), np.arange(len(ours)), *places)
    our_extent, their_extent = device.locate(ours, "device"), host.locate(theirs, "host")
    is_next = (step == 1) & (theirs[1:] - theirs[:-1] == 1)
    is_next &= (our_extent[1:] == our_extent[:-1]) & (their_extent[1:] == their_extent[:-1])
    starts = np.flatnonzero(np.concatenate((_FIRST, ~is_next)))
    lengths = np.diff(starts, append=len(ours))
    return Runs(_common(lengths), lengths, starts, *places)


_FAR = 1 << 62
_FIRST = np.array([True])


def _common(lengths: Int64s) -> int:
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0


def _power(number: int) -> int:
    return 1 << number.bit_length() - 1
