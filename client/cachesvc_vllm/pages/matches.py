"""Requests that have come, and their matches: of many that wait, all that may run next are matched in one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from cachesvc_client import CacheClientError, DeadlineExceeded, PoolExhausted

from cachesvc.model.layout import Layout
from cachesvc_vllm.daemon.errors import News
from cachesvc_vllm.pages.group_tables import other_tables
from cachesvc_vllm.pages.request_pages import RequestPages, Wish
from cachesvc_vllm.steps.outbox import Answer, Outbox

MATCH_HOLDS_S = 0.05
"""A request that waits for room is matched again after so long: others may have computed more of it by then."""

MOST_RENEWED = 8
"""Requests that are matched again in an iteration: the first ones, which may be scheduled in the next."""

log = logging.getLogger(__name__)


class Matches:
    """``pack``: the daemon's keys of hashes and a salt. ``abandon``: takes requests that ended before their match had
    an answer, and have a sequence since. ``ahead``: requests that were asked for, which vLLM has not admitted: up to
    ``ahead_blocks`` blocks. At most one message is under way. Used from vLLM's scheduler thread."""

    def __init__(
        self,
        pack: Callable[[Sequence[bytes], bytes], bytes],
        layout: Layout,
        abandon: Callable[[RequestPages], None],
        ahead_blocks: int,
    ) -> None:
        self._layout = layout
        self._pack = pack
        self._abandon = abandon
        self._ahead_blocks = ahead_blocks
        self.ahead: dict[str, RequestPages] = {}
        self._coming: dict[str, Wish] = {}
        self._sent: list[RequestPages] = []
        self.step = 0

    @property
    def are_under_way(self) -> bool:
        """True until the answer was taken."""
        return bool(self._sent)

    @property
    def waiting_blocks(self) -> int:
        """First blocks of requests that wait, as far as they have none."""
        ahead = sum(max(0, each.first_blocks - len(each.pages)) for each in self.ahead.values())
        return ahead + sum(wish.first_blocks for wish in self._coming.values())

    def is_recent(self, request: RequestPages, now_s: float) -> bool:
        """True where a match is as new as can be for the iteration that is scheduled, or nearly so."""
        return self.step - request.step <= 1 or now_s - request.begun_s < MATCH_HOLDS_S

    def stale(self, now_s: float) -> dict[str, Wish]:
        """Requests to match again, for they may be scheduled in the next iteration."""
        stale = (
            (each.request_id, each.wish)
            for each in self.ahead.values()
            if each.wish is not None and each.wants_match and not self.is_recent(each, now_s)
        )
        return {} if self._sent else dict(islice(stale, MOST_RENEWED))

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

    def send(self, outbox: Outbox, now_s: float, first: dict[str, Wish] | None = None) -> list[RequestPages]:
        """Ask for ``first``, and requests that have come first; not while a message is under way. Those asked for."""
        if self._sent or not outbox.has_room:
            return []
        wishes = {**(first or {}), **self._next_coming(0 if first or self.ahead else 1)}
        if not wishes:
            return []
        batch = outbox.stream.batch()
        for wish in wishes.values():
            keys = self._pack(wish.hashes, wish.salt) if wish.most_blocks else b""
            batch.match(keys, max_blocks=wish.most_blocks)
        requests = [
            RequestPages(
                request_id,
                now_s,
                lead=self._layout.full_groups[0],
                others=other_tables(self._layout),
                first_blocks=wish.first_blocks,
                is_matching=True,
                salt=wish.salt,
                wish=wish,
                step=self.step,
            )
            for request_id, wish in wishes.items()
        ]
        try:
            outbox.send(batch, partial(self._take, requests))
        except CacheClientError as error:
            refused("match", next(iter(wishes)), error)
            return []
        self._sent = requests
        for request in requests:
            self._coming.pop(request.request_id, None)
            self.ahead[request.request_id] = request
        return requests

    def _next_coming(self, at_least: int) -> dict[str, Wish]:
        """Requests that have come first, as far as the limit goes, ``at_least`` this number."""
        chosen: dict[str, Wish] = {}
        room_blocks = self._ahead_blocks - sum(each.first_blocks for each in self.ahead.values())
        for request_id, wish in self._coming.items():
            room_blocks -= wish.first_blocks
            if room_blocks < 0 and len(chosen) >= at_least:
                break
            chosen[request_id] = wish
        return chosen

    def drop(self) -> None:
        """No answer will come: the stream has ended."""
        for request in self._sent:
            request.is_matching = False
        self._sent = []

    def _take(self, requests: list[RequestPages], answer: Answer) -> None:
        if self._sent is requests:
            self._sent = []
        results = [answer] * len(requests) if isinstance(answer, CacheClientError) else answer
        for request, result in zip(requests, results, strict=True):
            request.is_matching = False
            if isinstance(result, CacheClientError):
                refused("match", request.request_id, result)
            else:
                request.match(result)
                if request.is_forgotten:
                    self._abandon(request)


def refused(what: str, request_id: str, error: CacheClientError) -> None:
    """Log what the daemon did not do. The engine asks again in each iteration, so a refusal is a warning once for each
    request and kind of reason, and then every minute (``News``). A full pool is none, nor are
    pages that come later."""
    if isinstance(error, PoolExhausted | DeadlineExceeded):
        log.debug("pool_exhausted request=%s why=%s", request_id, error)
        return
    is_news = _news.setdefault(what, News()).is_new((request_id, type(error)))
    log.log(logging.WARNING if is_news else logging.DEBUG, "%s_refused request=%s why=%s", what, request_id, error)


_news: dict[str, News] = {}
"""By what was asked for."""
