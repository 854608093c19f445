"""Cache of the first rank: it decides for all, and sends each decision to the others.

What is free changes when the daemon answers. So SGLang reads numbers that were sent with the last decision: between two
decisions they change on no rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cachesvc_client.plugins.request_pages import RequestPages

from cachesvc_sglang.calls import LEASE, Called, LoadAnswer, MatchAnswer, prompt_call, requests_call
from cachesvc_sglang.engine_cache import name_of
from cachesvc_sglang.links import Call, FollowerLinks, NewPages, Record
from cachesvc_sglang.page_cache import PageCache


class LeadingCache(PageCache):
    """``context``: as of ``PageCache``, with the links to the other ranks. ``is_to_move``: as of the iteration's
    begin."""

    is_to_move = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._followers: FollowerLinks = self.token_to_kv_pool_allocator.get_kvcache().cachesvc.followers
        self._told: dict[str, tuple[RequestPages, int]] = {}
        self._free_tokens = self._reserved_tokens = (0,) * len(self._pool_blocks)
        self._tell((Called.START,), None)

    # -- matches -----------------------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """Find what the daemon has of a request's prompt, and send the hit."""
        found = super().match_prefix(params)
        if params.req is None:
            return found
        rid, node, answer = name_of(params.req), found.last_device_node, None
        if isinstance(node, RequestPages):
            is_new = rid not in self._told or self._told[rid][0] is not node
            if is_new:
                self._told[rid] = node, 0
            answer = MatchAnswer(is_new, node.hit_blocks, node.host_blocks, self._loads.is_used(node))
        self._tell(prompt_call(rid, params.key, self._keys.get(rid), self.page_size), answer, [node])
        return found

    def init_load_back(self, params: Any) -> Any:
        """Load what the host has of a request, and send what became of it."""
        pages = params.best_match_node
        loaded = super().init_load_back(params)
        answer = LoadAnswer(self._loads.running(pages), self._loads.is_used(pages), loaded is not None)
        self._tell((Called.LOAD, pages.request_id), answer, [pages])
        return loaded

    # -- pages -------------------------------------------------------------------------------------------------------

    def available_tokens(self, pool: int = 0) -> int:
        """Tokens of a pool that could be had at the last decision."""
        return self._free_tokens[pool]

    def reserved_tokens(self, pool: int = 0) -> int:
        """Tokens that were reserved and not allocated at the last decision."""
        return self._reserved_tokens[pool]

    def ask_room(self) -> None:
        """Have the daemon say anew what is free, and send it."""
        super().ask_room()
        self._tell((Called.ROOM,), None)

    def reserve(self, new_tokens: int, *, fits: bool) -> bool:
        """Give the request that SGLang looks at the pages of its next tokens, and send them."""
        pages = self._looked_at
        has_room = super().reserve(new_tokens, fits=fits)
        rid = None if pages is None else pages.request_id
        self._tell((Called.PROMPT, rid, new_tokens, fits), (has_room, self._has_void_step), [pages])
        return has_room

    def reserve_decode(self, requests: Sequence[Any]) -> bool:
        """Make tables long enough for the next tokens, and send what is new of them."""
        has_room = super().reserve_decode(requests)
        call = requests_call(Called.DECODE, requests, sum(each.kv.kv_allocated_len for each in requests))
        self._tell(call, has_room, (each.last_node for each in requests))
        return has_room

    def take(self, requests: Sequence[Any], ends: Sequence[int]) -> list[list[int]] | None:
        """Tables of requests that are allocated up to these tokens."""
        tables = super().take(requests, ends)
        call = requests_call(Called.TAKE, requests, sum(ends))
        self._tell(call, tables is not None, (each.last_node for each in requests))
        return tables

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Check the lease, and send whether all requests are to begin anew."""
        super().begin_iteration()
        self.is_to_move = super().is_to_move
        self._tell((Called.ITERATION,), self.is_to_move)

    def begin_step(self, requests: Sequence[Any]) -> None:
        """A step is launched: send which of its requests have loads that run."""
        super().begin_step(requests)
        self._tell((Called.STEP, len(requests)), self._loads.launched)

    def end_launch(self, result: object) -> None:
        """A step was launched: send whether a load of it has failed, where it has loads."""
        has_loads = bool(self._loads.launched)
        super().end_launch(result)
        if has_loads:
            self._tell((Called.LAUNCHED,), self._has_void_step)

    def release_host_resources(self) -> None:
        super().release_host_resources()
        self._followers.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _next_lease(self) -> str:
        """The lease that all followers are on, once they are."""
        next_lease = super()._next_lease()
        self._tell((Called.MOVE,), next_lease)
        are_there = not next_lease or self._followers.gather(LEASE).count(next_lease) == self._followers.count
        return next_lease if are_there else ""

    def _forget(self, rid: str, *, ends: bool) -> None:
        super()._forget(rid, ends=ends)
        self._told.pop(rid, None)

    def _tell(self, call: Call, answer: object, nodes: Iterable[object] = ()) -> None:
        """Send a decision, and what is new of the tables of these requests."""
        pools = range(len(self._pool_blocks))
        self._free_tokens = tuple(super(LeadingCache, self).available_tokens(pool) for pool in pools)
        self._reserved_tokens = tuple(super(LeadingCache, self).reserved_tokens(pool) for pool in pools)
        self._followers.tell(Record(call, answer, self._free_tokens, self._reserved_tokens, self._news(nodes)))

    def _news(self, nodes: Iterable[object]) -> Mapping[str, NewPages]:
        news = {}
        for node in nodes:
            if isinstance(node, RequestPages) and (told := self._told.get(node.request_id)) and told[0] is node:
                first = told[1]
                if len(node.pages) > first:
                    windows = self._windows_of(node)[first:] if node.others else []
                    news[node.request_id] = NewPages(first, node.pages[first:], windows)
                    self._told[node.request_id] = node, len(node.pages)
        return news
