"""One rank's device pool as this process sees it: planes over the daemon's own memory, and waits for loads."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from kvcache.v1 import engine_pb2

from cachesvc.model.answers import TicketView
from cachesvc.model.futex import Words, load, wait_reached, words_of
from cachesvc.model.layout import Layout, Plane
from cachesvc.model.words import TimelineSlot, has_reached
from cachesvc_client.core.errors import (
    AlreadyClosed,
    Conflict,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    GpuFailed,
    InvalidRequest,
    LoadFailed,
    Maker,
    NoSuchPlane,
    NotSupported,
)
from cachesvc_client.memory import device
from cachesvc_client.memory.cuda import CudaDevice, open_device
from cachesvc_client.memory.device import PlaneView, view_of
from cachesvc_client.memory.mapping import DEVICE_KINDS, MappedMemory, Memory, memory_of
from cachesvc_client.memory.stream_waits import StreamWaits, stream_handle
from cachesvc_client.wire.life import LifeConnection

WAIT_SLICE_S = 0.1
"""A waiter sleeps in the kernel on the timeline word, which a dead daemon moves no more: it looks up this often."""

POLL_S = (100e-6, 1e-3)
"""A GPU sets words by itself; the daemon wakes waiters when it sees that a word's slice has landed, some 0.1 ms later.
The shortest and the longest pause of a waiter between two looks, for what comes earlier than that."""

log = logging.getLogger(__name__)


class LoadOutcome(Enum):
    """Outcome of a load, as one rank's pool knows it."""

    RUNNING = "running"
    CAME = "came"
    FAILED = "failed"
    LOST = "lost"  # the daemon went before it ended


