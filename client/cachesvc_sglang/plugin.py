"""Entry point of SGLang's plugins: register the cache by name, and the few hooks that SGLang's registry carries.

SGLang offers two seams for a cache of one's own: a factory of radix caches by name, and a registry of hooks on its
functions. The factory gets pool and allocator ready-made. So hooks do what no seam does: the KV buffers and the class
of the allocator (here), the requests of an allocation and the borders of a step (``steps``). Without
``--radix-cache-backend cachesvc`` they call what they wrap, and nothing else.
"""

from __future__ import annotations

from typing import Any

NAME = "cachesvc"


def activate() -> None:
    """Register the backend and the hooks that come before it. SGLang calls it once in each of its processes."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from cachesvc_sglang.allocator import PageAllocator

    register_radix_cache_backend(NAME, make_cache)
    HookRegistry.register(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", create_buffers, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_configurator.PagedTokenToKVPoolAllocator", PageAllocator, HookType.REPLACE
    )


def make_cache(context: Any) -> Any:
    """Make the cache of an engine: SGLang's factory, called in its scheduler's process. Raises EngineRefused."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from cachesvc_sglang.page_cache import PageCache
    from cachesvc_sglang.refusals import require_cache
    from cachesvc_sglang.steps import HOOKS

    require_cache(context)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    return PageCache(context)


def create_buffers(original: Any, pool: Any) -> None:
    """Lay the pool's buffers over the daemon's slab, where the engine is to use it."""
    from sglang.srt.runtime_context import get_memory

    if get_memory().radix_cache_backend != NAME:
        original(pool)
        return
    from cachesvc_sglang.memory import lay_over_slab

    lay_over_slab(pool)
