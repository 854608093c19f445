"""Places of a page's bytes on a tier: offsets and strides as data, so that movers never know a layout.

Device slabs are plane-major (each plane one tensor ``[pages, *page_shape]``; planes of equal width lie at one
constant stride), but for pools whose groups have planes of other widths: there a page lies in a row, so that the page
of one group never touches that of another. Host pages are block-major (all planes of a block one after another, in the
same order).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cachesvc.model.layout import Layout, Plane, widths_match

PLANE_ALIGN_BYTES = 256
ROW_ALIGN_BYTES = 16
"""Alignment of each plane within a page that lies in a row."""


@dataclass(frozen=True, slots=True)
class PlaneSpan:
    """One plane's bytes on one tier: page p's first byte is at ``offset + p * page_stride``."""

    plane: Plane
    offset: int
    page_stride: int

    @property
    def width(self) -> int:
        """Contiguous bytes of one page in this plane."""
        return self.plane.page_bytes


@dataclass(frozen=True)
class Geometry:
    """The spans of one group's planes in copy order, and the bytes that ``pages`` pages take.

    Neighbouring spans of equal width lie at a constant pitch, so that they can be one pitched copy.
    """

    spans: tuple[PlaneSpan, ...]
    pages: int
    total_bytes: int

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page in all planes."""
        return sum(span.width for span in self.spans)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a plane here, in order."""
        return tuple(sorted({span.plane.layer for span in self.spans}))


def device_geometry(layout: Layout, group: int, pages: int) -> Geometry:
    """Placement of one group in a slab of ``pages`` pages that starts at offset 0."""
    pool = next(pool for pool in layout.pools if group in pool)
    planes = layout.planes_of(group)
    if _is_plane_major(layout, pool):
        offsets = accumulate((_aligned(pages * plane.page_bytes) for plane in planes[:-1]), initial=0)
        spans = [PlaneSpan(plane, offset, plane.page_bytes) for plane, offset in zip(planes, offsets, strict=True)]
        return Geometry(tuple(spans), pages, sum(_aligned(pages * plane.page_bytes) for plane in planes))
    (stride,) = slab_strides(layout, pool)
    offsets = accumulate((_in_row(plane.page_bytes) for plane in planes[:-1]), initial=0)
    spans = [PlaneSpan(plane, offset, stride) for plane, offset in zip(planes, offsets, strict=True)]
    return Geometry(tuple(spans), pages, _aligned(pages * stride))


def slab_strides(layout: Layout, pool: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of a page in each part of a pool's slab: of its planes, or of the whole page where that lies in a row."""
    if _is_plane_major(layout, pool):
        return max((tuple(plane.page_bytes for plane in layout.planes_of(group)) for group in pool), key=len)
    rows = (sum(_in_row(plane.page_bytes) for plane in layout.planes_of(group)) for group in pool)
    return (_aligned(max(rows)),)


def _is_plane_major(layout: Layout, pool: tuple[int, ...]) -> bool:
    return widths_match([[plane.page_bytes for plane in layout.planes_of(group)] for group in pool])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES


def _in_row(size_bytes: int) -> int:
    return -(-size_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def host_geometry(layout: Layout, group: int, pages: int) -> Geometry:
    """Block-major placement: a page holds all planes of its block one after another."""
    stride = layout.host_page_bytes(group)
    spans: list[PlaneSpan] = []
    offset = 0
    for plane in layout.planes_of(group):
        spans.append(PlaneSpan(plane, offset, stride))
        offset += plane.page_bytes
    return Geometry(tuple(spans), pages, stride * pages)


def device_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that one rank's device slabs take for ``pages[g]`` pages of each group's pool: exactly what is allocated.

    Counts may leave out a layout's markers (``Layout.fill_pages``), which are in the sum all the same.
    """
    filled = layout.fill_pages(pages)
    return sum(slab_bytes(layout, pool, filled[pool[0]]) for pool in layout.pools)


def slab_bytes(layout: Layout, pool: tuple[int, ...], pages: int) -> int:
    """Bytes of the slab of ``pages`` pages that the groups of ``pool`` lie in on one rank."""
    return sum(_aligned(pages * stride) for stride in slab_strides(layout, pool))


def host_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that the host slabs of all stored ranks take for ``pages[g]`` pages of each group's pool, as
    ``device_bytes``."""
    filled = layout.fill_host_pages(pages)
    return sum(
        filled[pool[0]] * layout.host_page_bytes(pool[0]) * layout.host_ranks(pool[0]) for pool in layout.host_pools
    )
