"""Planner that turns page pairs into pitched copies. Pure: the same plan runs on NumPy in a test and on a GPU's
copy engine.

Every copy costs a submission, so there are three ways to copy a run of blocks that is contiguous in both pools
(``template``), and the cheapest differs from run to run; ``LinkCosts`` decides.

A plan is made on demand, part by part: the first is small and there at once, and while a part is copied there
is time to make the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.memory.arbiter import SLICE_BYTES
from cachesvc.memory.extents import ExtentTable, Int64s, PagePlaces
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, CopyStep
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Geometry
from cachesvc.model.words import Direction

# Copies of one piece of some pages, made by columns: each run of blocks in the way that costs least.
#
#     rows = planes   one copy a block:  height = planes,  pitch = from plane to plane
#     rows = blocks   one copy a plane:  height = blocks,  pitch = from page to page
#     singles         a copy of one row for each block and plane, where many of those go in one cheap call
#
# What is equal in all rows is written as one row; of each copy only the places are reckoned.

KEPT_CHOICES = 1 << 12
EVERY = slice(None)


class Strategy(IntEnum):
    BY_PLANES = 0
    BY_BLOCKS = 1
    SINGLES = 2


class When(Enum):
    """Costs of a copy beside its bytes' time: before the first byte moves the processor's time too, for which later
    nothing waits."""

    FIRST = "first"
    LATER = "later"

    __hash__ = object.__hash__  # an Enum's own is written in Python


@lru_cache(maxsize=KEPT_CHOICES)
def way_of(piece: Piece, length: int, costs: LinkCosts, when: When) -> tuple[Strategy, float, int]:
    """Cheapest way of a run of ``length`` blocks, its microseconds beyond the bytes' own time, and its copies."""
    row_us, single_us = costs.row_us(piece.row_width), costs.single_us(piece.row_width)
    is_whole = piece.is_dense and length * piece.row_width <= costs.max_pitch_bytes
    rows = 1 if is_whole else length
    upright_us = single_us if piece.planes == 1 else costs.per_copy_us + piece.planes * row_us
    flat_us = single_us if rows == 1 else costs.per_copy_us + rows * row_us
    if length > 1 and max(piece.device_stride, piece.host_stride) > costs.max_pitch_bytes:
        flat_us = float("inf")
    ways = (
        (Strategy.BY_PLANES, length * upright_us, length),
        (Strategy.BY_BLOCKS, piece.planes * flat_us, piece.planes),
        (Strategy.SINGLES, length * piece.planes * single_us, length * piece.planes),
    )
    if when is When.LATER:
        return min(ways, key=lambda way: way[1])
    processor_us = (
        costs.processor_us if piece.planes == 1 else costs.per_copy_us,
        costs.processor_us if rows == 1 else costs.per_copy_us,
        costs.processor_us,
    )
    return min(ways, key=lambda way: way[1] + processor_us[way[0]] * way[2])


def template(piece: Piece, runs: Runs, direction: Direction, costs: LinkCosts, when: When) -> CopyBatch:
    """Copies of a piece, each run in its cheapest way."""
    if runs.length:
        way = way_of(piece, runs.length, costs, when)[0]
        if way is Strategy.BY_BLOCKS and runs.length > 1:
            return _by_blocks(piece, runs, runs.starts, runs.lengths, direction, costs)
        return (
            _upright(piece, runs, EVERY, direction)
            if way is Strategy.BY_PLANES
            else _singles(piece, runs, EVERY, direction)
        )
    lengths, kinds = np.unique(runs.lengths, return_inverse=True)
    ways = np.array([way_of(piece, length, costs, when)[0] for length in lengths.tolist()])[kinds]
    way_of_page = np.repeat(ways, runs.lengths)
    batches = []
    if len(pages := np.flatnonzero(way_of_page == Strategy.BY_PLANES)):
        batches.append(_upright(piece, runs, pages, direction))
    if (is_flat := ways == Strategy.BY_BLOCKS).any():
        batches.append(_by_blocks(piece, runs, runs.starts[is_flat], runs.lengths[is_flat], direction, costs))
    if len(pages := np.flatnonzero(way_of_page == Strategy.SINGLES)):
        batches.append(_singles(piece, runs, pages, direction))
    return np.concatenate(batches) if len(batches) > 1 else batches[0]


