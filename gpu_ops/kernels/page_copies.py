"""Copies pages within every plane of a list in one launch: before a shared last block is written.

Needs CuPy. ``PagePlanes`` and ``PagePairs`` are made on the host, checked there, and may be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.launch import MAX_GRID, blocks_for, launch
from gpu_ops.kernels.operands import Array, Kind, Operand, bytes_operand, operand, require, same_device

SOURCE = "copy_pages"
THREADS = 256
CHUNK_BYTES = 16 << 10
"""Bytes of a page that one block of threads takes: four vectors a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePlanes:
    """Planes ``[pages, page bytes]``, described on a device. ``pages``: those of the smallest."""

    planes: tuple[Operand, ...]
    described: Operand
    device: int
    pages: int
    longest_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PagePairs:
    """Pairs of source and target pages, on a device. ``last``: the highest page of all."""

    pairs: Operand
    count: int
    last: int


def page_planes(planes: Sequence[Array]) -> PagePlanes:
    """Describe planes of any shapes ``[pages, ...]`` and types, on one device, and wait until that is there.

    Raises ValueError: no plane, too many, a page with gaps.
    """
    require(0 < len(planes) <= MAX_GRID, f"planes: {len(planes)}; 1 to {MAX_GRID}")
    read = tuple(_plane(f"planes[{at}]", plane) for at, plane in enumerate(planes))
    device = same_device(*read)
    sizes = [one.size_bytes * (one.count // one.shape[0]) for one in read]
    rows = [(one.address, one.strides[0], size) for one, size in zip(read, sizes, strict=True)]
    described = _uploaded("described", np.array(rows, np.int64), device)
    return PagePlanes(read, described, device, min(one.shape[0] for one in read), max(sizes))


def page_pairs(sources: Sequence[int], targets: Sequence[int], device: int) -> PagePairs:
    """Bring pairs of pages to a device, and wait for them.

    Raises ValueError: none at all, too many, a target twice or among the sources, a negative page.
    """
    require(len(sources) == len(targets), f"targets: {len(targets)} for {len(sources)} sources")
    require(0 < len(targets) <= MAX_GRID, f"targets: {len(targets)}; 1 to {MAX_GRID}")
    require(len(set(targets)) == len(targets), "targets: one is named twice")
    both = set(sources) & set(targets)
    require(not both, f"targets: {sorted(both)} are sources too")
    require(min(*sources, *targets) >= 0, "pages: one is negative")
    pairs = np.array(list(zip(sources, targets, strict=True)), np.int64)
    return PagePairs(_uploaded("pairs", pairs, device), len(targets), int(pairs.max()))


def copy_pages(planes: PagePlanes, pairs: PagePairs, stream: int) -> None:
    """Queue the copies on ``stream`` (a CUDA handle); planes and pairs must stay until they are done.

    Raises ValueError, with nothing queued.
    """
    require(pairs.last < planes.pages, f"pages: {pairs.last} of planes of {planes.pages}")
    same_device(planes.described, pairs.pairs)
    grid = (blocks_for(planes.longest_bytes, CHUNK_BYTES), pairs.count, len(planes.planes))
    launch(SOURCE, "copy_pages", grid, THREADS, (planes.described, pairs.pairs), stream, planes.device)


def _plane(name: str, plane: Array) -> Operand:
    read = bytes_operand(name, plane)
    require(len(read.shape) >= 2 and read.count > 0, f"{name}: shape {read.shape}, not [pages, ...] with bytes in it")
    return read.dense(1).spaced()


def _uploaded(name: str, rows: npt.NDArray[np.int64], device: int) -> Operand:
    import cupy

    with cupy.cuda.Device(device):
        made = cupy.asarray(rows)
        cupy.cuda.get_current_stream().synchronize()
    return operand(name, made, Kind.INT64, (None,) * rows.ndim)
