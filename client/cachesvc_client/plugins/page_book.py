"""Page accounting of an engine: the daemon grants a request's pages, and steps of its iterations report their use.

Used from the engine's scheduler thread alone, which waits for the daemon only while nothing runs, or where a running
request would be preempted otherwise (``outbox.py``):

    a request comes       its match is sent while nothing runs; else, with those of others, when the first is scheduled
    it is scheduled       its match is there, and its pages are in stock or were asked for ahead; else it comes again
    an iteration is made  growth, computed blocks and ended requests are reported; the answer fills the stock

Pages are reserved before the engine counts what is free, so that taking them cannot fail. Knows no engine.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc_client import Lease, LeaseLost
from cachesvc_client.plugins.grants import Grants
from cachesvc_client.plugins.matches import Matches, Prefills, Sealing, Untold, Written, next_wish
from cachesvc_client.plugins.outbox import Outbox
from cachesvc_client.plugins.request_pages import (
    NO_POSITIONS,
    AllParts,
    GroupTable,
    Positions,
    RequestPages,
    Wish,
    engine_groups,
)
from cachesvc_client.records.entries import Stock

log = logging.getLogger(__name__)


class PageBook:
    """``stock_blocks``: pages kept at hand while nothing runs. ``ahead_blocks``: limit of blocks that are matched and
    reserved together for waiting requests. ``step_blocks``: the most that an iteration takes for prompts, with a block
    for each of ``most_requests``. ``without_host``: requests that have what is in place alone, because a load of theirs
    has failed and might fail each time. ``drops_last``: leave out the last block of each hit, whose drafter's KV is
    right for another continuation."""

    def __init__(
        self,
        lease: Lease,
        stock_blocks: int,
        ahead_blocks: int = 0,
        clock: Clock = time.monotonic,
        *,
        parts: AllParts = (),
        step_blocks: int = 0,
        most_requests: int = 0,
    ) -> None:
        self._lease, self._clock = lease, clock
        self.groups = engine_groups(lease.registration.layout, parts)
        self._requests: dict[str, RequestPages] = {}
        self.untold = Untold()
        most = stock_blocks, step_blocks, most_requests
        self._grants = Grants(lease, self.groups, *most, part=self.untold.ready, pack=self.keys, clock=clock)
        self.without_host: set[str] = set()
        abandon = self.untold.ready.ended.append
        self._matches = Matches(self.keys, self.groups, abandon, ahead_blocks, self.without_host, clock)
        self.prefills = Prefills(self.untold, has_states=bool(self.groups.states))
        self._asking = Asking(self._grants, self._matches, self._drop_idle)
        self._writes: deque[list[Written]] = deque()
        self._written_on: list[RequestPages] = []
        self._private, self.salt = PrivatePages(len(self.groups.pools), has_markers=self.groups.has_markers), b""
        self._way = GivingWay(clock)
        self.held_blocks = 0
        self.drops_last = self.is_adrift = self.is_moving = False

    @property
    def is_empty(self) -> bool:
        """True when no request has a page."""
        return not self.held_blocks

    def is_beyond(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """True where a request of ``blocks`` finds no room before there is a new lease, whatever ends by then."""
        growth = request.growth(blocks, states)
        is_short = any(request.missing_pages(growth, pool) > self._own_pages(request, pool) for pool in request.pools)
        return self.is_adrift and (self.is_moving or (self.is_empty and is_short))

    def _own_pages(self, request: RequestPages, pool: int) -> int:
        """Count the pages that no other engine can use, but for ``request``'s."""
        others = (each.spare_pages(pool) for each in self._requests.values() if each is not request)
        return self._private.count(pool) + sum(others)

    def find(self, request_id: str) -> RequestPages | None:
        """Pages of a request, if it has begun."""
        return self._requests.get(request_id)

    def is_with_daemon(self) -> bool:
        """True while the lease lives. After that, this engine uses the pages that no other engine can use."""
        if self._lease.is_lost and not self.is_adrift:
            self._go_adrift()
        return not self.is_adrift

    @property
    def outbox(self) -> Outbox:
        return self._grants.outbox

    def expect(self, request_id: str, wish: Wish) -> None:
        """Note a request. The first that comes while nothing runs is matched at once; others are, with all that have
        come, when the engine schedules one of them."""
        self._matches.expect(request_id, wish)
        if not (self._matches.are_under_way or self.outbox.runs()) and self.is_with_daemon():
            self._send_matches()

    def begin(self, request_id: str, wish: Wish) -> RequestPages:
        """A request's pages from its longest hit on; those that it had before and never used are given back. While
        another node computes what is behind the hit, each ``flush`` looks whether to match it again."""
        self.outbox.poll()
        known = self._requests.get(request_id)
        if known is not None:
            self.outbox.wait_if_idle(lambda: known.is_coming or not known.is_matching)
        is_like = known is not None and known.salt == wish.salt
        is_usable = known is not None and is_like and (known.is_matching or self._is_fresh(known, wish))
        begun = known if known is not None and is_usable else self._match(request_id, next_wish(known, wish))
        while begun.host_blocks and request_id in self.without_host:
            begun = self.shorten(request_id, wish, begun.hit_blocks)
        drops = self.drops_last and not (begun.is_shortened or begun.is_coming)
        if (drops or begun.is_without_tail) and (found := begun.loaded_blocks):
            begun = self.shorten(request_id, wish, found - 1)
            begun.is_shortened = True
        return begun

    def shorten(self, request_id: str, wish: Wish, blocks: int) -> RequestPages:
        """Match a request again for at most ``blocks`` blocks, and give back what it pinned behind them: those
        blocks are computed, so their cells must be private pages."""
        return self._match(request_id, replace(wish, most_blocks=blocks, expected=None, shortens=wish.whole))

    def forget(self, request_id: str) -> None:
        """Give the request's pages back, at once or when the engine has freed the last of them."""
        self._matches.forget(request_id)
        self.prefills.forget(request_id)
        self._give_back(self._requests.pop(request_id, None))

    @property
    def goes_on(self) -> bool:
        """True where requests that run may go on in their pages."""
        return not self.is_adrift and not self.is_moving

    def has(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """True where a request that runs has these pages already, and may go on in them. A loss of the daemon is
        noticed elsewhere, in each iteration."""
        return request.taken > 0 and request.has_pages(blocks, states) and self.goes_on

    def is_ready(self, request: RequestPages, blocks: int) -> bool:
        """False where a request that waits would be scheduled with ``blocks`` blocks, and what the daemon has to say of
        it is on its way: it is asked for here. The engine may ask again in the next iteration."""
        if not self.outbox.runs() or not self.is_with_daemon() or self.is_moving:
            return True
        if request.sequence is None:
            return self._way.is_away
        request.take_cells()
        growth = request.growth(blocks, NO_POSITIONS)
        if request.has_pages(blocks, NO_POSITIONS) or self._grants.has_stock(request, growth):
            return True
        if any(each.is_state for each in request.others) and not request.host_blocks:
            return True  # how long its first chunk is, the engine knows alone
        self._asking.ahead(request, blocks, NO_POSITIONS)
        return not request.is_growing

    def reserve(self, request: RequestPages, blocks: int, states: Positions = NO_POSITIONS) -> bool:
        """Make the request's table ``blocks`` long, with pages for ``states``; False where there is no room now, or the
        daemon's answer is on its way."""
        if not self.is_with_daemon() and not self.is_moving:
            self._take_ended()
            return self._private.lengthen(request, blocks, states)
        if self.is_moving or request.sequence is None:
            return False
        is_urgent = request.taken > 0 or not self.outbox.runs()
        if request.is_growing:
            if is_urgent:
                self.outbox.wait(lambda: not request.is_growing)
            if request.is_growing:
                return False
        request.take_cells()
        if request.has_pages(blocks, states) or self._grants.grow(request, blocks, states):
            return True
        if not is_urgent:
            self._asking.ahead(request, blocks, states)
            return False
        if self.untold.ready.ended or self.untold.ready.dead:  # the engine has freed pages for this
            self._grants.report()
        elif self._grants.is_short:
            return False
        if self._asking.now(request, blocks, states):
            return True
        self._grants.pause()
        return False

    def use_hits(self, request: RequestPages) -> None:
        """The engine uses the blocks that were found in place."""
        self._matches.ahead.pop(request.request_id, None)
        self.held_blocks += request.take_hits()

    def take(self, request: RequestPages, pages: int) -> list[int]:
        """The next pages of a request, reserved before."""
        self._matches.ahead.pop(request.request_id, None)
        self.held_blocks += pages
        self._way.admit()
        return request.take(pages)

    def hold(self, request: RequestPages, cells: int) -> None:
        """The engine uses cells of another group than the leading one."""
        self._matches.ahead.pop(request.request_id, None)
        self.held_blocks += cells
        request.held += cells
        if self.groups.has_markers:
            request.follow()
            self._way.admit()

    def finish(self, request: RequestPages, output_tokens: int) -> None:
        """A request has ended, and the engine frees what it has of it; one that never was admitted has only what was
        got ahead. What still comes for it from another node is not fetched."""
        request.output_tokens = output_tokens
        is_coming = request.is_coming and request.wish is not None and request.wish.expected is not None
        if not request.held:
            self.forget(request.request_id)
        if is_coming and request.wish is not None:
            self._matches.give_up(request.request_id, request.wish)
            self._send_matches()

    def drop(self, request: RequestPages, blocks: int) -> None:
        """The engine has freed some of a request's pages: with the last of them the request is over."""
        self.held_blocks -= blocks
        request.held -= blocks
        if request.held:
            return
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        if self._is_written(request):
            self._written_on.append(request)
        else:
            self.untold.end(request)

    def drop_spare(self, request: RequestPages, table: GroupTable, position: int) -> None:
        """The engine has freed a cell for drafts of a request that goes on, and needs those before it."""
        page = table.drop_spare(position)
        self.held_blocks -= 1
        request.held -= 1
        if self.is_adrift:
            self._private.add([page], table.pool)
        else:
            table.dropped.append(page)
            self.untold.recycle(request, {})

    def begin_writes(self, writes: list[Written]) -> None:
        """A step is launched that writes these: they are kept until its output has come, also where the engine frees
        them before."""
        self._writes.append(writes)

    def end_writes(self, *, is_sound: bool) -> None:
        """The output of the first step under way has come: seal what it wrote of requests that the engine has let go
        of, if it ``is_sound``, and let their pages go."""
        for each in self._writes.popleft():
            if is_sound and each.is_over():
                self.seal(each.request, min(each.blocks, each.request.taken_blocks), each.keys)
        waiting, self._written_on = self._written_on, []
        for request in waiting:
            if self._is_written(request):
                self._written_on.append(request)
            else:
                self.untold.end(request)

    def distrust(self, pages: Collection[int]) -> None:
        """Steps under way lacked these pages: what they write of requests that the engine has let go of is for none."""
        for each in (each for step in self._writes for each in step):
            if each.is_over() and each.request.has_any(set(pages)):
                each.request.is_foreign = True

    def _forget_writes(self) -> None:
        """Seal nothing of what steps under way write of requests that are over."""
        for each in (each for step in self._writes for each in step):
            each.blocks = 0

    def _is_written(self, request: RequestPages) -> bool:
        return any(each.request is request for step in self._writes for each in step)

    def move_windows(self, request: RequestPages) -> None:
        """The engine has freed cells of a request that goes on, which nothing reads any more. Those go back whose
        states are sealed, or are for no other."""
        is_shared = request.is_shared and not self.is_adrift
        for table in request.others:
            end = table.unread if is_shared else table.first
            if end <= table.told:
                continue
            if self.is_adrift:
                pages = table.drop_pages(max(table.told, request.first_private_of(table)), end)
                self._private.add(pages, table.pool)
            else:
                self.untold.recycle(request, table.parts.dead(end))
            table.told = end

    def seal(self, request: RequestPages, blocks: int, hashes: Sequence[bytes]) -> None:
        """The first ``blocks`` blocks are computed: all engines' from the next ``flush`` on."""
        if blocks > request.wanted and request.is_shared and not self.is_adrift:
            states = request.take_states(blocks) if request.others else {}
            self.untold.seal(
                request, Sealing(blocks, hashes, states), is_prompt=blocks > request.wanted + 1 or not request.wanted
            )
            request.wanted = blocks
            if states and request.held:
                self.move_windows(request)

    def free_blocks(self, pool_blocks: int, request: RequestPages | None, pool: int = 0) -> int:
        """Count the pages of a pool that the engine may take, ``request``'s reservation and its untouched hits
        included. ``pool_blocks``: all that it has."""
        spare = 0 if request is None else request.spare_pages(pool)
        if self.is_adrift:
            return self._private.count(pool) + spare
        not_held = pool_blocks - self.held_blocks if pool == self.groups.main_pool else pool_blocks
        room = self._grants.room(pool)
        return not_held if room is None else min(not_held, room + spare)

    def flush(self, *, is_last: bool = False, may_wait: bool = True, for_waiting: bool = False) -> None:
        """Send what has been computed and what has ended, and the next matches; answers are taken in later.
        ``is_last``: no iteration may follow, unless requests wait: wait for what is on its way, if this engine
        ``may_wait``, and let the stock go back to its base. ``for_waiting``: only where requests wait."""
        if not self.is_with_daemon() or (for_waiting and not self._matches.waiting_blocks):
            return
        self.outbox.poll()
        if is_last and not self._requests and not self._matches.waiting_blocks:
            if may_wait:
                self.outbox.wait()
            self._grants.demand.rest()
        else:
            if self._matches.are_waiting:
                self._send_matches(self._matches.stale(self.outbox, self._clock()))
            self._grants.demand.look(self._running, self._matches.waiting_blocks)
        self._grants.report_if_due()
        due = self.prefills.take_due(self._matches.ahead.values())
        if due and self._send_matches(due):  # behind the report of what they wait for
            for request_id in due:
                self.prefills.forget(request_id)

    def must_wait(self, request: RequestPages) -> bool:
        """True while a request of this engine computes what this one begins with, and the daemon will have it."""
        return self.goes_on and request.sequence is not None and self.prefills.must_wait(request)

    def rest(self) -> None:
        """Nothing runs: report what has ended without an output, such as a request that was aborted while it waited. So
        other engines get its pages."""
        self.outbox.poll()
        self.untold.settle()
        if self.untold:
            self._grants.report_if_due()

    @property
    def _running(self) -> int:
        return len(self._requests) - len(self._matches.ahead)

    def begin_step(self) -> None:
        self.untold.begin_step()
        self.outbox.begin_step()
        self._matches.step += 1

    @property
    def is_urgent(self) -> bool:
        """True where ``flush`` has more to tell than what decoding leaves, or the stock may not last."""
        has_news = self._matches.are_waiting or self.untold.ready.is_urgent or self.prefills.are_due
        return has_news or self._grants.is_low(self._running)

    def top_up(self) -> None:
        """Take in what has come, and have the stock filled where the last step found too little for what waits, or
        much too little."""
        if self.is_with_daemon():
            self._grants.top_up(self._running, are_waiting=self._matches.are_waiting)

    def ask_room(self) -> None:
        """Have the daemon say anew what is free: the engine found it too little, and others may have ended since.
        Without the daemon, count what this engine's own ended requests had."""
        if self.is_with_daemon():
            self._grants.look_room()
        elif not self.is_moving:
            self._take_ended()

    def give_way(self, request: RequestPages) -> None:
        """A request found no room. Where nothing of this engine runs, give back now and then what waiting requests got:
        another engine may wait for it. Without the daemon, keep ``request``'s own."""
        if self._way.is_due(is_idle=self.is_empty and not request.is_growing):
            self._grants.demand.rest()
            self._drop_idle(request if self.is_adrift else None)

    def gives_up(self, request: RequestPages) -> bool:
        """True now and then for a request with pages that found no room for more, where nothing else of this engine
        runs: another engine may wait for what it has."""
        return self._way.is_due(is_idle=self.held_blocks == request.held and not request.is_growing)

    def change_keys(self, salt: bytes) -> None:
        """Mix keys with another salt from now on. Requests that have pages go on in them and share nothing further;
        others are matched anew."""
        for request_id, request in list(self._requests.items()):
            if request.is_ahead:
                self.forget(request_id)
            else:
                request.is_foreign = True
        self._matches.forget_coming()  # their salts may be of before
        self.untold.forget_blocks()  # they would be reported under the new keys
        self._forget_writes()
        self.salt = salt

    def close(self) -> None:
        """Tell what is left to tell, and end the stream. Idempotent."""
        self.flush(is_last=True)
        self._grants.stream.close()

    def adopt(self, lease: Lease) -> None:
        """Go on under a new lease. No request has a page. Raises DaemonUnavailable and LeaseLost, where that is lost
        too: another one is to be adopted then."""
        assert self.is_empty
        self._grants.adopt(lease)
        self._lease = lease
        self._requests.clear()
        self._matches.drop()
        self._matches.ahead.clear()
        self.prefills.clear()
        self.untold.clear()
        self._forget_writes()
        self._written_on.clear()
        self._private = PrivatePages(len(self.groups.pools), has_markers=self.groups.has_markers)
        self.is_adrift = self.is_moving = False

    def keys(self, hashes: Sequence[bytes], salt: bytes) -> bytes:
        """Pack the keys that the daemon knows blocks by: the hashes mixed with the engine's salt and the request's."""
        return salted(hashes, self.salt, salt)

    def _match(self, request_id: str, wish: Wish) -> RequestPages:
        """Send a request's match, and those of others that may run next."""
        self.forget(request_id)
        if self.is_with_daemon():
            self.outbox.wait_if_idle(lambda: not self._matches.are_under_way)
            if not self._send_matches({request_id: wish}):
                self._matches.expect(request_id, wish)
        if request_id not in self._requests:
            placeholder = RequestPages.begin(self.groups, request_id, self._clock(), wish=wish)
            self._requests[request_id] = self._matches.ahead[request_id] = placeholder
        begun = self._requests[request_id]
        self.outbox.wait_if_idle(lambda: begun.is_coming or not begun.is_matching)
        return begun

    def _is_fresh(self, request: RequestPages, wish: Wish) -> bool:
        """True where a request that waits need not be matched again: what it has is recent, or has its pages, and is no
        more than it may have."""
        if not request.answers(wish) or (request.host_blocks and request.request_id in self.without_host):
            return False
        if request.is_coming:
            return self.is_with_daemon()
        return not request.wants_match or self._matches.is_recent(request, self.outbox, self._clock())

    def _give_back(self, request: RequestPages | None) -> None:
        """Give back what a request has got, unless the engine has some of it."""
        if request is None or request.held:
            return
        request.is_forgotten = request.is_matching
        if not request.is_matching:
            self.untold.ready.ended.append(request)

    def _send_matches(self, first: dict[str, Wish] | None = None) -> bool:
        """True where they were sent, in place of what such requests had; not while others are under way, or this engine
        backs off."""
        if self._way.is_away:
            return False
        sent = self._matches.send(self.outbox, self._clock(), first, is_idle=self.is_empty)
        for request in sent:
            self._give_back(self._requests.get(request.request_id))
            self._requests[request.request_id] = request
        return bool(sent)

    def _drop_idle(self, but_for: RequestPages | None = None) -> bool:
        """Give back what requests pin that the engine has not admitted; True where there was one."""
        idle = [each for each in self._requests.values() if each.is_ahead and each is not but_for]
        for request in idle:
            self.forget(request.request_id)
        if self.is_with_daemon() and (idle or self._grants.wants_stock):
            self._grants.report()
        return bool(idle)

    # -- without it --------------------------------------------------------------------------------------------------

    def _take_ended(self) -> None:
        """Use the pages of ended requests anew: this engine's kernels run one after another."""
        self.untold.settle()
        self._private.take_ended(self.untold.ready.ended)
        self.untold.clear()

    def _go_adrift(self) -> None:
        """Detach from a lost daemon: requests keep their pages, and new ones get pages that no other engine can use.
        Where the daemon revoked the lease, or that is unknown, shared pages may be others' by now: then all requests
        stop."""
        self.is_adrift = True
        self.is_moving = isinstance(self._lease.record.loss, LeaseLost) or not self._lease.is_sure
        self.outbox.wait()
        self._matches.drop()
        self.untold.forget_blocks()
        self._private.take_stock(self._lease.record.stock, self.groups.pools)
        for table in (each for request in self._requests.values() for each in request.others):
            self._private.add(table.take_dropped(), table.pool)
        log.warning("daemon_gone private_pages=%s", self._private.count(self.groups.main_pool))


class Asking:
    """``drop_idle``: gives back what other requests hold that wait; True where one did. Used from the engine's
    scheduler thread."""

    def __init__(self, grants: Grants, matches: Matches, drop_idle: Callable[[RequestPages | None], bool]) -> None:
        self._grants = grants
        self._matches = matches
        self._drop_idle = drop_idle

    def ahead(self, request: RequestPages, blocks: int, states: Positions) -> None:
        """Ask the daemon for pages of a request that waits, and go on. Where it had none, take those of the stock, and
        first give back what other requests hold that wait."""
        if request.is_growing or self._grants.is_short or not self._grants.outbox.has_room:
            return
        if request.was_refused:
            request.was_refused = False
            self._drop_idle(request)
            self._grants.grow_some(request, blocks)
        self._grants.ask(request, blocks, states, self._matches.wanting(request), no_wait=True)

    def now(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Ask the daemon for pages; where it has too few, with what this engine can spare: hits of requests that wait,
        and its stock. True once the request has them; False at once where an answer does not come in time."""
        if self._allocate(request, blocks, states):
            return True
        assert request.sequence is not None
        if self._grants.is_late(request):
            return False
        if self._drop_idle(request) and self._allocate(request, blocks, states):
            return True
        hit_blocks = request.sequence.hit_blocks
        if request.rows < hit_blocks and not self._allocate(request, hit_blocks, NO_POSITIONS):
            return False
        self._grants.grow_some(request, blocks)
        return request.has_pages(blocks, states) or self._allocate(request, blocks, states)

    def _allocate(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        others = [] if request.taken or self._grants.is_short else self._matches.wanting(request)
        return not request.is_growing and self._grants.allocate(request, blocks, states, others)


class PrivatePages:
    """``pools``: number of those that pages are of. ``has_markers``: the first one's are markers, which no kernel
    reads: without the daemon a block has none."""

    def __init__(self, pools: int = 1, *, has_markers: bool = False) -> None:
        self._pages: list[list[int]] = [[] for _ in range(pools)]
        self._has_markers = has_markers

    def count(self, pool: int = 0) -> int:
        return sys.maxsize if self._has_markers and not pool else len(self._pages[pool])

    def take_stock(self, stock: Stock | None, leads: Sequence[int]) -> None:
        """Take all that is in stock. ``leads``: a group of each pool, the first one of those in the layout."""
        for cells in stock.drain() if stock is not None else ():
            if cells.group in leads:  # no engine computes markers
                self._pages[leads.index(cells.group)] += cells.pages

    def take_ended(self, ended: Iterable[RequestPages]) -> None:
        """Take the pages of ended requests too."""
        for request in ended:
            for pool in request.pools:
                self._pages[pool] += request.private_pages(pool)

    def add(self, pages: Iterable[int], pool: int = 0) -> None:
        """Take pages that a request reads no more."""
        self._pages[pool] += pages

    def lengthen(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Make a request's table ``blocks`` long, with pages for ``states``; False where there are too few pages, or
        what it was to load will not come."""
        if request.rows < request.shared_blocks or (request.lacks_tail and request.has_lent_tail):
            return False
        growth = request.growth(blocks, states)
        if any(request.missing_pages(growth, pool) > self.count(pool) for pool in request.pools):
            return False
        if request.lacks_tail:
            assert request.tail is not None
            request.tail.pages += self._take(1)
        new = range(request.rows, growth.blocks)
        request.pages += self._take(len(new) * request.lead_parts.count)
        for table in request.others:
            if table.is_state:
                wanted = growth.positions[table.state_group]
                table.add([self._take(1, table.pool)[0] if position in wanted else NO_PAGE for position in new])
            else:
                table.add(self._take(len(new) * table.parts.count, table.pool))
        return True

    def _take(self, pages: int, pool: int = 0) -> list[int]:
        if self._has_markers and not pool:
            return [NO_PAGE] * pages
        mine = self._pages[pool]
        taken = mine[:pages]
        del mine[:pages]
        return taken


def salted(hashes: Sequence[bytes], *salts: bytes) -> bytes:
    """Pack keys, each mixed with all ``salts`` that are not empty: other keys, as far apart as the hashes."""
    keys = b"".join(hashes)
    for each in filter(None, salts):
        keys = (np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES) ^ np.frombuffer(each, np.uint8)).tobytes()
    return keys


# Back-off of an engine: it gives back what it got for requests that wait. Engines on one pool know nothing of each
# other: two of which neither runs anything may each have what the other waits for.

Clock = Callable[[], float]
TRIES_S = 0.05
"""Time for which an engine that runs nothing tries, seconds; then it backs off for once to twice as long, so that
engines separate."""


class GivingWay:
    """Used from one thread. ``is_away``: nothing is asked for now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = math.inf
        self._away_until_s = 0.0

    @property
    def is_away(self) -> bool:
        """True for a moment after ``is_due`` was."""
        return self._clock() < self._away_until_s

    def admit(self) -> None:
        """Reset the back-off: a request found room."""
        self._since_s = math.inf

    def is_due(self, *, is_idle: bool) -> bool:
        """A request found no room: True where it is time to give back. ``is_idle``: nothing of this engine runs."""
        now_s = self._clock()
        if not is_idle:
            self._since_s = math.inf
        elif self._since_s == math.inf:
            self._since_s = now_s
        elif now_s - self._since_s > TRIES_S:
            self._away_until_s = self._since_s = now_s + TRIES_S * (1 + random.random())
            return True
        return False
