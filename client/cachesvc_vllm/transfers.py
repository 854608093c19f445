"""Messages between the two sides of the connector, sent through vLLM."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.node import Share
from cachesvc_client.plugins.request_pages import PageCopy, RequestPages
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cachesvc.model.answers import TicketView
from cachesvc_vllm.adapters import AdapterReport
from cachesvc_vllm.metrics import LOAD_SECONDS, CacheStats
from cachesvc_vllm.vllm_objects import LoraRequest


@dataclass
class WorkerShare(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Message of a worker, sent once: its memory is the daemon's, under this name. ``comes_back``: after a loss it can
    go on with the next daemon. ``instance``: the one of ``Node``, for the scheduler's. ``replaced``: why the name may
    be of other weights than the workers have; empty where it is not."""

    share: Share
    comes_back: bool
    instance: str
    replaced: str = ""


class EarlyLoad(NamedTuple):
    """A load that runs while its request is computed: each layer waits for its part. ``pages``: those that it fills,
    as the request's table has them."""

    tickets: tuple[TicketView, ...]
    pages: tuple[int, ...]


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """Message to the workers, in each step. ``loads``: by request, the transfers that bring its blocks from the host.
    ``next_lease``: after a loss, the lease that they are to move to, while nothing uses any page; else empty.
    ``is_empty``: the step computes nothing. ``copies``: pages to copy before it computes. ``early``: by request, loads
    that the step itself waits for. ``adapters``: those that the workers are to load and report, in ``adapters_epoch``
    (``Adapters``)."""

    loads: dict[str, tuple[TicketView, ...]] = field(default_factory=dict)
    next_lease: str = ""
    is_empty: bool = False
    copies: list[PageCopy] = field(default_factory=list)
    early: dict[str, EarlyLoad] = field(default_factory=dict)
    adapters: tuple[LoraRequest, ...] = ()
    adapters_epoch: int = 0


