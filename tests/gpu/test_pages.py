"""The page kernels against their oracle, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels.pages import check_pages, count_wrong, stamp_pages, stamps
from gpu_ops.kernels.reference import count_wrong as oracle_wrong
from gpu_ops.kernels.reference import page_bytes
from tests.gpu.frameworks import cupy
from tests.gpu.rig import scrambled

pytestmark = pytest.mark.gpu

PAGES, MARKED = 20, 9
WIDTHS = (1, 7, 8, 9, 37, 1000, 4096, 8448, 41_984, 73_728, 131_072, 1_000_003)
GAPS = (0, 1, 24)
"""Bytes between two pages: with an odd one, pages begin at odd addresses."""


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def poisoned(rng: np.random.Generator, width: int, gap: int) -> tuple[Any, Any, Any]:
    """A plane ``[PAGES, width]`` inside of random bytes: the array of all bytes, the plane in it, and the bytes."""
    size = PAGES * (width + gap)
    before = rng.integers(0, 256, size, np.uint8)
    whole = cupy.asarray(before)
    plane = cupy.ndarray((PAGES, width), np.uint8, memptr=whole.data, strides=(width + gap, 1))
    return whole, plane, before


def fresh(rng: np.random.Generator, count: int = MARKED) -> tuple[Any, Any]:
    """Pages in no order, and seeds."""
    return scrambled(rng, count, PAGES), rng.integers(0, 1 << 64, count, np.uint64)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_stamped_as_the_oracle_says_and_nothing_else_is(
    rng: np.random.Generator, stream: Any, width: int, gap: int
) -> None:
    whole, plane, before = poisoned(rng, width, gap)
    pages, seeds = fresh(rng)
    cupy.cuda.Device().synchronize()
    stamp_pages(plane, stamps(pages, seeds), stream.ptr)
    stream.synchronize()
    want = before.copy()
    for page, content in zip(pages, page_bytes(seeds, width), strict=True):
        want[page * (width + gap) :][:width] = content
    np.testing.assert_array_equal(whole.get(), want)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_wrong_words_are_counted_as_the_oracle_says(
    rng: np.random.Generator, stream: Any, width: int, gap: int
) -> None:
    whole, plane, _ = poisoned(rng, width, gap)
    pages, seeds = fresh(rng)
    marks = stamps(pages, seeds)
    cupy.cuda.Device().synchronize()
    assert count_wrong(plane, stamps(pages[::-1], seeds), stream.ptr).any()
    stamp_pages(plane, marks, stream.ptr)
    assert not count_wrong(plane, marks, stream.ptr).any()
    content = whole.get()
    for _ in range(60):  # in any page and between them: what is no part of a marked page is no mistake
        content[int(rng.integers(0, content.size))] ^= int(rng.integers(1, 256))
    for page in pages[:3]:  # the very first and the very last byte
        content[page * (width + gap)] ^= 0x80
        content[page * (width + gap) + width - 1] ^= 0x01
    whole.set(content)
    cupy.cuda.Device().synchronize()
    shown = np.lib.stride_tricks.as_strided(content, (PAGES, width), (width + gap, 1))[pages]
    wrong = cupy.full(MARKED, 0xDEADBEEF, np.uint32)
    cupy.cuda.Device().synchronize()
    for _ in range(2):  # whatever it held before is gone
        check_pages(plane, marks, wrong, stream.ptr)
        stream.synchronize()
        np.testing.assert_array_equal(wrong.get(), oracle_wrong(shown, seeds))


def test_a_plane_of_any_shape_and_type_is_its_bytes(rng: np.random.Generator, stream: Any) -> None:
    plane = cupy.zeros((PAGES, 4, 33, 5), np.uint16)
    pages, seeds = fresh(rng)
    cupy.cuda.Device().synchronize()
    stamp_pages(plane, stamps(pages, seeds), stream.ptr)
    stream.synchronize()
    found = plane.get().reshape(PAGES, -1).view(np.uint8)
    np.testing.assert_array_equal(found[pages], page_bytes(seeds, 4 * 33 * 5 * 2))
    assert not np.delete(found, pages, axis=0).any()


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(rng: np.random.Generator, stream: Any) -> None:
    plane = cupy.zeros((PAGES, 64), np.uint8)
    marks = stamps(*fresh(rng))
    wide = cupy.zeros((PAGES, 8, 8), np.uint8)
    overlapping = cupy.ndarray((PAGES, 64), np.uint8, memptr=plane.data, strides=(32, 1))
    for bad, why in (
        (cupy.zeros(64, np.uint8), "plane: shape"),
        (cupy.zeros((PAGES, 0), np.uint8), "no bytes"),
        (wide.transpose(0, 2, 1), "contiguous"),
        (overlapping, "stride 32 between pages of 64 bytes"),
        (plane[: marks.last], f"pages: {marks.last} of a plane of {marks.last}"),
    ):
        with pytest.raises(ValueError, match=why):
            stamp_pages(bad, marks, stream.ptr)
    for wrong, why in (
        (cupy.zeros(MARKED, np.int64), "wrong: dtype int64"),
        (cupy.zeros(MARKED + 1, np.uint32), "wrong: shape"),
        (cupy.zeros(2 * MARKED, np.uint32)[::2], "wrong: strides"),
    ):
        with pytest.raises(ValueError, match=why):
            check_pages(plane, marks, wrong, stream.ptr)
    cupy.cuda.Device().synchronize()
    assert not plane.any()


def test_a_check_can_be_captured_and_replayed(rng: np.random.Generator, stream: Any) -> None:
    plane = cupy.zeros((PAGES, 8448), np.uint8)
    marks = stamps(*fresh(rng))
    wrong = cupy.empty(MARKED, np.uint32)
    cupy.cuda.Device().synchronize()
    check_pages(plane, marks, wrong, stream.ptr)  # loads the kernels
    stream.synchronize()
    with stream:
        stream.begin_capture()
        check_pages(plane, marks, wrong, stream.ptr)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert wrong.get().min() > 0
    stamp_pages(plane, marks, stream.ptr)
    graph.launch(stream)
    stream.synchronize()
    assert not wrong.get().any()