class AttachedPool:
    """Planes of one rank by ``(layer, name)``, each an array ``[pages, *page_shape]`` over the daemon's memory: NumPy's
    over shared memory, CuPy's on a GPU.

    ``bfloat16`` and fp8 planes are uint16 and uint8 arrays of the same bits. Write only into pages that are private to
    your sequence. After ``close`` every use raises AlreadyClosed. Waits may run in many threads.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        attached: engine_pb2.AttachResponse,
        life: LifeConnection,
        detach: Callable[[], object],
        opener: Callable[[str], CudaDevice] = open_device,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.device = attached.device
        self.pages = tuple(slab.pages for slab in sorted(attached.slabs, key=lambda slab: slab.group))
        self._life = life
        self._detach = detach
        self._attached = attached
        self._opener = opener
        self._gpu: CudaDevice | None = None
        self._memories: list[Memory] = []
        self._slabs: dict[str, Memory] = {}
        self._planes = PoolPlanes(layout, self._show)
        self._words: Words | None = None
        self._poll_s: tuple[float, float] | None = None
        self._waits: StreamWaits | None = None
        self._writers: Writers | None = None
        self._is_closed = False
        self._is_told = False
        self._maker = Maker()

    def start(self) -> None:
        """Map everything. Raises NotSupported (names what this process lacks), NotFound, DaemonUnavailable, GpuFailed;
        nothing stays mapped then, and the daemon gets a Detach."""
        with ExitStack() as undo:
            undo.callback(self.close)
            if {slab.handle.kind for slab in self._attached.slabs} & set(DEVICE_KINDS):
                self._gpu = self._opener(self.device)
                self._gpu.start()
            self._map_timeline()
            if self._attached.HasField("writers"):
                self._writers = Writers(self._life.fetch_fd(self._attached.writers.token))
            mapped: dict[bytes, Memory] = {}
            for slab in self._attached.slabs:
                memory = mapped.get(slab.handle.token)
                if memory is None:
                    memory = mapped[slab.handle.token] = memory_of(slab.handle, self._life.fetch_fd, self._gpu)
                    self._map(memory)
                self._slabs[self.layout.groups[slab.group].name] = memory
                for placement in slab.planes:
                    spec = self._planes.spec(placement.group, placement.layer, placement.name)
                    view = view_of(spec, slab.pages, placement, memory.size_bytes)
                    self._planes.put(spec, memory.plane(view))
            undo.pop_all()

    @property
    def planes(self) -> Mapping[PlaneKey, Any]:
        """All planes by ``(layer, name)``; where two groups hold a plane of one name in one layer (heads split over
        groups), neither is here: take ``group_planes``. Markers are no planes. Raises NotSupported on a GPU without
        CuPy."""
        self._require_open()
        return MappingProxyType(self._planes.unambiguous())

    def group_planes(self, group: str) -> Mapping[PlaneKey, Any]:
        """Planes of one group by ``(layer, name)``. Raises InvalidRequest for an unknown group, and as ``planes``."""
        self._require_open()
        return MappingProxyType(self._planes.of_group(group))

    def page(self, group: str, page: int) -> dict[PlaneKey, Any]:
        """One page of a group: a view ``[*page_shape]`` of each of its planes. Raises InvalidRequest."""
        planes = self.group_planes(group)
        count = self.pages[self.layout.group_index[group]]
        if not 0 <= page < count:
            raise InvalidRequest(f"page {page} of group {group!r}, which has {count}")
        return {key: plane[page] for key, plane in planes.items()}

    def slab(self, group: str) -> Any:
        """All bytes of a group's slab as one uint8 array ``[bytes]``, for engines that lay their own tensors over it;
        held and unmapped as planes are. What is behind the last plane is padding. Raises as ``group_planes``."""
        return self._show(self._slab(group))

    def memory(self, group: str) -> Memory:
        """Mapping of a group's slab. Raises InvalidRequest for an unknown group."""
        self._require_open()
        self._planes.require(group)
        return self._slabs[group]

    @property
    def is_on_gpu(self) -> bool:
        """True where streams and kernels use this pool."""
        return self._gpu is not None

    @property
    def timeline(self) -> Words:
        self._require_open()
        assert self._words is not None
        return self._words

    def wait_layer(self, ticket: TicketView, layer: int, timeout_s: float) -> None:
        """Wait until layer ``layer`` (counted from 0) of a load is in place.

        Raises LoadFailed (the whole load counts as failed), DeadlineExceeded, DaemonUnavailable (soon after the daemon
        goes), InvalidRequest (no such layer).
        """
        self._wait(ticket, layer, timeout_s)

    def wait_ticket(self, ticket: TicketView, timeout_s: float) -> None:
        """Wait until all of a transfer is in place; raises as ``wait_layer``."""
        self._wait(ticket, None, timeout_s)

    def wait_layer_on(self, stream: object, ticket: TicketView, layer: int) -> None:
        """Have a GPU stream wait for a layer; returns at once, and may be captured into a graph.

        ``stream``: the driver's handle, or a stream of CuPy, torch or paddle. The wait ends with the load, however it
        ends, and soon after the daemon goes: so synchronise the stream and call ``confirm`` before you use what was
        computed. Raises LoadFailed and DaemonUnavailable for what is known already, NotSupported (no GPU: take
        ``wait_layer``), InvalidRequest (layer, stream).
        """
        self._wait_on(stream, ticket, layer)

    def wait_ticket_on(self, stream: object, ticket: TicketView) -> None:
        """Have a GPU stream wait for all of a transfer; as ``wait_layer_on``."""
        self._wait_on(stream, ticket, None)

    def confirm(self, *tickets: TicketView) -> None:
        """Make sure that loads which streams waited for did come: once the stream was synchronised, before what was
        computed behind the waits is used. Does not wait.

        It speaks of this rank's bytes. A load of several ranks has come where each rank's pool says so, and only then:
        one rank's part may be in place before another's fails. ``Sequence.wait_loaded`` knows of all ranks, and
        ``publish`` refuses what did not come whole.

        Raises LoadFailed (also where a mover ended the load because its daemon had gone), DaemonUnavailable (the
        daemon went and nothing ended the load: recompute), Conflict (it has not ended: synchronise first).
        """
        for ticket in tickets:
            self._require_open()
            slot = slot_of(ticket)
            outcome = LoadOutcome.CAME if slot is None else self._outcome_of(slot)
            self._require_came(ticket, outcome)
            if outcome is LoadOutcome.RUNNING:
                raise Conflict(
                    f"load {ticket.id} has not ended; synchronise the stream that waits for it, then confirm"
                )

    def outcome(self, ticket: TicketView) -> LoadOutcome:
        """Outcome of a load. Raises AlreadyClosed, InvalidRequest (no place on the timeline)."""
        self._require_open()
        if ticket.state == "failed":
            return LoadOutcome.FAILED
        slot = slot_of(ticket)
        return LoadOutcome.CAME if slot is None else self._outcome_of(slot)

    @property
    def is_quiet(self) -> bool:
        """True once nothing copies into this pool any more; always False while the daemon serves. Until then a copy may
        land in the pages of ``lost_tokens``, also after the daemon has gone. Raises AlreadyClosed."""
        return self.wait_quiet(0.0)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until ``is_quiet``; False where the time passes first. A daemon that is too old to tell counts as quiet
        once it has gone. Raises AlreadyClosed."""
        self._require_open()
        return self._life.lost.wait(timeout_s) if self._writers is None else self._writers.wait_over(timeout_s)

    def to_torch(self, layer: int, name: str, group: str | None = None) -> Any:
        """A plane as a torch tensor of the layout's dtype over the same bytes. Raises ImportError without torch,
        NotSupported for a plane on a GPU where torch has no CUDA."""
        self._require_open()
        spec, plane = self._planes.find(layer, name, group)
        return device.to_torch(plane, spec.dtype)

    def slab_to_torch(self, group: str) -> Any:
        """``slab`` as a torch tensor ``[bytes]`` of uint8 over the same bytes, which needs no CuPy on a GPU. Raises
        InvalidRequest for an unknown group, and as ``to_torch``."""
        return device.to_torch(self._slab(group), "uint8")

    def to_paddle(self, layer: int, name: str, group: str | None = None) -> Any:
        """A plane as a paddle tensor of the layout's dtype over the same bytes. Raises ImportError without paddle."""
        self._require_open()
        spec, _ = self._planes.find(layer, name, group)
        return device.to_paddle(self._planes.array(spec), spec.dtype)

    def close(self) -> bool:
        """Unmap, and tell the daemon: True. Kernels and stream waits that use the pool must have ended.

        False while arrays or tensors are held, or a stream may still wait for a load: their memory stays mapped, and
        the daemon takes this process for a possible writer. Call it again when they are gone. Idempotent. Raises
        UsedAfterFork.
        """
        self._maker.check()
        self._is_closed = True
        if not self._unmap():
            log.warning("pool_still_mapped rank=%s arrays=%s", self.rank, self.held)
            return False
        if not self._is_told:
            self._is_told = True
            self._detach()
        return True

    @property
    def held(self) -> int:
        """Number of arrays and tensors, or views of them, that keep memory mapped after a ``close`` that returned
        False; where it is 0, a stream may still wait."""
        return sum(memory.held for memory in self._memories)

    def __enter__(self) -> AttachedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AttachedPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # a driver may take its time

    def _wait(self, ticket: TicketView, layer: int | None, timeout_s: float) -> None:
        if (slot := slot_of(ticket)) is None:
            return
        target = layer_target(slot, layer)
        deadline_s = time.monotonic() + timeout_s
        while True:
            words = self.timeline
            slice_s = min(deadline_s, time.monotonic() + WAIT_SLICE_S)
            if wait_reached(words, slot.word, target, slice_s, poll_s=self._poll_s):
                break
            if self._life.lost.is_set():
                raise DaemonUnavailable(f"the daemon went away during load {ticket.id}; recompute its blocks")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"load {ticket.id} did not get to word value {target} within {timeout_s:g} s")
        self._require_came(ticket, self._outcome_of(slot))

    def _require_came(self, ticket: TicketView, outcome: LoadOutcome) -> None:
        if outcome is LoadOutcome.FAILED:
            raise LoadFailed(f"load {ticket.id} failed; release its sequence, match again and recompute")
        if outcome is LoadOutcome.LOST:
            raise DaemonUnavailable(f"the daemon went away during load {ticket.id}; recompute its blocks")

    def _wait_on(self, stream: object, ticket: TicketView, layer: int | None) -> None:
        if (slot := slot_of(ticket)) is None:
            return
        target = layer_target(slot, layer)
        self._require_open()
        handle = stream_handle(stream)
        if self._waits is None:
            raise NotSupported(f"the pool of rank {self.rank} is in host memory: no stream waits there; use wait_layer")
        if handle is None:
            raise InvalidRequest(
                f"{type(stream).__name__} is no stream: pass its handle, or one of CuPy, torch or paddle"
            )
        if self._life.lost.is_set():
            raise DaemonUnavailable(
                f"the daemon went away before load {ticket.id} was waited for; recompute its blocks"
            )
        self._waits.wait(ticket.id, slot, handle, target)

    def _outcome_of(self, slot: TimelineSlot) -> LoadOutcome:
        words = self.timeline
        if not has_reached(load(words, slot.word), slot.end):
            return LoadOutcome.LOST if self._life.lost.is_set() else LoadOutcome.RUNNING
        failed, is_reused = int(words[slot.failed_word]), int(words[slot.word]) != slot.end
        if failed != slot.end and not (is_reused and has_reached(failed, slot.end)):
            return LoadOutcome.CAME  # where a later load of the slot failed, nothing tells any more of this one
        is_ours = self._waits is not None and self._waits.has_released(slot)
        return LoadOutcome.LOST if is_ours else LoadOutcome.FAILED

    def _map_timeline(self) -> None:
        handle = self._attached.timeline
        if handle.kind != "memfd":
            raise NotSupported(
                f"the daemon's timeline is of kind {handle.kind!r}, which this client cannot map: update it"
            )
        rights = mmap.PROT_READ if self._gpu is None else mmap.PROT_READ | mmap.PROT_WRITE
        memory = MappedMemory(handle, self._life.fetch_fd, protection=rights)
        self._map(memory)
        self._words = words_of(memory.bytes.data)
        if self._gpu is not None:
            self._poll_s = POLL_S
            waits = StreamWaits(self._gpu, self._words)
            waits.start()
            self._waits = waits
            self._life.watch(waits.lose)

    def _map(self, memory: Memory) -> None:
        memory.start()
        self._memories.append(memory)

    def _slab(self, group: str) -> Any:
        memory = self.memory(group)
        return memory.plane(PlaneView((memory.size_bytes,), np.uint8, 0, (1,)))

    def _show(self, plane: Any) -> Any:
        return plane if self._gpu is None else self._gpu.array(plane)

    def _require_open(self) -> None:
        self._maker.check()
        if self._is_closed or self._words is None:
            raise AlreadyClosed(f"the pool of rank {self.rank} is not attached; attach again")

    def _unmap(self) -> bool:
        """True when nothing is mapped any more."""
        self._planes.clear()
        try:
            if self._waits is not None:
                if not self._waits.close():
                    return False
                self._life.unwatch(self._waits.lose)
            self._words = None
            self._waits = None
            if self._writers is not None:
                self._writers.close()
            self._memories = [memory for memory in self._memories if not self._unmap_one(memory)]
            if self._memories:
                return False
            if self._gpu is not None:
                self._gpu.close()
        except GpuFailed as error:
            log.warning("pool_not_unmapped rank=%s why=%s", self.rank, error)
            return False
        return True

    def _unmap_one(self, memory: Memory) -> bool:
        """Unmap each memory, also after another has failed."""
        try:
            return memory.close()
        except GpuFailed as error:  # the context is broken, or goes with the process: there is nothing to be done
            log.warning("pool_not_unmapped rank=%s why=%s", self.rank, error)
            return False