def _upright(piece: Piece, runs: Runs, pages: Int64s | slice, direction: Direction) -> CopyBatch:
    """A copy for each page: as many rows as planes."""
    pitches = (piece.device_pitch, piece.host_pitch) if piece.planes > 1 else (piece.row_width, piece.row_width)
    return _rows(piece, runs, pages, (1, piece.planes, pitches), direction)


def _singles(piece: Piece, runs: Runs, pages: Int64s | slice, direction: Direction) -> CopyBatch:
    """A copy of one row for each page and plane."""
    return _rows(piece, runs, pages, (piece.planes, 1, (piece.row_width, piece.row_width)), direction)


def _by_blocks(
    piece: Piece, runs: Runs, pages: Int64s, heights: Int64s, direction: Direction, costs: LinkCosts
) -> CopyBatch:
    """A copy for each plane of runs that begin at ``pages`` and are as many blocks long."""
    flat = _rows(piece, runs, pages, (piece.planes, 1, (piece.device_stride, piece.host_stride)), direction)
    flat[:, 5] = np.repeat(heights, piece.planes)
    if piece.is_dense:
        whole = flat[:, 4] * flat[:, 5] <= costs.max_pitch_bytes
        flat[whole, 4] *= flat[whole, 5]
        flat[whole, 5] = 1
    is_row = flat[:, 5] == 1
    flat[is_row, 6:8] = flat[is_row, 4:5]
    return flat


Shape = tuple[int, int, tuple[int, int]]
"""Copies a page, rows of each, and their pitches: the device's, the host's."""


def _rows(piece: Piece, runs: Runs, pages: Int64s | slice, shape: Shape, direction: Direction) -> CopyBatch:
    """The copies of each page, a plane after another."""
    copies, height, pitches = shape
    device, host = (runs.device, runs.host) if pages is EVERY else (runs.device.part(pages), runs.host.part(pages))
    ends = (
        (device.region, device.page * piece.device_stride + (device.offset + piece.device), piece.device_pitch),
        (host.region, host.page * piece.host_stride + (host.offset + piece.host), piece.host_pitch),
    )
    if direction is Direction.LOAD:
        ends, pitches = ends[::-1], pitches[::-1]
    rows = np.empty((len(device.page) * copies, len(COPY_FIELDS)), np.int64, order="F")
    rows[:] = _like(piece.row_width, height, pitches)
    for column, (region, place, pitch) in zip((0, 2), ends, strict=True):
        if copies == 1:
            rows[:, column], rows[:, column + 1] = region, place
        else:
            rows[:, column] = region if isinstance(region, int) else region.repeat(copies)
            rows[:, column + 1] = (place[:, None] + pitch * np.arange(copies)).ravel()
    return rows


@lru_cache(maxsize=KEPT_CHOICES)
def _like(width: int, height: int, pitches: tuple[int, int]) -> CopyBatch:
    """Fields that are equal in all rows."""
    return np.array((0, 0, 0, 0, width, height, *pitches), np.int64)


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
        return len(self.device.page)

    def part(self, first: int, stop: int) -> Runs:
        """Pairs ``[first, stop)`` alone. A run that reaches beyond is cut."""
        if stop - first == self.pages:
            return self
        device, host = self.device.part(slice(first, stop)), self.host.part(slice(first, stop))
        if self.length == 1:
            return Runs(1, _NO_RUNS, _NO_RUNS, device, host)
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
        return Runs(1, _NO_RUNS, _NO_RUNS, device_places, host_places)
    our_extent, their_extent = device.locate(ours, "device"), host.locate(theirs, "host")
    is_next = (step == 1) & (theirs[1:] - theirs[:-1] == 1)
    is_next &= (our_extent[1:] == our_extent[:-1]) & (their_extent[1:] == their_extent[:-1])
    starts = np.flatnonzero(np.concatenate((_FIRST, ~is_next)))
    return _of(starts, np.diff(starts, append=len(ours)), device_places, host_places)


