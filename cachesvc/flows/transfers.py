"""Transfers: check the limits, begin one, wait for it, land it.

Whether the mover can take a transfer is asked before a flow changes anything, so a refusal at submission is the end of
the mover or a bug. Such a ticket fails at once, and its flow answers with it: a ticket that does not run is never
reported as running.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial

from cachesvc.flows.core import Core, Count, next_slice
from cachesvc.flows.stored import came_to_host, did_not_come, is_about_to_leave, was_used
from cachesvc.ledger.block_ledger import Filling, forget_bare
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.planner import EvictionPlan
from cachesvc.ledger.reuse_stats import Miss
from cachesvc.ledger.tickets import Ticket
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import TicketView, Wait
from cachesvc.model.errors import CacheError, LedgerBroken, LimitExceeded
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import BACKGROUND, Party, share_of
from cachesvc.model.words import DONE, Direction, Failed, Inward, Outcome, PagePairs, PageState, Transfer, Urgency
from cachesvc.policy.eviction import eviction_policy

_NONE = Counter[Party]()


def may_submit(core: Core, model: Model, replica: Replica, party: Party = BACKGROUND) -> bool:
    """True where one more transfer of the replica can begin for ``party``: it has a share of all transfers under way,
    and of those of the model. What no process has asked for leaves a quarter of either to those that ask."""
    book, limit = core.ledger.tickets, core.limits.running_tickets
    running, slots = len(book.running), core.mover.free_slots(model.id, replica.id)
    if running >= limit or slots <= 0:
        return False
    of_model = book.held.get(model.id, _NONE)
    of_all = of_model if len(book.held) <= 1 else sum(book.held.values(), Counter[Party]())
    in_model = of_model.total()
    return _has_share(of_all, party, running, limit) and _has_share(of_model, party, in_model, in_model + slots)


def _has_share(held: Counter[Party], party: Party, running: int, limit: int) -> bool:
    if party == BACKGROUND:
        return running < max(1, limit * 3 // 4)
    busy = len(held) - (BACKGROUND in held) + (party not in held)
    return held[party] < share_of(limit, busy)


def require_transfer(core: Core, model: Model, replica: Replica, party: Party) -> None:
    """Raises LimitExceeded where no further transfer of the replica can begin for ``party``."""
    if not may_submit(core, model, replica, party):
        running = len(core.ledger.tickets.running)
        raise LimitExceeded("transfers under way", running + 1, min(running, core.limits.running_tickets))


def store_pairs(place: Place, coming: Filling) -> tuple[PagePairs, ...]:
    """Page pairs from a replica's device to the host copies that come."""
    return tuple(
        PagePairs(group, place.pages_of(group, rows), pages)
        for group, (rows, pages) in enumerate(zip(coming.rows, coming.pages, strict=True))
        if rows
    )


def load_pairs(source: Place, coming: Filling) -> tuple[PagePairs, ...]:
    """Page pairs from the host, or another replica's device, to the device copies that come."""
    return tuple(
        PagePairs(group, pages, source.pages_of(group, rows))
        for group, (rows, pages) in enumerate(zip(coming.rows, coming.pages, strict=True))
        if rows
    )


def submit(
    core: Core,
    model: Model,
    ticket: Ticket,
    pairs: tuple[PagePairs, ...],
    *,
    layered: bool,
    short_suffix: bool = False,
) -> None:
    """Hand a ticket's pages to the mover and note where its progress is read; the flags are those of ``Transfer``.

    Call it once the ledger knows all about the ticket: one without pages is done at once, and one that the mover
    refuses has failed.
    """
    ticket.size_bytes = _moved_bytes(model.layout, ticket.direction, pairs)
    if not pairs:
        land(core, ticket.id, DONE)
        return
    assert isinstance(ticket.direction, Direction), "movers have no part in what comes from storage"
    transfer = Transfer(
        ticket.id,
        model.id,
        ticket.replica,
        ticket.direction,
        pairs,
        layered=layered,
        short_suffix=short_suffix,
        urgency=ticket.urgency,
        source_replica=ticket.source[0] if ticket.source is not None else None,
    )
    try:
        ticket.slot = core.mover.submit(transfer)
    except CacheError as refusal:
        land(core, ticket.id, Failed(str(refusal)))
        if core.on_refused is not None:
            core.on_refused(ticket.id, str(refusal))
        return
    onto_device = Count.H2D_BYTES if ticket.source is None else Count.P2P_BYTES
    core.count(Count.D2H_BYTES if ticket.direction is Direction.STORE else onto_device, ticket.size_bytes)


def _moved_bytes(layout: Layout, direction: Direction | Inward, pairs: Iterable[PagePairs]) -> int:
    """Bytes that all ranks move: each has its own on its device, and the host keeps replicated ones once."""
    copies = layout.host_ranks if direction is Direction.STORE else lambda _: layout.ranks
    return sum(len(pair.device_pages) * layout.page_bytes(pair.group) * copies(pair.group) for pair in pairs)


