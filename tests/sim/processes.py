"""The life of a simulated engine: its processes, its lease, and what its kernels do when they should not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cachesvc.flows.core import resolve
from cachesvc.flows.leases import attach, close_lease, open_lease, process_arrived, process_gone
from cachesvc.ledger.ledger import LeaseState, Model
from cachesvc.model.answers import TicketView
from cachesvc.model.errors import LimitExceeded, NotFound, Unavailable
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from tests.sim.node import SimNode, content_of


@dataclass
class Request:
    """One sequence as its engine sees it. ``written``: blocks that hold their bytes; ``computed_tokens`` so far.
    ``told``: blocks up to which a publish under way has told them, some of which may be sealed by now.
    ``private_states``: by group and position, pages of states that it has not published."""

    id: int
    keys: bytes
    tables: list[list[int]]
    hit: int = 0
    sealed: int = 0
    written: int = 0
    told: int = 0
    total: int = 0
    tickets: list[TicketView] = field(default_factory=list)
    swapped: bool = False
    returning: bool = False
    spares: list[tuple[int, int]] = field(default_factory=list)
    cursors: dict[int, int] = field(default_factory=dict)
    private_states: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class Pending:
    """A call that was told to wait; without being ``is_patient`` it may ask again before anything has ended.

    ``request``: whose call it is, which nothing else is asked for meanwhile; None for one that is still to begin.
    """

    call: Callable[[], object]
    then: Callable[[Any], None]
    tickets: tuple[int, ...]
    until: float
    request: Request | None
    is_patient: bool = True


class SimProcesses:
    """One engine's processes and lease, and the tables that it believes in."""

    def __init__(self, node: SimNode, rng: random.Random, name: str, replica: int) -> None:
        self.node = node
        self.rng = rng
        self.name = name
        self.replica = replica
        self.model: Model | None = None
        self.lease = ""
        self.tokens: list[bytes] = []
        self.requests: dict[int, Request] = {}
        self.stock: list[list[tuple[int, int]]] = []
        self.pending: list[Pending] = []
        self.starved = 0
        self.grants: set[tuple[int, int, int]] = set()
        self.owned_when_lost: list[tuple[int, int]] = []
        self.silent_until = 0.0
        self.verified = 0
        self.instance = ""
        self.member = 0
        self._ids = 0

    # -- life --------------------------------------------------------------------------------------------------

    def start(self, model: Model) -> None:
        """Connect, open a lease, alone or each process for itself, and attach from every process."""
        self.model = model
        self.tokens = [self.rng.randbytes(8) for _ in range(self.rng.choice((1, 2, 2)))]
        self.instance = self.rng.choice(("", self.rng.randbytes(4).hex()))
        for token in self.tokens:
            process_arrived(self.node.core, token, 1, 1)
        opening = self.tokens if self.instance else self.tokens[:1]
        if not all(self._open(token) for token in self.rng.sample(opening, len(opening))):
            self.die()
            return
        for token in self.tokens:
            self._attach(token)
        self.stock = [[] for _ in model.layout.groups]
        self.grants = set()

    def _open(self, token: bytes) -> bool:
        """Have a process open the lease, perhaps twice. The first of the tokens is the scheduler's, which calls."""
        assert self.model is not None
        core, now = self.node.core, self.node.now
        try:
            lease = open_lease(core, self.model.id, self.replica, self.name, token, 1, now, self.instance)
            again = open_lease(core, self.model.id, self.replica, self.name, token, 1, now, self.instance)
        except (Unavailable, LimitExceeded, NotFound):  # NotFound: its replica is lost
            return False
        assert again is lease
        assert self.lease in ("", lease.id)
        self.lease = lease.id
        if token == self.tokens[0]:
            self.member = lease.members[token]
        return True

    def _attach(self, token: bytes) -> None:
        attach(self.node.core, resolve(self.node.core.ledger, self.lease, self.node.now), 0, token)

    @property
    def is_open(self) -> bool:
        return bool(self.lease)

    def die(self) -> None:
        """Every process ends."""
        for token in self.tokens:
            self.node.run(partial(process_gone, self.node.core, token))
        self._forget()

    def lose_worker(self) -> bool:
        """One process of two ends; the other may still write. An instance goes on, perhaps with a new scheduler."""
        if len(self.tokens) < 2:
            return False
        lease = self.node.core.ledger.leases.get(self.lease)
        if self.instance and lease is not None and lease.members and self.rng.random() < 0.5:
            self._change_scheduler()
            return True
        self.node.run(partial(process_gone, self.node.core, self.tokens.pop()))
        return True

    def _change_scheduler(self) -> None:
        """The worker lives, and its kernels go on with what the dead scheduler had told them."""
        self.node.run(partial(process_gone, self.node.core, self.tokens.pop(0)))
        self._lost()
        self.tokens.insert(0, self.rng.randbytes(8))
        process_arrived(self.node.core, self.tokens[0], 1, 1)
        lease = self.node.core.ledger.leases.get(self.lease)
        if lease is None or lease.state is not LeaseState.LIVE:  # what its processes left took too much of a pool
            self.die()
            self.node.faults["instance_ended"] += 1
        elif self._open(self.tokens[0]):
            self._attach(self.tokens[0])
            self.node.faults["scheduler_changed"] += 1
        else:
            self.die()

    def own_pages(self) -> list[tuple[int, int]]:
        """Pages that this engine believes to be its own to write."""
        pages = [(group, page) for group, held in enumerate(self.stock) for page, _ in held]
        for request in self.requests.values():
            is_followed = all(ticket.slot is not None for ticket in request.tickets)
            if not request.swapped and (is_followed or not request.returning):  # streams wait for what comes back
                pages += request.spares
                pages += [
                    (group, page)
                    for group, table in enumerate(request.tables)
                    for page in table[max(request.sealed, request.hit, request.told) :]
                    if page != NO_PAGE
                ]
        return pages

    def scribble(self) -> None:
        """Kernels that hang on write into pages that were this engine's."""
        assert self.model is not None
        for group, page in self.owned_when_lost or self.own_pages():
            garbage = [b"\xee" * self.model.layout.page_bytes(group)] * self.model.layout.ranks
            self.node.write_page(self.model, self.replica, group, page, garbage)

    def write_half(self) -> None:
        """Leave a private page half written."""
        assert self.model is not None
        for group, page in self.own_pages()[:1]:
            half = [b"\x77" * (self.model.layout.page_bytes(group) // 2)] * self.model.layout.ranks
            self.node.write_page(self.model, self.replica, group, page, half)

    def quiesce(self) -> None:
        """A lost lease's engine stops its kernels and says so; it may then begin anew."""
        self.node.run(partial(close_lease, self.node.core, self.lease, quiesced=True))
        tokens, self.tokens = self.tokens, []
        for token in tokens:
            self.node.run(partial(process_gone, self.node.core, token))
        self._forget()

    def _forget(self) -> None:
        self.lease, self.tokens, self.requests, self.stock = "", [], {}, []
        self.instance, self.member = "", 0
        self.pending, self.owned_when_lost = [], []

    def _lost(self) -> None:
        self.owned_when_lost = self.owned_when_lost or self.own_pages()
        self.requests, self.pending = {}, []
        self.stock = [[] for _ in self.stock]

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_tables(self, request: Request) -> None:
        self._verify(request, 0, request.written)

    def _verify(self, request: Request, first: int, last: int) -> None:
        """Every page of the tables that must hold a block's bytes holds them, and no window has a hole."""
        assert self.model is not None
        layout = self.model.layout
        for group, table in enumerate(request.tables):
            required = self._required(group, last)
            for position in range(first, last):
                key = request.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
                page = table[position]
                if page == NO_PAGE:
                    assert position not in required, f"a hole at block {position} of group {group}"
                    continue
                self.verified += 1
                found = self.node.page(self.model, self.replica, group, page)
                assert found == content_of(layout, group, key), f"block {position} of group {group}, page {page}"

    def _required(self, group: int, last: int) -> Iterable[int]:
        assert self.model is not None
        layout = self.model.layout
        if group in layout.full_groups:
            return range(last)
        if group in layout.state_groups:
            return ()
        tokens = last * layout.block_tokens
        start = max(0, tokens - layout.window_of(group) + 1) // layout.block_tokens
        return {*range(min(layout.sink_blocks(group), last)), *range(start, last)}
