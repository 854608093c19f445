"""Turns pages to be moved into pitched copies. Pure: the same plan runs on NumPy in a test and on a GPU's
copy engine.

For every run of blocks that is contiguous in both pools there are three ways to copy a cluster of equal planes:

    rows = planes   one copy a block:  height = planes,  pitch = from plane to plane
    rows = blocks   one copy a plane:  height = blocks,  pitch = from page to page
    singles         a copy of one row for each block and plane, where many of those go in one cheap call

Every copy costs a submission, so the cheapest way differs from run to run; ``LinkCosts`` decides.

A plan is made as it is asked for, part by part: the first is small and there at once, and while a part is copied there
is time to make the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cachesvc.memory.extents import ExtentTable, Int64s
from cachesvc.memory.seam import COPY_FIELDS, CopyBatch, CopyStep
from cachesvc.model.geometry import Geometry
from cachesvc.model.transfer import Direction
from cachesvc.swap.pieces import Piece, Same, pieces_of
from cachesvc.swap.runs import Runs, runs_of

WORD_MASK = 0xFFFFFFFF
SINGLE_LOST_US = 0.08
"""Of the link, with each of a call's single rows: 1D batches reach 0.87 of it at 32 KiB, 0.96 at 64 (H100, 2026-11)."""
KEPT_CHOICES = 1 << 12
FIRST_PART_BYTES = 8 << 20
"""What is planned before the first copy starts: long enough to plan the next part meanwhile."""
PART_COPIES = 2048
"""Of every further part: some 0.3 ms to plan, for which other jobs wait."""
Float64s = npt.NDArray[np.float64]
_Memo = dict[tuple[Piece, tuple[int, int]], CopyBatch]
"""Copies of a shape's planes for pairs ``[first, stop)``."""
_NONE: CopyBatch = np.empty((0, len(COPY_FIELDS)), np.int64)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What copies cost on a link. The defaults fit an H100 on PCIe 5 x16, measured 2026-11.

    ``per_single_us``: what the processor takes to submit a copy of one row, where a call takes thousands of these; the
    link copies meanwhile, so only what is longer than the row itself is lost (and ``SINGLE_LOST_US`` in any case).
    Infinite: it is a copy like others. ``min_efficiency``: a layered load takes the smallest step that is estimated to
    reach this part of what the best one would. ``row_ns``: (width, nanoseconds) of rows that were measured.
    ``per_slice_us``: what the processor takes for a step beside its copies; a shorter step keeps the link waiting.
    """

    per_copy_us: float = 3.1
    per_row_ns: float = 30.0
    bytes_per_us: float = 54_700.0
    per_step_us: float = 2.6
    max_pitch_bytes: int = (1 << 31) - 1
    min_efficiency: float = 0.90
    per_single_us: float = math.inf
    row_ns: tuple[tuple[int, float], ...] = ()
    per_slice_us: float = 100.0

    def row_us(self, width: int) -> float:
        """What a row costs beside its bytes: as was measured for the next width, or ``per_row_ns``."""
        return _row_us(self, width)

    def single_us(self, width: int) -> float:
        """What a copy of one row costs beside its bytes' own time."""
        if math.isinf(self.per_single_us):
            return self.per_copy_us + self.row_us(width)
        return max(SINGLE_LOST_US, self.per_single_us - width / self.bytes_per_us)


@lru_cache(maxsize=KEPT_CHOICES)
def _row_us(costs: LinkCosts, width: int) -> float:
    _, row_ns = min(costs.row_ns or ((width, costs.per_row_ns),), key=lambda row: abs(math.log(row[0] / width)))
    return row_ns / 1e3


