"""Pages copied within planes of any width, in one launch, and no other byte touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops.kernels.page_copies import copy_pages, page_pairs, page_planes
from tests.gpu.frameworks import cupy
from tests.gpu.kernel_rig import POISON_BYTE, put, run

pytestmark = pytest.mark.gpu

PAGES = 12
WIDTHS = (1, 15, 16, 37, 8448, 16_384, 16_385, 41_984, 73_728)


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("gap", [0, 1, 16])
def test_pages_are_copied_in_every_plane(rng: np.random.Generator, stream: Any, gap: int) -> None:
    before = [rng.integers(0, 256, (PAGES, width + gap), np.uint8) for width in WIDTHS]
    rooms = [put(content) for content in before]
    order = rng.permutation(PAGES).tolist()
    targets = order[:4]
    sources = [order[4], order[5], order[4], order[6]]  # one block may be shared by several sequences
    planes = page_planes([room[:, :width] for room, width in zip(rooms, WIDTHS, strict=True)])
    pairs = page_pairs(sources, targets, planes.device)
    run(stream, lambda on: copy_pages(planes, pairs, on))
    for room, content, width in zip(rooms, before, WIDTHS, strict=True):
        want = content.copy()
        want[targets, :width] = content[sources, :width]
        np.testing.assert_array_equal(room.get(), want)


def test_planes_may_have_any_shape_and_type(rng: np.random.Generator, stream: Any) -> None:
    before: list[npt.NDArray[Any]] = [
        rng.integers(0, 256, (PAGES, 4, 16, 128), np.uint8).view(np.uint16),
        rng.standard_normal((PAGES, 33)).astype(np.float32),
        rng.standard_normal((PAGES, 3, 5)),
    ]
    rooms = [put(content) for content in before]
    planes = page_planes(rooms)
    pairs = page_pairs([0], [PAGES - 1], planes.device)
    run(stream, lambda on: copy_pages(planes, pairs, on))
    for room, content in zip(rooms, before, strict=True):
        content[PAGES - 1] = content[0]
        np.testing.assert_array_equal(room.get(), content)


def test_what_does_not_fit_is_refused_and_nothing_is_written(stream: Any) -> None:
    room = put(np.full((PAGES, 64), POISON_BYTE, np.uint8))
    planes = page_planes([room])
    pairs = page_pairs([0], [PAGES], planes.device)
    with pytest.raises(ValueError, match=f"pages: {PAGES} of planes of {PAGES}"):
        copy_pages(planes, pairs, stream.ptr)
    with pytest.raises(ValueError, match="planes\\[0\\]: strides"):
        page_planes([room.reshape(PAGES, 8, 8).transpose(0, 2, 1)])
    stream.synchronize()
    assert (room.get() == POISON_BYTE).all()