@dataclass
class WorkerLease(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message of the workers. ``lease_id``: to a step with a ``next_lease``, the lease whose slab their tensors lie on;
    empty where one has another one than the rest. ``has_lapsed``: the step may have read other engines' pages.
    ``adapters``: those that are loaded, where that is news."""

    lease_id: str
    has_lapsed: bool = False
    adapters: AdapterReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerLease:
        """Combine two ranks' leases: the common one, or an empty name where they differ."""
        assert isinstance(other, WorkerLease)
        lease_id = self.lease_id if self.lease_id == other.lease_id else ""
        adapters = other.adapters if self.adapters is None else self.adapters.aggregate(other.adapters)
        return WorkerLease(lease_id, self.has_lapsed or other.has_lapsed, adapters)


def lapsed_blocks(pages: int) -> set[int]:
    """Return all blocks of an engine, for its scheduler: what was read of them may have been others'."""
    return set(range(pages))


def has_lapsed(invalid_blocks: Collection[int]) -> bool:
    """Return whether a worker reported ``lapsed_blocks``. Page 0 is in no request's table, so a sibling connector under
    a MultiConnector, which reports blocks that it could not load, never names it."""
    return 0 in invalid_blocks


# Loads from the host for an engine's requests, from vLLM's allocation to their end, and copies within the device.
#
# A request is scheduled once its load has ended, while others run. Where nothing else runs or waits, or the load is
# short, it is early: the request is scheduled at once, and the step waits for the load, layer by layer. Where that
# fails, vLLM drops what was computed, and the request is preempted: it begins anew with what is in place. With
# asynchronous scheduling a further step of it is under way by then, which is dropped too:
#
#     step 0    admits the request; its layers wait for the load
#     step 1    is launched, and reads what step 0 wrote
#     output 0  says which blocks did not come: no token of it, and what step 1 computes is stale (``drop_ahead``)
#     output 1  is dropped; the request has no step under way, and is preempted

SHORT_LOAD_BYTES = 32 << 20
"""Most that the early loads of a step bring beside other requests, which wait for them: 0.7 ms at 47 GB/s, of a PCIe 5
link. A request that waits for its load to end is scheduled an iteration or two later."""

NOT_FIRST = (
    "another connector of the MultiConnector loads a request into pages that the daemon loads too: name "
    "CachesvcConnector first among its connectors"
)


class Loading:
    """``find``: pages of a request. ``early_block_bytes``: of a block on the host; 0: no load can be early, for vLLM
    takes no word of blocks that a step lacked. ``waiting``: requests that were not admitted yet. Used from vLLM's
    scheduler thread."""

    def __init__(self, find: Callable[[str], RequestPages | None], early_block_bytes: int) -> None:
        self._find = find
        self._block_bytes = early_block_bytes
        self.waiting: set[str] = set()
        self._new: dict[str, tuple[TicketView, ...]] = {}
        self._since_s: dict[str, float] = {}
        self._copying: list[RequestPages] = []
        self._early_next = ""
        self._new_early: dict[str, EarlyLoad] = {}
        self._early: dict[str, RequestPages] = {}
        self._void: dict[str, RequestPages] = {}
        self._early_by_step: deque[set[str]] = deque()

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def is_awaited(self, request: RequestPages, running: Collection[str]) -> bool:
        """True where vLLM is to schedule a request once its load has come; False where it has none, or an early one."""
        if not request.host_blocks:
            return False
        is_early = (not running and self.waiting <= {request.request_id}) or self._is_short(request)
        self._early_next = request.request_id if is_early and self._block_bytes else ""
        return not self._early_next

    def _is_short(self, request: RequestPages) -> bool:
        """True where a step with others may wait for a request's load: no longer one is before it on the link."""
        blocks = request.host_blocks + sum(len(each.pages) for each in self._new_early.values())
        return not self._since_s and blocks * self._block_bytes <= SHORT_LOAD_BYTES

    def begin(self, request: RequestPages, external_tokens: int, block_tokens: int) -> bool:
        """vLLM has the pages of a request, ``external_tokens`` of which come with a load or a copy, or it is scheduled
        behind its load, or again, as a session with more input. True where a load begins. Raises ConnectorRefused where
        another connector loads into the pages that the daemon fills."""
        self.waiting.discard(request.request_id)
        name, has_load = request.request_id, request.host_blocks > 0 and not request.is_loading
        if not has_load and request.copy is None:
            return False
        if not request.is_loading and external_tokens != request.outside_tokens(block_tokens):
            raise ConnectorRefused(NOT_FIRST)
        is_early = has_load and name == self._early_next
        if request.copy is not None and (is_early or not has_load):
            self._copying.append(request)
        if not has_load:
            return False
        request.is_loading = True
        if is_early:
            self._new_early[name] = EarlyLoad(request.tickets, tuple(_loaded(request)))
            self._early[name] = request
        else:
            self._new[name] = request.tickets
            self._since_s[name] = time.perf_counter()
        return True

    def take_step(self, *, is_empty: bool, next_lease: str) -> StepTransfers:
        """Message to the workers for a scheduled step. A request that holds no page any more needs no copy."""
        copies = [each.copy for each in self._copying if each.copy is not None and each.held]
        for each in self._copying:
            each.copy = None
        self._void = {name: pages for name, pages in self._void.items() if pages.held}
        step = StepTransfers(self._new, next_lease, is_empty, copies, self._new_early)
        self._early_by_step.append(set(self._new_early))
        self._copying, self._new, self._new_early = [], {}, {}
        return step

    def end(self, ended: Collection[str], failed: Collection[str], stats: CacheStats) -> set[str]:
        """Note the end of loads, ours or a sibling's, in ``stats``; those of ours that have ``failed``."""
        now_s = time.perf_counter()
        ours = self._since_s.keys() & ended
        for request_id in ours:
            stats.data[LOAD_SECONDS].append(now_s - self._since_s.pop(request_id))
        stats.data["loads"] += len(ours)
        stats.data["failed_loads"] += len(ours & set(failed))
        return ours & set(failed)

    def end_step(self, stats: CacheStats) -> None:
        """The output of the first step under way has come, and with it the early loads that have not failed."""
        stats.data["loads"] += len(self._early_by_step.popleft())

    def end_early(self, invalid_pages: Collection[int], requests: Mapping[str, Any], stats: CacheStats) -> set[str]:
        """The output of a step has come, which lacked ``invalid_pages``. Return those of vLLM's ``requests`` that use
        pages of an early load that failed: vLLM counts less of all of them as computed, and they begin anew."""
        if not invalid_pages:
            return set()
        failed = [each for each in self._early.values() if each.held and not _loaded(each).isdisjoint(invalid_pages)]
        for step in self._early_by_step:
            step.difference_update(each.request_id for each in failed)
        for name in ("loads", "failed_loads"):
            stats.data[name] += len(failed)
        spoilt = set[int]().union(*map(_loaded, failed))
        for each in failed:
            del self._early[each.request_id]
        known = (pages for pages in map(self._find, requests) if pages is not None)
        users = [each for each in known if not spoilt.isdisjoint(each.pages[: each.taken])]
        for each in users:
            request = requests[each.request_id]
            if request.status.name == "RUNNING":
                each.is_foreign = True
                self._void[each.request_id] = each
                drop_ahead(request)
            elif request.status.name == "WAITING_FOR_REMOTE_KVS":
                request.num_computed_tokens = 0  # vLLM frees it at its load's end
        return {each.request_id for each in users}

    def is_void(self, request: RequestPages | None) -> bool:
        """True for pages that an early load did not fill: their request is to be preempted."""
        return request is not None and self._void.get(request.request_id) is request

    def forget(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        for known in (self._since_s, self._early, self._void):
            known.pop(request_id, None)


class SiblingLoads:
    """Loads of other connectors under a MultiConnector. vLLM computes a request behind such a load once it has come, or
    in the step that loads it, so what it brought is whole when the output of that step has come. ``are_shared``: it is
    shared from then on; else never, nor is that of an adapter, which a sibling may not know. Used from vLLM's scheduler
    thread."""

    def __init__(self, *, are_shared: bool) -> None:
        self._are_shared = are_shared
        self._awaited: dict[str, RequestPages] = {}
        self._steps: deque[list[RequestPages]] = deque()

    def begin(self, request: RequestPages) -> None:
        """Others load a part of a request."""
        if self._are_shared and not request.salt:
            request.awaits_others = True
            self._awaited[request.request_id] = request
        else:
            request.is_foreign = True

    def begin_step(self, scheduled: Collection[str]) -> None:
        """A step is launched that computes the ``scheduled`` requests."""
        self._steps.append([self._awaited.pop(each) for each in self._awaited.keys() & set(scheduled)])

    def end_step(self, *, is_sound: bool) -> None:
        """The output of the first step under way has come, which nothing that it read speaks against, or does."""
        for request in self._steps.popleft():
            request.is_foreign |= not is_sound
            request.awaits_others = False

    def note_failures(self, failed: Collection[str], invalid_pages: Collection[int]) -> None:
        """These requests' loads have failed, and these pages did not come: of what was being loaded none is shared."""
        for request in (*self._awaited.values(), *(each for step in self._steps for each in step)):
            request.is_foreign |= request.request_id in failed or bool(invalid_pages)

    def forget(self, request_id: str) -> None:
        self._awaited.pop(request_id, None)


def drop_ahead(request: Any) -> None:
    """Have vLLM drop what steps under way compute of a request: they read what a void step wrote. It does so by itself
    where a cache is reset. vLLM frees no block of a request that has a step under way, and preempts it after that."""
    request.drop_stale_output = True
    request.num_stale_output_tokens = request.num_in_flight_tokens


def _loaded(request: RequestPages) -> set[int]:
    """Pages that a load of the request fills."""
    return set(request.pages[request.hit_blocks : request.loaded_blocks])
