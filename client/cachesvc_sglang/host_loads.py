"""Loads from the host, as SGLang sees them: whole ones beside a running batch, and layer by layer where nothing runs.

An engine that runs others lets a request wait until all of its load has come. One that runs nothing launches the
request at once, and each layer waits for its own part: SGLang's KV pool asks ``wait_until`` before it shows a layer.
The outcome is known before the next step is launched; a step whose load failed is void, and its requests begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from cachesvc_client import CacheClientError
from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.memory.pool import LoadOutcome
from cachesvc_client.plugins.daemon.node import Node
from cachesvc_client.plugins.pages.request_pages import RequestPages

from cachesvc.model.answers import TicketView
from cachesvc_sglang.metrics import CacheMetrics

LOOK_S = 0.002
"""Time that an engine which runs nothing waits for a load, between two looks."""

log = logging.getLogger("sglang.srt." + __name__)


class _Load(NamedTuple):
    """A load that is looked at: of which pages, its tickets, and since when."""

    pages: RequestPages
    tickets: tuple[TicketView, ...]
    begun_s: float


class HostLoads:
    """SGLang's counter of layers. ``without_host``: requests whose load failed, which compute what did not come;
    ``num_layers``: of the KV pool. ``metrics``: None without SGLang's. Used from SGLang's scheduler thread."""

    def __init__(
        self, node: Node, without_host: set[str], num_layers: int, metrics: CacheMetrics | None = None
    ) -> None:
        self.num_layers = num_layers
        self._metrics = metrics
        self._node = node
        self._without_host = without_host
        self._running: dict[str, _Load] = {}
        self._came: dict[str, RequestPages] = {}
        self._early: dict[str, RequestPages] = {}
        self._launched: list[_Load] = []
        self._waits = LayerWaits(lambda: node.pool, current_stream)

    def is_running(self, pages: RequestPages) -> bool:
        """True for pages whose load is looked at: those that the request had before may have been given back."""
        load = self._running.get(pages.request_id)
        return load is not None and load.pages is pages

    def has_come(self, pages: RequestPages) -> bool:
        """True for pages whose load has come."""
        return self._came.get(pages.request_id) is pages

    def is_used(self, pages: RequestPages) -> bool:
        """True for pages that SGLang computes on: all has come, or each layer waits for its part."""
        return self.has_come(pages) or self._early.get(pages.request_id) is pages

    def begin(self, pages: RequestPages) -> None:
        """Look at the load of a request that has its pages, from now on."""
        if not (self.is_running(pages) or self.has_come(pages)):
            assert pages.sequence is not None
            self._running[pages.request_id] = _Load(pages, pages.sequence.tickets, time.perf_counter())

    def use_early(self, pages: RequestPages) -> None:
        """SGLang is to compute on pages whose load runs."""
        self._early[pages.request_id] = pages

    def look(self, pages: RequestPages, *, may_wait: bool = False) -> bool:
        """Look at the load of a request's pages; True while it runs. What did not come is computed."""
        rid, pool = pages.request_id, self._node.pool
        if not self.is_running(pages):
            return False
        tickets = self._running[rid].tickets
        if may_wait and tickets:
            with suppress(CacheClientError):  # what has become of it is looked at below
                pool.wait_ticket(tickets[-1], LOOK_S)
        outcomes = {pool.outcome(ticket) for ticket in tickets}
        if LoadOutcome.RUNNING in outcomes:
            return True
        if LoadOutcome.LOST in outcomes and not pool.wait_quiet(LOOK_S if may_wait else 0.0):
            return True
        begun_s, has_come = self._running.pop(rid).begun_s, outcomes <= {LoadOutcome.CAME}
        if has_come:
            self._came[rid] = pages
        else:
            self._without_host.add(rid)
        if self._metrics is not None:
            self._metrics.end_load(pages.host_blocks, time.perf_counter() - begun_s, has_come=has_come)
        return False

    def match(self, request_id: str) -> None:
        """A request waits, and is matched again: it computes on nothing now."""
        self._early.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Forget a request's loads."""
        for known in (self._running, self._came, self._early):
            known.pop(request_id, None)

    def forget_all(self) -> None:
        """Forget all loads: there is a new lease."""
        for known in (self._running, self._came, self._early):
            known.clear()

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, requests: Iterable[RequestPages]) -> None:
        """A step with these requests is launched: its layers wait for the loads that still run."""
        self._launched = [self._running[each.request_id] for each in requests if self.is_running(each)]
        self._waits.begin(ticket for load in self._launched for ticket in load.tickets)

    def end_launch(self) -> bool:
        """Wait for the loads of the step that was launched; True where one has failed: what it computes is void."""
        launched, self._launched = self._launched, []
        for load in launched:
            while self.look(load.pages, may_wait=True):
                pass
        is_sound = self._waits.is_sound
        failed = [load.pages.request_id for load in launched if not (is_sound and self.has_come(load.pages))]
        self._waits.begin(())
        if failed:
            log.warning("step_void failed_loads=%s", ", ".join(failed))
        return bool(failed)

    # -- SGLang's counter --------------------------------------------------------------------------------------------

    @property
    def consumer_index(self) -> int:
        """Negative while no step waits."""
        return 0 if self._launched else -1

    def wait_until(self, layer: int) -> None:
        """SGLang is about to use a layer of the step that it launches."""
        self._waits.wait(layer)


def current_stream() -> object:
    """Return the stream that kernels are put into."""
    import torch

    return torch.cuda.current_stream()
