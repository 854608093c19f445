"""Holds what the plugin hooks, replaces, implements and reads against the installed SGLang; prints what differs.

    python -m tests.sglang.signatures [TARGET]

TARGET: a name of SGLang, such as ``sglang.srt.managers.scheduler.Scheduler.run_batch``, that is taken away first: what
the next release may do. Run by the Python that has SGLang, which need not have pytest.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.sglang.stubs import install

install()

SRT = "sglang.srt"
CACHE = f"{SRT}.mem_cache"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
UPDATER = f"{SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
LORAS = f"{SRT}.lora.lora_manager.LoRAManager"
SCHEDULED = f"{SRT}.managers.schedule_batch"

CALLED: Mapping[str, list[str]] = {
    f"{CACHE}.memory_pool.MHATokenToKVPool._create_buffers_normal": ["self"],
    f"{CACHE}.memory_pool.MLATokenToKVPool._create_buffers": ["self"],
    f"{CACHE}.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": ["self", "pre_model_load_memory"],
    f"{CACHE}.kv_cache_configurator.KVCacheConfigurator._build_hybrid_swa_kv_pool": [
        *("self", "full_max_total_num_tokens", "swa_max_total_num_tokens", "mha_pool_class"),
    ],
    f"{SRT}.model_executor.model_runner.ModelRunner.load_model": ["self"],
    f"{LORAS}.load_lora_weights": ["self", "lora_ref"],
    f"{LORAS}.load_lora_weights_from_tensors": ["self", "lora_ref", "tensors"],
    f"{CACHE}.allocation.alloc_for_extend": ["batch"],
    f"{CACHE}.allocation.alloc_for_decode": ["batch", "token_per_req"],
    f"{SRT}.managers.schedule_policy.PrefillAdder.add_chunked_req": ["self", "req"],
    f"{SCHEDULER}.ingest_requests": ["self", "stop_at_pause"],
    f"{SCHEDULER}._add_request_to_queue": ["self", "req", "is_retracted"],
    f"{SCHEDULER}.run_batch": ["self", "batch", "pp_proxy_tensors"],
    f"{SCHEDULER}.update_running_batch": ["self", "batch"],
    f"{SCHEDULER}.process_batch_result": ["self", "batch", "result"],
    f"{SCHEDULER}.pause_generation": ["self", "recv_req"],
    f"{SCHEDULER}.continue_generation": ["self", "recv_req"],
    f"{SCHEDULER}._reqs_finishing_inflight": ["self", "batch"],
    f"{SCHEDULED}.ScheduleBatch._get_decode_retraction_order": ["reqs"],
    f"{SCHEDULED}.ScheduleBatch.release_req": ["self", "idx", "remaing_req_count", "offload_kv"],
    f"{SCHEDULED}.ScheduleBatch.filter_batch": ["self", "reqs_to_exclude", "keep_indices"],
    f"{SCHEDULED}.ScheduleBatch.maybe_evict_swa": ["self"],
    f"{SCHEDULED}.ReqKvInfo.get_evicted_seqlen": ["self", "component_type"],
    f"{SCHEDULED}.ReqKvInfo.set_evicted_seqlen": ["self", "component_type", "length"],
    f"{CACHE}.registry.register_radix_cache_backend": ["name", "factory"],
    f"{SRT}.plugins.hook_registry.HookRegistry.register": ["target", "hook", "hook_type", "source"],
    f"{SRT}.plugins.hook_registry.HookRegistry.apply_hooks": [],
    f"{SRT}.arg_groups.overrides.model_config_of": ["server_args"],
    f"{SRT}.runtime_context.get_memory": [],
    f"{SRT}.runtime_context.get_parallel": [],
    f"{SRT}.runtime_context.get_server_args": [],
    f"{SRT}.managers.scheduler_components.pool_stats_observer.kv_private_tokens": ["kv", "page_size"],
    f"{SRT}.managers.scheduler_components.pool_stats_observer.kv_private_swa_tokens": ["kv", "page_size"],
    f"{SRT}.utils.common.is_pin_memory_available": ["device"],
}
"""Functions that hooks wrap, or that the plugin calls, with their parameters."""

READ: Mapping[str, tuple[str, ...]] = {
    f"{SCHEDULED}.Req": (
        *("origin_input_ids", "output_ids", "full_untruncated_fill_ids", "cache_request_handle", "extra_key"),
        *("cache_salt", "lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides", "prefix_len"),
        *("skip_radix_cache_insert", "last_node", "kv", "finished"),
    ),
    f"{SCHEDULED}.ReqKvInfo": ("kv_allocated_len", "cache_protected_len"),
    f"{SCHEDULED}.ScheduleBatch": ("tree_cache", "reqs", "batch_is_full"),
    SCHEDULER: ("tree_cache", "waiting_queue", "_engine_paused"),
    UPDATER: ("scheduler", "_session"),
    f"{SRT}.managers.schedule_policy.PrefillAdder": ("tree_cache", "memory_budget"),
    f"{CACHE}.registry.TreeCacheBuildContext": ("params", "is_hybrid_ssm", "disable_radix_cache", "tp_worker"),
    f"{CACHE}.cache_init_params.CacheInitParams": (
        *("req_to_token_pool", "token_to_kv_pool_allocator", "page_size", "chunked_prefill_size", "enable_metrics"),
        "sliding_window_size",
    ),
    f"{CACHE}.radix_cache.RadixKey": ("token_ids", "limit"),
    f"{CACHE}.memory_pool.KVCache": ("size", "page_size", "store_dtype", "layer_num", "layer_transfer_counter"),
    f"{CACHE}.memory_pool.MHATokenToKVPool": (
        *("k_buffer", "v_buffer", "head_num", "head_dim", "v_head_dim", "kv_cache_layout", "is_quantized_kv_cache"),
        *("post_capture_active", "_create_buffers", "_kv_buffer_shapes"),
    ),
    f"{CACHE}.memory_pool.MLATokenToKVPool": ("kv_buffer", "kv_cache_dim"),
    f"{CACHE}.swa_memory_pool.SWAKVPool": (
        *("full_kv_pool", "swa_kv_pool", "full_layer_nums", "layers_mapping", "post_capture_active", "layer_num"),
        "register_layer_transfer_counter",
    ),
    f"{CACHE}.kv_cache_configurator.KVCacheConfigurator": ("sliding_window_size",),
    f"{CACHE}.allocator.paged.PagedTokenToKVPoolAllocator": ("num_pages", "free_pages"),
    f"{CACHE}.allocator.swa.SWATokenToKVPoolAllocator": ("full_to_swa_index_mapping", "size_full", "size_swa"),
    f"{CACHE}.prefill_budget.PrefillBudget": ("tree_cache", "ceil_paged_tokens"),
    f"{SRT}.model_executor.model_runner.ModelRunner": ("prefill_aware_swa",),
    f"{LORAS}": ("loras",),
    f"{SRT}.plugins.hook_registry.HookRegistry": ("_hooks", "_patched"),
}
"""Attributes of objects that the plugin reads or sets."""

KNOWN_METHODS: Mapping[str, frozenset[str]] = {
    f"{CACHE}.allocator.swa.SWATokenToKVPoolAllocator": frozenset(
        {
            *("alloc", "alloc_decode", "alloc_extend", "alloc_extend_swa_tail", "available_size", "clear"),
            *("clear_full_to_swa_mapping", "create_prefill_budget", "debug_print", "evict_to_free_tokens", "free"),
            *("free_full", "free_full_segment", "free_group_begin", "free_group_end", "free_segment", "free_swa"),
            *("free_swa_segment", "full_available_size", "get_cpu_copy", "get_kvcache", "load_cpu_copy"),
            *("new_pages_available", "reclaim_for_prealloc", "resize", "set_full_to_swa_mapping", "size", "size_full"),
            *("size_swa", "swa_available_size", "swa_capacity_and_available", "swa_req_ring"),
            *("swa_ring_cost_tokens", "translate_loc_from_full_to_swa", "translate_swa_indices_for_transfer"),
        }
    ),
    f"{CACHE}.prefill_budget.SWAPrefillBudget": frozenset(
        {
            *("available_chunk_tokens", "can_allocate_prefill", "check_prefill", "has_capacity", "remaining_swa"),
            *("reserve", "swa_never_fits", "swa_tokens"),
        }
    ),
}
"""Methods of classes that are taken over whole: a further one would do what SGLang's does."""


