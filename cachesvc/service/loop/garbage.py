"""Python's cyclic collector, run between calls instead of within them.

Left to itself it runs after a number of new objects, which is in the middle of a call, and a full pass over
the bookkeeping of a million blocks takes 20 ms. So it is off. What is new is passed over in a turn of its own whenever
there is some of it, which keeps each pass short, and the sweep has it run where hardly anything was done lately:
between two calls of an engine at work there is no room for a full pass. What the ledger keeps for long is taken out of
its sight now and then (``gc.freeze``): a full pass then costs by what is new.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

from cachesvc.flows.context.turns import NO_MODEL, Chore, Chores
from cachesvc.service.access.admission import Admission
from cachesvc.service.loop.node import Node

FULL_EVERY_SECONDS = 300.0
LATE_SECONDS = 30.0
"""A daemon that is never idle collects all the same, after so long: garbage in cycles would grow without bound."""
FULL_SHARE = 1e-4
"""Most of its time that full passes may take, as a share."""
QUIET_FLOWS = 20
"""Flows between two sweeps, a second, up to which the daemon is idle: signs of life, and the sweep itself."""
FREEZE_ROWS = 5_000
YOUNG_OBJECTS = 2_000
"""Number of new objects that a pass of some 0.2 ms looks at."""
PASS_SECONDS = 0.2e-3
MOST_FLOWS = 256
"""Most flows between two passes over new objects. The collector's own count is too low: it subtracts old objects that
go, and a full cache replaces old by new."""


class Collector:
    """``rest`` is called now and then, ``glance`` after whatever was done. ``is_idle``: nothing is being served;
    ``rows``: of all models' blocks."""

    def __init__(
        self, is_idle: Callable[[], bool], rows: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._is_idle = is_idle
        self._rows = rows
        self._frozen_rows = 0
        self._flows = 0
        self._flows_since_pass = 0
        self._flows_a_pass = MOST_FLOWS
        self._last = 0.0
        self._last_full: float | None = None
        self._full_took = 0.0
        self._is_lined_up = False

    def start(self) -> None:
        """Off from now on; modules and stubs live as long as the process, and are never walked again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def close(self) -> None:
        """Restore the collector."""
        gc.enable()
        gc.unfreeze()

    def glance(self, chores: Chores) -> None:
        """Something was done: where enough is new it is passed over in the next turn. Behind thousands of chores there
        would be ten times as much by then."""
        self._flows += 1
        self._flows_since_pass += 1
        is_much = self._flows_since_pass >= self._flows_a_pass or gc.get_count()[0] > YOUNG_OBJECTS
        if is_much and not self._is_lined_up:
            self._is_lined_up = True
            chores.appendleft(Chore(NO_MODEL, self._pass_over_new))

    def _pass_over_new(self) -> bool:
        self._is_lined_up = False
        self._flows_since_pass = 0
        took = self._pass_over(1)
        if took > PASS_SECONDS:
            self._flows_a_pass = max(1, self._flows_a_pass // 2)
        elif took < PASS_SECONDS / 4:
            self._flows_a_pass = min(MOST_FLOWS, 2 * self._flows_a_pass)
        return True

    def _pass_over(self, generation: int) -> float:
        """Run a collection; returns its seconds."""
        began = self._clock()
        gc.collect(generation)
        return self._clock() - began

    def rest(self, now: float) -> None:
        """Collect, where this is a good moment or the last one was too long ago. ``now``: seconds, monotonic."""
        is_quiet = self._is_idle() and self._flows <= QUIET_FLOWS
        self._flows = 0
        if not is_quiet and now - self._last < LATE_SECONDS:
            return
        if self._last_full is None:
            self._last_full = now
        rows = self._rows()
        has_grown = rows - self._frozen_rows >= FREEZE_ROWS
        full_every = FULL_EVERY_SECONDS if is_quiet else self._full_took / FULL_SHARE
        if not has_grown and now - self._last_full >= full_every:
            self._full_took = self._pass_over(2)
            self._last_full = now
        else:
            self._pass_over(1)
        if has_grown:  # before a full pass, which would walk all that is new: young garbage alone is gone
            gc.freeze()
        if has_grown or rows < self._frozen_rows:
            self._frozen_rows = rows
        self._last = now


def collector_between_calls(node: Node, admission: Admission, rows: Callable[[], int]) -> Collector:
    """Make a collector that the node's sweep runs while no call is being served and no flow has turns left."""
    collector = Collector(lambda: not (admission.work.held or node.has_turns), rows)
    node.sweeper.on_sweep = collector.rest
    node.on_work = partial(collector.glance, node.core.chores)
    return collector
