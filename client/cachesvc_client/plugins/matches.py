"""Requests that have come, and their matches: of many that wait, all that may run next are matched in one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from cachesvc_client import CacheClientError, DeadlineExceeded, PoolExhausted
from cachesvc_client.plugins.keeper import News
from cachesvc_client.plugins.outbox import Answer, Outbox
from cachesvc_client.plugins.request_pages import EngineGroups, RequestPages, Wish

MOST_RENEWED = 8
"""Requests that are matched again in an iteration: the first ones, which may be scheduled in the next. Those whose
blocks come from another node are not among them."""

MOST_AGAIN = 4096
"""Blocks of which requests are matched again in one message: an eighth of a mebibyte of keys, at most every 5 ms."""

log = logging.getLogger(__name__)


class Matches:
    """``pack``: the daemon's keys of hashes and a salt. ``abandon``: takes requests that ended before their match had
    an answer, and have a sequence since. ``ahead``: requests that were asked for and not admitted: up to
    ``ahead_blocks`` blocks. ``plain``: requests that are matched without their tail. At most one message is under way.
    Used from the engine's scheduler thread.

    A hit that ends with a tail is matched twice: with the tail, until no more of it comes, and then up to it."""

    def __init__(
        self,
        pack: Callable[[Sequence[bytes], bytes], bytes],
        groups: EngineGroups,
        abandon: Callable[[RequestPages], None],
        ahead_blocks: int,
        plain: set[str],
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._pack = pack
        self._abandon = abandon
        self._ahead_blocks = ahead_blocks
        self._plain = plain
        self._clock = clock
        self.ahead: dict[str, RequestPages] = {}
        self._coming: dict[str, Wish] = {}
        self._over: dict[str, Wish] = {}
        self._sent: list[RequestPages] = []
        self.step = 0

    @property
    def are_under_way(self) -> bool:
        return bool(self._sent)

    @property
    def are_waiting(self) -> bool:
        """True while requests wait for their turn, or the daemon has to hear of the end of one."""
        return bool(self.ahead or self._coming or self._over)

    @property
    def waiting_blocks(self) -> int:
        """First blocks of requests that wait for their turn, as far as they have none."""
        ahead = sum(max(0, each.first_blocks - each.rows) for each in self.ahead.values() if not each.is_put_off)
        return ahead + sum(wish.first_blocks for wish in self._coming.values())

    def is_recent(self, request: RequestPages, outbox: Outbox, now_s: float) -> bool:
        """True where a match is as new as can be for the iteration that is scheduled, or nearly so. An engine that
        waits for answers can have a new one at once."""
        is_last = outbox.runs() and self.step - request.step <= 1
        return is_last or request.is_recent(now_s)

    def stale(self, outbox: Outbox, now_s: float) -> dict[str, Wish]:
        """Requests to match again: some that may be scheduled in the next iteration, and those whose blocks come from
        another node."""
        if self._sent:
            return {}
        waiting = [each for each in self.ahead.values() if each.wants_match]
        others = (each for each in waiting if not (each.is_put_off or self.is_recent(each, outbox, now_s)))
        whole = (  # a shorter wish would find less each time
            (each.request_id, next_wish(each, each.wish))
            for each in others
            if each.wish is not None and not each.is_shortened
        )
        return coming_again(waiting, now_s) | dict(islice(whole, MOST_RENEWED))

    def wanting(self, but_for: RequestPages) -> list[RequestPages]:
        """Other requests that were matched, and may be given pages before they are scheduled."""
        return [each for each in self.ahead.values() if each is not but_for and each.wants_pages]

    def expect(self, request_id: str, wish: Wish) -> None:
        """Note a request that has come, and will be begun."""
        self._coming[request_id] = wish

    def forget(self, request_id: str) -> None:
        """Forget a request that was admitted, or ended before."""
        self._coming.pop(request_id, None)
        self.ahead.pop(request_id, None)

    def give_up(self, request_id: str, wish: Wish) -> None:
        """Have the daemon fetch no more of what a request expected that has ended."""
        assert wish.expected is not None
        self._over[request_id] = replace(wish, expected=wish.expected._replace(is_over=True))

    def forget_coming(self) -> None:
        """Forget requests that have come and were not sent: each is sent when it is begun."""
        self._coming.clear()

    def send(
        self, outbox: Outbox, now_s: float, first: dict[str, Wish] | None = None, *, is_idle: bool = False
    ) -> list[RequestPages]:
        """Ask for ``first``, and requests that have come first; not while a message is under way. Those asked for.
        ``is_idle``: no request has a page, so one that is alone may take its own with its match."""
        if self._sent or not outbox.has_room:
            return []
        over, self._over = self._over, {}
        wishes = {**(first or {}), **self._next_coming(is_alone=not first), **over}
        if not wishes:
            return []
        for request_id in self._plain & wishes.keys():
            wishes[request_id] = without_tail(wishes[request_id])
        whole = [each for each, wish in wishes.items() if wish.may_be_whole and not wish.goes_on]
        batch = outbox.stream.batch()
        is_alone = is_idle and len(wishes) == 1 and not (self.ahead or whole or self._plain & wishes.keys())
        for wish in wishes.values():
            keys = self._pack(wish.matched_hashes, wish.salt)
            expected = wish.expected if wish.most_blocks else None
            batch.match(
                keys,
                max_blocks=wish.most_blocks,
                expected=expected,
                retention=wish.retention,
                upto_blocks=wish.first_blocks if is_alone and wish.takes_all else 0,
                short_suffix=not wish.follows_layers,
            )
        tails = {each: RequestPages.begin(self._groups, each, now_s) for each in whole}
        for _ in tails:
            batch.match(b"", max_blocks=0)
        requests = [
            RequestPages.begin(
                self._groups,
                request_id,
                now_s,
                first_blocks=wish.first_blocks,
                is_matching=True,
                wish=wish,
                step=self.step,
            )
            for request_id, wish in wishes.items()
        ]
        try:
            outbox.send(batch, partial(self._take, outbox, requests, tails))
        except CacheClientError as error:
            refused("match", next(iter(wishes)), error)
            return []
        self._sent = requests
        for request in requests:
            request.is_forgotten = request.request_id in over
            if not request.is_forgotten:
                self._coming.pop(request.request_id, None)
                self.ahead[request.request_id] = request
        return [each for each in requests if not each.is_forgotten]

    def _next_coming(self, *, is_alone: bool) -> dict[str, Wish]:
        """Requests that have come first, as far as the limit goes; ``is_alone``: one at least, where none is ahead.
        Those that are put off run later, and stand in no other's way."""
        chosen: dict[str, Wish] = {}
        ahead = [each.first_blocks for each in self.ahead.values() if not each.is_put_off]
        room_blocks = self._ahead_blocks - sum(ahead)
        for request_id, wish in self._coming.items():
            room_blocks -= wish.first_blocks
            if room_blocks < 0 and (chosen or ahead or not is_alone):
                break
            chosen[request_id] = wish
        return chosen

    def drop(self) -> None:
        """No answer will come: the stream has ended."""
        for request in self._sent:
            request.is_matching = False
        self._sent = []

    def _take(
        self, outbox: Outbox, requests: list[RequestPages], tails: dict[str, RequestPages], answer: Answer
    ) -> None:
        if self._sent is requests:
            self._sent = []
        begun = [*requests, *tails.values()]
        results = [answer] * len(begun) if isinstance(answer, CacheClientError) else answer
        for request, result in zip(begun, results[: len(begun)], strict=True):  # the allocation of a lone one follows
            request.is_matching = False
            if isinstance(result, CacheClientError):
                refused("match", request.request_id, result)
            else:
                request.match(result)
                self._renew(request)
        for request in requests:
            tail = tails.get(request.request_id)
            if tail is not None and tail.sequence is not None and not request.take_tail(tail):
                self._abandon(tail)
            if request.is_forgotten and request.sequence is not None:
                self._abandon(request)
        self._set_apart(outbox, [each for each in requests if _has_come_with_tail(each)])

    def _set_apart(self, outbox: Outbox, requests: list[RequestPages]) -> None:
        """Match those again, up to their tails, that fill these blocks: what the sequence has there has another key."""
        if not requests:
            return
        batch = outbox.stream.batch()
        for request in requests:
            beside = RequestPages.begin(self._groups, request.request_id, request.begun_s)
            if not request.set_apart(beside):
                self._abandon(beside)
            assert request.wish is not None
            keys, blocks = self._pack(request.wish.hashes, request.wish.salt), request.wish.whole_blocks - 1
            batch.match(keys, max_blocks=blocks, retention=request.wish.retention)
        self._sent = requests
        try:
            outbox.send(batch, partial(self._take_apart, requests))
        except CacheClientError as error:
            self._take_apart(requests, error)

    def _take_apart(self, requests: list[RequestPages], answer: Answer) -> None:
        if self._sent is requests:
            self._sent = []
        results = [answer] * len(requests) if isinstance(answer, CacheClientError) else answer
        for request, result in zip(requests, results, strict=True):
            request.is_matching = False
            tail = request.tail
            if isinstance(result, CacheClientError):
                refused("match", request.request_id, result)
                self._plain.add(request.request_id)
            else:
                if tail is not None and result.hit_blocks + 1 < tail.loaded_blocks:
                    request.tail = None
                    self._abandon(tail)
                request.match(result)
                self._renew(request)
            if request.is_forgotten:
                self._abandon(request)

    def _renew(self, request: RequestPages) -> None:
        """A match is as old as its answer, which may have taken longer than a match holds."""
        if not request.is_coming:
            request.begun_s = self._clock()


