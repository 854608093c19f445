"""Places of a page's bytes on a tier: offsets and strides as data, so that movers never know a layout.

Device slabs are plane-major (each plane one tensor ``[pages, *page_shape]``; planes of equal width lie at one
constant stride). Host pages are block-major (all planes of a block one after another, in the same order).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cachesvc.model.layout import Layout, Plane

PLANE_ALIGN_BYTES = 256


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
    """Plane-major placement of one group in a slab of ``pages`` pages that starts at offset 0."""
    spans: list[PlaneSpan] = []
    offset = 0
    for plane in layout.planes_of(group):
        spans.append(PlaneSpan(plane, offset, plane.page_bytes))
        offset += -(-pages * plane.page_bytes // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
    return Geometry(tuple(spans), pages, offset)


def host_geometry(layout: Layout, group: int, pages: int) -> Geometry:
    """Block-major placement: a page holds all planes of its block one after another."""
    stride = layout.page_bytes(group)
    spans: list[PlaneSpan] = []
    offset = 0
    for plane in layout.planes_of(group):
        spans.append(PlaneSpan(plane, offset, stride))
        offset += plane.page_bytes
    return Geometry(tuple(spans), pages, stride * pages)


def device_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that one rank's device slabs take for ``pages[g]`` pages of each group: exactly what is allocated.

    Counts may leave out a layout's markers (``Layout.fill_pages``), which are in the sum all the same.
    """
    filled = layout.slab_pages(layout.fill_pages(pages))
    return sum(slab_bytes(layout, pool, filled[pool[0]]) for pool in layout.pools)


def slab_bytes(layout: Layout, pool: tuple[int, ...], pages: int) -> int:
    """Bytes of the slab of ``pages`` pages that the groups of ``pool`` lie in on one rank."""
    return max(device_geometry(layout, group, pages).total_bytes for group in pool)


def host_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that the host slabs of all stored ranks take for ``pages[g]`` pages of each group, as ``device_bytes``."""
    return sum(
        host_geometry(layout, group, count).total_bytes * layout.host_ranks(group)
        for group, count in enumerate(layout.fill_host_pages(pages))
    )
