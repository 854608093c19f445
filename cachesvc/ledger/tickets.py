"""Transfer jobs from the ledger's side: the moving copies, and the results.

A load whose blocks lie below those of another one is linked to it. A good ticket ends after those above it, a failed
one after those below, which fail with it: no block is ever there without its parent. Landing a ticket looks at those
that it is linked to, however many others run.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Protocol, TypeVar

from cachesvc.ledger.page_pool import Reservation
from cachesvc.ledger.pins import Pin
from cachesvc.ledger.planner import Drain
from cachesvc.model.errors import NotFound
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import Direction, Failed, Inward, Outcome, TimelineSlot, Urgency

Key = TypeVar("Key")


class TicketState(Enum):
    """A ticket ends in DONE or FAILED, never in silence."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class MovedPages:
    """Pages of one group of a sequence on their way out or in, by position; of ``own`` the device pages are its own,
    while the bytes of the others, which are shared, only go along."""

    group: int
    positions: array[int]
    device_pages: array[int]
    host_pages: array[int]
    own: array[int]


class Waiter(Protocol):
    """Sequence or prefetch that relies on a load."""

    def load_ended(self, ticket: int, reason: str) -> None:
        """The load has ended; ``reason``: why it failed, empty where it did not."""


class Traveller(Protocol):
    """Owner of the pages that a swap moves."""

    id: int
    lease: str

    def swap_ended(self, ticket: Ticket) -> list[array[int]]:
        """End the swap. Returns, by group, device pages in flight that are needed no more."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer job. ``rows`` are loads or backups of sealed blocks, ``drains`` evictions, ``moves`` private pages.

    ``traveller`` is whose pages ``moves`` are; ``waiters`` rely on a load. ``source``: the replica that a load reads
    from instead of the host, and its deepest row there, kept by ``pin`` until the ticket ends. ``room``: for whom
    drains free pages. ``after``: tickets whose blocks lie above these; ``below``: running ones that this one is above
    of, and ``above`` how many above it run still. ``landed``: what became of the copy itself, None while it goes on;
    ``failing``: why the ticket will fail, as soon as nothing below it runs. ``is_settling``: it has begun to end, and
    what is settled of it is in its lists no more. ``party``: for whom it moves.
    """

    id: int
    model: int
    replica: int
    direction: Direction | Inward
    urgency: Urgency
    after: tuple[int, ...] = ()
    source: tuple[int, int] | None = None
    pin: Pin | None = None
    room: Reservation | None = None
    rows: array[int] = field(default_factory=lambda: array("i"))
    drains: list[Drain] = field(default_factory=list)
    moves: list[MovedPages] = field(default_factory=list)
    traveller: Traveller | None = None
    waiters: list[Waiter] = field(default_factory=list)
    slot: TimelineSlot | None = None
    size_bytes: int = 0
    below: dict[int, Ticket] = field(default_factory=dict)
    above: int = 0
    landed: Outcome | None = None
    failing: str = ""
    state: TicketState = TicketState.RUNNING
    reason: str = ""
    moved_blocks: int = 0
    is_settling: bool = False
    party: Party = BACKGROUND

    @property
    def blocks(self) -> int:
        """Blocks or private pages that this ticket moves, or has moved."""
        moves = sum(len(moved.positions) for moved in self.moves)
        return self.moved_blocks or len(self.rows) + len(self.drains) + moves

    @property
    def has_parts(self) -> bool:
        """True while copies are to be settled."""
        return bool(self.rows or self.drains)

    @property
    def may_write(self) -> bool:
        """True where its copies never ended: what they were to bring may still come."""
        return isinstance(self.landed, Failed) and self.landed.may_write

    def take_rows(self, most: int) -> array[int]:
        """The next rows to settle, which it no longer has then: root first where they have come, so that a hit never
        has a gap, and leaves first where they have not, so that no child stays where its parent is gone."""
        if not self.failing:
            taken = self.rows[:most]
            del self.rows[:most]
            return taken
        taken = self.rows[-most:]
        del self.rows[-most:]
        taken.reverse()
        return taken

    def take_drains(self, most: int) -> list[Drain]:
        """The next drains to settle, leaves first; it no longer has them then."""
        taken = self.drains[:most]
        del self.drains[:most]
        return taken

    def forget_parts(self) -> None:
        """Keep only the result of an ended ticket: a page each of thousands of tickets is work for the collector."""
        self.moved_blocks = self.blocks
        self.rows, self.drains, self.moves, self.waiters = array("i"), [], [], []
        self.traveller = self.pin = self.room = None


