"""Slices are the whole of their job: every byte once, in order, each word after all bytes of its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.memory.arbiter import cut
from cachesvc.memory.interface import COPY_FIELDS, CopyJob, CopyStep, Slice
from cachesvc.memory.memcpy import run_copies

SOURCE, TARGET = 3, 8
Bytes = npt.NDArray[np.uint8]


@st.composite
def any_steps(draw: st.DrawFn) -> tuple[tuple[CopyStep, ...], int]:
    """Steps of pitched, tall, wide and flat copies whose targets never overlap, with the bytes that they span."""
    at, steps = 0, []
    for number in range(draw(st.integers(0, 4))):
        copies = []
        for _ in range(draw(st.integers(0, 6))):
            width = draw(st.sampled_from((1, 3, 17, 64, 200, 800)))
            height = draw(st.sampled_from((1, 1, 2, 5, 20)))
            pitches = [width + draw(st.sampled_from((0, 1, 50))) for _ in range(2)]
            copies.append((SOURCE, draw(st.integers(0, 99)) + at, TARGET, at, width, height, *pitches))
            at += height * max(pitches)
        word_value = draw(st.sampled_from((None, number + 1)))
        steps.append(CopyStep(np.array(copies, np.int64).reshape(-1, len(COPY_FIELDS)), word_value))
    return tuple(steps), at + 100


def job_of(steps: Sequence[CopyStep], word: int | None = 5) -> CopyJob:
    return CopyJob(1, tuple(steps), word, None, 9, lambda _: None)


def step(*copies: tuple[int, ...], value: int | None = None) -> CopyStep:
    return CopyStep(np.array(copies, np.int64).reshape(-1, len(COPY_FIELDS)), value)


def slices_of(job: CopyJob, slice_bytes: int) -> list[Slice]:
    return list(cut(job, slice_bytes)[1])


def executed(batches: Sequence[npt.NDArray[np.int64]], span: int) -> Bytes:
    source = memoryview(bytearray(np.random.default_rng(1).bytes(2 * span)))
    target = bytearray(b"\xee" * span)
    for batch in batches:
        run_copies(batch, {SOURCE: source, TARGET: memoryview(target)})
    return np.frombuffer(target, np.uint8)


def written(batches: Sequence[npt.NDArray[np.int64]], span: int) -> npt.NDArray[np.int64]:
    """Number of writes of each target byte."""
    times = np.zeros(span, np.int64)
    for batch in batches:
        for _, _, _, at, width, height, _, pitch in batch.tolist():
            for row in range(height):
                times[at + row * pitch : at + row * pitch + width] += 1
    return times


@settings(deadline=None, max_examples=60)
@given(made=any_steps(), slice_bytes=st.sampled_from((7, 64, 100, 777, 1 << 20)))
def test_slices_cover_every_byte_exactly_once(made: tuple[tuple[CopyStep, ...], int], slice_bytes: int) -> None:
    steps, span = made
    job = job_of(steps)
    size_bytes, made_slices = cut(job, slice_bytes)
    slices = list(made_slices)
    whole, parts = [one.copies for one in steps], [piece.copies for piece in slices]
    assert np.array_equal(executed(parts, span), executed(whole, span))
    assert np.array_equal(written(parts, span), written(whole, span))
    assert all(piece.size_bytes <= slice_bytes for piece in slices)
    assert all(piece.size_bytes == int((piece.copies[:, 4] * piece.copies[:, 5]).sum()) for piece in slices)
    assert sum(piece.size_bytes for piece in slices) == size_bytes
    assert [piece.is_last for piece in slices] == [False] * (len(slices) - 1) + [True]


@settings(deadline=None)
@given(made=any_steps(), slice_bytes=st.sampled_from((7, 100, 1 << 20)))
def test_a_word_goes_with_the_last_slice_of_its_step(made: tuple[tuple[CopyStep, ...], int], slice_bytes: int) -> None:
    steps, _ = made
    slices = slices_of(job_of(steps), slice_bytes)
    done = np.cumsum([int((one.copies[:, 4] * one.copies[:, 5]).sum()) for one in steps]).tolist()
    seen, moved = [], 0
    for piece in slices:
        moved += piece.size_bytes
        if piece.word_value is not None:
            seen.append((piece.word_value, moved))
    assert seen == [(one.word_value, end) for one, end in zip(steps, done, strict=True) if one.word_value is not None]
    assert all(piece.word_value is None for piece in slices_of(job_of(steps, word=None), slice_bytes))


def rows_of(pieces: Sequence[Slice]) -> list[list[list[int]]]:
    return [piece.copies.tolist() for piece in pieces]


def test_whole_copies_are_grouped_and_large_ones_cut_by_rows_then_by_width() -> None:
    small, tall, wide = (1, 0, 2, 0, 4, 2, 4, 9), (1, 10, 2, 90, 6, 5, 8, 7), (1, 50, 2, 300, 35, 2, 40, 50)
    pieces = slices_of(job_of([step(small, small, small, tall, wide, small)]), 16)
    assert rows_of(pieces) == [
        [list(small), list(small)],
        [list(small)],
        [[1, 10, 2, 90, 6, 2, 8, 7]],
        [[1, 26, 2, 104, 6, 2, 8, 7]],
        [[1, 42, 2, 118, 6, 1, 8, 7]],
        [[1, 50, 2, 300, 16, 1, 16, 16]],
        [[1, 66, 2, 316, 16, 1, 16, 16]],
        [[1, 82, 2, 332, 3, 1, 3, 3]],
        [[1, 90, 2, 350, 16, 1, 16, 16]],
        [[1, 106, 2, 366, 16, 1, 16, 16]],
        [[1, 122, 2, 382, 3, 1, 3, 3]],
        [list(small)],
    ]


def test_steps_without_copies_are_words_alone_and_a_job_without_steps_is_one_slice() -> None:
    pieces = slices_of(job_of([step(value=1), step(), step(value=3)]), 16)
    assert [(len(piece.copies), piece.word_value, piece.is_last) for piece in pieces] == [
        (0, 1, False),
        (0, None, False),
        (0, 3, True),
    ]
    (only,) = slices_of(job_of([]), 16)
    assert (len(only.copies), only.size_bytes, only.word_value, only.is_last) == (0, 0, None, True)


@pytest.mark.parametrize(
    "copy",
    [
        (1, 0, 2, 0, 8, 1 << 62, 8, 1 << 62),
        (1, 0, 2, 0, 1 << 62, 4, 8, 8),
        (1, -5, 2, 0, 999, 1, 8, 8),
        (1, 0, 2, 0, 999, -1, 8, 8),
        (1, 1 << 62, 2, 1 << 62, 999, 2, 1 << 62, 8),
    ],
)
def test_what_no_memory_can_hold_is_left_whole_for_the_check(copy: tuple[int, ...]) -> None:
    (piece,) = slices_of(job_of([step(copy)]), 16)
    assert piece.copies.tolist() == [list(copy)]
    assert piece.size_bytes == 0


def test_cutting_is_lazy() -> None:
    huge = (1, 0, 2, 0, 1 << 20, 1 << 40, 1 << 20, 1 << 20)
    _, pieces = cut(job_of([step(huge)]), 1 << 20)
    assert [next(pieces).copies[0, 1] for _ in range(3)] == [0, 1 << 20, 2 << 20]
