"""Fills pages of a plane with bytes that tell their seed, and finds those that hold other bytes, at memory speed.

For tests, benchmarks and replays, in the engine's own process. ``gpu_ops.kernels.reference`` says what the bytes are.
Needs CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.launch import external_stream, module

THREADS = 256
CHUNK_BYTES = 16 << 10
"""Bytes of a page that one block of threads takes: eight words a thread."""
MAX_CHUNKS = 65535
"""Limit of a grid's y; a longer page is walked in strides."""


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """Pages and the seed of each, on a device. ``first`` and ``last``: the lowest and the highest page."""

    pages: Any
    seeds: Any
    first: int
    last: int

    def __len__(self) -> int:
        return int(self.pages.size)


def stamps(pages: Sequence[int] | npt.NDArray[Any], seeds: Sequence[int] | npt.NDArray[Any]) -> Stamps:
    """Bring page numbers and seeds to CuPy's current device, and wait for them.

    Raises ValueError: none at all, a page twice, another number of seeds, values out of range.
    """
    where, what = np.asarray(pages), np.asarray(seeds)
    _require(where.ndim == 1 and where.size > 0, f"pages: shape {where.shape}; give a list of at least one")
    _require(where.dtype.kind in "iu", f"pages: dtype {where.dtype}; page numbers are integers")
    _require(what.shape == where.shape, f"seeds: shape {what.shape} for pages of shape {where.shape}")
    _require(len(np.unique(where)) == where.size, "pages: one is named twice")
    _require(int(where.min()) >= 0, f"pages: {int(where.min())} is negative")
    _require(all(0 <= int(seed) < 1 << 64 for seed in (what.min(), what.max())), "seeds: 0 to 2^64 - 1")
    import cupy

    made = Stamps(
        cupy.asarray(where.astype(np.int64)), cupy.asarray(what.astype(np.uint64)), int(where.min()), int(where.max())
    )
    cupy.cuda.get_current_stream().synchronize()
    return made


def stamp_pages(plane: Any, marks: Stamps, stream: int) -> None:
    """Queue on ``stream`` (a CUDA handle) the filling of pages of ``plane``, a CuPy array ``[pages, *page_shape]``.

    ``marks`` must stay until that is done. Raises ValueError, with nothing queued.
    """
    width = _check_plane(plane, marks)
    _launch("stamp_pages", plane, width, marks, stream, ())


def check_pages(plane: Any, marks: Stamps, wrong: Any, stream: int) -> None:
    """Queue on ``stream`` the counting of wrong words of each page into ``wrong``, a CuPy array uint32 ``[pages]``.

    Whatever ``wrong`` held before is gone. May be captured in a graph, after one use that loads the kernels. All arrays
    must stay until it is done. Raises ValueError, with nothing queued.
    """
    width = _check_plane(plane, marks)
    _require(wrong.dtype == np.uint32, f"wrong: dtype {wrong.dtype}, not uint32")
    _require(wrong.shape == (len(marks),), f"wrong: shape {wrong.shape} for {len(marks)} pages")
    _require(bool(wrong.flags.c_contiguous), f"wrong: strides {wrong.strides} leave gaps")
    _require(wrong.device.id == plane.device.id, f"wrong: on device {wrong.device.id}, the plane on {plane.device.id}")
    _launch("check_pages", plane, width, marks, stream, (wrong,))


def count_wrong(plane: Any, marks: Stamps, stream: int) -> npt.NDArray[np.uint32]:
    """``check_pages``, waited for: the wrong words of each page."""
    import cupy

    on = external_stream(stream)
    with plane.device, on:  # CuPy gives freed memory out again in the order of the stream that it was allocated on
        wrong = cupy.empty(len(marks), np.uint32)
        check_pages(plane, marks, wrong, stream)
        counted: npt.NDArray[np.uint32] = wrong.get(stream=on)
    return counted


def _check_plane(plane: Any, marks: Stamps) -> int:
    """Bytes of a page. Raises ValueError by what is wrong."""
    _require(plane.ndim >= 2, f"plane: shape {plane.shape}, not [pages, *page_shape]")
    width = int(prod(plane.shape[1:])) * int(plane.itemsize)
    _require(width > 0, f"plane: shape {plane.shape} has no bytes")
    dense = tuple(int(plane.itemsize * prod(plane.shape[axis + 1 :])) for axis in range(1, plane.ndim))
    _require(tuple(plane.strides[1:]) == dense, f"plane: strides {plane.strides}; a page's bytes must be contiguous")
    _require(plane.strides[0] >= width, f"plane: stride {plane.strides[0]} between pages of {width} bytes")
    _require(marks.last < plane.shape[0], f"pages: {marks.last} of a plane of {plane.shape[0]}")
    _require(
        marks.pages.device.id == plane.device.id,
        f"pages: on device {marks.pages.device.id}, the plane on {plane.device.id}",
    )
    return width


def _launch(name: str, plane: Any, width: int, marks: Stamps, stream: int, outputs: tuple[Any, ...]) -> None:
    import cupy

    chunks = min(-(-width // CHUNK_BYTES), MAX_CHUNKS)
    with plane.device, external_stream(stream):
        for output in outputs:
            cupy.cuda.runtime.memsetAsync(output.data.ptr, 0, output.nbytes, stream)
        arguments = (
            np.uint64(plane.data.ptr),
            np.int64(plane.strides[0]),
            np.int64(width),
            marks.pages,
            marks.seeds,
            *outputs,
        )
        module("pages").get_function(name)((len(marks), chunks), (THREADS,), arguments)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
