"""Copies of whole pages within a slab, by the engine's own kernels: they come before those of the step they are for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from cachesvc.model.geometry import device_geometry
from cachesvc.model.layout import Layout

ITEM_BYTES = 8
"""Bytes of an item that planes are copied in, where all planes begin and end with one: an eighth of the work."""


class PageCopier:
    """``slab``: all bytes of a pool's slab (int8 ``[bytes]``) of ``pages`` pages, in which the planes of the layout's
    first group have all bytes of a page."""

    def __init__(self, slab: Any, layout: Layout, pages: int) -> None:
        spans = device_geometry(layout, 0, pages).spans
        places = [(span.offset, span.page_stride, span.width) for span in spans]
        unit = 1 if any(number % ITEM_BYTES for place in places for number in place) else ITEM_BYTES
        items = slab[: slab.numel() // unit * unit]
        if unit > 1:
            import torch

            items = items.view(torch.int64)
        begin = items.storage_offset()
        self._planes = [
            items.as_strided((count, pages, width // unit), (step // unit, stride // unit, 1), begin + first // unit)
            for first, step, stride, width, count in _regions(places)
        ]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages ``(source, target)``, on the current stream."""
        for source, target in pairs:
            for planes in self._planes:
                planes[:, target].copy_(planes[:, source])


def _regions(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    """Planes at equal distances: the first one's offset, the distance, bytes from page to page and of a page, and how
    many there are. A kernel copies all of a region's planes."""
    regions: list[tuple[int, int, int, int, int]] = []
    steps = [after[0] - before[0] for before, after in pairwise(places)]
    for (offset, stride, width), step in zip(places, [0, *steps], strict=True):
        if regions:
            first, distance, *form, count = regions[-1]
            if form == [stride, width] and (count == 1 or step == distance):
                regions[-1] = first, step, stride, width, count + 1
                continue
        regions.append((offset, 0, stride, width, 1))
    return regions
