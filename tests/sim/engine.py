"""A simulated LLM engine: matches, allocates, writes bytes that name their block, publishes, checks what it hits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cachesvc_client.core.keys import block_keys

from cachesvc.flows.allocate import allocate, extend, refill_stock, swap_in, swap_out
from cachesvc.flows.core import resolve
from cachesvc.flows.leases import pause_write_backs
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.ledger import first_id
from cachesvc.ledger.tickets import TicketState
from cachesvc.model.answers import Allocated, GroupCells, Matched, Published, Swapped, Wait
from cachesvc.model.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    LoadFailed,
    NotFound,
    NotOwned,
    Unavailable,
)
from cachesvc.model.words import KEY_BYTES, NO_PAGE, Urgency, has_reached
from tests.sim.node import content_of
from tests.sim.processes import Request
from tests.sim.states import SimStates

STARVED = {"swap_out": 5.0, "release": 2.0, "begin": 0.2, "prefetch": 0.2, "grow": 0.2}
"""Factors of an engine's actions after it was refused pages a moment ago."""


class SimEngine(SimStates):
    """One engine with a scheduler process and perhaps a worker, and one lease at a time."""

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing. What the rules forbid must be refused by name; anything else is a bug."""
        if self.owned_when_lost:
            self.scribble()
            self.node.faults["wrote_after_loss"] += 1
        try:
            ready = [each for each in self.pending if self._is_ready(each)]
            if ready and self.rng.random() < 0.7:
                self._retry(self.rng.choice(ready))
            else:
                self._act()
        except LeaseLost:
            self._lost()
            if self.rng.random() < 0.1:
                self.quiesce()

    def _act(self) -> None:
        resolve(self.node.core.ledger, self.lease, self.node.now)
        choices: list[tuple[str, float, Callable[[], None]]] = [
            ("prefetch", 1, self._prefetch),
            ("refill", 0.2, self._refill),
            ("pause", 0.1, self._pause),
            ("mischain", 0.3, self._mischain),
        ]
        begun = len(self.requests) + sum(each.request is None for each in self.pending)
        if begun < self.node.bias.requests:
            choices.append(("begin", 3, self._begin))
        waiting = {each.request.id for each in self.pending if each.request is not None}
        for request in self.requests.values():
            if request.id in waiting:
                continue
            choices += [(name, weight, partial(action, request)) for name, weight, action in self._actions(request)]
        inclined, urge = self.node.bias.engine, STARVED if self.starved else {}
        self.starved = max(0, self.starved - 1)
        weights = [weight * inclined.get(name, 1.0) * urge.get(name, 1.0) for name, weight, _ in choices]
        self.rng.choices(choices, weights)[0][2]()

    def _pause(self) -> None:
        """Its decode is being hurt."""
        self.node.run(self._flow(pause_write_backs, self.rng.choice((1, 400, 1000))))

    def _actions(self, request: Request) -> list[tuple[str, float, Callable[[Request], None]]]:
        """Possible actions on a request, and the likelihood of each."""
        if request.swapped:
            return [("swap_in", 2, self._swap_in), ("release", 0.3, self._release)]
        if request.total == 0:
            return [("allocate", 4, self._allocate), ("release", 0.3, self._release)]
        if request.tickets:
            follow = ("follow_loads", 2.0, self._follow_loads)
            return [follow] if request.returning else [follow, ("publish", 0.3, self._publish)]
        can_write = request.written < min(request.total, len(request.keys) // KEY_BYTES)
        can_publish = request.written > request.sealed
        return [
            ("write", 4 * can_write, self._write),
            ("publish", 4 if can_publish else 0.2, self._publish),
            ("release", 0.3 if can_write or can_publish else 1.5, self._release),
            ("recycle", 1, self._recycle),
            ("extend", 0.7 * self._has_stock(), self._extend),
            ("grow", 0.7, self._grow),
            ("swap_out", 1, self._swap_out),
            ("check_tables", 0.2, self._check_tables),
        ]

    # -- operations --------------------------------------------------------------------------------------------

    def _keys(self) -> bytes:
        assert self.model is not None
        tokens: list[int] = []
        bias = self.node.bias
        family = self.rng.randint(1, bias.families)
        for _ in range(self.rng.randint(1, bias.most_blocks)):
            tokens += [family if self.rng.random() < bias.same else 0] * self.model.layout.block_tokens
        keys = block_keys(self.model.namespace, tokens, self.model.layout.block_tokens)
        self.node.note_chain(keys)
        return keys

    def _sharing(self, urgency: Urgency = Urgency.AWAITED) -> Sharing | None:
        """Most engines want what other replicas have."""
        return Sharing(urgency) if self.rng.random() < 0.9 else None

    def _mischain(self) -> None:
        """Match keys of which some are another prompt's. Whatever it finds is its own harm alone."""
        self._ids += 1
        one, other = self._keys(), self._keys()
        at = self.rng.randrange(max(1, min(len(one), len(other)) // KEY_BYTES)) * KEY_BYTES
        keys = one[:at] + other[at : at + self.rng.choice((1, 8)) * KEY_BYTES] + one[at + KEY_BYTES :]
        number = first_id(self.member) + self._ids
        try:
            answer = self.node.run(self._flow(match, number, keys, 0, self._sharing()))
        except (InvalidRequest, LimitExceeded, Unavailable):
            return
        self.node.faults["mischained"] += 1
        if isinstance(answer, Matched):
            request = Request(number, keys, [[] for _ in self.stock])
            self._end(request)

    def _begin(self) -> None:
        assert self.model is not None
        self._ids += 1
        keys = self._keys()
        told = keys[: self.rng.choice((0, 1, 8)) * KEY_BYTES] or keys
        request = Request(first_id(self.member) + self._ids, keys, [[] for _ in self.model.layout.groups])
        limit = self.rng.choice((0, 0, len(keys) // KEY_BYTES - 1))
        flow = self._flow(match, request.id, told, limit, self._sharing())

        def matched(answer: Matched) -> None:
            request.hit = answer.device_blocks + answer.host_blocks
            assert not limit or request.hit <= limit, "a hit of more than was asked for"
            request.sealed = request.written = answer.device_blocks
            self.requests[request.id] = request
            for cells in answer.tables:
                request.tables[cells.group] = list(cells.pages)
            if self.model is not None and answer.device_blocks and not answer.host_blocks:
                ends = [request.tables[group][-1] for group in self.model.layout.state_groups]
                assert NO_PAGE not in ends, "a hit without the state at its end"
                self.node.events["state_hits"] += bool(ends)
            self.node.events["lost_to_windows"] += answer.full_blocks > request.hit
            self.node.events["host_hits"] += answer.host_blocks > 0
            self.node.events["device_hits"] += answer.device_blocks > 0
            if not answer.host_blocks:
                self._verify(request, 0, answer.device_blocks)

        self._call(None, ("match", told, limit), flow, matched)

    def _allocate(self, request: Request) -> None:
        total = max(len(request.keys) // KEY_BYTES + self.rng.choice((0, 0, 1)), request.hit, 1)
        self._grow_to(request, total)

    def _grow(self, request: Request) -> None:
        self._grow_to(request, request.total + 1)

    def _grow_to(self, request: Request, total: int) -> None:
        call = partial(allocate, positions=self._positions(max(request.total, request.hit), total))
        flow = self._flow(call, request.id, total)

        def allocated(answer: Allocated) -> None:
            for cells in answer.tables:
                assert cells.first_block == len(request.tables[cells.group])
                request.tables[cells.group] += cells.pages
            self._note_states(request, max(request.total, request.hit))
            was_hit = request.total == 0
            request.total = total
            request.tickets = list(answer.tickets)
            self.node.events["loads_joined"] += len(answer.tickets) > 1
            self.node.events["loads"] += bool(answer.tickets)
            self.node.events["loads_found_done"] += bool(answer.loading_blocks and not answer.tickets)
            if was_hit and not request.tickets:
                self._loaded(request)

        self._call(request, ("allocate", request.id, total), flow, allocated)

    def _loaded(self, request: Request) -> None:
        request.sealed = max(request.sealed, request.hit)
        request.written = max(request.written, request.hit)
        self._verify(request, 0, request.hit)

    def _follow_loads(self, request: Request) -> None:
        """Wait on the timeline words, layer by layer, as the workers do."""
        assert self.model is not None
        devices = self.model.any_replica(self.replica).devices
        sheets = [self.node.backend.timeline(device).sheet(self.model.id) for device in devices]
        book = self.node.core.ledger.tickets
        for ticket in list(request.tickets):
            slot = ticket.slot
            if slot is None or not all(has_reached(sheet.read(slot.word), slot.end) for sheet in sheets):
                ended = book.ended.get(ticket.id)
                if slot is None and ended is not None and ended.state is TicketState.FAILED:
                    self._load_failed(request)
                    return
                if slot is None and ended is not None:
                    request.tickets.remove(ticket)
                continue
            if any(sheet.read(slot.failed_word) == slot.end for sheet in sheets):
                self.node.faults["load_seen_failed"] += 1
                self._load_failed(request)
                return
            request.tickets.remove(ticket)
        if not request.tickets:
            if request.returning:
                request.returning = False
                self.node.events["swapped_in"] += 1
                self._check_tables(request)
            else:
                self._loaded(request)

    def _load_failed(self, request: Request) -> None:
        if not request.returning:
            self._drop(request)
            return
        request.swapped, request.returning = True, False
        request.tickets.clear()

    def _write(self, request: Request) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if request.written < min(request.total, len(request.keys) // KEY_BYTES):
                self._write_block(request, request.written)
                request.written += 1

    def _write_block(self, request: Request, position: int) -> None:
        assert self.model is not None
        key = request.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        for group, table in enumerate(request.tables):
            if table[position] != NO_PAGE:
                content = content_of(self.model.layout, group, key)
                self.node.write_page(self.model, self.replica, group, table[position], content)

    def _publish(self, request: Request) -> None:
        first, last = request.sealed, request.written
        if request.tickets:
            first, last = request.hit, request.hit
        if self.rng.random() < 0.05:
            self._misuse(request)
        if last <= first and not request.tickets:
            return
        keys = request.keys[first * KEY_BYTES : last * KEY_BYTES]
        request.told = last
        states = self._named_states(request, last)
        flow = self._flow(publish, request.id, first, keys, last - first, Publishing(), states)

        def published(answer: Published) -> None:
            request.told = 0
            self._states_published(request, states, answer.kept)
            if request.tickets:
                request.tickets.clear()
                self._loaded(request)
            request.sealed = answer.sealed_blocks
            for cells in answer.duplicates:
                for position, page in zip(answer.duplicate_positions, cells.pages, strict=True):
                    request.tables[cells.group][position] = page
            request.spares += [(cells.group, page) for cells in answer.spares for page in cells.pages]
            self.node.events["published"] += 1
            self.node.events["duplicates"] += bool(answer.duplicate_positions)
            self.node.events["pending"] += answer.pending
            assert answer.pending == (answer.sealed_blocks < last)
            self._check_tables(request)

        self._call(request, ("publish", request.id, first, keys, states), flow, published)

    def _misuse(self, request: Request) -> None:
        """Break a rule: out of turn, twice, another engine's page, keys below another prefix."""
        wrong: list[Callable[[], object]] = [
            self._flow(publish, request.id, request.sealed + 1, request.keys[:KEY_BYTES], 1),
            self._flow(publish, request.id, request.sealed, request.keys[:KEY_BYTES] * 2, 2),
            self._flow(recycle, request.id, 0, (GroupCells(0, 0, (0,) * 2),)),
            self._flow(recycle, request.id, 1 << 20, ()),
            self._flow(extend, request.id, (GroupCells(0, 0, (0,), (9999,)),)),
            self._flow(match, request.id, b"", 0),
            self._flow(release, 1 << 40),
        ]
        try:
            answer = self.node.run(self.rng.choice(wrong))
        except (Conflict, NotOwned, InvalidRequest, NotFound, LoadFailed, Unavailable):
            self.node.faults["misuse"] += 1
        else:
            assert isinstance(answer, Wait)

    def _recycle(self, request: Request) -> None:
        assert self.model is not None
        layout = self.model.layout
        tokens = request.written * layout.block_tokens
        pages = [GroupCells(group, 0, (page,)) for group, page in request.spares]
        flow = self._flow(recycle, request.id, tokens, tuple(pages))

        def recycled(_: object) -> None:
            request.spares.clear()
            for group in set(layout.window_groups) - set(layout.scratch_groups):
                dead = max(0, tokens - layout.window_of(group) + 1) // layout.block_tokens
                for position in range(layout.sink_blocks(group), dead):
                    request.tables[group][position] = NO_PAGE
                    request.private_states.pop((group, position), None)

        if tokens or pages:
            self._call(request, ("recycle", request.id, tokens, tuple(pages)), flow, recycled)

    def _refill(self) -> None:
        assert self.model is not None
        groups = len(self.model.layout.groups)
        for cells in self.node.run(self._flow(refill_stock, (2,) * groups, self.member)):
            granted = list(zip(cells.pages, cells.generations, strict=True))
            self.stock[cells.group] += granted
            assert self.grants.isdisjoint((cells.group, *each) for each in granted), "a grant was given twice"
            self.grants.update((cells.group, *each) for each in granted)

    def _extend(self, request: Request) -> None:
        if not self._has_stock() or request.tickets:
            return
        assert self.model is not None
        layout = self.model.layout
        taken = [
            (NO_PAGE, 0) if group in layout.state_groups and self.rng.random() < 0.5 else self.stock[lead].pop()
            for group, lead in enumerate(layout.pool_leads)
        ]
        pages = tuple(GroupCells(g, 0, (page,), (generation,)) for g, (page, generation) in enumerate(taken))
        flow = self._flow(extend, request.id, pages)

        def extended(blocks: int) -> None:
            request.total = blocks
            for table, (page, _) in zip(request.tables, taken, strict=True):
                table.append(page)
            self._note_states(request, blocks - 1)

        self._call(None, ("extend", request.id, pages), flow, extended)

    def _swap_out(self, request: Request) -> None:
        flow = self._flow(swap_out, request.id)

        def going(answer: Swapped) -> None:
            request.swapped = True
            request.spares.clear()
            request.tickets = list(answer.tickets)

        self._call(request, ("out", request.id, self._ids), flow, going)

    def _swap_in(self, request: Request) -> None:
        book = self.node.core.ledger.tickets
        for ticket in request.tickets:  # the way out
            if book.is_running(ticket.id):
                return
            if book.get(ticket.id).state is TicketState.FAILED:
                request.tickets.clear()
                request.swapped = False
                self.node.faults["swap_out_failed"] += 1
                self._check_tables(request)
                return
        flow = self._flow(swap_in, request.id)

        def coming(answer: Swapped) -> None:
            request.swapped, request.returning = False, True
            request.tables = [list(cells.pages) for cells in answer.tables]
            request.tickets = list(answer.tickets)
            request.private_states.clear()
            self._note_states(request, 0)

        self._call(request, ("in", request.id, self._ids), flow, coming)

    def _prefetch(self) -> None:
        keys = self._keys()
        sharing = self._sharing(Urgency.BACKGROUND)
        flow = self._flow(prefetch, keys, sharing)
        self._call(None, ("prefetch", keys), flow, lambda _: None)

    def _release(self, request: Request) -> None:
        del self.requests[request.id]
        self._end(request)
