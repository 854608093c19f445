"""Loads from the host for an engine's requests, from vLLM's allocation to their end, and copies within the device.

A request is scheduled once its load has ended, while others run. Where nothing else runs or waits, or the load is
short, it is early: the request is scheduled at once, and the step waits for the load, layer by layer. Where that fails,
vLLM drops what was computed, and the request is preempted: it begins anew with what is in place. With asynchronous
scheduling a further step of it is under way by then, which is dropped too:

    step 0    admits the request; its layers wait for the load
    step 1    is launched, and reads what step 0 wrote
    output 0  says which blocks did not come: no token of it, and what step 1 computes is stale (``drop_ahead``)
    output 1  is dropped; the request has no step under way, and is preempted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cachesvc_client.plugins.daemon.errors import ConnectorRefused
from cachesvc_client.plugins.pages.request_pages import RequestPages

from cachesvc.model.answers import TicketView
from cachesvc_vllm.daemon.metrics import LOAD_SECONDS, CacheStats
from cachesvc_vllm.transfers import EarlyLoad, StepTransfers

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

    def begin(self, request: RequestPages, external_tokens: int, block_tokens: int, stats: CacheStats) -> bool:
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
            stats.data["loads"] += 1
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

    def end_early(self, invalid_pages: Collection[int], requests: Mapping[str, Any], stats: CacheStats) -> set[str]:
        """The output of a step has come, which lacked ``invalid_pages``. Return those of vLLM's ``requests`` that use
        pages of an early load that failed: vLLM counts less of all of them as computed, and they begin anew."""
        if not invalid_pages:
            return set()
        failed = [each for each in self._early.values() if each.held and not _loaded(each).isdisjoint(invalid_pages)]
        stats.data["failed_loads"] += len(failed)
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
        """The request has ended."""
        self.waiting.discard(request_id)
        for known in (self._since_s, self._early, self._void):
            known.pop(request_id, None)


def drop_ahead(request: Any) -> None:
    """Have vLLM drop what steps under way compute of a request: they read what a void step wrote. It does so by itself
    where a cache is reset. vLLM frees no block of a request that has a step under way, and preempts it after that."""
    request.drop_stale_output = True
    request.num_stale_output_tokens = request.num_in_flight_tokens


def _loaded(request: RequestPages) -> set[int]:
    """Pages that a load of the request fills."""
    return set(request.pages[request.hit_blocks : request.loaded_blocks])