class TicketBook:
    """Running tickets, and the last ``keep`` that have ended. ``held``: how many run of each model, by party.
    ``numbers``: where they get their names (left out: 1, 2, ...)."""

    def __init__(self, keep: int, numbers: Iterator[int] | None = None) -> None:
        self.running: dict[int, Ticket] = {}
        self.ended: OrderedDict[int, Ticket] = OrderedDict()
        self._of_replica: dict[tuple[int, int, Direction | Inward], dict[int, Ticket]] = {}
        self._reading: dict[tuple[int, int], dict[int, Ticket]] = {}
        self._keep = keep
        self._numbers = count(1) if numbers is None else numbers
        self.held: dict[int, Counter[Party]] = {}

    def open(
        self,
        model: int,
        replica: int,
        direction: Direction | Inward,
        urgency: Urgency = Urgency.AWAITED,
        *,
        after: Iterable[int] = (),
        source: tuple[int, Pin] | None = None,
        party: Party = BACKGROUND,
    ) -> Ticket:
        """A new running ticket, below the running tickets ``after``, for ``party``.

        ``source``: the replica that it reads from, and what it holds there; the ticket owns the pin from now on.
        """
        ticket = Ticket(next(self._numbers), model, replica, direction, urgency, tuple(after), party=party)
        self.held.setdefault(model, Counter())[party] += 1
        self.running[ticket.id] = ticket
        self._of_replica.setdefault((model, replica, direction), {})[ticket.id] = ticket
        if source is not None:
            ticket.source, ticket.pin = (source[0], source[1].row), source[1]
            self._reading.setdefault((model, source[0]), {})[ticket.id] = ticket
        for above in ticket.after:
            self.running[above].below[ticket.id] = ticket
            ticket.failing = ticket.failing or self.running[above].failing
        ticket.above = len(ticket.after)
        return ticket

    def get(self, ticket_id: int) -> Ticket:
        """A ticket by id. Raises NotFound for one that never was or ended too long ago."""
        ticket = self.running.get(ticket_id) or self.ended.get(ticket_id)
        if ticket is None:
            raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
        return ticket

    def is_running(self, ticket_id: int) -> bool:
        return ticket_id in self.running

    def has_failed(self, ticket_id: int) -> bool:
        """True for a ticket that ended in failure not long ago."""
        ended = self.ended.get(ticket_id)
        return ended is not None and ended.state is TicketState.FAILED

    def of_replica(self, model: int, replica: int, direction: Direction) -> list[Ticket]:
        """Running tickets of one replica in one direction, oldest first."""
        return list(self._of_replica.get((model, replica, direction), {}).values())

    def touches(self, model: int, replica: int) -> bool:
        """True while a ticket runs for a replica, or copies from it."""
        ways: tuple[Direction | Inward, ...] = (*Direction, *Inward)
        return (model, replica) in self._reading or any((model, replica, way) in self._of_replica for way in ways)

    def reading(self, model: int, replica: int) -> list[Ticket]:
        """Running tickets that copy from one replica to another one."""
        return list(self._reading.get((model, replica), {}).values())

    def land(self, ticket_id: int, outcome: Outcome) -> list[Ticket]:
        """The mover is through with a ticket. Returns those that may be able to end now, which is to be seen in this
        order: settle each that ``may_end``, then ``end`` it."""
        ticket = self.running[ticket_id]
        ticket.landed = outcome
        return [ticket, *self._fail(ticket, outcome.reason)] if isinstance(outcome, Failed) else [ticket]

    def _fail(self, ticket: Ticket, reason: str) -> list[Ticket]:
        """Fail a ticket and all below it. Returns those that end now."""
        known = bool(ticket.failing)
        ticket.failing = reason
        told: list[Ticket] = []
        due = [] if known else list(ticket.below.values())
        for below in due:  # grows
            if not below.failing:
                below.failing = f"ticket {ticket.id} above it failed: {reason}"
                told.append(below)
                due += below.below.values()
        return told

    def may_end(self, ticket: Ticket) -> bool:
        """True where its copy has ended, and all tickets that must end before it."""
        is_due = ticket.landed is not None and not (ticket.below if ticket.failing else ticket.above)
        return is_due and ticket.id in self.running

    def end(self, ticket: Ticket) -> list[Ticket]:
        """End one that is settled; returns those that it was linked to, which may be able to end now."""
        ticket.state = TicketState.FAILED if ticket.failing else TicketState.DONE
        ticket.reason = ticket.failing
        del self.running[ticket.id]
        held = self.held[ticket.model]
        held[ticket.party] -= 1
        if not held[ticket.party]:
            del held[ticket.party]
        if not held:
            del self.held[ticket.model]
        _remove(self._of_replica, (ticket.model, ticket.replica, ticket.direction), ticket.id)
        if ticket.source is not None:
            _remove(self._reading, (ticket.model, ticket.source[0]), ticket.id)
        self.ended[ticket.id] = ticket
        while len(self.ended) > self._keep:
            self.ended.popitem(last=False)
        linked = [self.running[above] for above in ticket.after if above in self.running]
        for above in linked:
            del above.below[ticket.id]
        for below in ticket.below.values():
            below.above -= 1
            linked.append(below)
        ticket.below = {}
        return linked


def _remove(index: dict[Key, dict[int, Ticket]], key: Key, ticket: int) -> None:
    of_key = index[key]
    del of_key[ticket]
    if not of_key:
        del index[key]
