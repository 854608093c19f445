"""Host memory of one group and rank: page ids over extents, which become usable as their chunks arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.memory.extents import Extent, ExtentTable
from cachesvc.memory.host.free_ranges import ByteRange, columns_of
from cachesvc.model.words import Run

OnPages = Callable[[Run], None]


@dataclass(slots=True)
class HostExtent:
    """``pages`` pages from ``first_page`` on in ``place``. ``is_clean``: zeroed; ``is_ready``: populated too, and
    registered with all devices of the slab."""

    first_page: int
    pages: int
    place: ByteRange
    region: int | None = None
    is_clean: bool = False
    is_ready: bool = False

    @property
    def run(self) -> Run:
        """Page ids of the slab."""
        return Run(self.first_page, self.pages)


class HostSlab:
    """Pages 0 .. ``pages`` - 1 of ``page_bytes``; made by ``HostPool.reserve`` and guarded by the pool's lock.

    ``places``: its bytes as columns (``columns_of``). ``devices``: those that copy from and to it.
    """

    def __init__(
        self, page_bytes: int, pieces: list[tuple[int, ByteRange]], devices: frozenset[str] = frozenset()
    ) -> None:
        """``pieces``: (pages, bytes) in order."""
        self.page_bytes = page_bytes
        self.devices = devices
        self.extents: list[HostExtent] = []
        first = 0
        for count, place in pieces:
            self.extents.append(HostExtent(first, count, place))
            first += count
        self.pages = first
        self.places = columns_of(place for _, place in pieces)
        self.is_released = False
        self.table = ExtentTable(())
        self.watchers: list[OnPages] = []

    def ready_runs(self) -> list[Run]:
        """Page ids that are usable now."""
        return [extent.run for extent in self.extents if extent.is_ready]

    def refresh(self) -> None:
        """Rebuild ``table`` after extents became ready."""
        self.table = ExtentTable(
            Extent(extent.first_page, extent.pages, extent.region, extent.place.offset)
            for extent in self.extents
            if extent.is_ready and extent.region is not None
        )
