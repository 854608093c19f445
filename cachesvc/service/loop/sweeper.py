"""Periodic work of the daemon: leases that fell silent, lost places that are empty, pins that end, the collector.

Silence counts only while the daemon listens. After a hold of the loop, heartbeats of that time are yet to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from cachesvc.flows.context.core import Core
from cachesvc.flows.leases.device_loss import empty_lost
from cachesvc.flows.leases.leases import LEASES_A_TURN, lose_silent
from cachesvc.flows.models.pinning import expire_pins
from cachesvc.ledger.leases import Lease
from cachesvc.questions.owned import private_pages
from cachesvc.service.access.owners import shown_id
from cachesvc.service.loop.latency import LoopWatch
from cachesvc.telemetry import events

SHOWN_DIGITS = 16
"""Hexadecimal digits of a key in the log."""


def tell_left(lease: Lease) -> None:
    """Log what a process held of a lease at its end, and the pages that come back once no process can write them."""
    held = {"sequences": len(lease.sequences), "private_pages": private_pages(lease)}
    events.event("lease_process_ended", lease=shown_id(lease.id), engine=lease.engine, **held)


class RunFlow(Protocol):
    """``Node.run``."""

    def __call__(self, flow: Callable[[], Any], /) -> Any: ...


class Sweeper:
    """Used on the loop alone. ``on_sweep`` is called now and then, with the time: for what has to be done sometime."""

    def __init__(
        self, core: Core, lease_seconds: float, now: Callable[[], float], run: RunFlow, loop_watch: LoopWatch
    ) -> None:
        self.on_sweep: Callable[[float], None] | None = None
        self._core = core
        self._lease_seconds = lease_seconds
        self._now = now
        self._run = run
        self._loop_watch = loop_watch

    async def sweep(self) -> None:
        """Sweep until it is cancelled."""
        rest = pause = min(1.0, self._lease_seconds / 4)
        while True:
            asleep = self._now()
            await asyncio.sleep(rest)
            try:
                self.excuse(self._now() - asleep - rest, pause)
                self._core.ledger.mark_time(self._now())
                with self._loop_watch.watching("sweep"):
                    self._run(partial(empty_lost, self._core))
                    self._expire_pins()
                rest = 0.0 if self._lose_some() else pause
                if self.on_sweep is not None:
                    with self._loop_watch.watching("collector"):
                        self.on_sweep(self._now())
            except Exception:  # noqa: BLE001 - the root of a task: without it no lease would be lost again
                events.failure("sweep_broke")

    def _expire_pins(self) -> None:
        for model, pin in self._run(partial(expire_pins, self._core, self._now())):
            events.event("pin_expired", model=model.id, key=pin.key.hex()[:SHOWN_DIGITS], blocks=pin.blocks)

    def _lose_some(self) -> bool:
        """Lose leases that are silent, a turn's worth; True where there may be more."""
        with self._loop_watch.watching("sweep"):
            lost = self._run(partial(lose_silent, self._core, self._lease_seconds, self._now()))
            for lease in lost:
                events.warning("lease_silent", lease=shown_id(lease), seconds=self._lease_seconds)
        return len(lost) == LEASES_A_TURN

    def excuse(self, late: float, pause: float) -> None:
        """Count the time of a long hold as no silence of any lease."""
        if late > pause:
            now = self._now()
            for lease in self._core.ledger.leases.values():
                lease.heard(min(now, lease.last_heard + late))
