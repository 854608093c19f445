"""Pools that a transfer may touch: the host slabs of each model and the device slabs of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cachesvc.memory.extents import ExtentTable
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.geometry import Geometry, device_geometry, host_geometry
from cachesvc.model.layout import Layout
from cachesvc.model.transfer import Direction, Transfer
from cachesvc.swap.planner import GroupMove, Pool
from cachesvc.swap.slots import SlotPool

RankMoves = tuple[tuple[GroupMove, ...], ...]
"""Moves of each rank, group by group."""


class HostPages(Protocol):
    """Host memory of one group and host rank; ``table`` holds the pages that are usable now."""

    pages: int
    page_bytes: int

    @property
    def table(self) -> ExtentTable:
        """Places of the usable pages."""


@dataclass(frozen=True)
class AttachedReplica:
    """Replica with one GPU for each rank; ``pools[rank][group]``."""

    devices: tuple[str, ...]
    pools: tuple[tuple[Pool, ...], ...]


@dataclass
class AttachedModel:
    """A layout, its host slabs ``host_slabs[group][host rank]``, and the replicas that hold it. ``slots``: its places
    on timelines; ``sheets``: the devices whose timelines have a sheet for it."""

    layout: Layout
    host_slabs: tuple[tuple[HostPages, ...], ...]
    host_geometries: tuple[Geometry, ...]
    slots: SlotPool
    replicas: dict[int, AttachedReplica] = field(default_factory=dict)
    sheets: set[str] = field(default_factory=set)

    def replica(self, replica_id: int) -> AttachedReplica:
        """Raises NotFound."""
        if replica_id not in self.replicas:
            raise NotFound("replica", replica_id)
        return self.replicas[replica_id]

    def every_pool(self) -> list[Pool]:
        """Device pools of all replicas, and host pools as they are now."""
        ranks = range(self.layout.ranks)
        host = [self.host_pool(group, rank) for group in range(len(self.layout.groups)) for rank in ranks]
        return host + [pool for replica in self.replicas.values() for rank in replica.pools for pool in rank]

    def host_pool(self, group: int, rank: int) -> Pool:
        """The host side of one rank: the same for all ranks where the group is replicated."""
        mine = self.host_slabs[group]
        return Pool(self.host_geometries[group], mine[rank if len(mine) > 1 else 0].table)


def attached_model(layout: Layout, host_slabs: Sequence[Sequence[HostPages]], slots: SlotPool) -> AttachedModel:
    """Raises InvalidRequest where the slabs do not fit the layout."""
    if len(host_slabs) != len(layout.groups):
        raise InvalidRequest(f"host slabs of {len(host_slabs)} groups for a layout of {len(layout.groups)}")
    for group, slabs in enumerate(host_slabs):
        if len(slabs) != layout.host_ranks(group):
            raise InvalidRequest(f"group {group}: {len(slabs)} host slabs for {layout.host_ranks(group)} host ranks")
        for slab in slabs:
            if slab.page_bytes != layout.host_page_bytes(group):
                raise InvalidRequest(
                    f"group {group}: host pages of {slab.page_bytes} bytes, not {layout.host_page_bytes(group)}"
                )
    geometries = tuple(host_geometry(layout, group, slabs[0].pages) for group, slabs in enumerate(host_slabs))
    return AttachedModel(layout, tuple(tuple(slabs) for slabs in host_slabs), geometries, slots)


def attached_replica(
    layout: Layout, devices: Sequence[str], slabs: Sequence[Sequence[Slab]], pages: Sequence[int]
) -> AttachedReplica:
    """``slabs[rank][group]`` with ``pages[group]`` pages. Raises InvalidRequest where they do not fit the
    layout."""
    if not len(devices) == len(slabs) == layout.ranks:
        raise InvalidRequest(f"{len(devices)} devices and slabs of {len(slabs)} ranks for a layout of {layout.ranks}")
    if len(pages) != len(layout.groups):
        raise InvalidRequest(f"pages of {len(pages)} groups for a layout of {len(layout.groups)}")
    geometries = [device_geometry(layout, group, count) for group, count in enumerate(pages)]
    pools = []
    for rank, mine in enumerate(slabs):
        if len(mine) != len(geometries):
            raise InvalidRequest(f"rank {rank}: slabs of {len(mine)} groups for a layout of {len(geometries)}")
        for slab, geometry in zip(mine, geometries, strict=True):
            if slab.handle.size_bytes < geometry.total_bytes:
                raise InvalidRequest(f"rank {rank}: a slab of {slab.handle.size_bytes} of {geometry.total_bytes} bytes")
        pools.append(
            tuple(
                Pool(geometry, ExtentTable.whole(slab.region, geometry.pages))
                for slab, geometry in zip(mine, geometries, strict=True)
            )
        )
    return AttachedReplica(tuple(devices), tuple(pools))


def rank_moves(
    model: AttachedModel, replica: AttachedReplica, source: AttachedReplica | None, transfer: Transfer
) -> RankMoves:
    """Moves of each rank for a transfer; pages are checked when it is planned. Raises InvalidRequest for a group
    that does not exist, and for a store from two replicas.

    A replicated group is stored from rank 0 alone, and loaded from the one host page to every rank. From another
    replica (``source``) each rank loads what its like has there.
    """
    if source is not None and transfer.direction is Direction.STORE:
        raise InvalidRequest("a store goes to the host, not to another replica")
    groups = [pairs.group for pairs in transfer.pages]
    if len(set(groups)) != len(groups):
        raise InvalidRequest(f"a transfer names a group twice: {groups}")
    ranks: list[list[GroupMove]] = [[] for _ in replica.devices]
    for pairs in transfer.pages:
        if not 0 <= pairs.group < len(model.layout.groups):
            raise InvalidRequest(f"group {pairs.group} of {len(model.layout.groups)}")
        device_pages, host_pages = (
            np.array(pairs.device_pages, np.int64),
            np.array(pairs.host_pages, np.int64),
        )
        once = transfer.direction is Direction.STORE and model.layout.groups[pairs.group].replicated
        for rank, moves in enumerate(ranks[:1] if once else ranks):
            pool = replica.pools[rank][pairs.group]
            there = model.host_pool(pairs.group, rank) if source is None else source.pools[rank][pairs.group]
            moves.append(GroupMove(pool, there, device_pages, host_pages))
    return tuple(tuple(moves) for moves in ranks)