def differences() -> Iterator[str]:
    """Differences from what the plugin takes SGLang to be, one a line."""
    for target, parameters in CALLED.items():
        found = _resolve(target)
        if found is None:
            yield f"SGLang has no {target}, which the plugin hooks or calls"
        elif (names := _parameters(found)) != parameters:
            yield f"{target} takes {names}, and the plugin knows {parameters}"
    for target, attributes in READ.items():
        kind = _resolve(target)
        if kind is None:
            yield f"SGLang has no {target}, of which the plugin reads {', '.join(attributes)}"
            continue
        text = "".join(inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("sglang"))
        missing = [each for each in attributes if f"self.{each}" not in text and not _is_member(kind, each)]
        yield from (f"{target} has no {each}, which the plugin reads" for each in missing)
    for target, known in KNOWN_METHODS.items():
        kind = _resolve(target)
        public = {name for name in vars(kind) if not name.startswith("_")} if kind is not None else set()
        if public != known:
            yield f"{target}: methods that the plugin does not know, or misses: {sorted(public ^ known)}"
    yield from _overridden()


def _overridden() -> Iterator[str]:
    """Methods of the plugin's classes that SGLang could not call as it does its own."""
    from cachesvc_sglang.allocator import DaemonBudget, PageAllocator, WindowAllocator, WindowBudget
    from cachesvc_sglang.follower import FollowingCache
    from cachesvc_sglang.leader import LeadingCache
    from cachesvc_sglang.memory import WindowPoolPart
    from cachesvc_sglang.page_cache import PageCache

    ours = (PageCache, LeadingCache, FollowingCache, PageAllocator, WindowAllocator, DaemonBudget, WindowBudget)
    for kind in (*ours, WindowPoolPart):
        if abstract := getattr(kind, "__abstractmethods__", None):
            yield f"{kind.__name__} lacks {', '.join(sorted(abstract))}, which SGLang wants of it"
        theirs = [each for each in kind.__mro__ if each.__module__.startswith("sglang")]
        for mine in (each for each in kind.__mro__ if each.__module__.startswith("cachesvc_sglang")):
            for name, method in vars(mine).items():
                base = next((vars(each)[name] for each in theirs if name in vars(each)), None)
                if inspect.isfunction(method) and inspect.isfunction(base) and name != "__init__":
                    yield from _unlike(f"{mine.__name__}.{name}", method, base)
    for name in ("PageCache.checkpoint", "PageCache.on_release", "PageCache.finish", "PageCache.reset", *SEAMS):
        kind = next(each for each in ours if each.__name__ == name.partition(".")[0])
        method = name.partition(".")[2]
        if not any(method in vars(each) for each in kind.__mro__ if each.__module__.startswith("sglang")):
            yield f"SGLang's base of {name} has no {method}: it would never be called"


