"""Hooks around SGLang's steps: which requests an allocation is for, when a step begins, and when its output has come.

    ingest  ->  schedule, allocate  ->  run_batch  ->  (the step before:) process_batch_result  ->  tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cachesvc_sglang.allocator import PageAllocator
from cachesvc_sglang.page_cache import PageCache


def allocate(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the allocator which requests it serves."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, PageAllocator):
        return original(batch, *args, **kwargs)
    allocator.batch = batch
    try:
        return original(batch, *args, **kwargs)
    finally:
        allocator.batch = None


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin an iteration."""
    received = original(scheduler, *args, **kwargs)
    if isinstance(scheduler.tree_cache, PageCache):
        scheduler.tree_cache.begin_iteration()
    return received


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a step."""
    if isinstance(scheduler.tree_cache, PageCache):
        scheduler.tree_cache.begin_step()
    return original(scheduler, batch, *args, **kwargs)


def process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Take a step's output. Raises PagesLapsed before any token leaves the engine."""
    cache = scheduler.tree_cache
    if not isinstance(cache, PageCache):
        original(scheduler, batch, result)
        return
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    cache.begin_output()
    original(scheduler, batch, result)
    cache.end_output()


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

HOOKS: Mapping[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.allocation.alloc_for_extend": allocate,
    "sglang.srt.mem_cache.allocation.alloc_for_decode": allocate,
    f"{SCHEDULER}.ingest_requests": ingest_requests,
    f"{SCHEDULER}.run_batch": run_batch,
    f"{SCHEDULER}.process_batch_result": process_batch_result,
}
