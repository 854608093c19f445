"""Loads from the host that an engine's requests wait for, from vLLM's allocation to the end that workers report; and
copies within the device, which a step makes before it computes."""

from __future__ import annotations

import time
from collections.abc import Collection

from cachesvc.model.answers import TicketView
from cachesvc_vllm.daemon.errors import NOT_FIRST, ConnectorRefused
from cachesvc_vllm.metrics import LOAD_SECONDS, CacheStats
from cachesvc_vllm.pages.request_pages import PageCopy, RequestPages


class Loading:
    """Used from vLLM's scheduler thread."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[TicketView, ...]] = {}
        self._since_s: dict[str, float] = {}
        self._copying: list[RequestPages] = []

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def begin(self, request: RequestPages, external_tokens: int, block_tokens: int) -> bool:
        """vLLM has the pages of a request, ``external_tokens`` of which come with a load or a copy, or it is scheduled
        behind its load. True where a load begins. Raises ConnectorRefused where another connector loads into the pages
        that the daemon fills."""
        if not request.outside_blocks:
            return False
        if not request.is_loading and external_tokens != request.outside_tokens(block_tokens):
            raise ConnectorRefused(NOT_FIRST)
        if request.is_loading or not request.host_blocks:  # all of the hit is there
            if request.copy is not None:
                self._copying.append(request)
            return False
        request.is_loading = True
        assert request.sequence is not None
        self._new[request.request_id] = request.sequence.tickets
        self._since_s[request.request_id] = time.perf_counter()
        return True

    def take_new(self) -> dict[str, tuple[TicketView, ...]]:
        """Loads that no worker watches yet."""
        new, self._new = self._new, {}
        return new

    def take_copies(self) -> list[PageCopy]:
        """Copies of the step that is scheduled. A request that holds no page any more needs none."""
        copies = [each.copy for each in self._copying if each.copy is not None and each.held]
        for each in self._copying:
            each.copy = None
        self._copying = []
        return copies

    def end(self, ended: Collection[str], failed: Collection[str], stats: CacheStats) -> set[str]:
        """Note the end of loads, ours or a sibling's, in ``stats``; those of ours that have ``failed``."""
        now_s = time.perf_counter()
        ours = self._since_s.keys() & ended
        for request_id in ours:
            stats.data[LOAD_SECONDS].append(now_s - self._since_s.pop(request_id))
        stats.data["loads"] += len(ours)
        stats.data["failed_loads"] += len(ours & set(failed))
        return ours & set(failed)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._since_s.pop(request_id, None)