def wait_for(core: Core, tickets: Iterable[int]) -> Wait:
    """The answer of a flow that can go on only when one of the tickets has ended; they are awaited from now on."""
    wait = Wait(tuple(tickets))
    expedite(core, wait.tickets)
    return wait


def expedite(core: Core, tickets: Iterable[int]) -> None:
    """Make the tickets awaited, and those that must end before them."""
    running = core.ledger.tickets.running
    due = list(tickets)
    for number in due:  # grows
        ticket = running.get(number)
        if ticket is not None and ticket.urgency is Urgency.BACKGROUND:
            ticket.urgency = Urgency.AWAITED
            core.mover.expedite(number)
            due += ticket.after


def land(core: Core, ticket_id: int, outcome: Outcome) -> list[int]:
    """End a ticket that its mover has finished. Returns the tickets that end at once; longer work goes on as a
    background task, and ends in ``core.on_ended``.

    A load below another that still runs is held back until that one has ended, and fails with it.
    """
    running = core.ledger.tickets.running
    model, party = running[ticket_id].model, running[ticket_id].party
    landing = _Landing(core, deque(core.ledger.tickets.land(ticket_id, outcome)))
    core.begin(model, landing.go_on, party=party)
    return landing.take_ended()


class _Landing:
    """Tickets that may be able to end, one after another, since one has landed."""

    def __init__(self, core: Core, due: deque[Ticket]) -> None:
        self._core = core
        self._due = due
        self._ended: list[int] | None = []

    def take_ended(self) -> list[int]:
        """Tickets that ended in the first turn; later ones go to ``on_ended``."""
        ended, self._ended = self._ended, None
        return ended or []

    def go_on(self) -> bool:
        """A turn; True when no ticket is left. Raises LedgerBroken where one cannot be settled: it ends all the same,
        and the others go on."""
        try:
            return self._settle_some()
        except Exception as broken:
            number = self._give_up(self._due.popleft(), broken)
            raise LedgerBroken(f"ticket {number}: {type(broken).__name__}: {broken}") from broken

    def _settle_some(self) -> bool:
        core, book = self._core, self._core.ledger.tickets
        left = 1.0
        while self._due and left > 0:
            ticket = self._due[0]
            if not book.may_end(ticket):
                self._due.popleft()
                continue
            left = _settle_part(core, ticket, left)
            if not ticket.has_parts:
                self._due += book.end(ticket)
                _settle_rest(core, ticket)
                self._tell(ticket)
                self._due.popleft()
        return not self._due

    def _give_up(self, ticket: Ticket, broken: Exception) -> int:
        """End a ticket as failed whose copies cannot be settled; they stay as they are. Returns its number."""
        core, ended = self._core, self.take_ended()
        ticket.failing = ticket.failing or f"{type(broken).__name__}: {broken}"
        if core.ledger.tickets.is_running(ticket.id):
            self._due += core.ledger.tickets.end(ticket)
        if self._due:
            core.later(ticket.model, self.go_on, party=ticket.party)
        if core.on_ended is not None:
            core.on_ended([*ended, ticket.id])
        waiters, pin = ticket.waiters, ticket.pin
        ticket.forget_parts()
        with suppress(LedgerBroken):  # it follows from the defect that is raised
            for waiter in waiters:
                waiter.load_ended(ticket.id, ticket.failing)
            if pin is not None:
                pin.let_go()
        return ticket.id

    def _tell(self, ticket: Ticket) -> None:
        if self._ended is not None:
            self._ended.append(ticket.id)
        elif self._core.on_ended is not None:
            self._core.on_ended([ticket.id])