PlaneKey = tuple[int, str]


class PlanesByKey(dict[PlaneKey, Any]):
    def __missing__(self, key: object) -> Any:
        layers = sorted({layer for layer, _ in self})
        names = sorted({name for _, name in self})
        there = f"layers {layers[0]} to {layers[-1]} with {', '.join(names)}" if layers else "none"
        raise NoSuchPlane(
            f"there is no plane {key!r} here; planes go by (layer, name), and there are {there}; a plane that two "
            "groups have is found by group_planes"
        )


class PoolPlanes:
    """``show`` makes the array of a plane as it was mapped; on a GPU that needs a library which may be missing."""

    def __init__(self, layout: Layout, show: Callable[[Any], Any]) -> None:
        self._specs = {(plane.group, plane.layer, plane.name): plane for plane in layout.planes}
        self._marker = None if layout.marker is None else layout.groups[layout.marker].name
        self._show = show
        self._mapped: dict[str, dict[PlaneKey, Any]] = {group.name: {} for group in layout.groups}
        self._arrays: dict[str, PlanesByKey] = {}

    def spec(self, group: str, layer: int, name: str) -> Plane:
        """Specification of a plane in the layout. Raises DaemonFault for an unknown plane."""
        spec = self._specs.get((group, layer, name))
        if spec is None:
            raise DaemonFault(f"plane {name}.{layer}.{group} is not in the layout")
        return spec

    def require(self, group: str) -> None:
        """Check a group's name. Raises InvalidRequest for an unknown group."""
        if group not in self._mapped:
            raise InvalidRequest(f"there is no group {group!r}; the layout has {', '.join(self._mapped)}")

    def put(self, spec: Plane, mapped: Any) -> None:
        self._mapped[spec.group][spec.layer, spec.name] = mapped

    def of_group(self, group: str) -> PlanesByKey:
        """Arrays of one group. Raises InvalidRequest, and NotSupported where arrays cannot be made."""
        self.require(group)
        arrays = self._arrays.get(group)
        if arrays is None:
            shown = {key: self._show(plane) for key, plane in self._mapped[group].items()}
            arrays = self._arrays[group] = PlanesByKey(shown)
        return arrays

    def unambiguous(self) -> PlanesByKey:
        """Arrays of all groups, without those whose key two groups have. Raises as ``of_group``."""
        merged: dict[PlaneKey, Any] = {}
        doubled: set[PlaneKey] = set()
        for group in self._mapped:
            if group == self._marker:
                continue
            planes = self.of_group(group)
            doubled |= merged.keys() & planes.keys()
            merged.update(planes)
        return PlanesByKey((key, plane) for key, plane in merged.items() if key not in doubled)

    def find(self, layer: int, name: str, group: str | None) -> tuple[Plane, Any]:
        """One plane as it was mapped, and what the layout says of it. Raises InvalidRequest: none, or several."""
        groups = [group] if group is not None else list(self._mapped)
        found = [each for each in groups if (layer, name) in self._mapped.get(each, {})]
        if len(found) != 1:
            raise InvalidRequest(
                f"plane {name!r} of layer {layer} is in {len(found)} groups ({', '.join(found)}); name one that has it"
            )
        return self._specs[found[0], layer, name], self._mapped[found[0]][layer, name]

    def array(self, spec: Plane) -> Any:
        """The array of a plane. Raises as ``of_group``."""
        return self.of_group(spec.group)[spec.layer, spec.name]

    def clear(self) -> None:
        self._mapped.clear()
        self._arrays.clear()


