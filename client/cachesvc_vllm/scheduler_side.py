"""The scheduler's side: match when vLLM looks for hits, reserve before it counts, seal what is computed."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from cachesvc_client import DaemonUnavailable, LeaseLost
from vllm.lora.utils import get_adapter_absolute_path

from cachesvc.model.answers import TicketView
from cachesvc_vllm.adapters import Adapters
from cachesvc_vllm.block_pool import DaemonBlockPool
from cachesvc_vllm.errors import ConnectorRefused
from cachesvc_vllm.media import Media
from cachesvc_vllm.metrics import LOAD_SECONDS, STEP_SECONDS, CacheStats, Stopwatch
from cachesvc_vllm.node import Node
from cachesvc_vllm.page_book import PageBook
from cachesvc_vllm.request_pages import RequestPages, Wish, computed_blocks
from cachesvc_vllm.settings import Settings
from cachesvc_vllm.vouching import Vouching

STUCK = (
    "the daemon is gone or took this engine's lease, what is asked for needs pages that are not the engine's own, and "
    "its memory cannot be replaced: start it again; with --device-memory vmm the daemon's next memory takes its place"
)
"""An engine that can serve nothing any more ends, so that whoever watches it starts it again."""

WAITING = ("WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS")
"""States of a request that waits for its turn; with the last one it may be that it need not know yet."""

AHEAD_DIVISOR = 8
"""Requests that wait are given at most so small a part of the pool ahead of their turn: others want it too."""


class SchedulerSide:
    """Begun once the workers have their memory from the daemon. Used from vLLM's scheduler thread."""

    def __init__(self, node: Node, settings: Settings, step_tokens: int) -> None:
        """``step_tokens``: the most that vLLM schedules in an iteration."""
        self._node = node
        self._step_tokens = step_tokens
        registration = node.lease.registration
        ahead_blocks = min(
            step_tokens // registration.layout.block_tokens, registration.device_pages[0] // AHEAD_DIVISOR
        )
        self._book = PageBook(node.lease, settings.stock_blocks, ahead_blocks)
        self._media = Media(is_shared=settings.share_media)
        self._adapters = Adapters(get_adapter_absolute_path)
        self._check = node.page_check()
        self._vouching = Vouching(lambda: node.lease)
        self._is_dropped = False
        self._loads: dict[str, tuple[TicketView, ...]] = {}
        self._loading_since_s: dict[str, float] = {}
        self._pool: DaemonBlockPool | None = None
        self._manager: Any = None
        self._block_tokens = 0
        self._find_hits: Any = None
        self._allocate: Any = None
        self._unfinished: dict[str, Any] = {}
        self._has_admitted = self._is_hasty = False
        self._watch = Stopwatch()
        self._stats = CacheStats()

    def bind(self, manager: Any) -> None:
        """Take the place of the manager's block pool, and of two methods that say which request is scheduled."""
        pool = self._pool = DaemonBlockPool(manager.block_pool, self._book)
        manager.block_pool = manager.coordinator.block_pool = pool
        for group in manager.coordinator.single_type_managers:
            group.block_pool = pool
            group._null_block = pool.null_block  # noqa: SLF001 - there is no other way to it
        self._manager = manager
        self._block_tokens = pool.hash_block_size
        self._find_hits, self._allocate = manager.get_computed_blocks, manager.allocate_slots
        manager.get_computed_blocks, manager.allocate_slots = self.get_computed_blocks, self.allocate_slots

    def expect(self, request: Any) -> None:
        """A request has come; vLLM will schedule it."""
        with self._watch:
            wish = self._wish(request, None)
            if wish is not None:
                self._book.expect(request.request_id, wish)

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        """As ``KVCacheManager.get_computed_blocks``, after the request's match; no hits while its adapter is read, and
        ``host_tokens`` then says so. vLLM 0.32 has no limit to pass on."""
        assert self._pool is not None
        with self._watch:
            self._look()
            self._leave_if_back()
            wish = self._wish(request, max_cache_hit_length)
            if wish is None:
                self._pool.hide_hits()
            else:
                self._pool.show_hits(self._book.begin(request.request_id, wish), request.block_hashes)
        return self._find_hits(request)

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As ``KVCacheManager.allocate_slots``, once the request's pages are reserved; None where there is no room."""
        self._look()
        pool, pages = self._pool, self._book.find(request.request_id)
        assert pool is not None
        asked = (
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            *args,
        )
        tokens = num_new_computed_tokens + num_external_computed_tokens + num_new_tokens + num_lookahead_tokens
        if num_external_computed_tokens:  # it holds them while it waits, so it gets all that it needs to run
            tokens = max(tokens, request.num_tokens + self._block_tokens)
        tokens = min(request.num_computed_tokens + tokens, self._manager.max_model_len)
        blocks_wanted = -(-tokens // self._block_tokens)
        if pages is not None and self._book.has(pages, blocks_wanted):
            if pages.taken >= blocks_wanted and self._fills_nothing(request, pages, num_new_tokens):
                return self._manager.empty_kv_cache_blocks
            pool.schedule(pages)
            pool.counts_own = True
            blocks = self._allocate(*asked, **kwargs)
            pool.counts_own = False
            if blocks is not None:
                return blocks
        with self._watch:
            pages = self._reserve(request, blocks_wanted)
        if pages is None:
            return None
        pool.schedule(pages)
        pages.is_foreign |= num_external_computed_tokens > pages.host_blocks * self._block_tokens
        is_admitted = bool(pages.taken)
        blocks = self._allocate(*asked, **kwargs)
        if blocks is None:
            with self._watch:
                self._book.ask_room()
                self._book.give_way(pages)
        elif not is_admitted:
            self._has_admitted = True
            self._unfinished[request.request_id] = request
            self._count(request, "asked_tokens", request.num_tokens)
            self._count(request, "device_tokens", pages.hit_blocks * self._block_tokens)
        return blocks

    @property
    def next_lease(self) -> str:
        """The lease that workers are to move to: after a loss, once nothing uses pages of the old one."""
        return self._node.back_id if self._book.is_moving and self._book.is_empty else ""

    def move(self, lease_id: str) -> None:
        """All workers are on this lease's slab: go on under it, if it is the new one; empty: they differ."""
        with self._watch:
            if not lease_id or lease_id != self.next_lease or not self._node.move(lease_id):
                return
            self._check = self._node.page_check()  # the model may have another number
            with suppress(DaemonUnavailable, LeaseLost):  # then they move again
                self._book.adopt(self._node.lease)

    def host_tokens(self, request: Any) -> int | None:
        """Tokens of the request's hit that have to be loaded from the host; None where it was not matched yet."""
        pages = self._book.find(request.request_id)
        return None if pages is None else pages.host_blocks * self._block_tokens

    def note_load(self, request: Any) -> None:
        """vLLM has the pages that the request's host blocks are loaded into."""
        pages = self._book.find(request.request_id)
        assert pages is not None
        assert pages.sequence is not None
        self._count(request, "host_tokens", pages.host_blocks * self._block_tokens)
        self._loads[request.request_id] = pages.sequence.tickets
        self._loading_since_s[request.request_id] = time.perf_counter()

    def note_ends(self, ended: Collection[str], failed: Collection[str]) -> None:
        """Loads of these requests have ended. Where one ``failed``, vLLM frees the request's pages, and schedules it
        again."""
        now_s = time.perf_counter()
        for request_id in ended:
            if (since_s := self._loading_since_s.pop(request_id, None)) is not None:
                self._stats.data[LOAD_SECONDS].append(now_s - since_s)
        self._book.without_host.update(self._unfinished.keys() & failed)
        self._stats.data["loads"] += len(ended)
        self._stats.data["failed_loads"] += len(failed)

    def begin_step(self, *, computes: bool) -> None:
        """An iteration is scheduled. ``computes``: it has tokens."""
        self._vouching.begin_step(computes=computes)

    def drop_step(self) -> None:
        """A worker says of the output that has come that what it was computed from may have been others'."""
        self._is_dropped = True

    def take_loads(self) -> dict[str, tuple[TicketView, ...]]:
        """Loads that the workers are to watch. An iteration is scheduled: tell the daemon of the last one. Where
        somebody waits for a first token, the next one tells."""
        with self._watch:
            self._is_hasty = self._has_admitted and not self._is_hasty
            self._has_admitted = False
            if not self._is_hasty:
                self._book.flush()
        loads, self._loads = self._loads, {}
        return loads

    def finish(self, request: Any) -> None:
        """A request has ended: what it has computed is sealed before its pages go."""
        with self._watch:
            self._unfinished.pop(request.request_id, None)
            self._book.without_host.discard(request.request_id)
            self._loading_since_s.pop(request.request_id, None)
            pages = self._book.find(request.request_id)
            if pages is None:
                self._book.forget(request.request_id)
                return
            self._seal(request)
            self._book.finish(pages, request.num_output_tokens)

    def end_step(self) -> None:
        """A step's output has come: seal what it has computed, and tell the daemon. Raises PagesLapsed."""
        assert self._pool is not None
        is_dropped, self._is_dropped = self._is_dropped, False
        self._vouching.end_step(is_dropped=is_dropped)
        with self._watch:
            filling = self._pool.filling
            for request_id, (request, full_blocks) in list(filling.items()):
                if request.is_finished() or self._seal(request) >= full_blocks or self._book.find(request_id) is None:
                    del filling[request_id]
            if not self._unfinished:  # there may be no iteration after this; else answers to users come first
                self._book.flush()
            self._leave_if_back()
        if seconds := self._watch.lap():
            self._stats.data[STEP_SECONDS].append(seconds)
        if not self._book.is_adrift:
            self._check.step()

    def take_stats(self) -> CacheStats:
        """What was seen since the last call."""
        taken, self._stats = self._stats, CacheStats()
        return taken

    def close(self) -> None:
        """Tell what is left to tell, and end the lease. Idempotent."""
        self._book.close()
        self._adapters.close()
        self._node.close()

    def _count(self, request: Any, name: str, tokens: int) -> None:
        """Tokens of an admission: what a preempted request finds again, its own answer included, is no prompt's hit."""
        self._stats.data[f"preempted_{name}" if request.num_preemptions else name] += tokens

    def _look(self) -> None:
        """Once in an iteration, before it schedules anything: what is lost is used no more."""
        if self._vouching.look():
            self._book.is_with_daemon()

    def _wish(self, request: Any, most_tokens: int | None) -> Wish | None:
        """None while its adapter is read."""
        salt = self._adapters.salt(request.lora_request)
        if salt is None:
            return None
        salt = self._media.salt(request.mm_features, salt)
        tokens = request.num_tokens - 1 if most_tokens is None else most_tokens
        may_hit = self._manager.prefix_cache_lookup_enabled(request)
        most = min(tokens // self._block_tokens, len(request.block_hashes)) if may_hit else 0
        first = -(-min(request.num_tokens, self._step_tokens) // self._block_tokens)
        return Wish(request.block_hashes, most, first, salt)

    def _reserve(self, request: Any, blocks: int) -> RequestPages | None:
        """Have a request's table be so many blocks long; None where there is no room. Raises ConnectorRefused where
        there will be none, for this engine does not come back."""
        self._leave_if_back()
        pages = self._book.find(request.request_id)
        if pages is None:
            return None
        if self._book.reserve(pages, blocks):
            return pages
        if self._book.is_beyond(blocks) and not self._node.comes_back:
            raise ConnectorRefused(STUCK)
        self._book.give_way(pages)
        if self._book.is_adrift:
            self._free_waiting()
        return None

    def _free_waiting(self) -> None:
        """Without the daemon, nobody finds room, or moves on, while all pages are those of requests that came from the
        host and wait. vLLM preempts none that has not run, and looks no further than the first: they start over."""
        waiting = [each for each in self._unfinished.values() if each.status.name in WAITING]
        waiting = [each for each in waiting if each.request_id not in self._loading_since_s]
        held = [pages.held for each in waiting if (pages := self._book.find(each.request_id)) is not None]
        if self._book.is_moving or sum(held) == self._book.held_blocks:
            for request in waiting:
                self._manager.free(request)
                request.num_computed_tokens = 0

    def _fills_nothing(self, request: Any, pages: RequestPages, num_new_tokens: int) -> bool:
        """True where ``KVCacheManager.allocate_slots`` would do nothing for a request that runs, has a slot for each
        token, and whose full blocks vLLM has told of: most of what decoding costs there, in most iterations."""
        tokens = request.num_computed_tokens + num_new_tokens
        return num_new_tokens > 0 and min(tokens // self._block_tokens, len(request.block_hashes)) <= pages.full_blocks

    def _seal(self, request: Any) -> int:
        full_blocks = computed_blocks(
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_tokens=self._block_tokens,
            keys=len(request.block_hashes),
        )
        pages = self._book.find(request.request_id)
        if pages is not None:
            self._book.seal(pages, min(full_blocks, pages.taken), request.block_hashes)
        return full_blocks

    def _leave_if_back(self) -> None:
        """After a loss: once there is a new lease, preempt everything; then the workers are asked to move."""
        if self._node.back_id:
            self._book.is_moving = True
