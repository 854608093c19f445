"""Python's cyclic collector, run between calls instead of within them.

Left to itself it runs when so many objects were made, which is in the middle of somebody's call, and a full pass over
the bookkeeping of a million blocks takes 20 ms. So it is off. What is new is passed over in a turn of its own whenever
there is some of it, which keeps each pass short, and the sweep has it run where nothing is being served. What the
ledger keeps for long is taken out of its sight now and then (``gc.freeze``): a full pass then costs by what is new.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

from cachesvc.flows.turns import NO_MODEL, Chore, Chores
from cachesvc.service.access.admission import Admission
from cachesvc.service.node import Node

FULL_EVERY_SECONDS = 300.0
LATE_SECONDS = 30.0
"""A daemon that is never idle collects all the same, after so long: garbage in cycles would grow without bound."""
FREEZE_ROWS = 50_000
YOUNG_OBJECTS = 2_000
"""So many new objects are passed over in some 0.2 ms."""


class Collector:
    """``rest`` is called now and then, ``glance`` after whatever was done. ``is_idle``: nothing is being served;
    ``rows``: of all models' blocks."""

    def __init__(self, is_idle: Callable[[], bool], rows: Callable[[], int]) -> None:
        self._is_idle = is_idle
        self._rows = rows
        self._frozen_rows = 0
        self._last = self._last_full = 0.0
        self._is_lined_up = False

    def start(self) -> None:
        """Off from now on; modules and stubs live as long as the process, and are never walked again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def close(self) -> None:
        """As it was."""
        gc.enable()
        gc.unfreeze()

    def glance(self, chores: Chores) -> None:
        """Something was done: where enough is new it is passed over in a turn."""
        if gc.get_count()[0] > YOUNG_OBJECTS and not self._is_lined_up:
            self._is_lined_up = True
            chores.append(Chore(NO_MODEL, self._pass_over_new))

    def _pass_over_new(self) -> bool:
        self._is_lined_up = False
        gc.collect(1)
        return True

    def rest(self, now: float) -> None:
        """Collect, where this is a good moment or the last one was too long ago. ``now``: seconds, monotonic."""
        if not self._is_idle() and now - self._last < LATE_SECONDS:
            return
        rows = self._rows()
        has_grown = rows - self._frozen_rows >= FREEZE_ROWS
        if not has_grown and now - self._last_full >= FULL_EVERY_SECONDS:
            gc.collect()
            self._last_full = now
        else:
            gc.collect(1)
        if has_grown:  # before a full pass, which would walk all that is new: young garbage alone is gone
            gc.freeze()
        if has_grown or rows < self._frozen_rows:
            self._frozen_rows = rows
        self._last = now


def collector_between_calls(node: Node, admission: Admission, rows: Callable[[], int]) -> Collector:
    """One that the node's sweep has run, where no call is being served and no flow has turns left."""
    collector = Collector(lambda: not (admission.work.held or node.has_turns), rows)
    node.on_sweep = collector.rest
    node.on_work = partial(collector.glance, node.core.chores)
    return collector
