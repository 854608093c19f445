"""vLLM's block pool, whose block ids are the daemon's pages: a method for each that vLLM's scheduler calls.

Blocks are objects of one request each, also where requests share a page: the block then tells which request frees it,
and in which group. Each of vLLM's managers, one a group, has a view of the pool that knows its group. The position of a
block is its place in the manager's table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from cachesvc_client.plugins.keeper import ConnectorRefused, WeightsVersion
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import GroupTable, RequestPages
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from cachesvc.model.words import NO_PAGE
from cachesvc_vllm.metrics import Stopwatch, timed


class RequestBlock(KVCacheBlock):  # type: ignore[misc]
    """A page in the table of one request. ``table``: of its group, None for the leading one; ``uses``: its own."""

    __slots__ = ("position", "request", "table")

    def __init__(
        self, page: int, request: RequestPages, pool: BlockPool, position: int, table: GroupTable | None, uses: int
    ) -> None:
        super().__init__(page, uses, pool=pool)
        self.request = request
        self.position = position
        self.table = table


@dataclass(slots=True)
class _Now:
    """State of the iteration that all views share. ``current``: the request that is scheduled; ``hits``: the positions
    of its hit's hashes. ``filling``: requests with full blocks that may not be sealed yet, by id, and up to where.
    ``counts_own``: set while a request takes pages that it has already, when no others need to be counted.
    ``managers``: of all groups."""

    current: RequestPages | None = None
    hits: dict[bytes, int] = field(default_factory=dict)
    filling: dict[str, tuple[Any, int]] = field(default_factory=dict)
    counts_own: bool = False
    managers: Sequence[Any] = ()

    def zero_no_more(self, pages: set[int]) -> None:
        """Take freed pages off the lists of new ones, which workers set to zero in the step that is scheduled: a
        request that is preempted in the same step has got them, and they may be another engine's by then."""
        for manager in self.managers:
            if not pages.isdisjoint(manager.new_block_ids):
                manager.new_block_ids = [page for page in manager.new_block_ids if page not in pages]