H100_COSTS = LinkCosts(per_single_us=0.65)
"""With the driver's call for single rows (CUDA 12.8 and later), where nothing was measured."""


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

    def pieces(self, layers: frozenset[int], costs: LinkCosts) -> tuple[tuple[Piece, Piece], ...]:
        """See ``pieces_of``."""
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
    + layers``. A step comes in parts, the first of all of ``first_bytes``, any other of about ``part_copies`` copies;
    the last one has the word.

    ``layers_per_step``: 0 for one step of all layers; None lets ``costs`` choose. Raises InvalidRequest, before
    anything is planned, where pages are unpaired, outside of their pool, or written to twice.
    """
    runs = [
        runs_of(move.device.table, move.host.table, move.device_pages, move.host_pages, direction) for move in moves
    ]
    present = sorted({layer for move in moves for layer in move.device.geometry.layers})
    if layers_per_step != 0 and present and present[0] > 0:  # layers that nothing is moved for are there at once
        yield CopyStep(_NONE, (base + present[0]) & WORD_MASK)
    memos: list[_Memo] = [{} for _ in moves]
    is_first, room, at = True, 1.0, 0  # room: what of the part is not used yet
    for size in _step_sizes(moves, runs, present, layers_per_step, costs):
        chunk, at = present[at : at + size], at + size
        batches: list[CopyBatch] = []
        for move, run, memo in zip(moves, runs, memos, strict=True):
            pieces, first = move.pieces(frozenset(chunk), costs), 0
            while pieces and first < run.pages:
                page = (
                    _bytes_a_page(pieces) / first_bytes
                    if is_first
                    else _copies_a_page(pieces, run, costs) / part_copies
                )
                count = min(run.pages - first, int(room / page))
                if not count and batches:
                    yield CopyStep(np.concatenate(batches))
                    batches, is_first, room = [], False, 1.0
                    continue
                stop = first + max(1, count)
                batches += _copies(pieces, run, (first, stop), memo, direction, costs)
                room -= (stop - first) * page
                first = stop
        word_value = base + (present[at] if at < len(present) else layers)
        yield CopyStep(np.concatenate([_NONE, *batches]), word_value & WORD_MASK)
        is_first, room = False, 1.0


def _step_sizes(
    moves: Sequence[GroupMove],
    runs: Sequence[Runs],
    present: Sequence[int],
    layers_per_step: int | None,
    costs: LinkCosts,
) -> Iterator[int]:
    """Layers of each step. Where they are followed one by one, the first is a layer whatever that costs, and nothing is
    reckoned before it."""
    layers = len(present)
    if layers_per_step is not None or layers < 2:
        size = layers_per_step or max(1, layers)
        yield from (size for _ in range(0, max(1, layers), size))
        return
    yield 1
    yield from _rising(_smallest_good_step(moves, runs, present, costs), layers)[1:]


def _rising(largest: int, layers: int) -> list[int]:
    """Sizes of steps: 1, 1, 2, 2, 4, 4 and so on up to ``largest``, for so many layers.

    Who waits layer by layer begins after the first step, so that one is short, though short steps use the link badly;
    and no step is much longer than the time that the one before it keeps its waiter busy. Where even the largest steps
    are bad ones, the first is a layer all the same, and the second is all the rest.
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
    memo: _Memo,
    direction: Direction,
    costs: LinkCosts,
) -> list[CopyBatch]:
    """Copies of the pieces of a stretch of pages. Pieces that differ in their place alone share a template."""
    batches: list[CopyBatch] = []
    for piece, shape in pieces:
        template = memo.get((shape, pages))
        if template is None:
            template = memo[shape, pages] = _template(shape, runs.part(*pages), direction, costs)
        batch = template.copy()
        source, target = (piece.host, piece.device) if direction is Direction.LOAD else (piece.device, piece.host)
        batch[:, 1] += source
        batch[:, 3] += target
        batches.append(batch)
    return batches


def _way_costs(piece: Piece, lengths: Int64s, costs: LinkCosts) -> tuple[Float64s, Float64s, Float64s]:
    """Microseconds beyond the bytes' own time for each run: rows = planes, rows = blocks, singles."""
    row_us = costs.row_us(piece.row_width)
    single_us = costs.single_us(piece.row_width)
    blocks: Float64s = lengths.astype(np.float64)
    rows = blocks
    if piece.is_dense:
        rows = np.where(blocks * piece.row_width > costs.max_pitch_bytes, blocks, 1.0)
    upright_us = single_us if piece.planes == 1 else costs.per_copy_us + piece.planes * row_us
    by_planes: Float64s = blocks * upright_us
    by_blocks: Float64s = piece.planes * np.where(rows == 1, single_us, costs.per_copy_us + rows * row_us)
    if max(piece.device_stride, piece.host_stride) > costs.max_pitch_bytes:
        by_blocks = np.where(blocks > 1, np.inf, by_blocks)
    return by_planes, by_blocks, blocks * piece.planes * single_us


def _bytes_a_page(pieces: Sequence[tuple[Piece, Piece]]) -> int:
    return sum(piece.planes * piece.row_width for piece, _ in pieces)


def _copies_a_page(pieces: Sequence[tuple[Piece, Piece]], runs: Runs, costs: LinkCosts) -> float:
    """About how many copies a page takes."""
    _, length = runs.about()
    return sum(_copies_in(shape, length, costs) for _, shape in pieces)


@lru_cache(maxsize=KEPT_CHOICES)
def _copies_in(piece: Piece, length: int, costs: LinkCosts) -> float:
    ways = [float(way[0]) for way in _way_costs(piece, np.array([length]), costs)]
    return (1.0, piece.planes / length, float(piece.planes))[ways.index(min(ways))]


def _template(piece: Piece, runs: Runs, direction: Direction, costs: LinkCosts) -> CopyBatch:
    """Copies of a piece at offset 0 of its page, each run in its cheapest way."""
    by_planes, by_blocks, by_singles = _way_costs(piece, runs.lengths, costs)
    as_singles = by_singles < np.minimum(by_planes, by_blocks)
    as_blocks = (by_blocks < by_planes) & ~as_singles
    batches = []
    if not (as_blocks | as_singles).all():
        pages = np.flatnonzero(np.repeat(~(as_blocks | as_singles), runs.lengths))
        upright = _rows(piece, runs, pages, direction)
        upright[:, 5] = piece.planes
        upright[:, 6:8] = _pitches(piece.device_pitch, piece.host_pitch, direction)
        batches.append(upright)
    if as_blocks.any() or as_singles.any():
        alone = np.flatnonzero(np.repeat(as_singles, runs.lengths))
        chosen = np.concatenate((runs.starts[as_blocks], alone))
        heights = np.concatenate((runs.lengths[as_blocks], np.ones(len(alone), np.int64)))
        batches.append(_flat(piece, runs, chosen, heights, direction, costs))
    batch = np.concatenate(batches) if len(batches) > 1 else batches[0]
    is_row = batch[:, 5] == 1
    batch[is_row, 6:8] = batch[is_row, 4:5]
    return batch