def next_wish(last: RequestPages | None, wish: Wish) -> Wish:
    """Return the next match of a request. It expects nothing where the last one found that nothing is coming: the
    engine does not wait for a match that expects blocks, and while its turns take longer than a match holds, each
    request would be without an answer in each turn. Nor does it where the last one expected nothing, and was not sent
    or refused."""
    if last is None:
        return wish
    if last.sequence is not None:
        expects = last.sequence.coming_blocks > 0
    else:
        expects = last.wish is None or last.wish.expected is not None
    return wish if expects else replace(wish, expected=None)


def _has_come_with_tail(request: RequestPages) -> bool:
    """True of a request that waits with a match that may have its tail, where no more of it is on its way."""
    goes_on = request.wish is not None and request.wish.goes_on
    return goes_on and request.sequence is not None and not (request.is_forgotten or request.sequence.coming_blocks)


def without_tail(wish: Wish) -> Wish:
    """Return the match up to the tail."""
    return wish if wish.tail is None else replace(wish, most_blocks=wish.whole_blocks - 1, whole_blocks=0, tail=None)


def coming_again(requests: Iterable[RequestPages], now_s: float) -> dict[str, Wish]:
    """Return requests whose blocks are coming from another node, once one is due to be matched again: those that were
    matched longest ago, of ``MOST_AGAIN`` blocks together, or one."""
    coming = sorted((each for each in requests if each.is_coming), key=lambda each: each.begun_s)
    if not coming or coming[0].is_recent(now_s):
        return {}
    return of_one_message((each.request_id, each.wish) for each in coming if each.wish is not None)


