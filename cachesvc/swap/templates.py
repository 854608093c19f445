"""Copies of one piece of some pages, made by columns: each run of blocks in the way that costs least.

    rows = planes   one copy a block:  height = planes,  pitch = from plane to plane
    rows = blocks   one copy a plane:  height = blocks,  pitch = from page to page
    singles         a copy of one row for each block and plane, where many of those go in one cheap call

What is equal in all rows is written as one row; of each copy only the places are reckoned.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import lru_cache

import numpy as np

from cachesvc.memory.extents import Int64s
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch
from cachesvc.model.transfer import Direction
from cachesvc.swap.costs import LinkCosts
from cachesvc.swap.pieces import Piece
from cachesvc.swap.runs import Runs

KEPT_CHOICES = 1 << 12
EVERY = slice(None)


class Strategy(IntEnum):
    """Ways to copy a run."""

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
