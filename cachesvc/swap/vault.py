"""Allocator of pools: device slabs from the backend, host slabs from the host pool.

Making and freeing device memory waits for drivers, so it may be done on any thread, by one at a time for each device:
``open_replica`` and ``close_retired``. Host memory waits for none: ``open_host`` and ``free_retired``
may be called on any thread. Everything else is called where the ledger is and never waits.
A model of which something is still to be made or freed is not in the ledger.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cachesvc.memory.host_pool import HostPool, HostSlab
from cachesvc.memory.interface import DeviceMemory, Slab
from cachesvc.model.errors import NotFound
from cachesvc.model.layout import Layout, slab_bytes
from cachesvc.model.words import Run
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import Headroom, PoolSizes

log = logging.getLogger(__name__)

S = TypeVar("S", Slab, HostSlab)

LANDING_SECONDS = 2.0
"""Time limit of waiting for the copies of lost replicas, seconds. Where they take longer, for a GPU hangs, their memory
is freed later: callers that make pools wait here, on any device."""

OnHostPages = Callable[[int, int, Run], None]
"""``(model, group, run)``: more host pages of a group are usable on every rank; called from a thread of the pool."""


class Arrivals:
    """Number of ranks on which each host page of a model is usable."""

    def __init__(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """``pages`` and the ``ranks`` that keep them, of each group."""
        self._ranks = ranks
        self._arrived: list[npt.NDArray[np.uint8]] = [np.zeros(count, np.uint8) for count in pages]

    def count(self, group: int, run: Run) -> list[Run]:
        """Count one rank's new pages; returns the runs of them that now have arrived on every rank."""
        if self._ranks[group] == 1:
            return [run]
        arrived = self._arrived[group][run.first : run.first + run.count]
        arrived += 1
        is_whole = np.concatenate(([False], arrived == self._ranks[group], [False]))
        edges = run.first + np.flatnonzero(is_whole[1:] != is_whole[:-1]).reshape(-1, 2)
        return [Run(first, end - first) for first, end in edges.tolist()]


class Shared(NamedTuple):
    """A descriptor for engines: of a rank's slab, or (no ``replica``) of the model's words on a device, or of
    what tells that nothing is copied there any more."""

    fd: int
    device: str
    model: int
    replica: int | None = None
    rank: int = 0


@dataclass(eq=False)
class _Holding:
    """Slabs and handles of one model. ``page_bytes``: of a page of each group. ``news``: (group, run) pairs that
    arrived before it was ``announced``, not reported yet. ``lost``: slabs, with their devices, of replicas of which
    another device lost its memory; some are gone by now. ``serving``: devices of replicas that are there or being made:
    host pages are usable once these can reach them."""

    host: list[list[HostSlab]]
    page_bytes: list[int]
    arrivals: Arrivals
    replicas: dict[int, list[list[Slab]]] = field(default_factory=dict)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    news: list[tuple[int, Run]] = field(default_factory=list)
    is_announced: bool = False
    lost: dict[int, list[tuple[str, Slab]]] = field(default_factory=dict)
    serving: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def slabs(self) -> Iterable[tuple[str, Slab]]:
        for replica, ranks in self.replicas.items():
            for device, rank in zip(self.devices[replica], ranks, strict=True):
                for slab in unique(rank):
                    yield device, slab
        for slabs in self.lost.values():
            yield from slabs

    def lose(self, device: str) -> None:
        """A device lost its memory: replicas that had some there are not given out any more."""
        for replica in [number for number, devices in self.serving.items() if device in devices]:
            del self.serving[replica]
        for replica in [number for number, devices in self.devices.items() if device in devices]:
            ranks = zip(self.devices.pop(replica), self.replicas.pop(replica), strict=True)
            self.lost[replica] = [(where, slab) for where, rank in ranks for slab in unique(rank)]


@dataclass(eq=False)
class _Leaving:
    """Memory that one device has to give back, of a model or replica that is forgotten; 0 bytes: its words."""

    device: str
    close: Callable[[], None]
    size_bytes: int