def of_one_message(wishes: Iterable[tuple[str, Wish]]) -> dict[str, Wish]:
    """Return the first ones, by request, of ``MOST_AGAIN`` blocks together, or one."""
    chosen, blocks = dict[str, Wish](), 0
    for request_id, wish in wishes:
        blocks += wish.most_blocks
        if chosen and blocks > MOST_AGAIN:
            break
        chosen[request_id] = wish
    return chosen


def refused(what: str, request_id: str, error: CacheClientError) -> None:
    """Log what the daemon did not do. The engine asks again in each iteration, so a refusal is a warning once for each
    request and kind of reason, and then every minute (``News``). A full pool is none, nor are pages that
    come later."""
    if isinstance(error, PoolExhausted | DeadlineExceeded):
        log.debug("pool_exhausted request=%s why=%s", request_id, error)
        return
    is_news = _news.setdefault(what, News()).is_new((request_id, type(error)))
    log.log(logging.WARNING if is_news else logging.DEBUG, "%s_refused request=%s why=%s", what, request_id, error)


_news: dict[str, News] = {}
"""By what was asked for."""


# Prompts that requests of this engine compute, while others with the same beginning wait.
#
# Requests that come together are matched before any of them computes, so each would compute what all have in common.
# The first one does, and the others wait until its blocks are reported, and are matched again:
#
#     iteration 1   the first one computes
#               2   its blocks are reported, and behind that the others' matches are sent
#               3   the others are scheduled, with a hit


