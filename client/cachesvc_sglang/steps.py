"""Hooks around SGLang's steps: which requests an allocation is for, when a step begins, and when its output has come.

ingest  ->  schedule, allocate  ->  run_batch  ->  (the step before:) process_batch_result  ->  tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cachesvc_sglang.allocator import DaemonPages
from cachesvc_sglang.engine_cache import EngineCache


def allocate(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the allocator which requests it serves."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, DaemonPages):
        return original(batch, *args, **kwargs)
    allocator.batch = batch
    try:
        return original(batch, *args, **kwargs)
    finally:
        allocator.batch = None


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    received = original(scheduler, *args, **kwargs)
    cache = scheduler.tree_cache
    if isinstance(cache, EngineCache):
        cache.begin_iteration()
        if scheduler._engine_paused:  # noqa: SLF001 - SGLang's own pause
            return received
        if cache.take_void_step():
            _retract_all(scheduler)
        if cache.is_to_move:
            _retract_all(scheduler)
            cache.move()
    return received


def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """Retract requests until the rest can decode. SGLang would abort the last one; the pages that it lacks may be
    another engine's, which ends some time, so it waits for its turn again."""
    cache = scheduler.tree_cache
    if isinstance(cache, EngineCache) and not scheduler._reqs_finishing_inflight(batch):  # noqa: SLF001 - no other way
        while batch.reqs and not cache.reserve_decode(_best(batch)) and not cache.reserve_decode(batch.reqs):
            _retract(scheduler, batch, _order(batch)[-1])
    return original(scheduler, batch)


def _best(batch: Any) -> list[Any]:
    """The request that SGLang would keep: while it can decode, SGLang retracts others by itself."""
    return [batch.reqs[_order(batch)[0]]]


def _order(batch: Any) -> list[int]:
    order: list[int] = batch._get_decode_retraction_order(batch.reqs)  # noqa: SLF001 - SGLang's own order
    return order


def _retract(scheduler: Any, batch: Any, index: int) -> None:
    request = batch.reqs[index]
    keep = [each for each in range(len(batch.reqs)) if each != index]
    is_over = request.finished()
    if not is_over:
        batch.release_req(index, len(keep), offload_kv=False)
    batch.filter_batch(keep_indices=keep)
    batch.batch_is_full = False
    if not is_over:
        scheduler._add_request_to_queue(request, is_retracted=True)  # noqa: SLF001 - no other way


def _retract_all(scheduler: Any) -> None:
    """Let every request begin anew: nothing uses any page afterwards."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def add_request_to_queue(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Name a request that comes, and match it where it waits from now on."""
    cache = scheduler.tree_cache
    if isinstance(cache, EngineCache):
        cache.name_request(request)
    original(scheduler, request, *args, **kwargs)
    if isinstance(cache, EngineCache) and scheduler.waiting_queue and scheduler.waiting_queue[-1] is request:
        cache.expect(request)


def add_chunked_request(original: Callable[..., Any], adder: Any, request: Any) -> Any:
    """Tell the cache whose chunk is to have its pages."""
    if isinstance(adder.tree_cache, EngineCache):
        adder.tree_cache.look_at_chunk(request)
    return original(adder, request)


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    cache = scheduler.tree_cache
    if not isinstance(cache, EngineCache):
        return original(scheduler, batch, *args, **kwargs)
    cache.begin_step(batch.reqs)
    result = original(scheduler, batch, *args, **kwargs)
    cache.end_launch(result)
    return result


def process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Take a step's output, unless a load failed that it was computed on: then its requests begin anew. Raises
    PagesLapsed before any token leaves the engine."""
    cache = scheduler.tree_cache
    if not isinstance(cache, EngineCache):
        original(scheduler, batch, result)
        return
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    cache.begin_output()
    if not cache.take_void(result):
        original(scheduler, batch, result)
    cache.end_output()


def change_weights(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Change the engine's weights, or a part of them within a session."""
    cache = updater.scheduler.tree_cache
    if not isinstance(cache, EngineCache):
        return original(updater, *args, **kwargs)
    cache.begin_weights()
    try:
        return original(updater, *args, **kwargs)
    finally:
        cache.end_weights(is_whole=updater._session is None)  # noqa: SLF001 - begin_weight_update to end_weight_update


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "begin_weight_update", "end_weight_update"),
)
"""Calls that write weights into the model."""

HOOKS: Mapping[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.allocation.alloc_for_extend": allocate,
    "sglang.srt.mem_cache.allocation.alloc_for_decode": allocate,
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req": add_chunked_request,
    f"{SCHEDULER}.ingest_requests": ingest_requests,
    f"{SCHEDULER}._add_request_to_queue": add_request_to_queue,
    f"{SCHEDULER}.run_batch": run_batch,
    f"{SCHEDULER}.update_running_batch": update_running_batch,
    f"{SCHEDULER}.process_batch_result": process_batch_result,
    **{f"{UPDATER}.{each}": change_weights for each in UPDATES},
}
