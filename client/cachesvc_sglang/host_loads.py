"""Loads from the host, as SGLang sees them: whole ones beside a running batch, and layer by layer where nothing runs.

An engine that runs others lets a request wait until all of its load has come. One that runs nothing launches the
request at once, and each layer waits for its own part: SGLang's KV pool asks ``wait_until`` before it shows a layer.
The outcome is known before the next step is launched; a step whose load failed is void, and its requests begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from cachesvc_client import CacheClientError
from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.memory.pool import AttachedPool, LoadOutcome
from cachesvc_client.plugins.node import Node
from cachesvc_client.plugins.request_pages import RequestPages

from cachesvc.model.answers import TicketView
from cachesvc_sglang.engine_cache import CacheMetrics
from cachesvc_sglang.links import FollowerLinks

LOOK_S = 0.002
"""Time that an engine which runs nothing waits for a load, between two looks."""

SOUND = "sound"
"""Word of a follower on a step that was launched: no wait of its layers was refused."""

log = logging.getLogger("sglang.srt." + __name__)


class LoadBegin(NamedTuple):
    """A load that other ranks are to look at."""

    number: int
    tickets: tuple[TicketView, ...]


class _Load(NamedTuple):
    """A load that is looked at: its number, of which pages, its tickets, and since when."""

    number: int
    pages: RequestPages
    tickets: tuple[TicketView, ...]
    begun_s: float


class HostLoads:
    """SGLang's counter of layers. ``without_host``: requests whose load failed, which compute what did not come;
    ``num_layers``: of the KV pool. ``metrics``: None without SGLang's. ``followers``: other ranks, on which a load has
    to come as well; None without. Used from SGLang's scheduler thread."""

    def __init__(
        self,
        node: Node,
        without_host: set[str],
        num_layers: int,
        metrics: CacheMetrics | None = None,
        followers: FollowerLinks | None = None,
    ) -> None:
        self.num_layers = num_layers
        self._metrics = metrics
        self._followers = followers
        self._node = node
        self._without_host = without_host
        self._running: dict[str, _Load] = {}
        self._came: dict[str, RequestPages] = {}
        self._early: dict[str, RequestPages] = {}
        self._launched: list[_Load] = []
        self._number = 0
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
            self._end(pages.request_id)
            self._number += 1
            load = _Load(self._number, pages, pages.sequence.tickets, time.perf_counter())
            self._running[pages.request_id] = load
            if self._followers is not None:
                self._followers.expect(load.number)

    def running(self, pages: RequestPages) -> LoadBegin | None:
        """A load that is looked at; None of another one."""
        load = self._running.get(pages.request_id)
        return None if load is None or load.pages is not pages else LoadBegin(load.number, load.tickets)

    def use_early(self, pages: RequestPages) -> None:
        """SGLang is to compute on pages whose load runs."""
        self._early[pages.request_id] = pages

    def look(self, pages: RequestPages, *, may_wait: bool = False) -> bool:
        """Look at the load of a request's pages; True while it runs. What did not come is computed."""
        rid = pages.request_id
        if not self.is_running(pages):
            return False
        load, wait_s = self._running[rid], LOOK_S if may_wait else 0.0
        has_come = end_of(self._node.pool, load.tickets, wait_s)
        if has_come is not None and self._followers is not None:
            on_others = self._followers.has_come(load.number, wait_s)
            has_come = None if on_others is None else has_come and on_others
        if has_come is None:
            return True
        begun_s = self._running.pop(rid).begun_s
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
        self._end(request_id)
        for known in (self._came, self._early):
            known.pop(request_id, None)

    def forget_all(self) -> None:
        """Forget all loads: there is a new lease."""
        for request_id in [*self._running]:
            self._end(request_id)
        for known in (self._came, self._early):
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
        if launched and self._followers is not None:
            is_sound = all([is_sound, *self._followers.gather(SOUND)])
        failed = [load.pages.request_id for load in launched if not (is_sound and self.has_come(load.pages))]
        self._waits.begin(())
        if failed:
            log.warning("step_void failed_loads=%s", ", ".join(failed))
        return bool(failed)

    @property
    def launched(self) -> list[str]:
        """Requests of the step that is launched whose layers wait."""
        return [load.pages.request_id for load in self._launched]

    def _end(self, request_id: str) -> None:
        """Look at no load of a request."""
        load = self._running.pop(request_id, None)
        if load is not None and self._followers is not None:
            self._followers.forget(load.number)

    # -- SGLang's counter --------------------------------------------------------------------------------------------

    @property
    def consumer_index(self) -> int:
        return 0 if self._launched else -1

    def wait_until(self, layer: int) -> None:
        """SGLang is about to use a layer of the step that it launches."""
        self._waits.wait(layer)


def end_of(pool: AttachedPool, tickets: Sequence[TicketView], wait_s: float) -> bool | None:
    """True where a load has come into this rank's pool, False where it has failed and nothing of it can come any more;
    None while it runs, after ``wait_s`` at most."""
    if wait_s and tickets:
        with suppress(CacheClientError):  # what has become of it is looked at below
            pool.wait_ticket(tickets[-1], wait_s)
    outcomes = {pool.outcome(ticket) for ticket in tickets}
    if LoadOutcome.RUNNING in outcomes:
        return None
    if LoadOutcome.LOST in outcomes and not pool.wait_quiet(wait_s):
        return None
    return outcomes <= {LoadOutcome.CAME}


def current_stream() -> object:
    """Return the stream that kernels are put into."""
    import torch

    return torch.cuda.current_stream()
