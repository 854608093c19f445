"""SGLang's prefix cache, whose content is the daemon's index: a request's node is its own hold on pages.

SGLang's tree has nodes that requests share and lock. Here the daemon has the index. A match opens a sequence that pins
its hit; the request's pages (``RequestPages``) stand where SGLang keeps a node, from the match to the release, and its
lock is that sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from cachesvc_client import CacheClientError, DaemonUnavailable, LeaseLost
from cachesvc_client.plugins.keeper import STUCK, WeightsVersion
from cachesvc_client.plugins.node import announced_in
from cachesvc_client.plugins.outbox import LEASE_LOOK_S
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import RequestPages, Wish
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, IncLockRefResult

from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc_sglang.engine_cache import ROOT, CacheMetrics, EngineCache, name_of
from cachesvc_sglang.host_loads import HostLoads
from cachesvc_sglang.plain import EngineRefused, may_share

AHEAD_DIVISOR = 8
"""Largest part of the pool that waiting requests get ahead of their turn: other engines want it too."""

log = logging.getLogger("sglang.srt." + __name__)


class PageCache(EngineCache):
    """``context``: SGLang's ``TreeCacheBuildContext``. Used from SGLang's scheduler thread."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        params, allocator = context.params, self.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        registration = self.node.lease.registration
        step_tokens = max(params.chunked_prefill_size or 0, 0) or self.total_size()
        self._chunk_blocks = step_tokens // self.page_size if self.supports_swa() else self._pool_blocks[0]
        ahead = min(step_tokens // self.page_size, min(self._pool_blocks) // AHEAD_DIVISOR)
        self._book = PageBook(self.node.lease, self._settings.stock_blocks, ahead)
        self._book.untold.is_late = bool(self.node.pool.is_on_gpu)
        self._weights = WeightsVersion(
            self._settings.weights_version, announced_in(registration), self.node.announced_weights
        )
        if pool.cachesvc.replaced:
            self._weights.lose(pool.cachesvc.replaced)
        self._book.salt = self._weights.salt
        self._check = self.node.page_check()
        self._metrics = self._make_metrics(registration.layout) if params.enable_metrics else None
        followers = pool.cachesvc.followers
        self._loads = HostLoads(self.node, self._book.without_host, pool.layer_num, self._metrics, followers)
        pool.register_layer_transfer_counter(self._loads)
        self._changes_weights = self._resets_later = False
        self._looked_at: RequestPages | None = None
        self._computed_tokens = 0
        self._reserved: dict[str, RequestPages] = {}
        allocator.bind(self)

    # -- matches -----------------------------------------------------------------------------------------------------

    def expect(self, request: Any) -> None:
        """A request waits: match it before its turn, so that SGLang waits for no answer then."""
        name = name_of(request)
        if self._book.find(name) is None:
            self._book.expect(name, self._wish(request, request.origin_input_ids + request.output_ids, None))

    def match_prefix(self, params: Any) -> Any:
        """Find what the daemon has of a request's prompt; it stays pinned until the request ends or is matched anew."""
        request = params.req
        if request is None:
            return self._found(ROOT, 0, 0)
        wish = self._wish(request, params.key.token_ids, params.key.limit)
        name = name_of(request)
        self._loads.match(name)
        pages = self._book.find(name)
        if pages is None or not self._loads.look(pages):
            pages = self._book.begin(name, wish)
        if pages.is_matching:  # its hit would come after a match that reported none, and be computed over
            return self._found(ROOT, 0, 0)
        self._looked_at = pages
        return self._found(pages, pages.hit_blocks, pages.host_blocks)

    def inc_lock_ref(self, node: Any) -> Any:
        """SGLang looks at the request of this node. Its pages are pinned since its match."""
        self._looked_at = node if isinstance(node, RequestPages) else None
        self._computed_tokens = node.loaded_blocks * self.page_size if isinstance(node, RequestPages) else 0
        return IncLockRefResult()

    def look_at_chunk(self, request: Any) -> None:
        """SGLang looks at the request whose next chunk is to be computed."""
        node = request.last_node
        self._looked_at = node if isinstance(node, RequestPages) else None
        self._computed_tokens = request.prefix_len

    def path_device_indices(self, node: Any) -> Any:
        """Slots of what a match has found in place, and of what SGLang was told to load."""
        if not isinstance(node, RequestPages):
            return torch.empty(0, dtype=torch.int64)
        blocks = node.loaded_blocks if self._loads.is_used(node) else node.hit_blocks
        return self._indices(node.pages[:blocks])

    def init_load_back(self, params: Any) -> Any:
        """Load what the host has of a request that has its pages. None where others run: SGLang asks again, until all
        has come. Where nothing runs, SGLang computes at once, and each layer waits for its part. None after a failure,
        too: the request is matched again, and computes what did not come."""
        pages = params.best_match_node
        self._loads.begin(pages)
        if self._loads.look(pages):
            if not self._book.is_empty:
                return None
            self._loads.use_early(pages)
        elif not self._loads.has_come(pages):
            return None
        return pages.host_blocks * self.page_size, pages

    # -- pages -------------------------------------------------------------------------------------------------------

    def available_tokens(self, pool: int = 0) -> int:
        """Tokens of a pool that can be had, those of this pass's reservations left out."""
        return int(self._book.free_blocks(self._pool_blocks[pool], None, pool) * self.page_size)

    def reserved_tokens(self, pool: int = 0) -> int:
        """Tokens that this pass has reserved, and that are not allocated yet. Pages that came with the match of the
        request that SGLang looks at are among them: for the daemon they are in use."""
        reserved, looked_at = sum(each.spare_pages(pool) for each in self._reserved.values()), self._looked_at
        if looked_at is not None and not looked_at.taken and looked_at.request_id not in self._reserved:
            table = self._windows_of(looked_at) if pool else looked_at.pages
            reserved += sum(page != NO_PAGE for page in table[looked_at.hit_blocks :])
        return int(reserved * self.page_size)

    def ask_room(self) -> None:
        """Have the daemon say anew what is free."""
        self._book.ask_room()

    def reserve(self, new_tokens: int, *, fits: bool) -> bool:
        """Give the request that SGLang looks at the pages of its next tokens; False where there is no room now. A
        request that waits for room with pages of its first chunks begins anew now and then, where nothing else runs:
        another engine may wait for these."""
        pages = self._looked_at
        if pages is None:
            return False
        blocks = -(-(self._computed_tokens + new_tokens) // self.page_size)
        if fits and self._book.reserve(pages, blocks):
            self._reserved[pages.request_id] = pages
            pages.is_admitted = True
            return True
        if fits and self._book.is_beyond(pages, blocks) and not self.node.comes_back:
            raise EngineRefused(STUCK)
        if not pages.held:
            self._book.give_way(pages)
        elif self._book.gives_up(pages):
            self._has_void_step = True
        return False

    def reserve_decode(self, requests: Sequence[Any]) -> bool:
        """Make the table of each request long enough for its next token; False where there is no room now."""
        for request in requests:
            pages, blocks = request.last_node, request.kv.kv_allocated_len // self.page_size + 1
            if not isinstance(pages, RequestPages) or self._book.has(pages, blocks):
                continue
            if not self._book.reserve(pages, blocks):
                return False
        return True

    def take(self, requests: Sequence[Any], ends: Sequence[int]) -> list[list[int]] | None:
        """Tables of requests that are allocated up to these tokens; None where one is too short."""
        tables = []
        for request, end in zip(requests, ends, strict=True):
            pages, blocks = request.last_node, -(-end // self.page_size)
            if not isinstance(pages, RequestPages) or len(pages.pages) < blocks:
                log.error("table_too_short request=%s blocks=%s", name_of(request), blocks)
                return None
            if not pages.taken:
                self._book.use_hits(pages)
            if blocks > pages.taken:
                self._book.take(pages, blocks - pages.taken)
                for table in pages.others:
                    table.taken = blocks
            self._reserved.pop(name_of(request), None)
            self._rows[name_of(request)] = request.kv
            tables.append(pages.pages)
        return tables

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        pages, blocks = req.last_node, up_to // self.page_size
        if not isinstance(pages, RequestPages):
            return
        if may_share(req) and not self._is_off:
            keys = self._keys_of(req).extend(req.full_untruncated_fill_ids[:up_to])
            self._book.seal(pages, min(blocks, pages.taken, len(keys)), keys)
        if self.supports_swa() and not req.finished():
            self.evict_sliding_windows(req, up_to)
        self._protect(req, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """The request has ended, or was retracted."""
        pages = req.last_node
        if isinstance(pages, RequestPages):
            pages.output_tokens = len(req.output_ids)
            self._book.drop(pages, pages.held)
        self._forget(name_of(req), ends=bool(req.finished()))
        if not req.finished():
            self._settle()

    def finish(self, handle: Any, outcome: Any) -> None:
        """A request was aborted, perhaps before it had any page, or its match was sent."""
        if outcome is CacheRequestOutcome.SUCCESS:
            return
        pages = self._book.find(handle.rid)
        if pages is None or not pages.held:
            self._book.forget(handle.rid)
            self._forget(handle.rid, ends=True)

    def reset(self) -> None:
        """Go on under the keys of the weights that the engine has now: once they are whole, where they are changed."""
        if self._changes_weights:
            self._resets_later = True
        else:
            self._weights.reset()
        self._book.change_keys(self._weights.salt)
        for name in [*self._keys]:
            self._forget(name, ends=True)

    def begin_weights(self) -> None:
        """SGLang begins to change the weights: their name ends, whatever is flushed. Requests that run share nothing
        further, and those that wait are matched anew."""
        self._changes_weights = True
        self._weights.lose("SGLang changes the weights")
        self._book.change_keys(self._weights.salt)

    def end_weights(self, *, is_whole: bool) -> None:
        """A change of the weights has ended. Where it ``is_whole``, and the cache was flushed meanwhile, an announced
        version is adopted."""
        self._changes_weights = not is_whole
        if is_whole and self._resets_later:
            self._resets_later = False
            self._weights.reset()
            self._book.change_keys(self._weights.salt)

    def release_host_resources(self) -> None:
        self._book.close()
        self.node.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Check the lease before anything is scheduled: lost pages are used no more."""
        self._end_pass()
        lease = self.node.lease
        if not lease.is_sure:
            with suppress(CacheClientError):  # the lease says it from now on; without an answer, the end asks again
                lease.make_sure(LEASE_LOOK_S)
        if self._book.is_with_daemon() and not self._in_flight:
            self._book.rest()

    @property
    def is_to_move(self) -> bool:
        """True where all requests are to begin anew: pages may be others', or there is a new lease."""
        is_lapsed = self._book.is_moving and not self._book.is_empty
        return is_lapsed or bool(self._book.is_adrift and self.node.back_id)

    def move(self) -> None:
        """Go on under the new lease, where there is one. Nothing uses any page."""
        self._settle()
        self._book.is_moving = True
        next_lease = self._next_lease()
        if not next_lease or not self.node.move(next_lease):
            return
        self._check = self.node.page_check()  # the model may have another number
        self._loads.forget_all()
        with suppress(DaemonUnavailable, LeaseLost):  # then it moves again
            self._book.adopt(self.node.lease)

    def begin_step(self, requests: Sequence[Any]) -> None:
        """A step with these requests is launched. Others that wait are matched anew meanwhile; where none does,
        nothing is sent to the daemon before the kernels are."""
        self._loads.begin_step(each.last_node for each in requests if isinstance(each.last_node, RequestPages))
        self._end_pass()
        self._reserved.clear()
        self._in_flight += 1
        self._book.begin_step()
        self._vouching.begin_step(computes=True)
        self._book.flush(for_waiting=True)

    def end_launch(self, result: object) -> None:
        """A step was launched, and ``result`` will be its output."""
        if self._loads.end_launch():
            self._void, self._has_void_step = result, True

    def begin_output(self) -> None:
        """A step's output has come, and its kernels have ended. Raises PagesLapsed."""
        super().begin_output()
        self._book.untold.begin_output()

    def end_output(self) -> None:
        """The output was handed out, and ended requests were released: report that to the daemon, while the next step
        is computed."""
        self._book.untold.end_output(computes=self._in_flight > 0)
        self._book.flush(is_last=not self._in_flight)  # there may be no step after this
        if not self._book.is_adrift:
            self._check.step()
        if self._metrics is not None:
            is_shared = self._weights.is_shared and not (self._is_off or self._book.is_adrift)
            self._metrics.end_step(sum(self._book.outbox.take_waits()), is_shared=is_shared)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_metrics(self, layout: Layout) -> CacheMetrics:
        self.init_metrics_collector()
        return CacheMetrics(self.metrics_collector, self.page_size, layout.page_bytes(0))

    def _wish(self, request: Any, tokens: Sequence[int], most_tokens: int | None) -> Wish:
        """Match for a request's ``tokens``, at most ``most_tokens`` of them; the last one is computed."""
        all_blocks = -(-len(tokens) // self.page_size)
        first = min(all_blocks, self._chunk_blocks)
        takes_all = first == all_blocks
        if self._is_off or not may_share(request):
            return Wish((), 0, first, takes_all=takes_all)
        hashes = self._keys_of(request).extend(tokens)
        most = max(0, len(tokens) - 1) if most_tokens is None else min(most_tokens, len(tokens))
        blocks = min(most // self.page_size, len(hashes))
        return Wish(hashes, blocks, first, follows_layers=self._book.is_empty, takes_all=takes_all)

    def _windows_of(self, node: RequestPages) -> list[int]:
        return node.others[0].pages

    def _slide(self, node: Any, blocks: int) -> None:
        if isinstance(node, RequestPages):
            for table in node.others:
                table.first = max(table.first, blocks)
            self._book.move_windows(node)

    def _next_lease(self) -> str:
        """The lease to move to; empty while there is none, or pages are in use."""
        return self.node.back_id if self._book.is_empty else ""

    def _end_pass(self) -> None:
        """A pass of admissions is over: what it took is held, and the rest may be given back."""
        self._looked_at = None
        for pages in self._reserved.values():
            pages.is_admitted = False

    def _forget(self, rid: str, *, ends: bool) -> None:
        self._loads.forget(rid)
        self._reserved.pop(rid, None)
        self._rows.pop(rid, None)
        self._shown.pop(rid, None)
        if ends:
            self._keys.pop(rid, None)
            self._book.without_host.discard(rid)

    def _settle(self) -> None:
        self._synchronize()
        self._book.untold.settle()