def _flat(
    piece: Piece, runs: Runs, pages: Int64s, heights: Int64s, direction: Direction, costs: LinkCosts
) -> CopyBatch:
    """A copy for each plane of runs that begin at ``pages`` and are as many blocks long."""
    planes = np.arange(piece.planes, dtype=np.int64)
    flat = _rows(piece, runs, np.repeat(pages, piece.planes), direction)
    pitches = _pitches(piece.device_pitch, piece.host_pitch, direction)
    flat[:, 1] += np.tile(planes * pitches[0], len(pages))
    flat[:, 3] += np.tile(planes * pitches[1], len(pages))
    flat[:, 5] = np.repeat(heights, piece.planes)
    flat[:, 6:8] = _pitches(piece.device_stride, piece.host_stride, direction)
    if piece.is_dense:
        whole = flat[:, 4] * flat[:, 5] <= costs.max_pitch_bytes
        flat[whole, 4] *= flat[whole, 5]
        flat[whole, 5] = 1
    return flat


def _rows(piece: Piece, runs: Runs, pages: Int64s, direction: Direction) -> CopyBatch:
    """One copy for each of ``pages`` with regions, offsets and width; height and pitches are the caller's."""
    device = runs.device_offset[pages] + runs.device_page[pages] * piece.device_stride
    host = runs.host_offset[pages] + runs.host_page[pages] * piece.host_stride
    rows = np.empty((len(pages), len(COPY_FIELDS)), np.int64)
    device_columns, host_columns = ((2, 3), (0, 1)) if direction is Direction.LOAD else ((0, 1), (2, 3))
    rows[:, device_columns[0]], rows[:, device_columns[1]] = runs.device_region[pages], device
    rows[:, host_columns[0]], rows[:, host_columns[1]] = runs.host_region[pages], host
    rows[:, 4] = piece.row_width
    return rows


def _pitches(device: int, host: int, direction: Direction) -> tuple[int, int]:
    return (host, device) if direction is Direction.LOAD else (device, host)


def _smallest_good_step(
    moves: Sequence[GroupMove], runs: Sequence[Runs], present: Sequence[int], costs: LinkCosts
) -> int:
    """Fewest layers a step (1, 2, 4, ...) that are good enough. Remembered by about how many runs there are of about
    what length: one choice takes longer than all the rest of a plan."""
    sides = tuple((Same(move.device.geometry), Same(move.host.geometry)) for move in moves)
    return _step_of(sides, tuple(run.about() for run in runs), tuple(present), costs)


@lru_cache(maxsize=KEPT_CHOICES)
def _step_of(
    sides: tuple[tuple[Same, Same], ...], runs: tuple[tuple[int, int], ...], present: tuple[int, ...], costs: LinkCosts
) -> int:
    """``runs[i]``: how many of what length of the pages on ``sides[i]``."""
    lost = {size: _lost_us(sides, runs, present, size, costs) for size in _doublings(len(present))}
    ideal_us = (
        sum(
            count * length * device.geometry.page_bytes
            for (device, _), (count, length) in zip(sides, runs, strict=True)
        )
        / costs.bytes_per_us
    )
    bound_us = (ideal_us + min(lost.values())) / costs.min_efficiency
    return next((size for size in lost if ideal_us + lost[size] <= bound_us), max(1, len(present)))


def _doublings(most: int) -> list[int]:
    """1, 2, 4 and so on below ``most``, and ``most``."""
    return [*(1 << power for power in range(max(most - 1, 0).bit_length())), max(most, 1)]


def _lost_us(
    sides: tuple[tuple[Same, Same], ...],
    runs: tuple[tuple[int, int], ...],
    present: tuple[int, ...],
    size: int,
    costs: LinkCosts,
) -> float:
    """Microseconds beyond the bytes' own time with steps of ``size`` layers."""
    lost_us = 0.0
    for at in range(0, len(present), size):
        size_bytes = 0
        for (device, host), (count, length) in zip(sides, runs, strict=True):
            for _, shape in pieces_of(device, host, frozenset(present[at : at + size]), costs.max_pitch_bytes):
                ways = _way_costs(shape, np.array([length]), costs)
                lost_us += count * float(min(way[0] for way in ways))
                size_bytes += count * length * shape.planes * shape.row_width
        lost_us += max(costs.per_step_us, costs.per_slice_us - size_bytes / costs.bytes_per_us)
    return lost_us
