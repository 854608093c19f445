"""SGLang's prefix cache as every rank of an engine has it: what asks the daemon nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cachesvc_client.plugins.outbox import Dropped, Vouching
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_swa_tokens, kv_private_tokens
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, DecLockRefResult, EvictResult, MatchResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.utils.common import is_pin_memory_available

from cachesvc.model.words import NO_PAGE
from cachesvc_sglang.adapters import adapter_key
from cachesvc_sglang.plain import PromptKeys


def name_of(request: Any) -> str:
    """Name of a request that no other one of the engine has."""
    return str(request.cache_request_handle.rid)


ROOT = "root"
"""Node of a match that is no request's, or has no answer yet: none is admitted with it."""


class EngineCache(BasePrefixCache):  # type: ignore[misc]
    """``context``: SGLang's ``TreeCacheBuildContext``. Used from SGLang's scheduler thread."""

    def __init__(self, context: Any) -> None:
        params = context.params
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.disable = False
        self.root_node = ROOT
        self.sliding_window_size = params.sliding_window_size
        memory = allocator.get_kvcache().cachesvc
        self.node, self._settings = memory.node, memory.settings
        self._is_off = bool(context.disable_radix_cache)
        self._pool_blocks: tuple[int, ...] = allocator.pool_blocks
        self._vouching = Vouching(lambda: self.node.lease)
        self._namespace = self.node.lease.registration.namespace
        self._numbers = itertools.count(1)
        self._keys: dict[str, PromptKeys] = {}
        self._rows: dict[str, Any] = {}
        self._shown: dict[str, int] = {}
        self._in_flight = 0
        self._void: object = None
        self._has_void_step = False

    def name_request(self, request: Any) -> None:
        """Give a request that comes a name of this engine's own, which its cache handle carries.

        Clients choose ``rid``, and with several tokenizers two requests may have one. All ranks see requests in one
        order, so their names are alike.
        """
        handle = request.cache_request_handle
        if handle.rid == request.rid:
            request.cache_request_handle = replace(handle, rid=f"{next(self._numbers)}:{request.rid}")

    def begin_weights(self) -> None:
        """SGLang begins to change the weights. No-op: rank 0 chooses the keys."""

    def end_weights(self, *, is_whole: bool) -> None:
        """A change of the weights has ended; the last one where it ``is_whole``."""

    def dec_lock_ref(self, node: Any, params: Any = None) -> Any:
        return DecLockRefResult()

    def free_kv_row(self, kv: Any, ranges: Any) -> None:
        """No-op: ``on_release`` gives back all pages of a request."""

    def evict(self, params: Any) -> Any:
        return EvictResult()

    def protected_size(self) -> int:
        """Tokens of other engines' pages, and of hits in use: all that is neither to be had nor this engine's own."""
        own = sum(kv_private_tokens(each, self.page_size) for each in self._rows.values())
        return int(self.total_size() - self.available_tokens() - own)

    def full_protected_size(self) -> int:
        return self.protected_size()

    def swa_protected_size(self) -> int:
        """The same of the pool of windows."""
        own = sum(kv_private_swa_tokens(each, self.page_size) for each in self._rows.values())
        return int(self._pool_blocks[1] * self.page_size - self.available_tokens(1) - own)

    def available_tokens(self, pool: int = 0) -> int:
        raise NotImplementedError

    def total_size(self) -> int:
        return int(self._pool_blocks[0] * self.page_size)

    # -- windows -----------------------------------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        """True for a model that has layers with windows, whose pages are in a pool of their own."""
        return self.sliding_window_size is not None

    def evict_sliding_windows(self, req: Any, pre_len: int, *, eviction_interval: int = 1) -> None:
        """Give back the windows of blocks that no token from ``pre_len`` on reads, nor one that continues the last full
        block before it: that is where a hit may end."""
        window_blocks = -(-self.sliding_window_size // self.page_size)
        dead = (pre_len // self.page_size - window_blocks) * self.page_size
        if dead >= req.kv.get_evicted_seqlen(ComponentType.SWA) + max(eviction_interval, 1):
            req.kv.set_evicted_seqlen(ComponentType.SWA, dead)
            self._slide(req.last_node, dead // self.page_size)

    def take_windows(self, requests: Sequence[Any]) -> list[tuple[int, int]]:
        """Pages of blocks that these requests have taken since the last call, in both pools; none of a block behind
        whose window a hit ends."""
        new: list[tuple[int, int]] = []
        for request in requests:
            name, node = name_of(request), request.last_node
            pages, windows = node.pages, self._windows_of(node)
            new += zip(pages[self._shown.get(name, 0) :], windows[self._shown.get(name, 0) :], strict=True)
            self._shown[name] = len(pages)
        return [(page, window) for page, window in new if window != NO_PAGE]

    def _windows_of(self, node: Any) -> list[int]:
        """A request's table in the pool of windows."""
        raise NotImplementedError

    def _slide(self, node: Any, blocks: int) -> None:
        """Nothing reads the windows of a request's first ``blocks`` blocks any more."""
        raise NotImplementedError

    def pretty_print(self) -> None:
        """No-op: ``cachesvc show`` prints the index."""

    def take_void_step(self) -> bool:
        """True, once, where a load of a step failed: all requests are to begin anew."""
        was_void, self._has_void_step = self._has_void_step, False
        return was_void

    def take_void(self, result: object) -> bool:
        """True for the output of a step whose load failed: it is not handed out. Its kernels have ended then: without
        the overlap scheduler nothing else waits for them, and its pages are given back."""
        if result is None or result is not self._void:
            return False
        self._void = None
        if self.node.pool.is_on_gpu:
            torch.cuda.synchronize()
        return True

    def begin_output(self) -> None:
        """A step's output has come, and its kernels have ended. Raises PagesLapsed."""
        self._in_flight -= 1
        self._vouching.end_step(Dropped.NOT)

    def _found(self, node: Any, device_blocks: int, host_blocks: int) -> Any:
        return MatchResult(
            device_prefix_len=device_blocks * self.page_size,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            host_hit_length=host_blocks * self.page_size,
        )

    def _keys_of(self, request: Any) -> PromptKeys:
        name = name_of(request)
        keys = self._keys.get(name)
        if keys is None:
            adapter, extra = adapter_key(request, self.node.instance.encode()), request.extra_key
            if adapter is not None:  # SGLang appends the adapter's number
                extra = (extra or "").removesuffix(request.lora_id)
            keys = PromptKeys(self._namespace, self.page_size, extra, request.cache_salt, adapter)
            self._keys[name] = keys
        return keys

    def _indices(self, pages: list[int]) -> Any:
        """Slots of all tokens of these pages."""
        device = self.token_to_kv_pool_allocator.device
        firsts = to_device(np.array(pages, np.int64), device).view(-1, 1)
        return (firsts * self.page_size + torch.arange(self.page_size, device=device)).reshape(-1)

    def _protect(self, request: Any, up_to: int) -> None:
        """Note that the request has computed its tokens up to here."""
        end = up_to // self.page_size * self.page_size
        request.kv.cache_protected_len = max(request.kv.cache_protected_len, end)

    def _synchronize(self) -> None:
        """Wait for the kernels under way: SGLang needs the pages of a retracted request at once."""
        if self._in_flight and self.node.pool.is_on_gpu:
            torch.cuda.synchronize()


# Metrics of the cache beside SGLang's own: SGLang's counters of load backs, and what it has no counter for.
#
# Hits by tier are SGLang's ``cached_tokens_total``. Evictions are the daemon's, over all engines, and its metrics.

POOL = "kv"
"""SGLang's name of the pool."""


class CacheMetrics:
    """``collector``: SGLang's of radix caches, whose labels these have. ``block_tokens`` and ``block_bytes``: of a
    block in the pool of whole sequences. Used from SGLang's scheduler thread."""

    def __init__(self, collector: Any, block_tokens: int, block_bytes: int) -> None:
        from prometheus_client import Counter, Gauge  # once SGLang has chosen the folder of its processes' values

        self._collector = collector
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        names = list(collector.labels)
        self._loads = Counter(
            "sglang:cachesvc_loads_total", "Loads from the host pool that ended.", labelnames=[*names, "outcome"]
        )
        self._waits = Counter(
            "sglang:cachesvc_waits_total",
            "Answers of the daemon that SGLang's scheduler waited for.",
            labelnames=names,
        )
        self._shares = Gauge(
            "sglang:cachesvc_shares",
            "1 while the engine shares its cache with others.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )

    def end_load(self, blocks: int, seconds: float, *, has_come: bool) -> None:
        """Count a load of this number of blocks, from its begin until the engine saw its end."""
        labels = self._collector.labels
        self._loads.labels(**labels, outcome="came" if has_come else "failed").inc()
        if has_come:
            self._collector.increment_load_back_num_tokens(blocks * self._block_tokens, POOL)
            self._collector.increment_load_back_num_bytes(blocks * self._block_bytes)
            self._collector.observe_load_back_duration(seconds)

    def end_step(self, waits: int, *, is_shared: bool) -> None:
        labels = self._collector.labels
        self._waits.labels(**labels).inc(waits)
        self._shares.labels(**labels).set(int(is_shared))


def to_device(numbers: npt.NDArray[np.int64], device: Any) -> Any:
    """Put a copy into the current stream, and go on. Out of memory that is not pinned the driver may wait for the
    stream first. SGLang's scheduler has that wait for the whole prefill before it."""
    tensor = torch.from_numpy(numbers)
    is_pinned = is_pin_memory_available(device)
    return (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=is_pinned)
