"""Computed blocks of requests: sealed when the output has come that computed them, and at their requests' ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from cachesvc_client.plugins.pages.page_book import PageBook
from cachesvc_client.plugins.pages.request_pages import RequestPages
from cachesvc_client.plugins.pages.untold import Written

from cachesvc_vllm.kv_events import Announcer
from cachesvc_vllm.namespace.draft_keys import LookaheadKeys
from cachesvc_vllm.pages.lengths import computed_blocks

RUNNING = "RUNNING"
"""Status of a request that vLLM schedules, or has an output of to come."""


class Sealer:
    """``announcer``: notes the keys of what is sealed; None: there are no KV events. ``lookahead_tokens``: those that a
    drafter reads ahead. Used from vLLM's scheduler thread."""

    def __init__(
        self, book: PageBook, keys: LookaheadKeys, announcer: Announcer | None, block_tokens: int, lookahead_tokens: int
    ) -> None:
        self._book = book
        self._keys = keys
        self._announcer = announcer
        self._block_tokens = block_tokens
        self._lookahead_tokens = lookahead_tokens
        self._redrafted_tokens = max(0, lookahead_tokens - 1)

    def seal(self, request: Any, keys: Sequence[bytes] | None = None) -> int:
        """Seal what a request has computed; the number of these blocks. ``keys``: of the request, where they are at
        hand."""
        if keys is None:
            keys = self._keys.of(request)
        full_blocks = computed_blocks(
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_tokens=self._block_tokens,
            keys=len(keys),
            redrafted_tokens=self._redrafted_tokens,
        )
        pages = self._book.find(request.request_id)
        if pages is not None:
            if self._announcer is not None:
                self._announcer.note(request, keys, pages.salt)
            self._book.seal(pages, min(full_blocks, pages.taken_blocks), keys)
        return full_blocks

    def seal_filled(self, filling: dict[str, tuple[Any, int]]) -> None:
        """Seal what an output has computed of requests that have full blocks, by id and up to where; those are taken
        out that have no more of them."""
        if not filling:
            return
        for request_id, (request, full_blocks) in list(filling.items()):
            if request.is_finished() or self.seal(request) >= full_blocks or self._book.find(request_id) is None:
                del filling[request_id]

    def begin_step(self, filling: Mapping[str, tuple[Any, int]], scheduled: Collection[str]) -> None:
        """A step is launched that computes the ``scheduled`` requests, of which ``filling`` has blocks that will be
        full. A drafter may write behind its step's output, and who vouches for an adapter looks at running requests:
        of these nothing is sealed once vLLM has let go of them."""
        writes = []
        if not self._lookahead_tokens:
            for request_id, (request, blocks) in filling.items():
                pages = self._book.find(request_id)
                if pages is not None and pages.held and request_id in scheduled and request.lora_request is None:
                    keys = self._keys.of(request)
                    is_over = partial(self._is_over, request, pages)
                    writes.append(Written(pages, min(blocks, len(keys)), keys, is_over))
        self._book.begin_writes(writes)

    def _is_over(self, request: Any, pages: RequestPages) -> bool:
        return request.status.name != RUNNING or self._book.find(request.request_id) is not pages

    def end(self, request: Any, tail_keys: Sequence[bytes]) -> None:
        """Seal what a request has computed that has ended. ``tail_keys``: of its blocks with a last one that is not
        full, where that is handed over."""
        keys, pages = self._keys.of(request), self._book.find(request.request_id)
        self._keys.forget(request.request_id)
        if pages is None:
            self._book.forget(request.request_id)
            return
        self.seal(request, keys)
        if tail_keys:
            self._book.seal(pages, min(len(tail_keys), pages.taken_blocks), tail_keys)
        self._book.finish(pages, request.num_output_tokens)