class Prefills:
    """``untold``: reports that must wait. ``has_states``: a hit needs a state at its end, which a prompt leaves at the
    end of its last block. ``least_blocks``: that a request waits for. Used from the engine's scheduler thread.

    A request waits for one other (``RequestPages.waits_for``), which it is paired with once: a hash stands for all
    before it, so the one to wait for is looked up by the hash of the last block that it must have."""

    def __init__(self, untold: Untold, *, has_states: bool = False) -> None:
        self.least_blocks = 1
        self._untold = untold
        self._has_states = has_states
        self._computed: dict[str, RequestPages] = {}
        self._by_hash: dict[int, dict[tuple[bytes, bytes], list[RequestPages]]] = {}
        self._waiting: dict[str, RequestPages] = {}

    @property
    def are_due(self) -> bool:
        """True where requests are to be matched again."""
        return any(self._is_due(each) for each in self._waiting.values())

    def begin(self, request: RequestPages) -> None:
        """Note a request that the engine has admitted: it computes its prompt."""
        self.forget(request.request_id)
        if request.is_shared and _last_block(request) - request.loaded_blocks >= self.least_blocks:
            self._computed[request.request_id] = request
            for at, known in self._by_hash.items():
                _note(known, at, request)

    def forget(self, request_id: str) -> None:
        """Forget a request that was matched again, is admitted, or has ended. Idempotent."""
        if (request := self._waiting.pop(request_id, None)) is not None:
            request.waits_for = None

    def clear(self) -> None:
        """Forget all requests: their pages are those of a lease that is lost, and none waits for another."""
        for each in self._waiting.values():
            each.waits_for = None
        self._computed.clear()
        self._by_hash.clear()
        self._waiting.clear()

    def must_wait(self, request: RequestPages) -> bool:
        """True while another request computes blocks that continue this one's hit, and then until this one was matched
        again."""
        if request.waits_for is None:
            self._pair(request)
        return request.waits_for is not None

    def take_due(self, ahead: Iterable[RequestPages]) -> dict[str, Wish]:
        """Requests to match again, those of ``MOST_AGAIN`` blocks together: what they wait for is reported, or will not
        come. So are those ``ahead`` that were matched before another's prompt was reported with which they begin."""
        over = [each for each in self._computed.values() if _is_reported(each) or not self._comes(each)]
        if any(_is_reported(each) for each in over):
            for request in ahead:
                if request.waits_for is None and not request.is_coming:
                    self._pair(request)
        for each in over:
            del self._computed[each.request_id]
            self._by_hash.clear()
        due = (each for each in self._waiting.values() if self._is_due(each))
        return of_one_message((each.request_id, each.wish.whole) for each in due if each.wish is not None)

    def _pair(self, request: RequestPages) -> None:
        """Have a request wait, if another one computes enough of it behind its hit and has more to report of that."""
        wish, at = request.wish, request.loaded_blocks + self.least_blocks - 1
        if not self._computed or wish is None or at >= len(wish.hashes):
            return
        if at not in self._by_hash:
            known = self._by_hash[at] = {}
            for each in self._computed.values():
                _note(known, at, each)
        for other in self._by_hash[at].get((wish.salt, wish.hashes[at]), ()):
            common = self._common(request, other)
            if other.request_id != request.request_id and common and self._comes(other):
                request.waits_for, request.waits_upto = other, common
                self._waiting[request.request_id] = request
                return

    def _common(self, request: RequestPages, other: RequestPages) -> int:
        """Number of blocks up to which a request waits for another one; 0: for none."""
        assert request.wish is not None
        assert other.wish is not None
        last = _last_block(other)
        end = min(last, request.wish.whole.most_blocks)
        common = _common(other.wish.hashes, request.wish.hashes, request.loaded_blocks, end)
        leaves_hit = not self._has_states or common >= last - 1
        is_sent = common <= _asked_blocks(other) < last
        is_enough = common - request.loaded_blocks >= self.least_blocks
        return common if is_enough and leaves_hit and not is_sent else 0

    def _is_due(self, request: RequestPages) -> bool:
        other = request.waits_for
        if other is None or request.is_matching:
            return False
        return _asked_blocks(other) >= request.waits_upto or not self._comes(other)

    def _comes(self, request: RequestPages) -> bool:
        """True while more of a request is reported to the daemon, or was."""
        return request.is_shared and (request.held > 0 or _is_reported(request) or self._untold.has_blocks(request))


