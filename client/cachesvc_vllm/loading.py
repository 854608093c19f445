"""Loads from the host that an engine's requests wait for, from vLLM's allocation to the end that workers report."""

from __future__ import annotations

import time
from collections.abc import Collection

from cachesvc.model.answers import TicketView
from cachesvc_vllm.metrics import LOAD_SECONDS, CacheStats


class Loading:
    """Used from vLLM's scheduler thread."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[TicketView, ...]] = {}
        self._since_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def begin(self, request_id: str, tickets: tuple[TicketView, ...]) -> None:
        """vLLM has the pages of a request, which these transfers fill."""
        self._new[request_id] = tickets
        self._since_s[request_id] = time.perf_counter()

    def take_new(self) -> dict[str, tuple[TicketView, ...]]:
        """Loads that no worker watches yet."""
        new, self._new = self._new, {}
        return new

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
