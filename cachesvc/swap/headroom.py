"""Number of pages of a layout that fit into what is left: pure, so that a registration is planned before anything
changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachesvc.memory.host.free_ranges import FreeRanges
from cachesvc.model.geometry import PLANE_ALIGN_BYTES, slab_strides
from cachesvc.model.layout import Layout

SHARE_PRECISION = 1024
"""Precision of a share of the host pool: at most one part in this number below what would fit, as every try takes from
a copy."""


class PoolSizes:
    """Memory that pools of a layout take, worked out once. A block has one page in every group (and on every rank).

    ``device_block_bytes``: on one device; ``host_block_bytes``: on the host.
    ``host_slabs``: (first group, rank, bytes of a page) of each slab on the host, in the order in which they are made.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        units, host_units = layout.unit_pages, layout.host_unit_pages
        strides = [(pool[0], slab_strides(layout, pool)) for pool in layout.pools]
        self._planes = Counter((group, stride) for group, each in strides for stride in each)
        self.device_block_bytes = sum(
            sum(each) * (units[group] if group != layout.marker else 1) for group, each in strides
        )
        self.host_slabs = [
            (pool[0], rank, layout.host_page_bytes(pool[0]))
            for pool in layout.host_pools
            for rank in range(layout.host_ranks(pool[0]))
        ]
        self.host_block_bytes = sum(host_units[group] * page_bytes for group, _, page_bytes in self.host_slabs)

    def device_bytes(self, pages: Sequence[int]) -> int:
        """Bytes like ``geometry.device_bytes``, of counts for every group."""
        return sum(
            planes * -(-pages[group] * width // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
            for (group, width), planes in self._planes.items()
        )

    def host_bytes(self, pages: Sequence[int]) -> int:
        """Bytes like ``geometry.host_bytes``, of counts for every group."""
        return sum(pages[group] * page_bytes for group, _, page_bytes in self.host_slabs)

    def readers(self, group: int, rank: int, devices: Sequence[str]) -> frozenset[str]:
        """Devices that copy from and to a host slab: all ranks' where they share one."""
        return frozenset(devices if self.layout.host_ranks(group) == 1 else devices[rank : rank + 1])

    def device_pages(self, size_bytes: int) -> tuple[int, ...]:
        """Most pages of each group, in the layout's proportion, whose slabs take at most ``size_bytes`` of a device."""
        units = self.layout.unit_pages

        def pages(blocks: int) -> tuple[int, ...]:
            return tuple(blocks * unit for unit in units)

        block_bytes = sum(planes * width * units[group] for (group, width), planes in self._planes.items())
        high = max(0, size_bytes) // block_bytes
        if not high or self.device_bytes(pages(high)) <= size_bytes:
            return pages(high)
        # The rest is what planes lose by being aligned.
        low = max(0, (size_bytes - sum(self._planes.values()) * (PLANE_ALIGN_BYTES - 1)) // block_bytes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.device_bytes(pages(middle)) <= size_bytes else (low, middle)
        return pages(low)

    def host_pages(self, blocks: int) -> tuple[int, ...]:
        """Host pages of each group's pool for ``blocks`` blocks of every group."""
        return tuple(blocks * unit for unit in self.layout.host_unit_pages)


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory that the pools have left, or would have. ``device_bytes``: by device; ``nodes``: NUMA nodes by device.

    The capacities are totals, of each device and of the host.
    """

    device_bytes: Mapping[str, int]
    host: FreeRanges
    device_capacity: int
    host_capacity: int
    nodes: Mapping[str, int] = field(default_factory=dict)

    def left_on(self, devices: Sequence[str]) -> int:
        """Bytes that every one of the devices has left."""
        return min(self.device_bytes[device] for device in devices)

    def holds(self, sizes: PoolSizes, devices: Sequence[str], host_pages: Sequence[int]) -> bool:
        """True where the host pool has room for ``host_pages[group]`` pages of every rank."""
        if sizes.host_bytes(host_pages) > self.host.free_bytes:
            return False
        host = self.host.copy()
        return all(
            host.take(page_bytes, host_pages[group], self.nodes.get(devices[rank]), sizes.readers(group, rank, devices))
            is not None
            for group, rank, page_bytes in sizes.host_slabs
        )

    def host_blocks(self, sizes: PoolSizes, devices: Sequence[str], share: float = 1.0, most: int | None = None) -> int:
        """Blocks that ``share`` of the free host pool holds; ``most`` at most."""

        def holds(blocks: int) -> bool:
            return self.holds(sizes, devices, sizes.host_pages(blocks))

        high = int(self.host.free_bytes * share) // sizes.host_block_bytes
        high = high if most is None else max(0, min(high, most))
        if holds(high):
            return high
        # Little is lost, at the ends of chunks: look close below what bytes alone would allow, then further down.
        step = 1 + high // 64
        while (low := max(0, high - step)) and not holds(low):
            high, step = low, 4 * step
        while high - low > max(1, low // SHARE_PRECISION):
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low
