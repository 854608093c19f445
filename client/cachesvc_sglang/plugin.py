"""Entry point of SGLang's plugins: register the cache by name, and the few hooks that SGLang's registry carries.

SGLang offers two seams for a cache of one's own: a factory of radix caches by name, and a registry of hooks on its
functions. The factory gets pool and allocator ready-made. So hooks do what no seam does: the KV buffers and the class
of the allocator, and what comes before weights load (here), the requests of an allocation and the borders of a step
(``steps``). Without ``--radix-cache-backend cachesvc`` they call what they wrap, and nothing else.
"""

from __future__ import annotations

import os
from typing import Any

NAME = "cachesvc"

ENOUGH_BYTES = 1 << 50
"""Budget of a KV pool that takes none of the engine's memory: ``--max-total-tokens`` alone sizes it."""


def activate() -> None:
    """Register the backend and the hooks that come before it. SGLang calls it once in each of its processes."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from cachesvc_sglang.adapters import HOOKS as ADAPTER_HOOKS
    from cachesvc_sglang.allocator import PageAllocator, WindowAllocator

    register_radix_cache_backend(NAME, make_cache)
    for method in ("MHATokenToKVPool._create_buffers_normal", "MLATokenToKVPool._create_buffers"):
        HookRegistry.register(f"sglang.srt.mem_cache.memory_pool.{method}", create_buffers, HookType.AROUND)
    for target, hook in ADAPTER_HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load_model, HookType.AROUND)
    configurator = "sglang.srt.mem_cache.kv_cache_configurator"
    HookRegistry.register(f"{configurator}.PagedTokenToKVPoolAllocator", PageAllocator, HookType.REPLACE)
    HookRegistry.register(f"{configurator}.SWATokenToKVPoolAllocator", WindowAllocator, HookType.REPLACE)
    HookRegistry.register(
        f"{configurator}.KVCacheConfigurator._build_hybrid_swa_kv_pool", build_window_pool, HookType.AROUND
    )
    HookRegistry.register(
        f"{configurator}.KVCacheConfigurator._profile_available_bytes", available_bytes, HookType.AROUND
    )


def make_cache(context: Any) -> Any:
    """Make the cache of an engine: SGLang's factory, called in its scheduler's process. Raises EngineRefused."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from cachesvc_sglang.follower import FollowingCache
    from cachesvc_sglang.leader import LeadingCache
    from cachesvc_sglang.page_cache import PageCache
    from cachesvc_sglang.refusals import require_cache, require_patched
    from cachesvc_sglang.steps import HOOKS

    require_cache(context)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    require_patched(HookRegistry._hooks, HookRegistry._patched)  # noqa: SLF001 - it only logs a hook that does not fit
    memory = context.params.token_to_kv_pool_allocator.get_kvcache().cachesvc
    if memory.leader is not None:
        return FollowingCache(context)
    return PageCache(context) if memory.followers is None else LeadingCache(context)


def load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the weights of an engine that can be served. Raises EngineRefused before anything is read."""
    if _is_chosen():
        from sglang.srt.runtime_context import get_server_args

        from cachesvc_sglang.identity import look_at_weights
        from cachesvc_sglang.refusals import require_supported
        from cachesvc_sglang.settings import read_settings

        arguments = get_server_args()
        require_supported(arguments, read_settings(os.environ))
        look_at_weights(arguments)
    return original(runner, *args, **kwargs)


def available_bytes(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> int:
    """Return how many bytes the KV pool may take. What the daemon has is no longer free on the GPU, and the pool takes
    nothing of what is: SGLang would make it smaller than the daemon's, or refuse to start."""
    return ENOUGH_BYTES if _is_chosen() else int(original(configurator, *args, **kwargs))


def create_buffers(original: Any, pool: Any) -> None:
    """Lay the pool's buffers over the daemon's slab, where the engine is to use it."""
    if not _is_chosen():
        original(pool)
        return
    from cachesvc_sglang.memory import lay_over_slab

    lay_over_slab(pool)


def build_window_pool(original: Any, configurator: Any, *, mha_pool_class: type, **kwargs: Any) -> Any:
    """Build a pool of whole sequences and windows, and lay both over the daemon's slabs, where the engine is to use
    them."""
    if not _is_chosen():
        return original(configurator, mha_pool_class=mha_pool_class, **kwargs)
    from cachesvc_sglang.memory import WindowPoolPart, lay_over_slabs
    from cachesvc_sglang.refusals import require_parts

    require_parts(mha_pool_class)
    pool = original(configurator, mha_pool_class=WindowPoolPart, **kwargs)
    lay_over_slabs(pool, configurator.sliding_window_size)
    return pool


def _is_chosen() -> bool:
    from sglang.srt.runtime_context import get_memory

    return bool(get_memory().radix_cache_backend == NAME)
