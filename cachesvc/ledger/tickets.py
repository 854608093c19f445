"""Transfer jobs from the ledger's side: which copies are moving, and what has become of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from cachesvc.ledger.evict import Drain
from cachesvc.model.errors import NotFound
from cachesvc.model.transfer import Direction, TimelineSlot, Urgency


class TicketState(Enum):
    """A ticket ends in DONE or FAILED, never in silence."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class PageMove:
    """A page of a sequence on its way out or in; ``is_own`` is False where a shared page's bytes go along."""

    group: int
    position: int
    device_page: int
    host_page: int
    is_own: bool = True


@dataclass(slots=True)
class Ticket:
    """One transfer job. ``rows`` are loads or backups of sealed blocks, ``drains`` evictions, ``moves`` private pages.

    ``sequence`` is whose pages ``moves`` are; ``waiters`` are sequences that rely on a load. ``source``: the replica
    that a load reads from instead of the host, and its deepest row there, which is pinned until the ticket ends.
    ``after``: tickets whose blocks lie above these; this one counts as done only when they are.
    """

    id: int
    model: int
    replica: int
    direction: Direction
    urgency: Urgency
    rows: list[int] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    moves: list[PageMove] = field(default_factory=list)
    sequence: tuple[str, int] | None = None
    waiters: list[tuple[str, int]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    source: tuple[int, int] | None = None
    slot: TimelineSlot | None = None
    size_bytes: int = 0
    landed: str | None = None
    state: TicketState = TicketState.RUNNING
    reason: str = ""
    moved_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Blocks or private pages that this ticket moves, or has moved."""
        return self.moved_blocks or len(self.rows) + len(self.drains) + len(self.moves)

    def forget_parts(self) -> None:
        """Keep only what is told of an ended ticket: a page each of thousands of tickets is work for the collector."""
        self.moved_blocks = self.blocks
        self.rows, self.drains, self.moves, self.waiters = [], [], [], []


class TicketBook:
    """Running tickets, and the last ``keep`` that have ended."""

    def __init__(self, keep: int) -> None:
        self.running: dict[int, Ticket] = {}
        self.ended: OrderedDict[int, Ticket] = OrderedDict()
        self._keep = keep
        self._next = 1

    def open(self, model: int, replica: int, direction: Direction, urgency: Urgency = Urgency.AWAITED) -> Ticket:
        """A new running ticket."""
        ticket = Ticket(self._next, model, replica, direction, urgency)
        self._next += 1
        self.running[ticket.id] = ticket
        return ticket

    def get(self, ticket_id: int) -> Ticket:
        """A ticket by id. Raises NotFound for one that never was or ended too long ago."""
        ticket = self.running.get(ticket_id) or self.ended.get(ticket_id)
        if ticket is None:
            raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
        return ticket

    def is_running(self, ticket_id: int) -> bool:
        """True until the ticket has ended."""
        return ticket_id in self.running

    def of_replica(self, model: int, replica: int, direction: Direction) -> list[Ticket]:
        """Running tickets of one replica in one direction, oldest first."""
        return [
            ticket
            for ticket in self.running.values()
            if ticket.model == model and ticket.replica == replica and ticket.direction is direction
        ]

    def reading(self, model: int, replica: int) -> list[Ticket]:
        """Running tickets that copy from one replica to another one."""
        return [
            ticket
            for ticket in self.running.values()
            if ticket.model == model and ticket.source is not None and ticket.source[0] == replica
        ]

    def end(self, ticket: Ticket, error: str) -> None:
        """Done when ``error`` is empty, else failed with it."""
        ticket.state = TicketState.FAILED if error else TicketState.DONE
        ticket.reason = error
        del self.running[ticket.id]
        self.ended[ticket.id] = ticket
        while len(self.ended) > self._keep:
            self.ended.popitem(last=False)
