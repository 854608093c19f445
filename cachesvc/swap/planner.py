"""Planner that turns page pairs into pitched copies. Pure: the same plan runs on NumPy in a test and on a GPU's
copy engine.

Every copy costs a submission, so there are three ways to copy a run of blocks that is contiguous in both pools
(``templates.py``), and the cheapest differs from run to run; ``LinkCosts`` decides.

A plan is made on demand, part by part: the first is small and there at once, and while a part is copied there
is time to make the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cachesvc.memory.arbiter import SLICE_BYTES
from cachesvc.memory.extents import ExtentTable
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, CopyStep
from cachesvc.model.layout import Geometry
from cachesvc.model.words import Direction
from cachesvc.swap.templates import (
    KEPT_CHOICES,
    LinkCosts,
    Piece,
    Runs,
    Same,
    When,
    pieces_of,
    runs_of,
    template,
    way_of,
)

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
    yield from _rising(_smallest_good_step(moves, runs, present, costs), layers)[1:]


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


def _smallest_good_step(
    moves: Sequence[GroupMove], runs: Sequence[Runs], present: tuple[int, ...], costs: LinkCosts
) -> int:
    """Fewest layers a step (1, 2, 4, ...) that are good enough. Remembered by about how many runs there are of about
    what length: one choice takes longer than all the rest of a plan."""
    sides = tuple((Same(move.device.geometry), Same(move.host.geometry)) for move in moves)
    return _step_of(sides, tuple(run.about() for run in runs), present, costs)


@lru_cache(maxsize=KEPT_CHOICES)
def _step_of(
    sides: tuple[tuple[Same, Same], ...], runs: tuple[tuple[int, int], ...], present: tuple[int, ...], costs: LinkCosts
) -> int:
    """``runs[i]``: how many of what length of the pages on ``sides[i]``."""
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
