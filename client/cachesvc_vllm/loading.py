"""Loads from the host for an engine's requests, from vLLM's allocation to their end, and copies within the device.

A request is scheduled once its load has ended, while others run. Where nothing else runs or waits, its load is early:
the request is scheduled at once, and the step waits for the load, layer by layer. Where that fails, vLLM drops what was
computed, and the request is preempted: it begins anew with what is in place. With asynchronous scheduling no load is
early: vLLM has scheduled the next step by then, whose token it would give out.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from cachesvc_client.plugins.daemon.errors import ConnectorRefused
from cachesvc_client.plugins.pages.request_pages import RequestPages

from cachesvc.model.answers import TicketView
from cachesvc_vllm.metrics import LOAD_SECONDS, CacheStats
from cachesvc_vllm.transfers import EarlyLoad, StepTransfers

NOT_FIRST = (
    "another connector of the MultiConnector loads a request into pages that the daemon loads too: name "
    "CachesvcConnector first among its connectors"
)


class Loading:
    """``can_be_early``: vLLM takes word of blocks that a step lacked, before it schedules the next one. ``waiting``:
    requests that were not admitted yet. Used from vLLM's scheduler thread."""

    def __init__(self, *, can_be_early: bool = False) -> None:
        self._can_be_early = can_be_early
        self.waiting: set[str] = set()
        self._new: dict[str, tuple[TicketView, ...]] = {}
        self._since_s: dict[str, float] = {}
        self._copying: list[RequestPages] = []
        self._alone = ""
        self._new_early: dict[str, EarlyLoad] = {}
        self._early: dict[str, RequestPages] = {}
        self._void: dict[str, RequestPages] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def is_awaited(self, request: RequestPages, running: Collection[str]) -> bool:
        """True where vLLM is to schedule a request once its load has come; False where it has none, or an early one."""
        is_alone = not running and self.waiting <= {request.request_id}
        self._alone = request.request_id if is_alone and self._can_be_early else ""
        return request.host_blocks > 0 and not self._alone

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
        is_early = has_load and name == self._alone
        if request.copy is not None and (is_early or not has_load):
            self._copying.append(request)
        if not has_load:
            return False
        request.is_loading = True
        assert request.sequence is not None
        if is_early:
            loaded = tuple(request.pages[request.hit_blocks : request.loaded_blocks])
            self._new_early[name] = EarlyLoad(request.sequence.tickets, loaded)
            self._early[name] = request
            stats.data["loads"] += 1
        else:
            self._new[name] = request.sequence.tickets
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

    def end_early(self, invalid_pages: Collection[int], stats: CacheStats) -> set[str]:
        """The output of a step has come, which lacked ``invalid_pages``. Return requests whose early load failed: what
        they have is shared with none, and ``is_void``."""
        failed = {
            name: each
            for name, each in self._early.items()
            if each.held and not set(each.pages[each.hit_blocks : each.loaded_blocks]).isdisjoint(invalid_pages)
        }
        for name, each in failed.items():
            each.is_foreign = True
            del self._early[name]
        self._void |= failed
        stats.data["failed_loads"] += len(failed)
        return set(failed)

    def is_void(self, request: RequestPages | None) -> bool:
        """True for pages that an early load did not fill: their request is to be preempted."""
        return request is not None and self._void.get(request.request_id) is request

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.waiting.discard(request_id)
        for known in (self._since_s, self._early, self._void):
            known.pop(request_id, None)
