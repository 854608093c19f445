"""Where pools get their bytes: device slabs from the backend, host slabs from the host pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from cachesvc.memory.free_ranges import ALIGN_BYTES
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.host_slab import HostSlab
from cachesvc.memory.seam import Backend, Slab
from cachesvc.model.errors import CacheError, NotFound
from cachesvc.model.geometry import device_geometry
from cachesvc.model.layout import Layout
from cachesvc.model.words import Run, runs_of
from cachesvc.swap.engine import SwapEngine

OnHostPages = Callable[[int, int, Run], None]
"""``(model, group, run)``: more host pages of a group are usable on every rank; called from a thread of the pool."""


@dataclass
class _Holding:
    """What one model holds. ``arrived[g][p]`` counts the ranks whose copy of host page p is usable."""

    layout: Layout
    host: list[list[HostSlab]]
    arrived: list[bytearray]
    replicas: dict[int, list[list[Slab]]] = field(default_factory=dict)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)


class Vault:
    """Makes and frees the memory of models. Calls come from one thread; ``on_host_pages`` from the pool's."""

    def __init__(self, backend: Backend, host_pool: HostPool, engine: SwapEngine, on_host_pages: OnHostPages) -> None:
        self._backend = backend
        self._pool = host_pool
        self._engine = engine
        self._on_host_pages = on_host_pages
        self._models: dict[int, _Holding] = {}
        self._used: dict[str, int] = {}
        self._lock = Lock()

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the daemon's devices."""
        return self._backend.devices()

    def device_free_bytes(self, device: str) -> int:
        """What is left of a device's pool; slabs that were rounded up may take a little more than all of it."""
        return max(0, self._backend.capacity_bytes(device) - self._used.get(device, 0))

    def host_pages_for(self, layout: Layout, share: float) -> int:
        """Pages that ``share`` of what is left of the host pool holds, the same number in every group."""
        per_page = sum(layout.page_bytes(g) * layout.host_ranks(g) for g in range(len(layout.groups)))
        largest = max(layout.page_bytes(g) for g in range(len(layout.groups)))
        # A page never crosses a chunk: up to one page of each slab is lost at the end of every chunk.
        slabs = sum(layout.host_ranks(g) for g in range(len(layout.groups)))
        lost = slabs * (self._pool.chunks * largest if self._pool.chunks > 1 else ALIGN_BYTES)
        usable = int(self._pool.free_bytes * share) - lost
        return max(0, usable // per_page)

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...]) -> list[list[Run]]:
        """Reserve host pages; returns for each group the runs that are usable now. Raises PoolExhausted."""
        slabs: list[list[HostSlab]] = []
        try:
            for group, count in enumerate(pages):
                slabs.append([])
                for _ in range(layout.host_ranks(group)):
                    slabs[-1].append(self._pool.reserve(layout.page_bytes(group), count))
            self._engine.attach_model(model, layout, slabs)
        except CacheError:
            for slab in (slab for group_slabs in slabs for slab in group_slabs):
                self._pool.release(slab)
            raise
        holding = _Holding(layout, slabs, [bytearray(count) for count in pages])
        with self._lock:
            self._models[model] = holding
        return [self._ready_now(model, holding, group) for group in range(len(pages))]

    def _ready_now(self, model: int, holding: _Holding, group: int) -> list[Run]:
        ready: list[Run] = []
        for slab in holding.host[group]:
            for run in self._pool.ready_pages(slab, partial(self._more, model, group)):
                ready += self._count(holding, group, run)
        return ready

    def _more(self, model: int, group: int, run: Run) -> None:
        with self._lock:
            holding = self._models.get(model)
        if holding is not None:
            for whole in self._count(holding, group, run):
                self._on_host_pages(model, group, whole)

    def _count(self, holding: _Holding, group: int, run: Run) -> list[Run]:
        """Count one rank's pages as arrived; returns the runs that have now arrived on every rank."""
        arrived = holding.arrived[group]
        ranks = len(holding.host[group])
        with self._lock:
            whole: list[int] = []
            for page in range(run.first, run.first + run.count):
                arrived[page] += 1
                if arrived[page] == ranks:
                    whole.append(page)
        return runs_of(whole)

    def open_replica(
        self, model: int, replica: int, layout: Layout, devices: tuple[str, ...], pages: tuple[int, ...]
    ) -> None:
        """Make the device slabs of a replica, zeroed. Raises PoolExhausted."""
        holding = self._models[model]
        ranks: list[list[Slab]] = []
        try:
            for device in devices:
                ranks.append([])
                for group, count in enumerate(pages):
                    size = device_geometry(layout, group, count).total_bytes
                    ranks[-1].append(self._backend.create_slab(device, size))
            self._engine.attach_replica(model, replica, devices, ranks, pages)
        except CacheError:
            for slab in (slab for rank in ranks for slab in rank):
                slab.close()
            raise
        holding.replicas[replica] = ranks
        holding.devices[replica] = devices
        for device, rank in zip(devices, ranks, strict=True):
            self._used[device] = self._used.get(device, 0) + sum(slab.handle.size_bytes for slab in rank)

    def slabs(self, model: int, replica: int, rank: int) -> list[Slab]:
        """One rank's slabs, by group. Raises NotFound."""
        holding = self._models.get(model)
        if holding is None or replica not in holding.replicas:
            raise NotFound("replica", (model, replica))
        return holding.replicas[replica][rank]

    def descriptor(self, token: bytes) -> int | None:
        """The file descriptor behind a handle's token, or None: for handles that travel as descriptors."""
        for holding in self._models.values():
            for ranks in holding.replicas.values():
                for slab in (slab for rank in ranks for slab in rank):
                    if slab.handle.token == token:
                        return slab.fd
        for device in self._backend.devices():
            timeline = self._backend.timeline(device)
            if timeline.handle.token == token:
                return timeline.fd
        return None

    def close_model(self, model: int) -> None:
        """Give back everything of a model that nothing moves any more."""
        self._engine.detach_model(model)
        with self._lock:
            holding = self._models.pop(model)
        for replica, ranks in holding.replicas.items():
            for device, rank in zip(holding.devices[replica], ranks, strict=True):
                for slab in rank:
                    self._used[device] -= slab.handle.size_bytes
                    slab.close()
        for slabs in holding.host:
            for host_slab in slabs:
                self._pool.release(host_slab)
