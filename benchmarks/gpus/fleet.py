"""Pages on several devices at once, each with a mover of its own: one model whose ranks are the devices, and for each
device a model of its own, over the same pages on both sides; and transfers of them that are timed and checked."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cachesvc_client.memory.pool import POLL_S

from benchmarks.support.mover import WAIT_SECONDS, Mover
from benchmarks.swap.swaps import Way, scattered
from cachesvc.memory.host_pool import HostBudget, HostSlab
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import Unavailable
from cachesvc.model.futex import Words, wait_reached, words_of
from cachesvc.model.layout import Layout
from cachesvc.model.words import Direction, PagePairs, Transfer, Urgency
from cachesvc.mover.processes import MoverProcesses

LOAD, STORE = Direction
CHECKED_PAGES = 3
LOOK_SECONDS = 0.002
TICKS = os.sysconf("SC_CLK_TCK")
FRESH_MARKS = 1 << 40
"""Marks from here on are of one page and one move each; those below it say which page it is."""


class Moved(NamedTuple):
    """Seconds from the first call until the waiter for the last word resumes, and processor time meanwhile: of all
    threads of this process but the waiter, and of each mover."""

    seconds: float
    daemon_s: float
    movers_s: tuple[float, ...]


class Fleet:
    """``ranks`` is the model with a rank on each device, ``replicas[i]`` the one of device ``i`` alone, and ``both``
    has a replica on each of the first two. ``numbers``: of models, which never come again. The movers are processes."""

    def __init__(
        self, mover: Mover, devices: Sequence[str], slabs: list[Slab], layouts: tuple[Layout, Layout], pages: int
    ) -> None:
        """``layouts``: of one rank, and of as many as there are devices. ``pages``: of a device, and as many on the
        host for it."""
        self.mover = mover
        self.devices = tuple(devices)
        self.slabs = slabs
        self.layout, self._layout_of_ranks = layouts
        self.page_bytes = self.layout.page_bytes(0)
        self.pages = pages
        self._hosts: list[HostSlab] = []
        self._ends: dict[int, Future[None]] = {}
        self._tickets = itertools.count(1)
        self._marks = itertools.count(FRESH_MARKS, len(self.layout.planes))
        self._rng = np.random.default_rng(0)
        self.engine = mover.bare_engine(self._ended)
        self._poll_s = POLL_S if mover.gpu else None
        self._of: dict[int, tuple[int, ...]] = {}  # devices of a model, by their places
        self._words: dict[tuple[int, int], Words] = {}
        self._replica: dict[int, int] = {}
        self.ranks = 0
        self.replicas: tuple[int, ...] = ()
        self.both = 0

    def start(self, numbers: Iterator[int]) -> None:
        """Attach the models, write all host pages, and load each into some device page."""
        places = range(len(self.devices))
        self._hosts = [self.mover.reserve(self.layout, self.pages, device) for device in self.devices]
        self.ranks, self.both, *replicas = itertools.islice(numbers, len(places) + 2)
        self.replicas = tuple(replicas)
        for model, layout, mine in (
            (self.ranks, self._layout_of_ranks, tuple(places)),
            *((model, self.layout, (at,)) for at, model in enumerate(self.replicas)),
        ):
            self._of[model] = mine
            self._replica[model] = 0
            self.engine.attach_model(model, layout, [[self._hosts[at] for at in mine]])
            self.engine.attach_replica(
                model, 0, [self.devices[at] for at in mine], [[self.slabs[at]] for at in mine], [self.pages]
            )
            for at in mine:
                self._words[model, at] = self._sheet(model, at)
        self.engine.attach_model(self.both, self.layout, [[self._hosts[0]]])
        for at in (0, 1):
            self.engine.attach_replica(self.both, at, [self.devices[at]], [[self.slabs[at]]], [self.pages])
        self._of[self.both], self._replica[self.both] = (1,), 1
        self._words[self.both, 1] = self._sheet(self.both, 1)
        for at, page in itertools.product(places, range(self.pages)):
            self._mark(at, page, 1 + (at * self.pages + page) * len(self.layout.planes))
        order = tuple(range(self.pages))
        self.move([self._transfer(m, LOAD, tuple(self._rng.permutation(self.pages).tolist()), order) for m in replicas])

    def close(self) -> None:
        """Forget the models and give the host pages back."""
        for model in self._of:
            self.engine.detach_model(model)
        for host in self._hosts:
            self.mover.host.release(host)

    def transfers(
        self, models: Sequence[int], way: Way, blocks: int, urgency: Urgency = Urgency.AWAITED
    ) -> list[Transfer]:
        """For each model one transfer for each direction, of single pages that do not meet."""
        ready = []
        for model in models:
            parts = len(way.directions)
            device, host = (scattered(self._rng, self.pages, blocks, 1, parts) for _ in range(2))
            for direction, mine, theirs in zip(way.directions, device, host, strict=True):
                layered = direction is LOAD and way.steps != "whole"
                one = self._transfer(model, direction, mine, theirs, layered=layered)
                ready.append(replace(one, urgency=urgency))
        return ready

    def shared(self, loaded: Transfer) -> Transfer:
        """From the first device's replica of ``both`` to the second's: the pages that were loaded, to single pages
        anywhere."""
        theirs = loaded.pages[0].device_pages
        pairs = (PagePairs(0, scattered(self._rng, self.pages, len(theirs), 1, 1)[0], theirs),)
        return Transfer(next(self._tickets), self.both, 1, LOAD, pairs, layered=False, source_replica=0)

    def again(self, ready: Sequence[Transfer]) -> list[Transfer]:
        """The same moves under new tickets."""
        return [replace(one, ticket=next(self._tickets), replica=self._replica[one.model]) for one in ready]

    def mark(self, moved: Sequence[Transfer]) -> None:
        """Write what was never there into the host pages that are looked at: a load has to bring it, a store to replace
        it."""
        for transfer, page in self.looked_at(moved):
            for at in self._of[transfer.model]:
                self._mark(at, transfer.pages[0].host_pages[page], next(self._marks))

    def check(self, moved: Sequence[Transfer]) -> None:
        """On every rank the same bytes are on both sides, with the fresh mark after a load and without after a store.
        Raises AssertionError."""
        for transfer, page in self.looked_at(moved):
            pairs, name = transfer.pages[0], f"ticket {transfer.ticket}, {transfer.direction.value}, page {page}"
            for rank in range(len(self._of[transfer.model])):
                replica = self._replica[transfer.model]
                device = self.engine.page_bytes(transfer.model, replica, rank, 0, pairs.device_pages[page])
                host = self.engine.page_bytes(transfer.model, None, rank, 0, pairs.host_pages[page])
                if device != host:
                    raise AssertionError(f"{name}, rank {rank}: device and host differ")

    def move(self, ready: Sequence[Transfer], layers_per_step: int | None = 0) -> Moved:
        """Move all at once; then all have ended. Raises the first error of a ticket. Any thread, where steps are the
        same for all."""
        self.engine.layers_per_step = layers_per_step
        ends = [self._ends.setdefault(transfer.ticket, Future()) for transfer in ready]
        movers_s, daemon_s, waited_s = self._movers_s(), time.process_time(), 0.0
        began = time.perf_counter()
        slots = [self.engine.submit(transfer) for transfer in ready]
        waited_s -= time.thread_time()
        for transfer, slot in zip(ready, slots, strict=True):
            for at in self._of[transfer.model]:
                words, until = self._words[transfer.model, at], time.monotonic() + WAIT_SECONDS
                if not wait_reached(words, slot.word, slot.end, until, poll_s=self._poll_s):
                    raise TimeoutError(f"ticket {transfer.ticket} did not end within {WAIT_SECONDS:g} s")
        spent = time.perf_counter() - began
        waited_s += time.thread_time()
        for end in ends:
            end.result(WAIT_SECONDS)
        daemon_s = time.process_time() - daemon_s - waited_s
        pairs = zip(self._movers_s(), movers_s, strict=True)
        return Moved(spent, daemon_s, tuple(after - before for after, before in pairs))

    @property
    def budget(self) -> HostBudget:
        """The budget of background copies, which may be set."""
        return self._processes.budget

    @property
    def _processes(self) -> MoverProcesses:
        movers = self.mover.hardware.movers
        assert isinstance(movers, MoverProcesses)
        return movers

    def pid(self, at: int) -> int:
        """The process of a device's mover, 0 while there is none."""
        return self._processes.mover_pids()[self.devices[at]]

    def renew(self, at: int) -> None:
        """Wait for the next mover of a device whose mover died, and give the device's model a new replica there, as an
        engine that registers again gets. Raises TimeoutError."""
        model, until = self.replicas[at], time.monotonic() + WAIT_SECONDS
        self.engine.detach_replica(model, self._replica[model], WAIT_SECONDS)
        self._replica[model] += 1
        self.slabs[at].close()
        while True:
            try:
                self.slabs[at] = self.mover.slab(self.layout, self.pages, self.devices[at])
                break
            except Unavailable as missing:
                if time.monotonic() > until:
                    raise TimeoutError(f"no mover within {WAIT_SECONDS:g} s: {missing}") from missing
                time.sleep(LOOK_SECONDS)  # a client retries after this time
        self.engine.attach_replica(model, self._replica[model], [self.devices[at]], [[self.slabs[at]]], [self.pages])
        self._words[model, at] = self._sheet(model, at)

    def _transfer(
        self, model: int, direction: Direction, device: Sequence[int], host: Sequence[int], *, layered: bool = False
    ) -> Transfer:
        pages = (PagePairs(0, device, host),)
        return Transfer(next(self._tickets), model, self._replica[model], direction, pages, layered=layered)

    def looked_at(self, moved: Sequence[Transfer]) -> Iterator[tuple[Transfer, int]]:
        """Pairs of pages that are marked and checked."""
        for transfer in moved:
            last = len(transfer.pages[0].device_pages) - 1
            for page in sorted({*np.linspace(0, last, CHECKED_PAGES).astype(int).tolist()}):
                yield transfer, page

    def _mark(self, at: int, page: int, first: int) -> None:
        """Number the planes of a host page from ``first`` on, in the first and the last word of each."""
        planes = len(self.layout.planes)
        words = np.frombuffer(self.mover.host.view(self._hosts[at], page), np.uint64).reshape(planes, -1)
        marks: npt.NDArray[np.uint64] = np.arange(first, first + planes, dtype=np.uint64)
        words[:, 0] = words[:, -1] = marks

    def _sheet(self, model: int, at: int) -> Words:
        sheet = self.mover.backend.timeline(self.devices[at]).sheet(model)
        assert sheet.fd is not None
        return words_of(memoryview(mmap.mmap(sheet.fd, sheet.handle.size_bytes, prot=mmap.PROT_READ)))

    def _ended(self, ticket: int, error: Exception | None) -> None:
        end = self._ends.pop(ticket)
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)

    def _movers_s(self) -> list[float]:
        return [processor_seconds(self.pid(at)) for at in range(len(self.devices))]


def processor_seconds(pid: int) -> float:
    """Processor time that a process has had, by its own clock (clock_getcpuclockid), or in ticks where the kernel does
    not show that; 0 of one that is gone."""
    if not pid:
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
