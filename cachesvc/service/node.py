"""The daemon's one thread of truth: runs flows on the event loop, lands transfers, and lets callers wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from cachesvc.flows.call import Call, resolve
from cachesvc.flows.core import Core
from cachesvc.flows.leases import lose_silent
from cachesvc.flows.models import host_pages_arrived
from cachesvc.flows.transfers import land
from cachesvc.model.answers import Wait
from cachesvc.model.errors import DeadlineExceeded, Unavailable
from cachesvc.model.words import Run
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events

Answer = TypeVar("Answer")


class Node:
    """Owns the Core on one event loop. Everything but ``on_transfer_done`` and ``on_host_pages`` is called there.

    ``on_change`` is called after every flow: blocks may have come or gone. It must be quick.
    """

    def __init__(self, core: Core, *, epoch: int, wait_seconds: float, lease_seconds: float) -> None:
        self.core = core
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self.started = time.monotonic()
        self.on_change: Callable[[], None] | None = None
        self.wait_seconds = wait_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False
        self._vault: Vault | None = None

    @property
    def vault(self) -> Vault:
        """The memory; set by the composition root before the first call."""
        assert self._vault is not None
        return self._vault

    def start(self, vault: Vault) -> None:
        """Begin on the running loop."""
        self._vault = vault
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.create_task(self._sweep())

    async def close(self) -> None:
        """Stop sweeping; calls that still wait are refused at their next turn."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    def now(self) -> float:
        """Monotonic seconds: what flows call time."""
        return time.monotonic()

    # -- from other threads ------------------------------------------------------------------------------------

    def on_transfer_done(self, ticket: int, error: Exception | None) -> None:
        """A transfer has ended; called by the swap engine's threads."""
        self._soon(self._land, ticket, "" if error is None else str(error) or type(error).__name__)

    def on_host_pages(self, model: int, group: int, run: Run) -> None:
        """More host pages are usable; called by the host pool's threads."""
        self._soon(host_pages_arrived, self.core, model, group, run)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call, *arguments)

    # -- on the loop -------------------------------------------------------------------------------------------

    def run(self, flow: Callable[[], Answer]) -> Answer:
        """Run one flow to its end; tickets that could not be started are landed as failed right after."""
        self.core.ledger.moment.seconds = self.now()
        try:
            return flow()
        finally:
            while self.core.stillborn:
                self._land(*self.core.stillborn.pop(0))
            if self.on_change is not None:
                self.on_change()

    async def run_call(
        self, lease_id: str, flow: Callable[[Core, Call], Answer | Wait], seconds: float | None
    ) -> Answer:
        """``run_waiting`` under a lease, which is looked up anew for each run. Raises LeaseLost, NotFound."""
        core = self.core
        return await self.run_waiting(lambda: flow(core, resolve(core.ledger, lease_id, self.now())), seconds)

    async def run_waiting(self, flow: Callable[[], Answer | Wait], seconds: float | None) -> Answer:
        """Run a flow again whenever tickets that it waits for have ended, or its patience has, until it answers.

        ``seconds``: what is left of the caller's deadline. Raises DeadlineExceeded.
        """
        until = self.now() + min(self.wait_seconds, seconds if seconds is not None else self.wait_seconds)
        while True:
            answer = self.run(flow)
            if not isinstance(answer, Wait):
                return answer
            left = until - self.now()
            if self._is_closed:
                raise Unavailable("the daemon stops; go on without the cache")
            if left <= 0:  # tickets may end for ever without bringing what the flow needs
                raise DeadlineExceeded(
                    "the transfers that this call needs did not help in time; try again or recompute"
                )
            patience = left if answer.seconds is None else min(left, answer.seconds)
            if not await self.wait_any(answer.tickets, patience) and answer.seconds is None:
                raise DeadlineExceeded("the transfers that this call needs did not end in time; try again or recompute")

    async def wait_any(self, tickets: Iterable[int], seconds: float) -> bool:
        """True as soon as one of the tickets has ended; False when the time is up first."""
        running = [ticket for ticket in tickets if self.core.ledger.tickets.is_running(ticket)]
        if not running:
            await asyncio.sleep(0)
            return True
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        for ticket in running:
            self._waiters.setdefault(ticket, []).append(future)
        try:
            await asyncio.wait_for(future, max(seconds, 0))
        except TimeoutError:
            return False
        finally:
            for ticket in running:
                waiting = self._waiters.get(ticket)
                if waiting is not None and future in waiting:
                    waiting.remove(future)
                    if not waiting:
                        del self._waiters[ticket]
        return True

    def _land(self, ticket: int, error: str) -> None:
        self.core.ledger.moment.seconds = self.now()
        if error:
            events.warning("transfer_failed", ticket=ticket, reason=error)
        for ended in land(self.core, ticket, error):
            for future in self._waiters.pop(ended, ()):
                if not future.done():
                    future.set_result(None)
        if self.on_change is not None:
            self.on_change()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_seconds / 4))
            try:
                self.core.ledger.mark_time(self.now())
                for lease in self.run(lambda: lose_silent(self.core, self.lease_seconds, self.now())):
                    events.warning("lease_silent", lease=lease, seconds=self.lease_seconds)
            except Exception:  # noqa: BLE001 - the root of a task: without it no lease would be lost again
                events.failure("sweep_broke")
