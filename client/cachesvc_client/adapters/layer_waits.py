"""Waits of an engine's step for loads that still run: before each layer, for that layer's part, or for all at once.

On a GPU the step's stream waits, and the thread goes on; on a processor the thread does. A load that fails ends its
waits, so the engine has to look at its outcome before it uses what was computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from cachesvc.model.answers import TicketView
from cachesvc_client.core.errors import CacheClientError, DeadlineExceeded
from cachesvc_client.memory.pool import AttachedPool, LoadOutcome

LOOK_S = 1.0
"""Time of one wait on a processor, seconds; it is begun again until the part has come, or the load has failed."""


log = logging.getLogger(__name__)


class LayerWaits:
    """``pool``: of this rank; ``stream``: the stream that the step's kernels are put into, asked for on a GPU alone.
    ``is_sound``: no wait of the step was refused; else it may have read what had not come, however the load ends.
    Used from the thread that launches steps."""

    def __init__(self, pool: Callable[[], AttachedPool], stream: Callable[[], object]) -> None:
        self._pool = pool
        self._stream = stream
        self._tickets: tuple[TicketView, ...] = ()
        self._layer = -1
        self.is_sound = True

    @property
    def is_waiting(self) -> bool:
        """True while the step at hand has loads."""
        return bool(self._tickets)

    def begin(self, tickets: Iterable[TicketView]) -> None:
        """Begin a step that uses what these loads bring."""
        self._tickets = tuple(tickets)
        self._layer = -1
        self.is_sound = True

    def wait(self, layer: int) -> None:
        """Have what follows wait for ``layer``, counted from 0, and for those before it."""
        if layer > self._layer:
            self._layer = layer
            for ticket in self._tickets:
                self._wait(ticket, layer)

    def wait_all(self) -> None:
        """Have what follows wait for all of the loads; no layer waits any more."""
        tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            self._wait(ticket, None)

    def end(self, ticket: TicketView) -> LoadOutcome:
        """Wait until a load has ended, and return how. Of one that was lost nothing can land in the pool any more."""
        pool = self._pool()
        while True:
            with suppress(CacheClientError):
                pool.wait_ticket(ticket, LOOK_S)
            outcome = pool.outcome(ticket)
            is_settled = outcome is not LoadOutcome.LOST or pool.wait_quiet(LOOK_S)
            if outcome is not LoadOutcome.RUNNING and is_settled:
                return outcome

    def _wait(self, ticket: TicketView, layer: int | None) -> None:
        pool = self._pool()
        try:
            if pool.is_on_gpu:
                if layer is None:
                    pool.wait_ticket_on(self._stream(), ticket)
                else:
                    pool.wait_layer_on(self._stream(), ticket, layer)
                return
            while True:
                with suppress(DeadlineExceeded):
                    if layer is None:
                        pool.wait_ticket(ticket, LOOK_S)
                    else:
                        pool.wait_layer(ticket, layer, LOOK_S)
                    return
        except CacheClientError as error:
            log.debug("layer_not_awaited load=%s why=%s", ticket.id, error)
            self.is_sound = False