def _settle_part(core: Core, ticket: Ticket, left: float) -> float:
    """Settle copies of a ticket that may end, as many as ``left`` of a turn is for; returns what of it is left then."""
    model = core.ledger.models[ticket.model]
    replica = model.any_replica(ticket.replica)
    arrived = not ticket.failing
    # Rows before drains: a drain drops its block's device copy, and may only rely on host copies that are READY. What
    # storage waits for is forgotten before the rows of a failed store lose their keys, and told of rows that came only
    # after all of them are READY: it writes a block with everything above it.
    if not ticket.is_settling:
        ticket.is_settling, ticket.moved_blocks = True, ticket.blocks
        if ticket.drains:
            replica.failed_drains = 0 if arrived else replica.failed_drains + 1
        if not arrived:  # no pin may rely on rows that will be gone
            _tell_waiters(core, replica, ticket)
    if rows := ticket.take_rows(max(1, int(left * core.turns.landed))):
        left -= len(rows) / core.turns.landed
        place = replica.place if ticket.direction is Direction.LOAD else model.blocks.host
        if ticket.direction is Direction.STORE and not arrived:
            did_not_come(core, model, rows)
        model.blocks.finish_fills(place, rows, arrived=arrived, may_write=ticket.may_write)
        if ticket.direction is Direction.LOAD:
            model.reuse.unloaded += 0 if arrived else len(rows)
            if ticket.source is not None:
                core.count(Count.PEER_BLOCKS, len(rows) if arrived else 0)
        if arrived and ticket.direction is not Direction.LOAD:
            came_to_host(core, model, rows)
        elif arrived and ticket.source is None:
            model.blocks.use(model.blocks.host, rows)
            was_used(core, model, rows)
    if left > 0 and (drains := ticket.take_drains(max(1, int(left * core.turns.drained)))):
        left -= len(drains) / core.turns.drained
        for drain in drains:
            model.evictor.finish_drain(replica.place, drain, arrived=arrived, may_write=ticket.may_write)
        if arrived:
            came_to_host(core, model, [drain.row for drain in drains if drain.copied])
        core.count(Count.EVICTIONS, len(drains) if arrived else 0)
    remember_dropped(core, model)
    return left


def _settle_rest(core: Core, ticket: Ticket) -> None:
    """End a ticket whose copies are settled, and wake its waiters."""
    model = core.ledger.models[ticket.model]
    replica = model.any_replica(ticket.replica)
    core.count(Count.TICKETS_FAILED if ticket.reason else Count.TICKETS_DONE)
    if ticket.pin is not None:
        ticket.pin.let_go()
    _tell_waiters(core, replica, ticket)
    if ticket.room is not None:
        ticket.room.top_up()
    ticket.forget_parts()
    remember_dropped(core, model)
    if ticket.direction is Direction.LOAD and model.stored.landed:
        core.begin(model.id, partial(next_slice, _unstaging(core, model)))
    look_ahead(core, model, replica)


def _tell_waiters(core: Core, replica: Replica, ticket: Ticket) -> None:
    """Inform the waiters once, when the result is known."""
    for waiter in ticket.waiters:
        waiter.load_ended(ticket.id, ticket.failing)
    ticket.waiters = []
    if ticket.traveller is not None:
        _settle_swap(core, replica, ticket)


def _settle_swap(core: Core, replica: Replica, ticket: Ticket) -> None:
    """Free the pages of an ended sequence, unless a process may still write them."""
    assert ticket.traveller is not None
    lease = core.ledger.leases.get(ticket.traveller.lease)
    for group, pages in enumerate(ticket.traveller.swap_ended(ticket)):
        pool = replica.place.pools[group]
        if lease is not None and lease.may_write(ticket.traveller.id):
            lease.set_aside(group, pool, pages)
        else:
            pool.move_all(pages, PageState.FREE)
    ticket.traveller, ticket.moves = None, []


def ticket_view(ticket: Ticket) -> TicketView:
    return TicketView(
        ticket.id,
        ticket.state.value,
        ticket.reason,
        ticket.slot,
        ticket.direction.value,
        ticket.blocks,
        ticket.size_bytes,
    )


# Host pages of blocks that are on their way through the host: freed once a device, or storage, has them.
#
# Such blocks came from storage in pieces, because the host cannot hold their prefix whole, or from a device to be
# written. Their copies on the host would keep out others.


def unstage(model: Model, key: bytes) -> int:
    """Free the host page of a landed block that a device has, and of those above it that had to wait for it; returns
    how many were freed. One whose host copy is the last one stays for good; one that is in use is tried again."""
    landed, index, host = model.stored.landed, model.blocks.index, model.blocks.host
    run: list[int] = []
    row = index.rows.get(key, NO_ROW)
    if row == NO_ROW:
        landed.discard(key)
    while row != NO_ROW and (name := index.key_of(row)) in landed:
        is_on_device = any(place.is_hittable(row) for place in index.places if place is not host)
        if not is_on_device or not host.is_hittable(row):
            landed.discard(name)
            break
        if host.pins[row] or index.flights[row] or host.children[row] != bool(run):
            break
        landed.discard(name)
        run.append(row)
        row = index.parent[row]
    if run:
        model.evictor.carry_out(EvictionPlan(host, drops=run))
    return len(run)


def _unstaging(core: Core, model: Model) -> Iterator[None]:
    """Free what ended loads no longer need on the host."""
    left = core.turns.evicted
    for key in list(model.stored.landed):
        left -= max(1, unstage(model, key))
        if left <= 0:
            yield
            left = core.turns.evicted