def layer_target(slot: TimelineSlot, layer: int | None) -> int:
    """The value that a load's word reaches with a layer, or with all of them. Raises InvalidRequest."""
    if layer is None:
        return slot.end
    if not 0 <= layer < max(slot.layers, 1):
        raise InvalidRequest(f"layer {layer} of a load of {slot.layers} layers")
    return (slot.base + layer + 1) & 0xFFFFFFFF


def slot_of(ticket: TicketView) -> TimelineSlot | None:
    """Slot to wait on; None when the ticket has ended well. Raises LoadFailed, InvalidRequest."""
    if not isinstance(ticket, TicketView):
        raise InvalidRequest(f"a wait takes a ticket, such as those of Sequence.tickets, not {ticket!r:.60}")
    if ticket.state == "failed":
        raise LoadFailed(f"load {ticket.id} failed: {ticket.reason}; release its sequence, match again and recompute")
    if ticket.state == "done":
        return None
    if ticket.slot is None:
        raise InvalidRequest(f"ticket {ticket.id} has no place on the timeline; wait for it with lease.wait_tickets")
    return ticket.slot


class Writers:
    """Takes over ``fd``, a pipe's end. Any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._is_over = False

    def wait_over(self, timeout_s: float) -> bool:
        """True once the other end is closed in every process that copied; False where the time passes first, or this
        end was closed before that was seen."""
        with self._lock:  # so that none looks at a number that is another file's by now
            if self._is_over or self._fd < 0:
                return self._is_over
            mine = os.dup(self._fd)
        try:
            poll = select.poll()
            poll.register(mine, 0)  # a hang-up is always told
            is_over = bool(poll.poll(max(timeout_s, 0.0) * 1e3))
        finally:
            os.close(mine)
        if is_over:
            self._is_over = True
        return is_over

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
