"""Page accounting of an engine: the daemon grants a request's pages, and one step an iteration reports their use.

Used from vLLM's scheduler thread alone. While it schedules, requests are matched, and their pages are reserved before
vLLM counts what is free, so that taking them cannot fail: for all that wait and may run next, in one message each. When
a step's output has come, blocks that are computed are sealed and ended requests released, in a message that is not
waited for. Knows nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from cachesvc_client import CacheClientError, Lease, LeaseLost, PendingStep, StepStream

from cachesvc_vllm.namespace.draft_keys import salted
from cachesvc_vllm.pages.giving_way import Clock, GivingWay
from cachesvc_vllm.pages.group_tables import NO_POSITIONS, AllParts, Positions, engine_groups
from cachesvc_vllm.pages.matches import Matches, coming_again, refused
from cachesvc_vllm.pages.private_pages import PrivatePages
from cachesvc_vllm.pages.reports import put_reports
from cachesvc_vllm.pages.request_pages import RequestPages, Wish
from cachesvc_vllm.pages.untold import Sealing, Untold

SHORT_PAUSE_S = 0.002
"""vLLM's loop turns as fast as it can while nothing fits; the daemon is not asked again sooner."""

STOCK_DIVISOR = 16
"""A stock takes at most so small a part of the pool: others cannot use what lies in it."""

ANSWER_S = 1.0
"""vLLM's scheduler waits no longer for an answer: what it is about waits, and everything else goes on."""

log = logging.getLogger(__name__)