# Room made ahead: a few device pages are kept free, so that a short load and a request's first blocks find theirs.
#
# As many as a load takes, by the last ones, so that a long prompt's pages are free when its load is asked for. Only
# what would go next anyway goes, in its order, and only while the host has it whole: nothing is saved, nothing is lost,
# and where the next one would be lost nothing goes. It costs a load for a request that returns to one of the last
# blocks before eviction. It runs as a background task, a short turn at a time, and no call waits for it.

FEWEST_PAGES = 8
"""Fewer are worth nothing: a small pool has none."""
SHARE_OF_TURN = 2
"""Divisor of a call's turn of evictions: this task takes a smaller part, since no call waits for it."""


LOAD_PART = 16
"""Largest part of a pool that is kept free for loads, a 16th: other requests return to what lies there."""
MEMORY = 8
"""Part by which a load's pages are remembered less with each shorter one, an 8th."""


def note_load(place: Place, pages: int) -> None:
    """A load has taken ``pages`` pages; 0: something else was allocated, so loads have become rarer."""
    left = place.recent_load - (place.recent_load // MEMORY if pages else min(1, place.recent_load))
    place.recent_load = max(pages, left)


def pages_ahead(core: Core, place: Place) -> int:
    """Pages that are kept free. None where groups have windows: their copies on the host may be fewer."""
    limits, pages = core.limits, place.pools[place.lead].capacity
    if not limits.ahead_pages or place.window_groups or pages < limits.ahead_part * FEWEST_PAGES:
        return 0
    return max(min(limits.ahead_pages, pages // limits.ahead_part), min(place.recent_load, pages // LOAD_PART))


def look_ahead(core: Core, model: Model, replica: Replica) -> None:
    """Pages were taken, or blocks can go that could not before: make room once half of it is used up."""
    wanted = pages_ahead(core, replica.place)
    if not replica.gone and wanted and 2 * replica.place.free_blocks < wanted:
        core.later_once((look_ahead, model.id, replica.id), model.id, partial(_make_ahead, core, model, replica))


def _make_ahead(core: Core, model: Model, replica: Replica) -> bool:
    """A turn; True when there is room enough, or the next block cannot go."""
    short = pages_ahead(core, replica.place) - replica.place.free_blocks
    if short <= 0 or model.suspect or replica.gone or core.ledger.models.get(model.id) is not model:
        return True
    plan = model.evictor.plan_backed(replica.place, short, max(1, core.turns.evicted // SHARE_OF_TURN))
    if plan.found:
        carry_out(core, model, plan)
    return not 0 < plan.found < short


def carry_out(core: Core, model: Model, plan: EvictionPlan, ticket: int = 0) -> Filling:
    """Evict what was planned; returns the host copies that the drains bring, with ``ticket``."""
    coming = model.evictor.carry_out(plan, ticket)
    is_host = plan.place is model.blocks.host
    core.count(Count.HOST_EVICTIONS, len(plan.drops if is_host else plan.host_drops))
    if plan.drops if is_host else plan.host_drops:
        is_about_to_leave(core, model)
    if not is_host:
        core.count(Count.EVICTIONS, len(plan.drops))
    remember_dropped(core, model)
    return coming


def set_eviction(core: Core, name: str) -> None:
    """Switch to another eviction policy, one of the same order (``same_order``)."""
    policy = core.eviction = eviction_policy(name)
    for model in core.ledger.models.values():
        for replica in model.replicas:
            place = replica.place
            replica.shadow = replica.shadow or policy.new_shadow(place.pools[place.lead].capacity)
        blocks = model.blocks
        if blocks.chooser is not None:
            blocks.chooser.govern(decides=policy.learns, weighs_cost=policy.weighs_cost)
        elif (history := policy.new_history(model.layout.block_tokens)) is not None:
            blocks.follow(history)


def _prune(core: Core, model: Model) -> bool:
    """A turn of forgetting bare rows; True when no more can go."""
    return core.ledger.models.get(model.id) is not model or forget_bare(model.blocks, core.turns.landed)


def remember_dropped(core: Core, model: Model, cause: Miss = Miss.EVICTED) -> None:
    """Remember which blocks left the index and why, and for the write policy their reuse counts. Bare rows that were
    above them leave as a chore."""
    if model.blocks.index.childless:
        core.later_once((_prune, model.id), model.id, partial(_prune, core, model))
    dropped = model.blocks.dropped
    if not dropped:
        return
    if model.stored.coming:
        model.stored.coming.difference_update(key for key, _, _ in dropped)
    limit = core.limits.remembered_blocks // len(core.ledger.models)
    model.reuse.dropped(((key, tier) for key, _, tier in dropped), cause, limit)
    if core.writing.counts_reuse:
        for key, reuses, _ in dropped:
            if reuses:
                model.remembered[key] = reuses
                model.remembered.move_to_end(key)
        while len(model.remembered) > core.writing.remember:
            model.remembered.popitem(last=False)
    dropped.clear()
