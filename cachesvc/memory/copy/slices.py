"""Cuts copy jobs into slices, lazily: short pieces of work between which the arbiter can choose again.

A step is cut between its copies; only a copy that is larger than a slice is cut itself, by rows, and a row that is
larger than a slice by width. The pieces in order are the very bytes of the step in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cachesvc.memory.copy.memcpy import extremes
from cachesvc.memory.extents import Int64s
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, CopyJob, CopyStep, Slice

_REACH_LIMIT = 1 << 61
"""Offset beyond all memory. A copy that reaches further is not cut, because its arithmetic may overflow: the runner's
check refuses it."""


def cut(job: CopyJob, slice_bytes: int) -> tuple[int, Iterator[Slice]]:
    """The job's bytes, and its slices in order, at least one. A step's word goes with the last slice of the step.

    Where the job says how large it is, nothing is looked at here, and each step is asked for when it is its turn: only
    when no bytes are left is there a look for steps that have none.
    """
    if job.size_bytes is not None:
        return job.size_bytes, _slices(job, iter(job.steps), job.size_bytes, slice_bytes)
    steps = tuple(job.steps)
    size_bytes = sum(int(_sizes(step.copies).sum()) for step in steps)
    return size_bytes, _slices(job, iter(steps), size_bytes, slice_bytes)


def _slices(job: CopyJob, steps: Iterator[CopyStep], left_bytes: int, slice_bytes: int) -> Iterator[Slice]:
    step, is_last = next(steps, None), False
    while step is not None:
        total, sizes = step.size_bytes, None
        if total is None:
            sizes = _sizes(step.copies)
            total = int(sizes.sum())
        left_bytes -= total
        following = next(steps, None) if left_bytes <= 0 else None
        is_last = left_bytes <= 0 and following is None
        word_value = step.word_value if job.word is not None else None
        parts = _parts(step.copies, sizes, total, slice_bytes)
        part: tuple[CopyBatch, int] | None = next(parts)
        while part is not None:
            (copies, size_bytes), part = part, next(parts, None)
            ends_step = part is None
            yield Slice(job, copies, size_bytes, word_value if ends_step else None, ends_step and is_last)
        step = following or (None if is_last else next(steps, None))
    if not is_last:  # no steps, or fewer bytes than there were to be: what has no sane size counts as none
        yield Slice(job, np.empty((0, len(COPY_FIELDS)), np.int64), 0, None, is_last=True)


def _parts(copies: CopyBatch, sizes: Int64s | None, total: int, slice_bytes: int) -> Iterator[tuple[CopyBatch, int]]:
    if total <= slice_bytes:
        yield copies, total
        return
    ends = np.cumsum(copies[:, 4] * copies[:, 5] if sizes is None else sizes)
    first, before = 0, 0
    while first < len(copies):
        stop = int(np.searchsorted(ends, before + slice_bytes, side="right"))
        if stop == first:  # a copy larger than a slice
            yield from _pieces(copies[first].tolist(), slice_bytes)
            stop = first + 1
        else:
            yield copies[first:stop], int(ends[stop - 1]) - before
        first, before = stop, int(ends[stop - 1])


def _pieces(copy: list[int], slice_bytes: int) -> Iterator[tuple[CopyBatch, int]]:
    src, src_at, dst, dst_at, width, height, src_pitch, dst_pitch = copy
    if width <= slice_bytes:
        rows = slice_bytes // width
        for row in range(0, height, rows):
            count = min(rows, height - row)
            at = (src, src_at + row * src_pitch, dst, dst_at + row * dst_pitch)
            yield np.array([(*at, width, count, src_pitch, dst_pitch)], np.int64), width * count
        return
    for row in range(height):
        for column in range(0, width, slice_bytes):
            size = min(slice_bytes, width - column)
            at = (src, src_at + row * src_pitch + column, dst, dst_at + row * dst_pitch + column)
            yield np.array([(*at, size, 1, size, size)], np.int64), size


def _sizes(copies: CopyBatch) -> Int64s:
    """Bytes of each copy; 0 for one that no memory can hold."""
    width, height = copies[:, 4], copies[:, 5]
    if len(copies):
        least, most = extremes(copies)
        reach_at_most = most[5] * max(most[4], most[6], most[7])
        if min(least) >= 0 and min(least[4:6]) > 0 and max(reach_at_most, most[1], most[3]) < _REACH_LIMIT:
            product: Int64s = width * height
            return product
    reach = np.maximum(np.maximum(copies[:, 6], copies[:, 7]), np.maximum(width, 1))
    is_sane = (width > 0) & (height > 0) & (height <= _REACH_LIMIT // reach)
    is_sane &= (copies[:, [1, 3, 6, 7]] >= 0).all(axis=1) & (copies[:, [1, 3]] < _REACH_LIMIT).all(axis=1)
    sizes: Int64s = np.where(is_sane, width * height, 0)
    return sizes
