"""Batches, tables and awkward numbers for the tests of kernels, and arrays on the device that show what was touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_batches import Lengths, Table, cumulate_lengths
from gpu_ops.kernels.reference_numbers import HalfBits, narrow
from tests.gpu.frameworks import cupy

POISON_HALF = 0x7FC1
"""A NaN of both formats, and of no kernel's making."""
POISON_BYTE = 0xA5
PERCENT_HOLES = 15
Reaches = (EVERYTHING, Reach(1), Reach(7), Reach(64), Reach(16, 4), Reach(33, 40), Reach(128, 1))


@dataclass(frozen=True)
class Batch:
    """Rows with new tokens behind cached ones, and where they begin."""

    added: Lengths
    cached: Lengths
    starts_q: Lengths
    starts_k: Lengths
    longest: Lengths

    @property
    def tokens(self) -> int:
        """New ones."""
        return int(self.starts_q[-1])

    @property
    def keys(self) -> int:
        """New ones, and cached ones within reach."""
        return int(self.starts_k[-1])


def batch_of(added: list[int], cached: list[int], reach: Reach = EVERYTHING) -> Batch:
    """The batch with these lengths."""
    lengths = np.array(added, np.int32), np.array(cached, np.int32)
    return Batch(*lengths, *cumulate_lengths(*lengths, reach))


def random_batch(rng: np.random.Generator, rows: int, most: int, reach: Reach = EVERYTHING) -> Batch:
    """Rows of up to ``most`` new and three times as many cached tokens; some without the one, the other or both."""
    added = rng.integers(0, most + 1, rows) * (rng.random(rows) < 0.8)
    cached = rng.integers(0, 3 * most + 1, rows) * (rng.random(rows) < 0.7)
    added[int(rng.integers(rows))] = most  # one row at least has something
    return batch_of(added.tolist(), cached.tolist(), reach)


def random_table(
    rng: np.random.Generator, batch: Batch, block_tokens: int, pages: int, percent_holes: int = PERCENT_HOLES
) -> Table:
    """A page for every block of every row; holes, and cells that name no page of the pool."""
    columns = int((batch.added + batch.cached).max()) // block_tokens + 1
    cells = rng.integers(0, pages, (len(batch.added), columns)).astype(np.int32)
    lots = rng.integers(0, 100, cells.shape)
    cells[lots < percent_holes] = -1
    cells[(lots == percent_holes) & (percent_holes > 0)] = pages
    return cells


def awkward_halves(rng: np.random.Generator, shape: tuple[int, ...], half: Half) -> HalfBits:
    """Numbers of all sizes; some rows with NaN, infinities, denormal numbers, zeros of both signs, or nothing else."""
    spread = rng.integers(-12, 8, (*shape[:-1], 1))
    bits = narrow((rng.standard_normal(shape) * 2.0**spread).astype(np.float32), half)
    flat = bits.reshape(-1, shape[-1])
    infinity, one = (0x7F80, 0x3F80) if half is Half.BF16 else (0x7C00, 0x3C00)
    for row, words in enumerate(flat):
        match row % 9:
            case 1:
                words[:] = rng.choice([0, 0x8000], shape[-1])
            case 2:
                words[:] = rng.integers(0, 128, shape[-1]) | rng.choice([0, 0x8000], shape[-1])  # denormal
            case 3:
                words[rng.integers(0, shape[-1], 3)] = POISON_HALF
            case 4:
                words[rng.integers(0, shape[-1], 4)] = (infinity, infinity | 0x8000, one, 1)
            case 5:
                words[:] = POISON_HALF
            case 6:
                words[:] = infinity
            case 7:
                words[:] = rng.integers(0, 1 << 16, shape[-1])
    return bits


def put(array: npt.NDArray[Any]) -> Any:
    """On the device."""
    return cupy.asarray(array)


def spaced_pages(array: npt.NDArray[Any], poison: int) -> tuple[Any, Any]:
    """Pages with as much between them as they hold: all of it, and the view that is the pages."""
    room = np.full((array.shape[0], 2, *array.shape[1:]), poison, array.dtype)
    room[:, 0] = array
    whole = put(room)
    return whole, whole[:, 0]


def run(stream: Any, queue: Callable[[int], None]) -> None:
    """Once all is on the device, queue something on a stream and wait for it."""
    cupy.cuda.Device().synchronize()
    queue(stream.ptr)
    stream.synchronize()


def same_bits(found: Any, want: npt.NDArray[Any]) -> None:
    """Assert that an array of the device holds these bits, floats too."""
    got = found.get()
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    word = np.dtype(f"u{want.dtype.itemsize}")
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(word), np.ascontiguousarray(want).view(word))