class PageBook:
    """``stock_blocks``: pages kept at hand, so that decode grows without a round trip. ``ahead_blocks``: limit of
    blocks that are matched and reserved together for waiting requests. ``without_host``: requests that have what is in
    place alone, because a load of theirs has failed and might fail each time. ``drops_last``: leave out the last block
    of each hit, whose drafter's KV is right for another continuation."""

    def __init__(
        self,
        lease: Lease,
        stock_blocks: int,
        ahead_blocks: int = 0,
        clock: Clock = time.monotonic,
        parts: AllParts = (),
    ) -> None:
        self._lease = lease
        layout = lease.registration.layout
        self.groups = engine_groups(layout, parts)
        self._lead = self.groups.lead_parts.groups[0]
        self._ahead_blocks = ahead_blocks
        pages = lease.registration.device_pages[self._lead] // len(layout.groups)
        self._stock_blocks = max(1, min(stock_blocks, pages // STOCK_DIVISOR))
        self._stream: StepStream = lease.step(self._stock_blocks)
        self._clock = clock
        self._requests: dict[str, RequestPages] = {}
        self._matches = Matches(self._stream, self.keys, self.groups)
        self.untold = Untold()
        self._pending: PendingStep | None = None
        self._private = PrivatePages()
        self.salt = b""
        self._short_until_s = 0.0
        self._way = GivingWay(clock)
        self.without_host: set[str] = set()
        self.held_blocks = 0
        self.drops_last = self.is_adrift = self.is_moving = False

    @property
    def is_empty(self) -> bool:
        """True when no request has a page."""
        return not self.held_blocks

    def is_beyond(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """True where a request of ``blocks`` blocks finds no room before there is a new lease, whatever ends by
        then."""
        mine = len(self._private) + sum(each.spare_pages for each in self._requests.values() if each is not request)
        is_short = self.is_empty and request.missing_pages(blocks, states) > mine
        return self.is_adrift and (self.is_moving or is_short)

    def find(self, request_id: str) -> RequestPages | None:
        """Pages of a request, if it has begun."""
        return self._requests.get(request_id)

    def is_with_daemon(self) -> bool:
        """True while the lease lives. After that, this engine uses the pages that no other engine can use."""
        if self._lease.is_lost and not self.is_adrift:
            self._go_adrift()
        return not self.is_adrift

    def expect(self, request_id: str, wish: Wish) -> None:
        """Note a request. A lone one is matched at once, many together when the first of them is scheduled."""
        self._matches.expect(request_id, wish)
        if not self._matches.are_under_way and self.is_with_daemon():
            self._send_matches({request_id: wish})

    def begin(self, request_id: str, wish: Wish) -> RequestPages:
        """A request's pages from its longest hit on; those that it had before and never used are given back."""
        known = self._requests.get(request_id)
        if known is not None and known.is_matching:
            self._take_matches()
        is_usable = known is not None and (known.is_matching or self._is_fresh(known, wish))
        begun = known if known is not None and is_usable else self._match(request_id, wish)
        while begun.host_blocks and request_id in self.without_host:
            begun = self.shorten(request_id, wish, begun.hit_blocks)
        if self.drops_last and not (begun.is_shortened or begun.is_coming) and (found := begun.loaded_blocks):
            begun = self.shorten(request_id, wish, found - 1)
            begun.is_shortened = True
        return begun

    def shorten(self, request_id: str, wish: Wish, blocks: int) -> RequestPages:
        """Match a request again for at most ``blocks`` blocks, and give back what it pinned behind them: vLLM computes
        those blocks, so their cells must be private pages."""
        return self._match(request_id, replace(wish, most_blocks=blocks, expected=None))

    def forget(self, request_id: str) -> None:
        """Give the request's pages back, at once or when vLLM has freed the last of them."""
        self._matches.forget(request_id)
        request = self._requests.pop(request_id, None)
        if request is None or request.held:
            return
        request.is_forgotten = request.is_matching
        if not request.is_matching:
            self.untold.ready.ended.append(request)

    def has(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """True where a request that runs has these pages already, and may go on in them. A loss of the daemon is
        noticed elsewhere, in each iteration."""
        return request.taken > 0 and request.has_pages(blocks, states) and not self.is_adrift and not self.is_moving

    def reserve(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """Make the request's table ``blocks`` long, with pages for ``states``; False where there is no room now."""
        if not self.is_with_daemon() and not self.is_moving:
            self.untold.settle()
            self._private.take_ended(self.untold.ready.ended)
            self.untold.clear()
            return self._private.lengthen(request, blocks, states)
        if self.is_moving or request.sequence is None or request.is_growing:
            return False
        request.take_cells()
        if request.has_pages(blocks, states) or self._grow(request, blocks, states):
            return True
        if self.untold.ready.ended or self.untold.ready.dead:  # vLLM has freed pages for this
            self.flush()
        elif self._clock() < self._short_until_s:
            return False
        if self._ask(request, blocks, states):
            return True
        self._short_until_s = self._clock() + SHORT_PAUSE_S
        return False

    def use_hits(self, request: RequestPages) -> None:
        """vLLM uses the blocks that were found in place."""
        self.held_blocks += request.take_hits()

    def take(self, request: RequestPages, pages: int) -> list[int]:
        """The next pages of a request, reserved before."""
        self.held_blocks += pages
        self._way.admit()
        return request.take(pages)

    def hold(self, request: RequestPages, cells: int) -> None:
        """vLLM uses cells of another group than the leading one."""
        self.held_blocks += cells
        request.held += cells

    def finish(self, request: RequestPages, output_tokens: int) -> None:
        """A request has ended, and vLLM frees what it has of it; one that never was admitted has only what was got
        ahead."""
        request.output_tokens = output_tokens
        if not request.held:
            self.forget(request.request_id)

    def drop(self, request: RequestPages, blocks: int) -> None:
        """vLLM has freed some of a request's pages: with the last of them the request is over."""
        self.held_blocks -= blocks
        request.held -= blocks
        if request.held:
            return
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        self.untold.end(request)

    def move_windows(self, request: RequestPages) -> None:
        """vLLM has freed cells of a request that goes on, which nothing reads any more."""
        for table in request.others:
            if table.first <= table.told:
                continue
            if self.is_adrift:
                self._private.add(table.drop_pages(max(table.told, request.first_private_of(table)), table.first))
            else:
                self.untold.recycle(request, table.parts.dead(table.first))
            table.told = table.first

    def seal(self, request: RequestPages, blocks: int, hashes: Sequence[bytes]) -> None:
        """The first ``blocks`` blocks are computed: all engines' from the next ``flush`` on."""
        if blocks > request.wanted and request.is_shared and not self.is_adrift:
            request.wanted = blocks
            self.untold.seal(request, Sealing(blocks, hashes, request.take_states(blocks)))

    def free_blocks(self, pool_blocks: int, request: RequestPages | None) -> int:
        """Count the blocks that vLLM may take, ``request``'s reservation and its untouched hits included."""
        spare = 0 if request is None else request.spare_pages
        if self.is_adrift:
            return len(self._private) + spare
        not_held = pool_blocks - self.held_blocks
        free = self._stream.free_pages
        if not free:
            return not_held
        to_be_had = free[self._lead] + self._stream.evictable_pages[self._lead] + self._stock_pages + spare
        return min(not_held, to_be_had)

    def flush(self) -> None:
        """Send what has been computed and what has ended; the answer is taken in the next time."""
        if not self.is_with_daemon() or not (self.untold or self._lease.record.growing):
            return
        try:
            self._collect()
            batch = self._stream.batch()
            put_reports(batch, self.untold.ready, self.keys)
            self.untold.ready.clear()
            self._pending = self._stream.send(batch)
        except CacheClientError as error:
            refused("step", "", error)

    def ask_room(self) -> None:
        """Have the daemon say anew what is free: vLLM found it too little, and others may have ended since."""
        if not self.is_with_daemon() or self._clock() < self._short_until_s:
            return
        self._short_until_s = self._clock() + SHORT_PAUSE_S
        try:
            self._collect()
            self._pending = self._stream.send()
        except CacheClientError as error:
            refused("step", "", error)

    def give_way(self, request: RequestPages) -> None:
        """A request found no room. Where nothing of this engine runs, give back now and then what waiting requests got:
        another engine may wait for it. Without the daemon, keep ``request``'s own."""
        if self._way.is_due(is_idle=self.is_empty and not request.is_growing):
            self._drop_idle(request if self.is_adrift else None)

    def change_keys(self, salt: bytes) -> None:
        """Mix keys with another salt from now on. No request has a page."""
        for request_id in list(self._requests):
            self.forget(request_id)
        self.untold.forget_blocks()  # they would be reported under the new keys
        self.salt = salt

    def close(self) -> None:
        """Tell what is left to tell, and end the stream. Idempotent."""
        self.flush()
        self._stream.close()

    def adopt(self, lease: Lease) -> None:
        """Go on under a new lease. No request has a page. Raises DaemonUnavailable and LeaseLost, where that is lost
        too: another one is to be adopted then."""
        assert self.is_empty
        self._stream = lease.step(self._stock_blocks)
        self._lease = lease
        self._requests.clear()
        self._matches.move(self._stream)
        self.untold.clear()
        self._private = PrivatePages()
        self._pending = None
        self.is_adrift = self.is_moving = False

    # -- with the daemon ---------------------------------------------------------------------------------------------

    def keys(self, hashes: Sequence[bytes], salt: bytes) -> bytes:
        """Pack the keys that the daemon knows blocks by: the hashes mixed with the engine's salt and the request's."""
        return salted(hashes, self.salt, salt)

    def _match(self, request_id: str, wish: Wish) -> RequestPages:
        """Match a request, and those beside it that may run next."""
        self.forget(request_id)
        if self.is_with_daemon():
            self._take_matches()
            ahead = sum(each.first_blocks for each in self._requests.values() if each.is_ahead)
            again = coming_again(self._requests.values(), self._clock()) if wish.expected is not None else {}
            for other in again:
                self.forget(other)
            self._send_matches({request_id: wish, **again, **self._matches.next_coming(self._ahead_blocks - ahead)})
            self._take_matches()
        return self._requests.setdefault(request_id, RequestPages.begin(self.groups, request_id, self._clock()))

    def _is_fresh(self, request: RequestPages, wish: Wish) -> bool:
        """True where a request that waits need not be matched again: what it has is recent, or has its pages, and is no
        more than it may have."""
        if not request.answers(wish):
            return False
        if request.host_blocks and request.request_id in self.without_host:
            return False
        has_pages = request.rows > request.hit_blocks
        return (has_pages and not request.is_coming) or request.is_recent(self._clock())

    def _send_matches(self, wishes: dict[str, Wish]) -> None:
        if self._way.is_away:
            return
        for request in self._matches.send(wishes, self._clock()):
            self._matches.forget(request.request_id)
            self._requests[request.request_id] = request

    def _take_matches(self) -> None:
        self.untold.ready.ended += self._matches.take(ANSWER_S)

    def _ask(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Ask the daemon for pages; where it has too few, with what this engine can spare: hits of requests that wait,
        and its stock. True once the request has them."""
        if self._allocate(request, blocks, states):
            return True
        assert request.sequence is not None
        if self._drop_idle(request) and self._allocate(request, blocks, states):
            return True
        hit_blocks = request.sequence.hit_blocks
        if request.rows < hit_blocks and not self._allocate(request, hit_blocks, NO_POSITIONS):
            return False
        rows = min(blocks - request.rows, self._stock_pages // request.row_pages)
        if rows > 0:
            self._grow(request, request.rows + rows, NO_POSITIONS)
        return request.has_pages(blocks, states) or self._allocate(request, blocks, states)

    def _grow(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Take pages of the stock; False where it has too few, or the hit's own pages must be asked for first."""
        sequence = request.sequence
        assert sequence is not None
        if self._stock_pages < request.missing_pages(blocks, states) or sequence.blocks < sequence.hit_blocks:
            return False
        growth = request.growth(blocks, states)
        try:
            sequence.grow_from_stock(growth.blocks - request.rows, positions=growth.positions)
        except CacheClientError as error:
            refused("grow", request.request_id, error)
            return False
        request.take_cells()
        return True

    @property
    def _stock_pages(self) -> int:
        stock = self._lease.record.stock
        assert stock is not None
        return stock.pages[self._lead]

    def _allocate(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Have the daemon make the table ``blocks`` long, in a step that reports growth first; and, as far as they go,
        those of others that were matched and may run next."""
        try:
            self._collect()
            wanting = [(request, request.growth(blocks, states))]
            if self._clock() >= self._short_until_s:
                others = (other for other in self._requests.values() if other is not request and other.wants_pages)
                wanting += [(other, other.growth(other.first_blocks, NO_POSITIONS)) for other in others]
            batch = self._stream.batch()
            for each, (wanted, positions) in wanting:
                assert each.sequence is not None
                batch.allocate(each.sequence, wanted, short_suffix=True, positions=positions)
            self._pending = self._stream.send(batch)
            self._collect()
        except CacheClientError as error:
            refused("allocate", request.request_id, error)
        request.take_cells()
        return request.has_pages(blocks, states)

    def _drop_idle(self, but_for: RequestPages | None = None) -> bool:
        """Give back what requests pin that vLLM has not admitted; True where there was one."""
        idle = [each.request_id for each in self._requests.values() if each.is_ahead and each is not but_for]
        for request_id in idle:
            self.forget(request_id)
        if idle:
            self.flush()
        return bool(idle)

    def _collect(self) -> None:
        """Take in the answer to what was sent last. Raises DeadlineExceeded: it is asked for again the next time."""
        if self._pending is None:
            return
        results = self._pending.results(ANSWER_S)
        self._pending = None
        for result in results:
            if isinstance(result, CacheClientError):
                refused("operation", "", result)

    # -- without it --------------------------------------------------------------------------------------------------

    def _go_adrift(self) -> None:
        """Detach from a lost daemon: requests keep their pages, and new ones get pages that no other engine can use.
        Where the daemon revoked the lease, or that is unknown, shared pages may be others' by now: then all requests
        stop."""
        self.is_adrift = True
        self.is_moving = isinstance(self._lease.record.loss, LeaseLost) or not self._lease.is_sure
        self._take_matches()
        self.untold.forget_blocks()
        self._pending = None
        self._private.take_stock(self._lease.record.stock)
        log.warning("daemon_gone private_pages=%s", len(self._private))