def _note(known: dict[tuple[bytes, bytes], list[RequestPages]], at: int, request: RequestPages) -> None:
    """Note a request by the hash of its block ``at``, and by its salt."""
    if request.wish is not None and at < len(request.wish.hashes):
        known.setdefault((request.wish.salt, request.wish.hashes[at]), []).append(request)


def _asked_blocks(request: RequestPages) -> int:
    return 0 if request.sequence is None else request.sequence.record.asked_blocks


def _is_reported(request: RequestPages) -> bool:
    """True once all full blocks of a prompt have been reported to the daemon."""
    return _asked_blocks(request) >= _last_block(request)


def _last_block(request: RequestPages) -> int:
    """Number of full blocks of a request's prompt."""
    return 0 if request.wish is None else len(request.wish.hashes)


def _common(one: Sequence[bytes], other: Sequence[bytes], first: int, end: int) -> int:
    """Number of leading hashes that are equal in both, at most ``end``; those before ``first`` are. Each hash stands
    for all before it."""
    while first < end:
        middle = (first + end + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            first = middle
        else:
            end = middle - 1
    return first


# Reports to the daemon that must wait: computed blocks, cells that are not read any more, and ended requests.
#
# A drafter's kernels may run on when a step's output has come, for sampled tokens are copied out before that. They
# write KV behind what the step has computed. With a drafter the daemon gets the report of an output's blocks after the
# next output, whose kernels ran behind them, or after that of a step that computes nothing, for which workers wait.
#
#     end_step   blocks of this output, requests that it ended     -> late
#     end_step   of the next                                       -> ready, sent by the next flush


@dataclass(slots=True)
class Sealing:
    """``blocks``: how many leading blocks are computed; ``keys``: of these. ``states``: by group and position, the
    pages of states that are among them."""

    blocks: int
    keys: Sequence[bytes]
    states: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, newer: Sealing) -> None:
        self.blocks, self.keys = newer.blocks, newer.keys
        for group, states in newer.states.items():
            self.states.setdefault(group, {}).update(states)


@dataclass(slots=True)
class Written:
    """Blocks that a step under way writes of a request: once its output has come, the first ``blocks`` are computed.
    ``is_over``: then, True where the engine has let go of the request meanwhile, and says nothing of it any more."""

    request: RequestPages
    blocks: int
    keys: Sequence[bytes]
    is_over: Callable[[], bool]