class DaemonBlockPool(BlockPool):  # type: ignore[misc]
    """Takes the place of ``replaced``, with all that it knows. Used from vLLM's scheduler thread.

    ``watch``: counts what the methods take. ``block_tokens``: of the daemon's blocks, in which each group has
    whole ones. ``on_reset``: called when nothing older is found any more.
    """

    def __init__(
        self, replaced: BlockPool, book: PageBook, weights: WeightsVersion, watch: Stopwatch, block_tokens: int
    ) -> None:
        self.__dict__.update(replaced.__dict__)
        self.book = book
        self.weights = weights
        self.watch = watch
        self.now = _Now()
        self.on_reset: Callable[[], None] = lambda: None
        self.block_tokens = block_tokens
        self.group = book.groups.lead
        self.manager: Any = None

    def of_group(self, group: int, manager: Any) -> DaemonBlockPool:
        """Return the view of a group's manager."""
        view = copy(self)
        view.group, view.manager = group, manager
        return view

    def schedule(self, request: RequestPages) -> None:
        """Serve the next allocations for this request."""
        self.now.current = request

    def show_hits(self, request: RequestPages, hashes: Sequence[bytes]) -> None:
        """Let vLLM find the blocks that the request's match has found in place."""
        self.now.current = request
        end = request.hit_blocks * self.block_tokens // self.hash_block_size
        self.now.hits = {key: position for position, key in zip(range(end), hashes, strict=False)}

    def hide_hits(self) -> None:
        """Hide the hits of the current request from vLLM."""
        self.now.current, self.now.hits = None, {}

    @timed
    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """Find a block of the current request's hit, in all of these groups."""
        position, request = self.now.hits.get(block_hash), self.now.current
        if position is None or request is None:
            return None
        found: list[KVCacheBlock] = []
        end = (position + 1) * self.hash_block_size
        for group in kv_cache_group_ids:
            table = None if group == self.book.groups.lead else request.table_of(group)
            cell = end // self.now.managers[group].block_size - 1
            page = request.pages[cell] if table is None else table.page_at(cell)
            if page == NO_PAGE:
                return None
            found.append(RequestBlock(page, request, self, cell, table, 0))
        return found

    @timed
    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """vLLM takes the current request's hit: in the leading group all of it, for the daemon has it in the request's
        table, or nothing where it is a part of what is loaded; in others what the tokens behind the hit need."""
        request = self.now.current
        assert request is not None
        used = [block for block in blocks if isinstance(block, RequestBlock)]
        for block in used:
            block.ref_cnt += 1
        if self.group != self.book.groups.lead:
            if used:
                request.table_of(self.group).hold(used[0].position, len(used))
                self.book.hold(request, len(used))
            return
        if request.is_whole_load and not used:
            return
        if len(used) != request.hit_pages:
            raise RuntimeError(f"vLLM uses {len(used)} blocks of a hit of {request.hit_pages}")
        self.book.use_hits(request)

    @timed
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Pages that were reserved for the current request, for the next cells of the manager's table."""
        request, table = self.now.current, None
        assert request is not None
        first = request.taken
        if self.group == self.book.groups.lead:
            pages = self.book.take(request, num_blocks)
        else:
            first, table = len(self.manager.req_to_blocks[request.request_id]), request.table_of(self.group)
            pages = table.take(first, num_blocks)
            self.book.hold(request, num_blocks)
        return [RequestBlock(page, request, self, first + at, table, 1) for at, page in enumerate(pages)]

    @timed
    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Note that these blocks will be full. vLLM says so when it schedules: they are sealed once they are computed.
        ``block_mask`` leaves out windows and states that vLLM would not keep: here the daemon decides."""
        full_blocks = num_full_blocks * block_size // self.block_tokens
        self.now.filling[request.request_id] = (request, full_blocks)
        if (pages := self.book.find(request.request_id)) is not None:
            pages.full_blocks = full_blocks

    @timed
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks that nothing of this engine uses any more."""
        freed: Counter[RequestPages] = Counter()
        moved: set[RequestPages] = set()
        pages: set[int] = set()
        for block in ordered_blocks:
            if isinstance(block, RequestBlock):
                block.ref_cnt -= 1
                pages.add(block.block_id)
                freed[block.request] += 1
                if block.table is not None:
                    block.table.free(block.position)
                    moved.add(block.request)
        self.now.zero_no_more(pages)
        for request, count in freed.items():
            self.book.drop(request, count)
            if request in moved and request.held:
                self.book.move_windows(request)

    @timed
    def get_num_free_blocks(self) -> int:
        """Blocks that vLLM may count on; page 0 is none."""
        current = self.now.current
        if self.now.counts_own and current is not None:
            return current.spare_pages(self.book.groups.main_pool)
        return self.book.free_blocks(self.num_gpu_blocks - 1, current, self.book.groups.main_pool)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """No-op: what vLLM did not compute well was never sealed, and all engines share what is sealed."""

    def reset_prefix_cache(self) -> bool:
        """Go on under the keys of the weights that the engine has now. False while requests have blocks. vLLM asks
        every view of the pool."""
        if not self.book.is_empty:
            return False
        if self.group != self.book.groups.lead:
            return True
        self.weights.reset()
        self.book.change_keys(self.weights.salt)
        self.on_reset()
        return True

    def emit_cached_block_events(self, *args: Any, **kwargs: Any) -> None:
        """No-op: ``kv_events`` announces what the daemon has."""

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> None:
        """No-op at the end of a block, which ``cache_full_blocks`` has noted, and for KV within one: hits end with the
        daemon's blocks. Raises ConnectorRefused for a state there: keys as fine as that are refused at the start."""
        is_state = isinstance(block, RequestBlock) and block.table is not None and block.table.is_state
        if is_state and num_tokens % block_size:
            raise ConnectorRefused(
                f"vLLM keeps a state at token {num_tokens}, within a block of {block_size}, and goes on to write its "
                "page: leave out --prefix-match-unit"
            )

    def replace_spare(self, blocks: list[KVCacheBlock], position: int) -> None:
        """vLLM moves a state for drafts from ``position`` in the table ``blocks`` to its end, behind a chunk of several
        blocks. Nothing in it is needed, so it gets the page of the new position, and the one of the old goes back:
        where a request has a page, the daemon has it too."""
        spare = blocks[position]
        assert isinstance(spare, RequestBlock)
        assert spare.table is not None
        spare.ref_cnt -= 1
        blocks[position] = self.null_block
        self.now.zero_no_more({spare.block_id})
        self.book.drop_spare(spare.request, spare.table, spare.position)
        blocks += self.get_new_blocks(1)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """vLLM will overwrite a state: it is not sealed."""
        if isinstance(block, RequestBlock) and block.table is not None:
            block.table.states.pop(block.position, None)
        return False

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Raise: vLLM does it for states within a block alone, as ``cache_partial_block``."""
        raise NotImplementedError("a sealed block stays in its page")

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Any) -> None:
        """Raise: sparse attention with a host pool of vLLM's own alone needs it, and that is refused."""
        raise NotImplementedError("pages that were freed may be another engine's at once")


def spare_states(manager: Any) -> int:
    """Return how many states vLLM's manager of a group has for drafts, behind the running one."""
    return int(getattr(manager, "num_speculative_blocks", 0))


def take_place(manager: Any, pool: DaemonBlockPool) -> None:
    """Give vLLM's ``KVCacheManager``, and its manager of each group, this pool for the one that they made."""
    manager.block_pool = manager.coordinator.block_pool = pool
    pool.now.managers = manager.coordinator.single_type_managers
    for group, each in enumerate(manager.coordinator.single_type_managers):
        each.block_pool = pool.of_group(group, each)
        each._null_block = pool.null_block  # noqa: SLF001 - there is no other way to it
        if spare_states(each):
            each._relocate_speculative_block = each.block_pool.replace_spare  # noqa: SLF001 - as above
