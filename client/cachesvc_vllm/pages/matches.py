"""Requests that have come, and their matches: of many that wait, all that may run next are matched in one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from cachesvc_client import CacheClientError, DeadlineExceeded, PendingStep, PoolExhausted, StepStream

from cachesvc_vllm.daemon.errors import News
from cachesvc_vllm.pages.group_tables import EngineGroups
from cachesvc_vllm.pages.request_pages import RequestPages, Wish

MOST_AGAIN = 16_384
"""Blocks of which requests are matched again in one message: half a mebibyte of keys, at most every 20 ms."""

log = logging.getLogger(__name__)


class Matches:
    """``pack``: the daemon's keys of hashes and a salt. At most one message is under way. Used from vLLM's scheduler
    thread."""

    def __init__(
        self, stream: StepStream, pack: Callable[[Sequence[bytes], bytes], bytes], groups: EngineGroups
    ) -> None:
        self._stream = stream
        self._groups = groups
        self._pack = pack
        self._coming: dict[str, Wish] = {}
        self._sent: tuple[PendingStep, list[RequestPages]] | None = None

    @property
    def are_under_way(self) -> bool:
        """True until the answer was taken."""
        return self._sent is not None

    def expect(self, request_id: str, wish: Wish) -> None:
        """Note a request that has come, and will be begun."""
        self._coming[request_id] = wish

    def forget(self, request_id: str) -> None:
        """Forget a request that was begun, or ended before."""
        self._coming.pop(request_id, None)

    def next_coming(self, room_blocks: int) -> dict[str, Wish]:
        """Requests that have come first, as far as ``room_blocks`` go."""
        chosen: dict[str, Wish] = {}
        for request_id, wish in self._coming.items():
            room_blocks -= wish.first_blocks
            if room_blocks < 0:
                break
            chosen[request_id] = wish
        return chosen

    def send(self, wishes: dict[str, Wish], now_s: float) -> list[RequestPages]:
        """Ask, unless a message is under way; the requests that are begun with it."""
        if self._sent is not None:
            return []
        batch = self._stream.batch()
        for wish in wishes.values():
            keys = self._pack(wish.hashes, wish.salt) if wish.most_blocks else b""
            expected = wish.expected if wish.most_blocks else None
            batch.match(keys, max_blocks=wish.most_blocks, expected=expected, retention=wish.retention)
        try:
            step = self._stream.send(batch)
        except CacheClientError as error:
            refused("match", next(iter(wishes)), error)
            return []
        requests = [
            RequestPages.begin(
                self._groups, request_id, now_s, first_blocks=wish.first_blocks, is_matching=True, wish=wish
            )
            for request_id, wish in wishes.items()
        ]
        self._sent = step, requests
        return requests

    def take(self, timeout_s: float) -> list[RequestPages]:
        """Wait for the answer to what was sent, if anything was. Return the abandoned requests that have a sequence
        now. Requests without an answer in time stay pending."""
        if self._sent is None:
            return []
        step, requests = self._sent
        try:
            results = step.results(timeout_s)
        except DeadlineExceeded as late:
            refused("match", requests[0].request_id, late)
            return []
        except CacheClientError as error:
            results = [error] * len(requests)
        self._sent = None
        for request, result in zip(requests, results, strict=True):
            request.is_matching = False
            if isinstance(result, CacheClientError):
                refused("match", request.request_id, result)
            else:
                request.match(result)
        return [request for request in requests if request.is_forgotten and request.sequence is not None]

    def move(self, stream: StepStream) -> None:
        """Go on by another stream. What was under way on the old one has no answer."""
        self._stream = stream
        self._sent = None


def coming_again(requests: Iterable[RequestPages], now_s: float) -> dict[str, Wish]:
    """Return requests whose blocks are coming from another node and that are due to be matched again: those that were
    matched longest ago, of ``MOST_AGAIN`` blocks together, or one."""
    again, blocks = dict[str, Wish](), 0
    for each in sorted(requests, key=lambda each: each.begun_s):
        if each.wish is None or not each.is_coming or each.is_recent(now_s):
            continue
        blocks += each.wish.most_blocks
        if again and blocks > MOST_AGAIN:
            break
        again[each.request_id] = each.wish
    return again


def refused(what: str, request_id: str, error: CacheClientError) -> None:
    """Log what the daemon did not do. The engine asks again in each iteration, so a refusal is a warning once for each
    request and kind of reason, and then every minute (``News``). A full pool is none."""
    if isinstance(error, PoolExhausted):
        log.debug("pool_exhausted request=%s why=%s", request_id, error)
        return
    is_news = _news.setdefault(what, News()).is_new((request_id, type(error)))
    log.log(logging.WARNING if is_news else logging.DEBUG, "%s_refused request=%s why=%s", what, request_id, error)


_news: dict[str, News] = {}
"""By what was asked for."""