def _readers(holding: _Holding, replicas: Iterable[tuple[str, ...]]) -> dict[HostSlab, set[str]]:
    """Devices of some replicas that copy from and to each host slab: all ranks' where they share one."""
    slabs: dict[HostSlab, set[str]] = {}
    for ranks in holding.host:
        for rank, slab in enumerate(ranks):
            mine = slabs.setdefault(slab, set())
            for devices in replicas:
                mine.update(devices if len(ranks) == 1 else devices[rank : rank + 1])
    return slabs


def unique(slabs: Iterable[S]) -> Iterable[S]:
    """Each slab once: several groups may lie in one."""
    return {id(slab): slab for slab in slabs}.values()


class Vault:
    """The memory of models: what is free, what is whose, and what has arrived."""

    def __init__(
        self,
        backend: DeviceMemory,
        host_pool: HostPool,
        engine: SwapEngine,
        on_host_pages: OnHostPages,
        landing_seconds: float = LANDING_SECONDS,
    ) -> None:
        self._backend = backend
        self._pool = host_pool
        self._engine = engine
        self._on_host_pages = on_host_pages
        self._landing_seconds = landing_seconds
        self._models: dict[int, _Holding] = {}
        self._retired: dict[int, _Holding] = {}
        self._used: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._leaving: list[_Leaving] = []  # of models that are forgotten: what each device has to give back
        self._freeing = Lock()
        self._lock = Lock()

    # -- where the ledger is -----------------------------------------------------------------------------------

    def devices(self) -> tuple[str, ...]:
        return self._backend.devices()

    def device_free_bytes(self, device: str) -> int:
        """Free bytes of a device's pool; slabs that were rounded up may take a little more than all of it."""
        with self._lock:
            return max(0, self._backend.capacity_bytes(device) - self._used[device])

    def headroom(self, without: Collection[int] = ()) -> Headroom:
        """Free memory, or what would be free without some models."""
        with self._lock:
            gone = [self._models[model] for model in without]
            used = Counter(self._used)
            for holding in self._models.values():  # lost slabs are freed before anything is made
                for device, slab in (each for slabs in holding.lost.values() for each in slabs if holding not in gone):
                    used[device] -= slab.handle.size_bytes
            for leaving in self._leaving:  # as those of retired models are
                used[leaving.device] -= leaving.size_bytes
            gone += self._retired.values()
        for holding in gone:
            for device, slab in holding.slabs():
                used[device] -= slab.handle.size_bytes
        capacity = {device: self._backend.capacity_bytes(device) for device in self.devices()}
        return Headroom(
            {device: max(0, capacity[device] - used[device]) for device in capacity},
            self._pool.plan(unique(slab for holding in gone for group in holding.host for slab in group)),
            device_capacity=min(capacity.values(), default=0),
            host_capacity=self._pool.total_bytes,
            nodes=self._pool.nodes,
        )

    def slabs(self, model: int, replica: int, rank: int) -> list[Slab]:
        """One rank's slabs, by group. Raises NotFound."""
        with self._lock:
            holding = self._models.get(model)
            if holding is None or replica not in holding.replicas:
                raise NotFound("replica", (model, replica))
            return holding.replicas[replica][rank]

    def host_view(self, model: int, group: int, rank: int, page: int) -> memoryview:
        """The bytes of a host page. Raises NotFound for a model that has gone, InvalidRequest for a page that is not
        usable. The memory stays as long as the view."""
        with self._lock:
            holding = self._models.get(model)
        if holding is None:
            raise NotFound("model", model)
        return self._pool.view(holding.host[group][rank], page)[: holding.page_bytes[group]]

    def shared(self, token: bytes) -> Shared | None:
        """Memory behind a handle's token; None for a token of no handle that travels as a descriptor."""
        with self._lock:
            for model, holding in self._models.items():
                for replica, ranks in holding.replicas.items():
                    for rank, slabs in enumerate(ranks):
                        if any(slab.handle.token == token for slab in slabs):
                            fd = next(slab.fd for slab in slabs if slab.handle.token == token)
                            return (
                                None if fd is None else Shared(fd, holding.devices[replica][rank], model, replica, rank)
                            )
                for device in {device for devices in holding.devices.values() for device in devices}:
                    sheet = self._backend.timeline(device).sheet(model)
                    if sheet.handle.token == token and sheet.fd is not None:
                        return Shared(sheet.fd, device, model)
                    if sheet.writers is not None and sheet.writers[0].token == token:
                        return Shared(sheet.writers[1], device, model)
        return None

    def announce(self, model: int) -> list[tuple[int, Run]]:
        """The model is in the ledger: (group, run) of host pages that arrived since ``take_news``, and from now on
        ``on_host_pages`` tells of them."""
        with self._lock:
            self._models[model].is_announced = True
        return self.take_news(model)

    def retire(self, model: int) -> None:
        """Give out nothing of a model any more: it has left the ledger. ``close_retired`` frees its memory."""
        with self._lock:
            self._retired[model] = self._models.pop(model)

    def lose(self, device: str) -> None:
        """A device lost its memory: give out nothing of replicas that had some there. ``close_retired`` frees what they
        had elsewhere."""
        with self._lock:
            self._losses[device] += 1
            losing = [holding for holding in self._models.values() if device in sum(holding.serving.values(), ())]
            for holding in self._models.values():
                holding.lose(device)
        for holding in losing:
            self._serve(holding)

    def _serve(self, holding: _Holding) -> None:
        """Wait for the devices of a model's replicas with its host pages, and for no others."""
        with self._lock:
            every = list(holding.serving.values())
        for slab, readers in _readers(holding, every).items():
            if readers:  # without a replica its pages stay as they are
                self._pool.serve(slab, frozenset(readers))

    def has_replica(self, model: int, replica: int) -> bool:
        with self._lock:
            return replica in self._models[model].replicas

    # -- on any thread, one at a time for each device ----------------------------------------------------------

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...], devices: tuple[str, ...]) -> None:
        """Reserve host pages, each rank's near its device where there is room. Raises PoolExhausted, Unavailable."""
        made: dict[int, list[HostSlab]] = {pool[0]: [] for pool in layout.host_pools}
        with ExitStack() as undo:
            sizes = PoolSizes(layout)
            for group, rank, page_bytes in sizes.host_slabs:
                readers = sizes.readers(group, rank, devices)
                slab = self._pool.reserve(page_bytes, pages[group], devices[rank], readers)
                undo.callback(self._pool.release, slab)
                made[group].append(slab)
            by_group = {group: made[pool[0]] for pool in layout.host_pools for group in pool}
            slabs = [by_group[group] for group in range(len(pages))]
            self._engine.attach_model(model, layout, slabs)
            undo.pop_all()
        page_bytes_of = list(map(layout.page_bytes, range(len(pages))))
        with self._lock:
            arrivals = Arrivals(pages, [len(ranks) for ranks in slabs])
            self._models[model] = _Holding(slabs, page_bytes_of, arrivals)
        for group, ranks in made.items():
            more = partial(self._more, model, group)
            for slab in ranks:
                for run in self._pool.ready_pages(slab, more):
                    more(run)

    def take_news(self, model: int) -> list[tuple[int, Run]]:
        """(first group of a pool, run) of host pages that have arrived on every rank since the last look."""
        with self._lock:
            holding = self._models[model]
            news, holding.news = holding.news, []
        return news

    def open_replica(
        self, model: int, replica: int, layout: Layout, devices: tuple[str, ...], pages: tuple[int, ...]
    ) -> None:
        with self._lock:
            losses = [self._losses[device] for device in devices]
            holding = self._models[model]
            holding.serving[replica] = devices
        ranks: list[list[Slab]] = []
        with ExitStack() as undo:
            undo.callback(self._stop_serving, holding, replica)
            self._serve(holding)  # first: what comes from here on waits for these devices
            for host_slab, readers in _readers(holding, [devices]).items():
                self._pool.require_reach(host_slab, readers)
            for device in devices:
                mine: dict[int, Slab] = {}
                for pool in layout.pools:
                    slab = self._backend.create_slab(device, slab_bytes(layout, pool, pages[pool[0]]))
                    undo.callback(slab.close)
                    mine |= dict.fromkeys(pool, slab)
                ranks.append([mine[group] for group in range(len(pages))])
            self._engine.attach_replica(model, replica, devices, ranks, pages)
            undo.pop_all()
        with self._lock:
            holding.replicas[replica] = ranks
            holding.devices[replica] = devices
            for device, rank in zip(devices, ranks, strict=True):
                self._used[device] += sum(slab.handle.size_bytes for slab in unique(rank))
            for device, before in zip(devices, losses, strict=True):
                if self._losses[device] != before:  # it may be of what was lost
                    holding.lose(device)

    def _stop_serving(self, holding: _Holding, replica: int) -> None:
        with self._lock:
            holding.serving.pop(replica, None)
        self._serve(holding)

    def require_answers(self, devices: Iterable[str]) -> None:
        """Raises Unavailable where one of the devices does not answer now."""
        for device in devices:
            self._backend.require_answer(device)

    def free_retired(self) -> None:
        """Free the host memory of retired models, which nothing moves any more. Their devices give theirs back in
        ``close_retired``; no device is waited for. Any thread, also beside the making of other pools."""
        with self._freeing, ExitStack() as every:  # all of it, whatever one of them raises
            for model, holding in list(self._retired.items()):
                every.callback(self._free, model, holding)

    def close_retired(self, devices: Collection[str] | None = None) -> None:
        """Free the memory of retired models, and of lost replicas as far as nothing moves it any more, on ``devices``
        (None: all). What other devices have to give back is left for those that make pools there."""
        self.free_retired()
        with self._lock:
            lost = [
                (model, replica)
                for model, holding in self._models.items()
                for replica, slabs in holding.lost.items()
                if devices is None or any(device in devices for device, _ in slabs)
            ]
        until = time.monotonic() + self._landing_seconds
        for model, replica in lost:
            if not self._engine.detach_replica(model, replica, max(0.0, until - time.monotonic())):
                continue
            with self._lock:
                slabs = self._models[model].lost.pop(replica)
                self._leaving += [
                    _Leaving(device, partial(self._close_slab, device, slab), slab.handle.size_bytes)
                    for device, slab in slabs
                ]
        with self._lock:
            mine = [each for each in self._leaving if devices is None or each.device in devices]
        with ExitStack() as every:
            for each in mine:
                every.callback(self._give_back, each)

    def _give_back(self, leaving: _Leaving) -> None:
        with self._lock:
            if leaving not in self._leaving:
                return
            self._leaving.remove(leaving)
        leaving.close()

    def _free(self, model: int, holding: _Holding) -> None:
        words: list[str] = []
        is_kept = False
        try:
            if is_kept := self._engine.hangs(model):
                log.error("memory_kept model=%d", model)
                return
            for host_slab in unique(slab for group in holding.host for slab in group):
                self._pool.release(host_slab)
            words = self._engine.forget_model(model)
        finally:
            with self._lock:  # always retired or leaving: a plan counts either as free
                del self._retired[model]
                if not is_kept:
                    self._leaving += [
                        _Leaving(device, partial(self._close_slab, device, slab), slab.handle.size_bytes)
                        for device, slab in holding.slabs()
                    ]
                    self._leaving += [
                        _Leaving(each, partial(self._engine.close_sheet, each, model), 0) for each in words
                    ]

    def _close_slab(self, device: str, slab: Slab) -> None:
        slab.close()
        with self._lock:
            self._used[device] -= slab.handle.size_bytes

    def _more(self, model: int, group: int, run: Run) -> None:
        with self._lock:
            holding = self._models.get(model)
            if holding is None:
                return
            whole = holding.arrivals.count(group, run)
            if not holding.is_announced:
                holding.news += ((group, one) for one in whole)
                return
        for one in whole:
            self._on_host_pages(model, group, one)