SEAMS = (
    *("PageCache.match_prefix", "PageCache.inc_lock_ref", "PageCache.path_device_indices", "PageCache.init_load_back"),
    *("PageCache.free_kv_row", "PageCache.evict_sliding_windows", "PageCache.supports_swa", "PageCache.protected_size"),
    *("PageCache.swa_protected_size", "PageCache.full_protected_size", "PageCache.release_host_resources"),
    *("PageAllocator.check_decode_capacity", "PageAllocator.create_prefill_budget", "PageAllocator.free_page_ids"),
    *("WindowAllocator.free_swa", "WindowAllocator.free_swa_segment", "WindowAllocator.swa_available_size"),
    *("WindowBudget.fit_chunk", "WindowBudget.available_chunk_tokens", "WindowBudget.remaining_swa"),
)
"""Methods by which SGLang calls the plugin, beside those that are abstract."""


def _unlike(name: str, mine: Callable[..., Any], theirs: Callable[..., Any]) -> Iterator[str]:
    """Parameters by which a call that fits ``theirs`` does not fit ``mine``."""
    own = inspect.signature(mine).parameters
    takes_more = any(each.kind is each.VAR_POSITIONAL for each in own.values())
    takes_named = any(each.kind is each.VAR_KEYWORD for each in own.values())
    wanted = [each for each in inspect.signature(theirs).parameters.values() if each.kind is not each.VAR_KEYWORD]
    for each in wanted:
        is_there = each.name in own or takes_named or (takes_more and each.kind is not each.KEYWORD_ONLY)
        if not is_there and each.kind is not each.VAR_POSITIONAL:
            yield f"{name} takes {[*own]}, and SGLang's has {each.name}"
    given = {each.name for each in wanted}
    for added in (each for each in own.values() if each.name not in given):
        if added.default is added.empty and added.kind not in (added.VAR_POSITIONAL, added.VAR_KEYWORD):
            yield f"{name} wants {added.name}, which SGLang does not give"


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def _parameters(function: Any) -> list[str]:
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind not in skipped]


def _is_member(kind: type, name: str) -> bool:
    return hasattr(kind, name) or any(name in getattr(each, "__annotations__", ()) for each in kind.__mro__)


def main() -> None:
    """Compare, once a name is away where one was given."""
    from cachesvc_sglang import adapters, steps

    for target in sys.argv[1:]:
        place, _, name = target.rpartition(".")
        delattr(pkgutil.resolve_name(place), name)
    unknown = sorted({*steps.HOOKS, *adapters.HOOKS} - CALLED.keys() - {f"{UPDATER}.{each}" for each in steps.UPDATES})
    missing = [f"{UPDATER}.{each}" for each in steps.UPDATES if _resolve(f"{UPDATER}.{each}") is None]
    found = [*differences(), *(f"SGLang has no {each}, which the plugin hooks" for each in missing)]
    print(json.dumps([*found, *(f"{each} is hooked, and not known here" for each in unknown)]))


if __name__ == "__main__":
    main()
