"""Calls of a simulated engine: perhaps sent twice, refused, made to wait, sent again and given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cachesvc.flows.core import resolve
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Ended, Wait
from cachesvc.model.errors import Conflict, KeyReused, LeaseLost, LimitExceeded, LoadFailed, PoolExhausted, Unavailable
from tests.sim.processes import Pending, Request, SimProcesses

WAIT_SECONDS = 20.0
STARVED_ACTIONS = 3
"""For how many of its actions an engine minds that it was refused pages."""


class SimCalls(SimProcesses):
    """An engine that has calls under way: one for each request at most, and some that begin one."""

    def _flow(self, flow: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """A flow under the engine's lease, looked up anew each time it is run, as the daemon does."""
        node, lease = self.node, self.lease
        return lambda: flow(node.core, resolve(node.core.ledger, lease, node.now), *arguments)

    def _call(
        self, request: Request | None, contents: object, flow: Callable[[], object], then: Callable[[Any], None]
    ) -> None:
        """Send a call, perhaps twice; a refusal that an engine must expect ends the request."""
        self._ids += 1
        key = self._ids

        def call() -> object:
            answer = self.node.call(self.lease, key, contents, flow)
            if not isinstance(answer, Wait) and self.rng.random() < 0.2:
                self.node.faults["client_retry"] += 1
                again = self.node.call(self.lease, key, contents, flow)
                assert again is answer, "a retry is answered from memory"
                try:
                    self.node.call(self.lease, key, "another request", flow)
                except KeyReused:
                    return answer
                raise AssertionError("a key was taken twice")
            return answer

        self._finish(Pending(call, then, (), self.node.now + WAIT_SECONDS, request))

    def _finish(self, pending: Pending) -> None:
        try:
            answer = pending.call()
        except (PoolExhausted, LoadFailed, LimitExceeded, Unavailable) as refusal:
            self.node.faults[f"refused_{type(refusal).__name__}"] += 1
            self.starved = STARVED_ACTIONS if isinstance(refusal, PoolExhausted) else 0
            patient = isinstance(refusal, PoolExhausted) and self.rng.random() < 0.7
            if pending.request is not None and not patient:
                self._drop(pending.request)
            return
        except Conflict as refusal:
            if isinstance(refusal, LeaseLost) or "being swapped" not in str(refusal):
                raise
            self.node.faults["told_to_wait_for_swap"] += 1
            return
        if isinstance(answer, Wait):
            pending.tickets = answer.tickets
            pending.is_patient = answer.seconds is None
            self.pending.append(pending)
            self.node.faults["told_to_wait"] += 1
            return
        pending.then(answer)

    def _is_ready(self, pending: Pending) -> bool:
        """True where a call that waits may be sent again, or given up."""
        book = self.node.core.ledger.tickets
        if (
            not pending.tickets
            or self.node.now > pending.until
            or any(not book.is_running(ticket) for ticket in pending.tickets)
        ):
            return True
        return not pending.is_patient and self.rng.random() < 0.1

    def _retry(self, pending: Pending) -> None:
        self.pending.remove(pending)
        book = self.node.core.ledger.tickets
        if self.node.now <= pending.until and not pending.tickets:
            self.node.events["turns"] += 1
            self._finish(pending)
        elif any(not book.is_running(ticket) for ticket in pending.tickets):
            self._finish(pending)
        elif self.node.now > pending.until:
            self.node.faults["gave_up_waiting"] += 1
            if pending.request is not None:
                self._drop(pending.request)
        else:
            self.node.faults["patience_ended"] += 1
            self._finish(pending)

    def _drop(self, request: Request) -> None:
        if self.requests.pop(request.id, None) is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Release a sequence, in as many turns as it takes."""
        ended = Ended(self.rng.choice((None, 20, 500)))
        self._call(None, ("release", request.id), self._flow(release, request.id, ended), lambda _: None)
