"""One rank's device pool as this process sees it: planes over the daemon's own memory, and waits for loads."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcache.v1 import engine_pb2

from cachesvc.model.answers import TicketView
from cachesvc.model.layout import ITEM_BYTES, Layout, Plane
from cachesvc.model.shared_words import Words, wait_reached, words_of
from cachesvc.model.transfer import TimelineSlot
from cachesvc_client import tensors
from cachesvc_client.errors import (
    AlreadyClosed,
    CacheClientError,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    LoadFailed,
)
from cachesvc_client.life import LifeConnection
from cachesvc_client.mapping import MappedMemory

PlaneArray = npt.NDArray[Any]
PlaneKey = tuple[int, str]

WAIT_SLICE_S = 0.1
"""A waiter sleeps in the kernel on the timeline word, which a dead daemon moves no more: it looks up this often."""


class AttachedPool:
    """Planes of one rank by ``(layer, name)``, each an array ``[pages, *page_shape]`` over shared memory.

    ``bfloat16`` and fp8 planes are uint16 and uint8 arrays of the same bits. Write only into pages that are private to
    your sequence. After ``close`` every use raises AlreadyClosed. Waits may run in many threads.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        attached: engine_pb2.AttachResponse,
        life: LifeConnection,
        detach: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.device = attached.device
        self.pages = tuple(slab.pages for slab in sorted(attached.slabs, key=lambda slab: slab.group))
        self._life = life
        self._detach = detach
        self._attached = attached
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self._slabs = [MappedMemory(slab.handle, life.fetch_fd, protection=writable) for slab in attached.slabs]
        self._timeline = MappedMemory(attached.timeline, life.fetch_fd, protection=mmap.PROT_READ)
        self._words: Words | None = None
        self._groups: dict[str, dict[PlaneKey, PlaneArray]] = {}
        self._planes: dict[PlaneKey, PlaneArray] = {}
        self._specs = {(plane.group, plane.layer, plane.name): plane for plane in layout.planes}
        self._is_closed = False

    def start(self) -> None:
        """Map everything. Raises NotSupported, NotFound, DaemonUnavailable; nothing stays mapped then."""
        try:
            self._timeline.start()
            for memory in self._slabs:
                memory.start()
            self._groups = {group.name: {} for group in self.layout.groups}
            for memory, slab in zip(self._slabs, self._attached.slabs, strict=True):
                for placement in slab.planes:
                    spec = self._spec(placement)
                    self._groups[spec.group][spec.layer, spec.name] = _plane_array(
                        memory.bytes, spec, slab.pages, placement
                    )
            self._planes = _unambiguous(self._groups.values())
            self._words = words_of(self._timeline.bytes.data)
        except CacheClientError:
            self._unmap()
            raise

    @property
    def planes(self) -> Mapping[PlaneKey, PlaneArray]:
        """All planes by ``(layer, name)``; where two groups hold a plane of one name in one layer (heads split over
        groups), neither is here: take ``group_planes``."""
        self._require_open()
        return MappingProxyType(self._planes)

    def group_planes(self, group: str) -> Mapping[PlaneKey, PlaneArray]:
        """Planes of one group by ``(layer, name)``. Raises InvalidRequest for an unknown group."""
        self._require_open()
        if group not in self._groups:
            raise InvalidRequest(f"there is no group {group!r}; the layout has {', '.join(self._groups)}")
        return MappingProxyType(self._groups[group])

    def page(self, group: str, page: int) -> dict[PlaneKey, PlaneArray]:
        """One page of a group: a view ``[*page_shape]`` of each of its planes. Raises InvalidRequest."""
        planes = self.group_planes(group)
        count = self.pages[self.layout.group_index[group]]
        if not 0 <= page < count:
            raise InvalidRequest(f"page {page} of group {group!r}, which has {count}")
        return {key: plane[page] for key, plane in planes.items()}

    @property
    def timeline(self) -> Words:
        """The timeline's words, read-only."""
        self._require_open()
        assert self._words is not None
        return self._words

    def wait_layer(self, ticket: TicketView, layer: int, timeout_s: float) -> None:
        """Wait until layer ``layer`` (counted from 0) of a load is in place.

        Raises LoadFailed (the whole load counts as failed), DeadlineExceeded, DaemonUnavailable (soon after the daemon
        goes), InvalidRequest (no such layer).
        """
        slot = _slot(ticket)
        if slot is None:
            return
        if not 0 <= layer < max(slot.layers, 1):
            raise InvalidRequest(f"layer {layer} of a load of {slot.layers} layers")
        self._wait(ticket, slot, (slot.base + layer + 1) & 0xFFFFFFFF, timeout_s)

    def wait_ticket(self, ticket: TicketView, timeout_s: float) -> None:
        """Wait until all of a transfer is in place; raises as ``wait_layer``."""
        slot = _slot(ticket)
        if slot is not None:
            self._wait(ticket, slot, slot.end, timeout_s)

    def to_torch(self, layer: int, name: str, group: str | None = None) -> Any:
        """A plane as a torch tensor of the layout's dtype over the same bytes. Raises ImportError without torch."""
        spec, plane = self._find(layer, name, group)
        return tensors.to_torch(plane, spec.dtype)

    def to_paddle(self, layer: int, name: str, group: str | None = None) -> Any:
        """A plane as a paddle tensor of the layout's dtype over the same bytes. Raises ImportError without paddle."""
        spec, plane = self._find(layer, name, group)
        return tensors.to_paddle(plane, spec.dtype)

    def close(self) -> None:
        """Unmap, and tell the daemon. Idempotent.

        Arrays and tensors that are still held keep their memory mapped; the daemon is not told then, and takes this
        process for a possible writer until it ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._unmap():
            self._detach()

    def __enter__(self) -> AttachedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, ticket: TicketView, slot: TimelineSlot, target: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            words = self.timeline
            slice_s = min(deadline_s, time.monotonic() + WAIT_SLICE_S)
            if wait_reached(words, slot.word, target, slice_s):
                break
            if self._life.lost.is_set():
                raise DaemonUnavailable(f"the daemon went away during load {ticket.id}; recompute its blocks")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"load {ticket.id} did not get to word value {target} within {timeout_s:g} s")
        if int(words[slot.failed_word]) == slot.end:
            raise LoadFailed(f"load {ticket.id} failed; release its sequence, match again and recompute")

    def _find(self, layer: int, name: str, group: str | None) -> tuple[Plane, PlaneArray]:
        self._require_open()
        groups = [group] if group is not None else list(self._groups)
        found = [each for each in groups if (layer, name) in self.group_planes(each)]
        if len(found) != 1:
            raise InvalidRequest(
                f"plane {name!r} of layer {layer} is in {len(found)} groups ({', '.join(found)}); name one that has it"
            )
        return self._specs[found[0], layer, name], self._groups[found[0]][layer, name]

    def _spec(self, placement: engine_pb2.PlanePlacement) -> Plane:
        spec = self._specs.get((placement.group, placement.layer, placement.name))
        if spec is None:
            raise DaemonFault(f"plane {placement.name}.{placement.layer}.{placement.group} is not in the layout")
        return spec

    def _require_open(self) -> None:
        if self._is_closed or self._words is None:
            raise AlreadyClosed(f"the pool of rank {self.rank} is not attached; attach again")

    def _unmap(self) -> bool:
        """True when nothing is mapped any more."""
        self._groups.clear()
        self._planes.clear()
        self._words = None
        unmapped = [memory.close() for memory in (*self._slabs, self._timeline)]  # each, whatever the others say
        return all(unmapped)


def _unambiguous(groups: Iterable[dict[PlaneKey, PlaneArray]]) -> dict[PlaneKey, PlaneArray]:
    """Planes of all groups, without those whose key two groups have."""
    merged: dict[PlaneKey, PlaneArray] = {}
    doubled: set[PlaneKey] = set()
    for planes in groups:
        doubled |= merged.keys() & planes.keys()
        merged.update(planes)
    return {key: plane for key, plane in merged.items() if key not in doubled}


def _slot(ticket: TicketView) -> TimelineSlot | None:
    """Where to wait; None when the ticket has ended well. Raises LoadFailed, InvalidRequest."""
    if ticket.state == "failed":
        raise LoadFailed(f"load {ticket.id} failed: {ticket.reason}; release its sequence, match again and recompute")
    if ticket.state == "done":
        return None
    if ticket.slot is None:
        raise InvalidRequest(f"ticket {ticket.id} has no place on the timeline; wait for it with lease.wait_tickets")
    return ticket.slot


def _plane_array(
    slab: npt.NDArray[np.uint8], spec: Plane, pages: int, placement: engine_pb2.PlanePlacement
) -> PlaneArray:
    """``[pages, *page_shape]`` over the slab. Raises DaemonFault where it would reach beyond."""
    item_bytes = ITEM_BYTES[spec.dtype]
    inner = tuple(item_bytes * prod(spec.page_shape[axis + 1 :]) for axis in range(len(spec.page_shape)))
    try:
        return np.ndarray(
            (pages, *spec.page_shape),
            tensors.NUMPY_DTYPES[spec.dtype],
            buffer=slab,
            offset=placement.offset,
            strides=(placement.page_stride, *inner),
        )
    except (TypeError, ValueError) as error:
        raise DaemonFault(f"plane {spec.label} does not fit its slab: {error}") from error
