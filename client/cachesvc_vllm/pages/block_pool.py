"""vLLM's block pool, whose block ids are the daemon's pages: a method for each that vLLM's scheduler calls.

Blocks are objects of one request each, also where requests share a page: the block then tells which request frees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from cachesvc_vllm.daemon.weights_version import WeightsVersion
from cachesvc_vllm.pages.page_book import PageBook
from cachesvc_vllm.pages.request_pages import RequestPages


class RequestBlock(KVCacheBlock):  # type: ignore[misc]
    """A page in the table of one request."""

    __slots__ = ("request",)

    def __init__(self, page: int, request: RequestPages, pool: BlockPool) -> None:
        super().__init__(page, pool=pool)
        self.request = request


class DaemonBlockPool(BlockPool):  # type: ignore[misc]
    """Takes the place of ``replaced``, with all that it knows. Used from vLLM's scheduler thread.

    ``filling``: requests with full blocks that may not be sealed yet, by id, and up to where. ``counts_own``: set while
    a request takes pages that it has already, when no others need to be counted. ``on_reset``: called when
    nothing older is found any more.
    """

    def __init__(self, replaced: BlockPool, book: PageBook, weights: WeightsVersion) -> None:
        self.__dict__.update(replaced.__dict__)
        self.book = book
        self.weights = weights
        self.filling: dict[str, tuple[Any, int]] = {}
        self._current: RequestPages | None = None
        self.counts_own = False
        self._hits: dict[bytes, RequestBlock] = {}
        self.on_reset: Callable[[], None] = lambda: None

    def schedule(self, request: RequestPages) -> None:
        """Serve the next allocations for this request."""
        self._current = request

    def show_hits(self, request: RequestPages, hashes: Sequence[bytes]) -> None:
        """Let vLLM find the blocks that the request's match has found in place."""
        self._current = request
        self._hits = {
            key: RequestBlock(page, request, self)
            for key, page in zip(hashes, request.pages[: request.hit_blocks], strict=False)
        }

    def hits(self) -> list[KVCacheBlock]:
        """Return the blocks of the current request's hit, in order."""
        return list(self._hits.values())

    def hide_hits(self) -> None:
        """Hide the hits of the current request from vLLM."""
        self._current, self._hits = None, {}

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """Find a block of the current request's hit."""
        block = self._hits.get(block_hash)
        return None if block is None else [block]

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """vLLM takes the current request's hit: all of it, for the daemon has it in the request's table."""
        request = self._current
        assert request is not None
        if len(blocks) != request.hit_blocks:
            raise RuntimeError(f"vLLM uses {len(blocks)} blocks of a hit of {request.hit_blocks}")
        for block in blocks:
            block.ref_cnt += 1
        self.book.use_hits(request)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Pages that were reserved for the current request."""
        request = self._current
        assert request is not None
        blocks = [RequestBlock(page, request, self) for page in self.book.take(request, num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

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
        """Note that these blocks will be full. vLLM says so when it schedules: they are sealed once they are
        computed."""
        self.filling[request.request_id] = (request, num_full_blocks)
        if (pages := self.book.find(request.request_id)) is not None:
            pages.full_blocks = num_full_blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks that nothing of this engine uses any more."""
        freed: Counter[RequestPages] = Counter()
        for block in ordered_blocks:
            if isinstance(block, RequestBlock):
                block.ref_cnt -= 1
                freed[block.request] += 1
        for request, count in freed.items():
            self.book.drop(request, count)

    def get_num_free_blocks(self) -> int:
        """Blocks that vLLM may count on; page 0 is none."""
        if self.counts_own and self._current is not None:
            return len(self._current.pages) - self._current.taken
        return self.book.free_blocks(self.num_gpu_blocks - 1, self._current)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """No-op: what vLLM did not compute well was never sealed, and all engines share what is sealed."""

    def reset_prefix_cache(self) -> bool:
        """Go on under the keys of the weights that the engine has now. False while requests have blocks."""
        if not self.book.is_empty:
            return False
        self.weights.reset()
        self.book.change_keys(self.weights.salt)
        self.on_reset()
        return True

    def emit_cached_block_events(self, *args: Any, **kwargs: Any) -> None:
        """No-op: ``kv_events`` announces what the daemon has."""

    def cache_partial_block(self, *args: Any, **kwargs: Any) -> None:
        """Raise: models with several groups alone need it, and these are refused."""
        raise NotImplementedError("partial blocks cannot be shared")

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Raise, like ``cache_partial_block``."""
        raise NotImplementedError("a sealed block stays in its page")

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Any) -> None:
        """Raise: sparse attention with a host pool of vLLM's own alone needs it, and that is refused."""
        raise NotImplementedError("pages that were freed may be another engine's at once")