_FAR = 1 << 62
_FIRST = np.array([True])
_NO_RUNS = np.empty(0, np.int64)


def _of(starts: Int64s, lengths: Int64s, device: PagePlaces, host: PagePlaces) -> Runs:
    length = int(lengths[0]) if (lengths == lengths[0]).all() else 0
    return Runs(1, _NO_RUNS, _NO_RUNS, device, host) if length == 1 else Runs(length, lengths, starts, device, host)


def _power(number: int) -> int:
    return 1 << number.bit_length() - 1


# Cuts the planes of a step into pieces that one pitched copy can take: equal width, constant pitch on both sides.

KEPT_CUTS = 1 << 14
"""Steps whose pieces are remembered: some 200 a group of 64 layers, over all step sizes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``planes`` rows of ``row_width`` bytes a block; ``device`` and ``host`` are the first row's place
    for page 0."""

    planes: int
    row_width: int
    device: int
    host: int
    device_pitch: int
    host_pitch: int
    device_stride: int
    host_stride: int

    @property
    def is_dense(self) -> bool:
        """True where a run of blocks is one stretch of bytes on both sides."""
        return self.planes == 1 and self.row_width == self.device_stride == self.host_stride


class Same:
    """A geometry by identity: hashing one by value would cost more than cutting it."""

    __slots__ = ("geometry",)

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __hash__(self) -> int:
        return id(self.geometry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.geometry is other.geometry


@lru_cache(maxsize=KEPT_CUTS)
def pieces_of(
    device: Same, host: Same, layers: tuple[int, ...], max_pitch_bytes: int
) -> tuple[tuple[Piece, Piece], ...]:
    """Pieces that cover the planes of ``layers`` exactly once, each with itself at offset 0: pieces that
    differ in their place alone have that in common. Both geometries list the same planes in one order."""
    pieces: list[Piece] = []
    for piece in _stretches(device.geometry, host.geometry, layers, max_pitch_bytes):
        last = pieces[-1] if pieces else None
        grown = None if last is None else _stacked(last, piece, max_pitch_bytes)
        if grown is None:
            pieces.append(piece)
        else:
            pieces[-1] = grown
    return tuple((piece, replace(piece, device=0, host=0)) for piece in pieces)


def _stretches(device: Geometry, host: Geometry, layers: tuple[int, ...], max_width: int) -> list[Piece]:
    """One piece of one row for each plane; neighbours on both sides become one row (a block-major device
    pool)."""
    rows: list[Piece] = []
    for ours, theirs in zip(device.spans, host.spans, strict=True):
        if ours.plane.layer not in layers:
            continue
        width = ours.width
        row = Piece(1, width, ours.offset, theirs.offset, width, width, ours.page_stride, theirs.page_stride)
        last = rows[-1] if rows else None
        if last is not None and _touches(last, row, max_width):
            width = last.row_width + row.row_width
            rows[-1] = replace(last, row_width=width, device_pitch=width, host_pitch=width)
        else:
            rows.append(row)
    return rows


def _touches(last: Piece, row: Piece, max_width: int) -> bool:
    width = last.row_width + row.row_width
    return (
        last.device + last.row_width == row.device
        and last.host + last.row_width == row.host
        and (last.device_stride, last.host_stride) == (row.device_stride, row.host_stride)
        and width <= min(row.device_stride, row.host_stride, max_width)
    )


def _stacked(last: Piece, row: Piece, max_pitch_bytes: int) -> Piece | None:
    """``last`` with one more row, or None where width, stride or pitch differ or no copy can have such a
    pitch."""
    if (last.row_width, last.device_stride, last.host_stride) != (
        row.row_width,
        row.device_stride,
        row.host_stride,
    ):
        return None
    device_pitch = row.device - last.device - (last.planes - 1) * last.device_pitch
    host_pitch = row.host - last.host - (last.planes - 1) * last.host_pitch
    if last.planes > 1 and (device_pitch, host_pitch) != (last.device_pitch, last.host_pitch):
        return None
    if not all(row.row_width <= pitch <= max_pitch_bytes for pitch in (device_pitch, host_pitch)):
        return None
    return replace(last, planes=last.planes + 1, device_pitch=device_pitch, host_pitch=host_pitch)


SINGLE_LOST_US = 0.08
"""Link time lost with each of a call's single rows, where nothing was measured: 1D batches reach 0.87 of it at 32 KiB,
0.96 at 64 (H100, 2026-11)."""
LEAST_LOST_US = 0.02
"""Least loss where it was measured and too small to see: 0.95 at 32 KiB, 0.99 at 64 (H200, 2026-11)."""
PROCESSOR_US = 0.7
"""Processor time of one of a call's single rows: planning, and 0.4 to 0.6 in the driver (H200, 2026-11)."""
HOST_BYTES_PER_US = 54_700.0
"""Rate of a link from the host, where nothing was measured: an H100's on PCIe 5 x16 (2026-11)."""
PEER_BYTES_PER_US = 375_000.0
"""Rate of one copy between two H100s by NVLink (2026-11)."""
PEER_RATE = PEER_BYTES_PER_US / HOST_BYTES_PER_US
"""Rate of copies between devices in units of the host's."""
KEPT_FIGURES = 1 << 12
ByWidth = tuple[tuple[int, float], ...]
"""A figure for rows of each of some widths in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkCosts:
    """Costs of copies on a link; compared by identity, for choices are remembered by it. The defaults fit an H100 on
    PCIe 5 x16, measured 2026-11.

    ``per_single_us``: what the processor takes to submit a copy of one row, where a call takes thousands of these; the
    link copies meanwhile, so only what is longer than the row itself is lost (and ``SINGLE_LOST_US`` in any case).
    Infinite: it is a copy like others, as those of less than ``narrowest_single`` bytes are: the link's other end
    limits these, the more so the more memory they lie in (16 KiB took 1.1 us over 16 GiB; H200, 2026-11).
    ``singles_us``: what each was measured to take, bytes and all. ``min_efficiency``: a layered load takes the smallest
    step that is estimated to reach this part of what the best one would; ``least_efficiency``: with the smaller steps
    that lead up to it too, or all behind the first layer is one step. ``row_ns``: nanoseconds of measured rows.
    ``per_slice_us``: what the processor takes for a step beside its copies; a shorter step keeps the link waiting.
    """

    per_copy_us: float = 3.1
    per_row_ns: float = 30.0
    bytes_per_us: float = HOST_BYTES_PER_US
    per_step_us: float = 2.6
    max_pitch_bytes: int = (1 << 31) - 1
    min_efficiency: float = 0.90
    least_efficiency: float = 0.75
    per_single_us: float = math.inf
    narrowest_single: int = 32 << 10
    row_ns: ByWidth = ()
    singles_us: ByWidth = ()
    per_slice_us: float = 100.0

    def row_us(self, width: int) -> float:
        """Cost of a row beside its bytes: as was measured for the next width, or ``per_row_ns``."""
        return _next_width(self.row_ns or ((width, self.per_row_ns),), width)[1] / 1e3

    def single_us(self, width: int) -> float:
        """Cost of a copy of one row beside its bytes' own time."""
        if math.isinf(self.per_single_us) or width < self.narrowest_single:
            return self.per_copy_us + self.row_us(width)
        if not self.singles_us:
            return max(SINGLE_LOST_US, self.per_single_us - width / self.bytes_per_us)
        measured, taken_us = _next_width(self.singles_us, width)
        lost_us = taken_us - min(width, measured) / self.bytes_per_us
        return max(LEAST_LOST_US, lost_us, PROCESSOR_US - width / self.bytes_per_us)

    @property
    def processor_us(self) -> float:
        """Processor time of a copy of one row."""
        return self.per_copy_us if math.isinf(self.per_single_us) else PROCESSOR_US


def costs_of(figures: Mapping[str, Any]) -> LinkCosts:
    """Costs of plans on a link that was measured, from the figures of its calibration by name (``LinkFigures`` of
    ``gpu_ops``). They may have gone as JSON, which has lists for tuples."""
    known: dict[str, Any] = {name: figures[name] for name in _SAME_FIGURES}
    for name in ("row_ns", "singles_us"):
        known[name] = tuple((width, figure) for width, figure in figures[name])
    return LinkCosts(bytes_per_us=figures["load_bytes_per_us"], **known)


_SAME_FIGURES = ("per_copy_us", "per_row_ns", "per_step_us", "max_pitch_bytes", "per_single_us")


def peer_costs(costs: LinkCosts) -> LinkCosts:
    """Costs of plans on the links from other devices, for a device with these costs to the host: its processor takes
    the same time, and bytes take less."""
    return replace(costs, bytes_per_us=PEER_BYTES_PER_US, singles_us=())


@lru_cache(maxsize=KEPT_FIGURES)
def _next_width(figures: ByWidth, width: int) -> tuple[int, float]:
    return min(figures, key=lambda figure: abs(math.log(figure[0] / width)))


H100_COSTS = LinkCosts(per_single_us=0.65)
"""Costs with the driver's call for single rows (CUDA 12.8 and later), where nothing was measured."""


# Plans.

WORD_MASK = 0xFFFFFFFF
FIRST_PART_BYTES = 8 << 20
"""Bytes planned before the first copy starts: long enough to plan the next part meanwhile."""
FIRST_PART_COPIES = 16
"""Copies planned before the first one starts, where that is more, but a slice at most: a few large copies are planned
and submitted as fast as one."""
ALL_BUT_FIRST = -1
"""Value of ``layers_per_step``: the first layer is a step, and all the rest another."""
PART_COPIES = 2048
"""Copies of every further part: some 0.2 ms to plan, for which other jobs wait."""
_Memo = dict[tuple[Piece, tuple[int, int]], CopyBatch]
"""Copies of a shape's planes for pairs ``[first, stop)``."""
_NONE: CopyBatch = np.empty((0, len(COPY_FIELDS)), np.int64)


@dataclass(frozen=True, slots=True)
class Pool:
    """One group's pages on one side of the link: strides from the geometry, places from the extents."""

    geometry: Geometry
    table: ExtentTable

    def rows_of(self, page: int) -> list[tuple[int, int, int]]:
        """(region, offset, bytes) of a page's planes in copy order. Raises InvalidRequest for a page that
        is not here."""
        at = int(self.table.locate(np.array([page], np.int64), "page")[0])
        extent = self.table.extents[at]
        local = page - extent.first_page
        return [
            (extent.region, extent.offset + span.offset + local * span.page_stride, span.width)
            for span in self.geometry.spans
        ]


@dataclass(frozen=True, slots=True)
class GroupMove:
    """Pages of one group to move: ``device_pages[i]`` and ``host_pages[i]`` hold the same block."""

    device: Pool
    host: Pool
    device_pages: npt.NDArray[np.int64]
    host_pages: npt.NDArray[np.int64]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this group on this rank."""
        return self.device.geometry.page_bytes

    def pieces(self, layers: tuple[int, ...], costs: LinkCosts) -> tuple[tuple[Piece, Piece], ...]:
        return pieces_of(Same(self.device.geometry), Same(self.host.geometry), layers, costs.max_pitch_bytes)


def plan(
    moves: Sequence[GroupMove],
    direction: Direction,
    *,
    layers: int,
    base: int,
    layers_per_step: int | None,
    costs: LinkCosts,
    first_bytes: int = FIRST_PART_BYTES,
    part_copies: int = PART_COPIES,
) -> Iterator[CopyStep]:
    """Steps that move every page; after each that has one the timeline may stand at its ``word_value``, at last ``base
    + layers``. A step comes in parts, the first of all of ``first_bytes`` or ``FIRST_PART_COPIES`` copies, any other of
    about ``part_copies`` copies; the last one has the word.

    ``layers_per_step``: 0 for one step of all layers; None lets ``costs`` choose; or ``ALL_BUT_FIRST``. Raises
    InvalidRequest, before anything is planned, where pages are unpaired, outside of their pool, or written to twice.
    """
    runs = [
        runs_of(move.device.table, move.host.table, move.device_pages, move.host_pages, direction) for move in moves
    ]
    present = _layers_of(moves)
    if layers_per_step != 0 and present and present[0] > 0:  # layers that nothing is moved for are there at once
        yield CopyStep(_NONE, (base + present[0]) & WORD_MASK)
    memos: list[_Memo | None] = [None if layers_per_step == 0 else {} for _ in moves]  # one step uses nothing again
    is_first, room, at = True, 1.0, 0  # room: what of the part is not used yet
    most_bytes = first_bytes  # of it: twice the longest before, for it is submitted while that one is copied
    for size in _step_sizes(moves, runs, present, layers_per_step, costs):
        chunk, at = present[at : at + size], at + size
        batches, size_bytes = list[CopyBatch](), 0
        for move, run, memo in zip(moves, runs, memos, strict=True):
            pieces, first = move.pieces(chunk, costs), 0
            page_bytes = sum(piece.planes * piece.row_width for piece, _ in pieces)
            while pieces and first < run.pages:
                when = When.FIRST if is_first else When.LATER
                page = _copies_a_page(pieces, run, costs, when)
                if is_first:
                    page = min(page_bytes / first_bytes, max(page / FIRST_PART_COPIES, page_bytes / SLICE_BYTES))
                else:
                    page = max(page_bytes / most_bytes, page / part_copies)
                count = min(run.pages - first, int(room / page))
                if not count and batches:
                    yield CopyStep(_joined(batches), size_bytes=size_bytes)
                    most_bytes = max(most_bytes, 2 * size_bytes)
                    batches, size_bytes, is_first, room = [], 0, False, 1.0
                    continue
                stop = first + max(1, count)
                batches += _copies(pieces, run, (first, stop), memo, direction, costs, when)
                size_bytes += (stop - first) * page_bytes
                room -= (stop - first) * page
                first = stop
        word_value = base + (present[at] if at < len(present) else layers)
        yield CopyStep(_joined(batches), word_value & WORD_MASK, size_bytes)
        most_bytes = max(most_bytes, 2 * size_bytes)
        is_first, room = False, 1.0


def _step_sizes(
    moves: Sequence[GroupMove],
    runs: Sequence[Runs],
    present: tuple[int, ...],
    layers_per_step: int | None,
    costs: LinkCosts,
) -> Iterator[int]:
    """Layers of each step. Where they are followed one by one, the first is a layer whatever that costs, and nothing is
    reckoned before it."""
    layers = len(present)
    if layers_per_step == ALL_BUT_FIRST:
        yield from _rising(layers, layers)
        return
    if layers_per_step is not None or layers < 2:
        size = layers_per_step or max(1, layers)
        yield from (size for _ in range(0, max(1, layers), size))
        return
    yield 1
    sides = tuple((Same(move.device.geometry), Same(move.host.geometry)) for move in moves)
    yield from _rising(_step_of(sides, tuple(run.about() for run in runs), present, costs), layers)[1:]


def _rising(largest: int, layers: int) -> list[int]:
    """Sizes of steps: 1, 1, 2, 2, 4, 4 and so on up to ``largest``, for ``layers`` layers.

    A waiter that goes layer by layer begins after the first step, so that one is short, though short steps use the link
    badly; and no step is much longer than the time that the one before it keeps its waiter busy. Where even the largest
    steps are bad ones, the first is a layer all the same, and the second is all the rest.
    """
    if largest >= layers:
        return [1, layers - 1] if layers > 1 else [1]
    sizes: list[int] = []
    while sum(sizes) < layers:
        sizes.append(min(largest, 1 << len(sizes) // 2))
    return sizes


def _copies(
    pieces: Sequence[tuple[Piece, Piece]],
    runs: Runs,
    pages: tuple[int, int],
    memo: _Memo | None,
    direction: Direction,
    costs: LinkCosts,
    when: When,
) -> list[CopyBatch]:
    """Copies of the pieces of a stretch of pages. Pieces that differ in their place alone share a template."""
    batches: list[CopyBatch] = []
    for piece, shape in pieces:
        if memo is None:
            batches.append(template(piece, runs.part(*pages), direction, costs, when))
            continue
        like = memo.get((shape, pages))
        if like is None:
            like = memo[shape, pages] = template(shape, runs.part(*pages), direction, costs, when)
        batch = like.copy(order="F")
        source, target = (piece.host, piece.device) if direction is Direction.LOAD else (piece.device, piece.host)
        batch[:, 1] += source
        batch[:, 3] += target
        batches.append(batch)
    return batches


def _layers_of(moves: Sequence[GroupMove]) -> tuple[int, ...]:
    if len(moves) == 1:
        return moves[0].device.geometry.layers
    return tuple(sorted({layer for move in moves for layer in move.device.geometry.layers}))


def _joined(batches: Sequence[CopyBatch]) -> CopyBatch:
    return batches[0] if len(batches) == 1 else np.concatenate([_NONE, *batches])


def _copies_a_page(pieces: Sequence[tuple[Piece, Piece]], runs: Runs, costs: LinkCosts, when: When) -> float:
    """Approximate number of copies that a page takes."""
    _, length = runs.about()
    return sum(way_of(shape, length, costs, when)[2] for _, shape in pieces) / length


@lru_cache(maxsize=KEPT_CHOICES)
def _step_of(
    sides: tuple[tuple[Same, Same], ...], runs: tuple[tuple[int, int], ...], present: tuple[int, ...], costs: LinkCosts
) -> int:
    """Fewest layers a step (1, 2, 4, ...) that are good enough. ``runs[i]``: about how many of about what length of the
    pages on ``sides[i]``, so that a choice is remembered: one takes longer than all the rest of a plan."""
    layers = len(present)
    lost = {size: _lost_us(sides, runs, present, [size] * -(-layers // size), costs) for size in _doublings(layers)}
    ideal_us = (
        sum(
            count * length * device.geometry.page_bytes
            for (device, _), (count, length) in zip(sides, runs, strict=True)
        )
        / costs.bytes_per_us
    )
    best_us = ideal_us + min(lost.values())
    good = next(size for size in lost if ideal_us + lost[size] <= best_us / costs.min_efficiency)
    rising_us = ideal_us + _lost_us(sides, runs, present, _rising(good, layers), costs)
    return good if rising_us <= best_us / costs.least_efficiency else layers


def _doublings(most: int) -> list[int]:
    """1, 2, 4 and so on below ``most``, and ``most``."""
    return [*(1 << power for power in range(max(most - 1, 0).bit_length())), max(most, 1)]


def _lost_us(
    sides: tuple[tuple[Same, Same], ...],
    runs: tuple[tuple[int, int], ...],
    present: tuple[int, ...],
    sizes: Sequence[int],
    costs: LinkCosts,
) -> float:
    """Microseconds beyond the bytes' own time with steps of this size."""
    lost_us, at = 0.0, 0
    for step in sizes:
        chunk, at, size_bytes = present[at : at + step], at + step, 0
        for (device, host), (count, length) in zip(sides, runs, strict=True):
            for _, shape in pieces_of(device, host, chunk, costs.max_pitch_bytes):
                lost_us += count * way_of(shape, length, costs, When.LATER)[1]
                size_bytes += count * length * shape.planes * shape.row_width
        lost_us += max(costs.per_step_us, costs.per_slice_us - size_bytes / costs.bytes_per_us)
    return lost_us
