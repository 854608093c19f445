"""Page pairs sorted into runs: blocks that are contiguous on both sides, which one copy can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachesvc.memory.extents import ExtentTable, Int64s
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.transfer import Direction


@dataclass(frozen=True, slots=True)
class Runs:
    """The pairs of a move, and where each lies (without a plane's own offset and stride). ``length``: of every run, or
    0 where they differ."""

    length: int
    lengths: Int64s
    starts: Int64s
    device_page: Int64s  # counted from the first page of its extent
    device_offset: Int64s
    device_region: Int64s
    host_page: Int64s
    host_offset: Int64s
    host_region: Int64s

    @property
    def pages(self) -> int:
        """Pairs."""
        return len(self.device_page)

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
        return Runs(
            _common(lengths),
            lengths,
            starts,
            self.device_page[first:stop],
            self.device_offset[first:stop],
            self.device_region[first:stop],
            self.host_page[first:stop],
            self.host_offset[first:stop],
            self.host_region[first:stop],
        )

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
    order = np.argsort(device_pages, kind="stable")
    ours, theirs = device_pages[order], host_pages[order]
    our_extent, their_extent = device.locate(ours, "device"), host.locate(theirs, "host")
    step = ours[1:] - ours[:-1]
    written = step if direction is Direction.LOAD else np.diff(np.sort(theirs))
    if not written.all():
        raise InvalidRequest("a transfer names the same destination page twice")
    is_next = step == 1
    if is_next.any():
        is_next &= theirs[1:] - theirs[:-1] == 1
        is_next &= (our_extent[1:] == our_extent[:-1]) & (their_extent[1:] == their_extent[:-1])
        starts = np.flatnonzero(np.concatenate((_FIRST, ~is_next)))
        lengths = np.diff(starts, append=len(ours))
    else:
        starts, lengths = np.arange(len(ours)), np.ones(len(ours), np.int64)
    return Runs(
        length=_common(lengths),
        lengths=lengths,
        starts=starts,
        device_page=ours - device.firsts[our_extent],
        device_offset=device.offsets[our_extent],
        device_region=device.regions[our_extent],
        host_page=theirs - host.firsts[their_extent],
        host_offset=host.offsets[their_extent],
        host_region=host.regions[their_extent],
    )


_FIRST = np.array([True])


def _common(lengths: Int64s) -> int:
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0


def _power(number: int) -> int:
    return 1 << number.bit_length() - 1
