"""Pages that the daemon grants an engine: ahead, into its stock, or for a request that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cachesvc.model.answers import Allocated
from cachesvc_client import CacheClientError, Lease, PoolExhausted, StepStream
from cachesvc_client.plugins.matches import Reports, Sealing, refused
from cachesvc_client.plugins.outbox import Answer, Outbox, Waits, never
from cachesvc_client.plugins.request_pages import NO_POSITIONS, EngineGroups, Growth, Positions, RequestPages

SHORT_PAUSE_S = 0.002
"""An engine's loop turns as fast as it can while nothing fits; the daemon is not asked again sooner."""

STOCK_DIVISOR = 16
"""The stock of an engine that runs nothing has at most so small a part of the pool: others cannot use it."""


class Grants:
    """``stock_blocks``: kept in stock while nothing runs; ``step_blocks``, ``most_requests``: of an iteration, what it
    has while requests run. ``part``, ``pack``: what steps report. Used from the engine's scheduler thread."""

    def __init__(
        self,
        lease: Lease,
        groups: EngineGroups,
        stock_blocks: int,
        step_blocks: int,
        most_requests: int,
        *,
        part: Reports,
        pack: Pack,
        clock: Callable[[], float],
    ) -> None:
        layout, pages = lease.registration.layout, lease.registration.device_pages
        tables, self._pools, self._lead = len(layout.groups), groups.pools, groups.lead_parts.groups[0]
        blocks = min(pages[group] // layout.unit_pages[group] for group in groups.pools)
        most = most_in_stock(step_blocks, most_requests, blocks, lease.record.most_stock_pages // tables)
        self.demand = StockDemand(max(1, min(stock_blocks, blocks // STOCK_DIVISOR)), most)
        self.outbox = Outbox(lease.step(self.demand.base), Waits(), lambda: False)
        self._lease = lease
        self._part, self._pack = part, pack
        self._clock = clock
        self._short_until_s = self._stocked_s = 0.0
        self._aimed = (0, 0)

    def adopt(self, lease: Lease) -> None:
        self.demand.rest()
        self.outbox = Outbox(lease.step(self.demand.base), self.outbox.waits, self.outbox.runs)
        self._lease, self._aimed = lease, (0, 0)

    @property
    def stream(self) -> StepStream:
        return self.outbox.stream

    @property
    def is_short(self) -> bool:
        """True for a moment after the daemon had too few pages."""
        return self._clock() < self._short_until_s

    def pause(self, asked_s: float | None = None) -> None:
        """The daemon had too few pages at ``asked_s``, now by default: do not ask again at once."""
        since_s = self._clock() if asked_s is None else asked_s
        self._short_until_s = max(self._short_until_s, since_s + SHORT_PAUSE_S)

    # -- stock -------------------------------------------------------------------------------------------------------

    def stock_pages(self, pool: int = 0) -> int:
        """Number of pages in the stock of a pool."""
        stock = self._lease.record.stock
        assert stock is not None
        return stock.count(self._pools[pool])

    def has_stock(self, request: RequestPages, growth: Growth) -> bool:
        """True where the stock has enough for a request; a hit's own pages must be asked for first."""
        assert request.sequence is not None
        record = request.sequence.record
        if record.blocks < record.matched.device_blocks + record.matched.host_blocks or request.is_growing:
            return False
        if request.tail is not None and request.lacks_tail and request.has_lent_tail:
            return False
        return all(self.stock_pages(pool) >= request.missing_pages(growth, pool) for pool in request.pools)

    def grow(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Take pages of the stock; False where it has too few."""
        growth = request.growth(blocks, states)
        if not self.has_stock(request, growth):
            return False
        assert request.sequence is not None
        new = growth.blocks - request.rows
        try:
            if request.tail is not None and request.lacks_tail:
                assert request.tail.sequence is not None
                request.tail.sequence.grow_from_stock()
                self.demand.take(1)
            if new:
                self._lease.record.grow((request.sequence.record,), (new,), growth.positions)
        except CacheClientError as error:
            refused("grow", request.request_id, error)
            return False
        self.demand.take(new)
        request.take_cells()
        return True

    def grow_some(self, request: RequestPages, blocks: int) -> None:
        """Take blocks of a request from the stock, as far as that goes."""
        rows_of = ((self.stock_pages(pool), request.row_pages(pool)) for pool in request.pools)
        stocked = min(stock // pages for stock, pages in rows_of if pages)
        rows = min(blocks - request.rows, stocked)
        if rows > 0:
            self.grow(request, request.rows + rows, NO_POSITIONS)

    @property
    def wants_stock(self) -> bool:
        """True where the stock is to be filled, or to give back; where the daemon had too little, not at once again."""
        stock = self._lease.record.stock
        if stock is None:  # the stream was closed
            return False
        self._aim()
        if stock.has_surplus:
            return True
        if stock.is_full or self._clock() < self._stocked_s:
            return False
        self._stocked_s = self._clock() + SHORT_PAUSE_S
        return True

    def _aim(self) -> None:
        aim = self.demand.target, self.demand.due
        if aim != self._aimed:
            self.stream.resize(*aim)
            self._aimed = aim

    def is_low(self, running: int) -> bool:
        """True where the stock may not last for an iteration of ``running`` requests."""
        stock = self._lease.record.stock
        return stock is not None and stock.blocks < self.demand.least(running)

    def room(self, pool: int = 0) -> int | None:
        """Pages of a pool that can be had, the stock included, as of the last answer; None before the first."""
        free, evictable, group = self.stream.free_pages, self.stream.evictable_pages, self._pools[pool]
        return free[group] + evictable[group] + self.stock_pages(pool) if free else None

    # -- steps -------------------------------------------------------------------------------------------------------

    def report_if_due(self) -> None:
        """Send a step where there is something to tell, to do again, or to fill."""
        record = self._lease.record
        if self.outbox.has_room and (self._part or record.growing or record.has_ended or self.wants_stock):
            self.report()

    def report(self) -> None:
        """Send a step with growth and all that is to be reported, which fills the stock; later, where too many steps
        have no answer."""
        if not self.outbox.has_room:
            return
        try:
            batch = self.stream.batch()
            put_reports(batch, self._part, self._pack)
            self._aim()
            self.outbox.send(batch, _take_report)
            self._part.clear()
        except CacheClientError as error:
            refused("step", "", error)

    def allocate(self, request: RequestPages, blocks: int, states: Positions, others: Sequence[RequestPages]) -> bool:
        """Have the daemon make a request's table ``blocks`` long, in a step that reports growth first, and wait for it;
        True once it has them."""
        steps = 2 if self._part else 1  # what is reported first may be what frees the pages
        if not self.outbox.has_room_for(steps):
            self.outbox.wait(lambda: self.outbox.has_room_for(steps))
            if self._part:
                self.report()
        self.ask(request, blocks, states, others, no_wait=False)
        self.outbox.wait(lambda: not request.is_growing)
        if request.is_growing:
            return False
        request.take_cells()
        return request.has_pages(blocks, states)

    def is_late(self, request: RequestPages) -> bool:
        """True where an answer did not come in time: more steps would wait behind it."""
        return request.is_growing or not self.outbox.has_room

    def look_room(self) -> None:
        """Have the daemon say anew what is free."""
        if self.is_short:
            return
        self.pause()
        if self.outbox.is_empty:
            self.report()
        self.outbox.wait_if_idle(never)

    def top_up(self, running: int, *, are_waiting: bool) -> None:
        """Take in what has come, and have the stock filled where the last step found too little: while requests wait,
        or where the stock is low for ``running`` requests."""
        self.outbox.poll()
        if self.outbox.is_empty and (are_waiting or self.is_low(running)) and self.wants_stock:
            self.report()

    def ask(
        self,
        request: RequestPages,
        blocks: int,
        states: Positions,
        others: Sequence[RequestPages],
        *,
        no_wait: bool,
    ) -> None:
        """Ask for a request's pages, and those of ``others`` that were matched and may run next; not while too many
        steps have no answer. ``no_wait``: the answer comes at once, and pages whose blocks have to be saved first are
        to be asked for again."""
        if not self.outbox.has_room:
            return
        wanting = [(request, request, request.growth(blocks, states))]
        wanting += [(other, other, other.growth(other.first_blocks, NO_POSITIONS)) for other in others]
        tails = [(each, each.tail) for each, _, _ in wanting if each.tail is not None and each.lacks_tail]
        wanting += [(each, tail, Growth(max(1, tail.loaded_blocks), {})) for each, tail in tails]
        try:
            batch = self.stream.batch()
            batch.no_wait = no_wait
            for each, grown, (wanted, positions) in wanting:
                assert grown.sequence is not None
                is_whole = not (each.wish and each.wish.follows_layers)
                batch.allocate(grown.sequence, wanted, short_suffix=is_whole, positions=positions)
            self.outbox.send(batch, partial(self._take_allocations, [each for each, _, _ in wanting], self._clock()))
        except CacheClientError as error:
            refused("allocate", request.request_id, error)

    def _take_allocations(self, requests: Sequence[RequestPages], asked_s: float, answer: Answer) -> None:
        results = [answer] * len(requests) if isinstance(answer, CacheClientError) else answer
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Allocated):
                self.demand.take(len(result.tables[self._lead].pages) - result.loading_blocks)
                request.take_cells()  # it has pages from here on, and is not matched again
                continue
            refused("allocate", request.request_id, result)
            request.begun_s = self._clock()  # others save blocks for it: it asks again with the match that it has
            if isinstance(result, PoolExhausted):
                request.was_refused = True
                self.pause(asked_s)  # an answer from the last iteration delays no request in this one


def _take_report(answer: Answer) -> None:
    for result in [answer] if isinstance(answer, CacheClientError) else answer:
        if isinstance(result, CacheClientError):
            refused("operation", "", result)


# Reports of an iteration as operations of a step: blocks that are computed, cells that are given back, ended requests.
#
# In this order: a cell that is given back in the same report is sealed before.

Pack = Callable[[Sequence[bytes], bytes], bytes]
"""The daemon's keys of hashes and a salt."""


def put_reports(batch: Any, part: Reports, pack: Pack) -> None:
    """Add all that ``part`` has to a batch."""
    if part.sealing:
        _publish(batch, part.sealing, pack)
    ended = set(part.ended)
    for request, dead in part.dead.items():
        if request not in ended:
            _recycle(batch, request, dead)
    for request in part.ended:
        _release(batch, request)


def _publish(batch: Any, sealings: Mapping[RequestPages, Sealing], pack: Pack) -> None:
    """Those without states are entries of one column: it has the keys of all, or of none where Match had them."""
    plain: list[tuple[RequestPages, int, int, Sequence[bytes]]] = []
    sends_keys = False
    for request, sealing in sealings.items():
        assert request.sequence is not None
        record, blocks = request.sequence.record, sealing.blocks
        first = min(record.asked_blocks, blocks)
        if sealing.states:
            _publish_states(batch, request, sealing, first, pack)
        elif blocks > first:
            plain.append((request, first, blocks, sealing.keys))
            sends_keys = sends_keys or blocks > record.known_keys
    if plain:
        keys = [pack(keys[first:blocks], each.salt) for each, first, blocks, keys in plain] if sends_keys else ()
        sequences, firsts = [each.sequence for each, *_ in plain], [first for _, first, *_ in plain]
        batch.publish_all(sequences, [blocks for *_, blocks, _ in plain], keys, first_key=firsts)


def _publish_states(batch: Any, request: RequestPages, sealing: Sealing, first: int, pack: Pack) -> None:
    assert request.sequence is not None
    blocks = sealing.blocks
    keys = b"" if blocks <= request.sequence.record.known_keys else pack(sealing.keys[first:blocks], request.salt)
    try:
        batch.publish(request.sequence, max(blocks, first), keys, first_key=first, states=sealing.states)
    except CacheClientError as error:
        refused("publish", request.request_id, error)


def _recycle(batch: Any, request: RequestPages, dead: Mapping[int, int]) -> None:
    if request.sequence is None:
        return
    try:
        batch.give_back(request.sequence, dead, request.take_replaced(dead))
    except CacheClientError as error:
        refused("recycle", request.request_id, error)


def _release(batch: Any, request: RequestPages) -> None:
    if request.tail is not None:
        _release(batch, request.tail)
    if request.sequence is None:
        return
    try:
        batch.release(request.sequence, output_tokens=request.output_tokens)
    except CacheClientError as error:
        refused("release", request.request_id, error)


# Size of an engine's stock: what its next iterations may take, so that the daemon grants it between them.
#
# No other engine can use what lies in a stock. So its target follows what waits, what runs and what recent iterations
# took; an engine that runs nothing goes back to its ``base``, and the rest flows back to the pool.
#
#     target = base .. most, of  running + max(recent iterations, first blocks of requests that wait)

SHARE_DIVISOR = 32
"""Largest part of the pool that a stock may have: it holds what requests would return to, and other engines want it."""

STEP_SHARE = 0.9
"""Part of the largest recent take that is expected a step later."""

SLACK_DIVISOR = 4
"""A target falls once it is lower by such a part: pages do not go to and fro."""


def most_in_stock(step_blocks: int, requests: int, pool_blocks: int, limit: int) -> int:
    """Return the largest target: blocks of a whole iteration and one for each request, at most a share of the pool and
    ``limit`` (0: none)."""
    most = min(step_blocks + requests, pool_blocks // SHARE_DIVISOR)
    return min(most, limit) if limit else most


class StockDemand:
    """``base``: target of an engine that runs nothing. ``most``: the largest."""

    def __init__(self, base: int, most: int = 0) -> None:
        self.base = base
        self.most = max(base, most)
        self.target = base
        self._taken = 0
        self._recent = 0.0
        self._rests = True

    @property
    def due(self) -> int:
        """Blocks that other blocks are evicted for: none while nothing runs."""
        return 0 if self._rests else self.target

    def least(self, running: int) -> int:
        """Return what an iteration takes where each of ``running`` requests takes a block."""
        return min(running, self.most)

    def take(self, blocks: int) -> None:
        self._taken += blocks

    def rest(self) -> None:
        """Nothing runs and nothing waits: go back to the base."""
        self._taken, self._recent, self.target, self._rests = 0, 0.0, self.base, True

    def look(self, running: int, waiting_blocks: int) -> int:
        """Return the target of the step that is sent now. ``running``: requests that may take a block each;
        ``waiting_blocks``: first blocks of those that wait."""
        self._recent = max(self._taken, STEP_SHARE * self._recent)
        self._taken, self._rests = 0, False
        wanted = min(self.most, max(self.base, running + max(round(self._recent), waiting_blocks)))
        if wanted > self.target or wanted <= self.target - self.target // SLACK_DIVISOR:
            self.target = wanted
        return self.target
