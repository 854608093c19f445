"""Places of a pool's page ids: extents of consecutive pages, each inside one region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import InvalidRequest

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Pages ``[first_page, first_page + pages)``; the first one begins at ``offset`` of ``region``."""

    first_page: int
    pages: int
    region: int
    offset: int


class PagePlaces(NamedTuple):
    """Places of pages: each one's number in its extent, and the extent's own place, as one number where all lie in one
    extent."""

    page: Int64s
    offset: Int64s | int
    region: Int64s | int

    def part(self, which: Int64s | slice) -> PagePlaces:
        """Selection of the pages."""
        if isinstance(self.offset, int) or isinstance(self.region, int):
            return PagePlaces(self.page[which], self.offset, self.region)
        return PagePlaces(self.page[which], self.offset[which], self.region[which])


class ExtentTable:
    """An immutable set of extents as columns, sorted by first page. Pages that no extent holds are not
    usable (yet)."""

    __slots__ = ("ends", "extents", "firsts", "offsets", "regions")

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = tuple(sorted(extents))
        columns = np.array(
            [(e.first_page, e.first_page + e.pages, e.region, e.offset) for e in self.extents], np.int64
        ).reshape(-1, 4)
        self.firsts, self.ends, self.regions, self.offsets = (np.ascontiguousarray(column) for column in columns.T)

    @classmethod
    def whole(cls, region: int, pages: int) -> ExtentTable:
        """Table of one extent from offset 0 on: a device slab."""
        return cls([Extent(0, pages, region, 0)])

    @property
    def pages(self) -> int:
        """Usable pages."""
        return int((self.ends - self.firsts).sum())

    def places(self, pages: Int64s, what: str, *, is_sorted: bool = False) -> PagePlaces:
        """Places of pages. Raises InvalidRequest as ``locate``."""
        if self._is_one_for(pages, is_sorted=is_sorted):
            only = self.extents[0]
            return PagePlaces(pages - only.first_page if only.first_page else pages, int(only.offset), int(only.region))
        found = self.locate(pages, what)
        return PagePlaces(pages - self.firsts[found], self.offsets[found], self.regions[found])

    def locate(self, pages: Int64s, what: str) -> Int64s:
        """Index of each page's extent. Raises InvalidRequest that names the first page that lies in none."""
        if self._is_one_for(pages):
            return np.zeros(len(pages), np.int64)
        found = self.firsts.searchsorted(pages, side="right") - 1
        if len(self.ends) and (pages < self.ends[found]).all() and found.min(initial=0) >= 0:
            return found
        bad = found < 0
        if not bad.all():
            bad |= pages >= self.ends[found]
        if bad.any():
            page = int(pages[int(np.argmax(bad))])
            raise InvalidRequest(f"{what}: page {page} is not in the pool, which has {self.pages} usable pages")
        return found.astype(np.int64, copy=False)

    def _is_one_for(self, pages: Int64s, *, is_sorted: bool = False) -> bool:
        """True where all of some pages lie in the only extent."""
        if len(self.extents) != 1 or not len(pages):
            return False
        only = self.extents[0]
        if is_sorted:
            return bool(pages[0] >= only.first_page and pages[-1] < only.first_page + only.pages)
        is_inside = np.minimum.reduce(pages) >= only.first_page  # ``min`` of an array goes through Python first
        return bool(is_inside and np.maximum.reduce(pages) < only.first_page + only.pages)
