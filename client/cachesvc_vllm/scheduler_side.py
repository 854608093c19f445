"""The scheduler's side: match when vLLM looks for hits, reserve before it counts, seal what is computed."""

from __future__ import annotations

from typing import Any

from cachesvc.model.answers import TicketView
from cachesvc_vllm.block_pool import DaemonBlockPool
from cachesvc_vllm.node import Node
from cachesvc_vllm.page_book import PageBook
from cachesvc_vllm.request_pages import computed_blocks
from cachesvc_vllm.settings import Settings


class SchedulerSide:
    """Begun once the workers have their memory from the daemon. Used from vLLM's scheduler thread."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._book = PageBook(node.lease, settings.stock_blocks)
        self._loads: dict[str, tuple[TicketView, ...]] = {}
        self._pool: DaemonBlockPool | None = None
        self._manager: Any = None
        self._block_tokens = 0
        self._find_hits: Any = None
        self._allocate: Any = None

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

    def get_computed_blocks(self, request: Any) -> Any:
        """As ``KVCacheManager.get_computed_blocks``, after the request's match."""
        assert self._pool is not None
        self._move_if_back()
        may_hit = self._manager.prefix_cache_lookup_enabled(request)
        most = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes)) if may_hit else 0
        begun = self._book.begin(request.request_id, request.block_hashes, most)
        self._pool.show_hits(begun, request.block_hashes)
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
        assert self._pool is not None
        self._move_if_back()
        pages = self._book.find(request.request_id)
        if (
            self._book.is_moving
            and pages is not None
            and pages.held
            and request.status.name in ("WAITING", "PREEMPTED")
        ):
            self._manager.free(request)  # it came from the host, and vLLM does not preempt what has not run
            request.num_computed_tokens = 0
        if pages is None:
            return None
        tokens = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens + num_new_tokens
        tokens = min(tokens + num_lookahead_tokens, self._manager.max_model_len)
        if not self._book.reserve(pages, -(-tokens // self._block_tokens)):
            return None
        self._pool.schedule(pages)
        blocks = self._allocate(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            *args,
            **kwargs,
        )
        if blocks is None:
            self._book.ask_room()
        return blocks

    @property
    def lease_id(self) -> str:
        """Of the lease whose pages requests have."""
        return self._node.lease.id

    def host_tokens(self, request: Any) -> int:
        """Tokens of the request's hit that have to be loaded from the host."""
        pages = self._book.find(request.request_id)
        return 0 if pages is None else pages.host_blocks * self._block_tokens

    def note_load(self, request: Any) -> None:
        """vLLM has the pages that the request's host blocks are loaded into."""
        pages = self._book.find(request.request_id)
        assert pages is not None
        assert pages.sequence is not None
        self._loads[request.request_id] = pages.sequence.tickets

    def take_loads(self) -> dict[str, tuple[TicketView, ...]]:
        """Loads that the workers are to watch."""
        loads, self._loads = self._loads, {}
        return loads

    def finish(self, request: Any) -> None:
        """A request has ended: what it has computed is sealed before its pages go."""
        pages = self._book.find(request.request_id)
        if pages is not None:
            self._seal(request)
            self._book.finish(pages, request.num_output_tokens)

    def end_step(self) -> None:
        """A step's output has come: seal what it has computed, and tell the daemon."""
        assert self._pool is not None
        filling = self._pool.filling
        for request_id, (request, full_blocks) in list(filling.items()):
            if request.is_finished() or self._seal(request) >= full_blocks or self._book.find(request_id) is None:
                del filling[request_id]
        self._book.flush()
        self._move_if_back()

    def close(self) -> None:
        """Tell what is left to tell, and end the lease. Idempotent."""
        self._book.close()
        self._node.close()

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

    def _move_if_back(self) -> None:
        """After a loss: once there is a new lease, preempt everything, and go on under it when nothing is left."""
        if not self._node.is_back:
            return
        self._book.is_moving = True
        if self._book.is_empty:
            self._book.adopt(self._node.move())