@dataclass(slots=True)
class Reports:
    """Reports to make. ``dead``: by group, the first block that a request may still read. ``has_prompts``: blocks of
    prompts are among those that are computed."""

    sealing: dict[RequestPages, Sealing] = field(default_factory=dict)
    dead: dict[RequestPages, dict[int, int]] = field(default_factory=dict)
    ended: list[RequestPages] = field(default_factory=list)
    has_prompts: bool = False

    def __bool__(self) -> bool:
        """True where there is a report to make."""
        return bool(self.sealing or self.dead or self.ended)

    @property
    def is_urgent(self) -> bool:
        """True where it tells of more than decoding: others can use pages that come back, and prompts."""
        return self.has_prompts or bool(self.ended or self.dead)

    def add(self, other: Reports) -> None:
        """Take all that ``other`` has, which is newer."""
        if not other:
            return
        for request, sealing in other.sealing.items():
            self.seal(request, sealing)
        self.has_prompts |= other.has_prompts
        for request, dead in other.dead.items():
            self.dead.setdefault(request, {}).update(dead)
        self.ended += other.ended
        other.clear()

    def seal(self, request: RequestPages, sealing: Sealing) -> None:
        if (older := self.sealing.get(request)) is None:
            self.sealing[request] = sealing
        else:
            older.add(sealing)

    def clear(self) -> None:
        self.sealing.clear()
        self.dead.clear()
        self.ended.clear()
        self.has_prompts = False


class Untold:
    """Used from the engine's scheduler thread. ``is_late``: there is a drafter."""

    def __init__(self) -> None:
        self.is_late = False
        self.ready, self._late, self._fresh = Reports(), Reports(), Reports()

    def __bool__(self) -> bool:
        """True where a report may be sent."""
        return bool(self.ready)

    @property
    def has_late_pages(self) -> bool:
        """True where requests that have ended will give pages back without anything else."""
        return bool(self._late.ended or self._fresh.ended)

    def seal(self, request: RequestPages, sealing: Sealing, *, is_prompt: bool = False) -> None:
        newest = self._newest
        newest.seal(request, sealing)
        newest.has_prompts |= is_prompt

    def recycle(self, request: RequestPages, dead: Mapping[int, int]) -> None:
        """Note that the request reads no block before these, by group."""
        self._newest.dead.setdefault(request, {}).update(dead)

    def end(self, request: RequestPages) -> None:
        """Note that the engine has freed all pages of the request."""
        self._newest.ended.append(request)

    @property
    def _newest(self) -> Reports:
        return self._fresh if self.is_late else self.ready

    def begin_step(self) -> None:
        """Note that what is fresh was said without an output: kernels of the last output were the last to write it."""
        if self.is_late:
            self._late.add(self._fresh)

    def begin_output(self) -> None:
        """An output has come: all kernels before its step's have ended."""
        if self.is_late:
            self.ready.add(self._late)

    def end_output(self, *, computes: bool) -> None:
        """Note the end of an output. Without ``computes`` workers have waited for all kernels."""
        if self.is_late:
            (self._late if computes else self.ready).add(self._fresh)

    def settle(self) -> None:
        """Let all be used by this engine itself, whose kernels run one after another."""
        self.begin_output()
        self.end_output(computes=False)

    def forget_blocks(self, request: RequestPages | None = None) -> None:
        """Seal none of what is computed, or none of one request's."""
        for part in (self.ready, self._late, self._fresh):
            if request is not None:
                part.sealing.pop(request, None)
                continue
            part.sealing.clear()
            part.has_prompts = False

    def has_blocks(self, request: RequestPages) -> bool:
        """True where computed blocks of a request are to be reported."""
        return any(request in part.sealing for part in (self.ready, self._late, self._fresh))

    def clear(self) -> None:
        for part in (self.ready, self._late, self._fresh):
            part.clear()
