"""Unsupported configurations, refused before anything is allocated, with what works instead."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cachesvc_sglang.plain import EngineRefused
from cachesvc_sglang.settings import VARIABLE, EngineSettings

TESTED = ("0.5.23",)
"""Releases of SGLang that the plugin was tested with: its hooks are on functions that each release may change."""

SINGLE = {
    "pp_size": "stages of a pipeline have other layers, and a daemon's ranks have the same",
    "attn_cp_size": "ranks would have parts of a prompt's tokens, and a page has all of its block's",
    "dcp_size": "ranks would have parts of a block's tokens, and a page has all of them",
    "attn_dp_size": "its ranks would serve different requests, and a daemon's ranks have the same pages",
    "dwdp_size": "its ranks would serve different requests, and a daemon's ranks have the same pages",
    "nnodes": "all ranks of an engine are on one daemon, which has the GPUs of one node",
}
"""Options that must be 1, and why. ``tp_size`` may be more."""

OFF = (
    "enable_hierarchical_cache",
    "enable_unified_cache_external_linker",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    "enable_hisparse",
    "enable_lmcache",
    "enable_flexkv",
    "enable_kv_cache_sharding",
    "enable_pdmux",
    "enable_two_batch_overlap",
    "enable_streaming_session",
    "enable_session_radix_cache",
    "prefill_only_disable_kv_cache",
    "speculative_algorithm",
    "dllm_algorithm",
)
"""Options that change what the cache's pages mean, or who owns them."""


PAGE_TOKENS = 16, 128
"""Least and most tokens of a block."""

CHANGED: dict[str, tuple[object, str]] = {
    "kv_events_config": (None, "the plugin publishes no KV events: subscribe to the daemon (docs/events.md)"),
    "hicache_storage_backend": (None, "storage below the host pool is the daemon's (cachesvcd --storage)"),
    "radix_eviction_policy": ("lru", "the daemon evicts (cachesvcd --eviction)"),
    "radix_eviction_policy_config": (None, "the daemon evicts (cachesvcd --eviction)"),
    "kv_canary": ("none", "pages that other engines have written would fail its checks (cachesvcd --checksums all)"),
}
"""Options that the daemon's cache has no use for, or that fail with it: their default, and what is there instead."""

READ_WHEN_LOADED: dict[str, tuple[str, ...]] = {
    "load_format": (
        *("auto", "pt", "safetensors", "instanttensor", "npcache", "dummy", "sharded_state", "presharded", "gguf"),
        *("expert_pack", "bitsandbytes", "mistral", "layered", "flash_rl", "fastsafetensors", "runai_streamer"),
    ),
    "weight_cache_mode": ("off",),
    "startup_weight_load_mode": ("serial",),
}
"""Values by which weights are what the checkpoint's files hold when SGLang loads them (``dummy``: of a seed). Others
bring them from another process, or read the files after they were digested."""

POLICY_OF_TREE = "dfs-weight"
"""Order of the waiting queue that walks SGLang's own tree, which an engine of the daemon does not have."""


FULL_POOL, LATENT_POOL, WINDOW_POOL = "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"
"""SGLang's KV pools that are served: K and V of full attention, latents, and K and V of windows beside full ones."""

PARTS = "full_kv_pool", "swa_kv_pool"

WINDOW_PART = "WindowPoolPart"
"""Each of the two that the last one has, as the plugin makes them (``memory``)."""


def require_supported(arguments: Any, settings: EngineSettings) -> None:
    """Raises EngineRefused for a release, and for the first of its options, that cannot be served."""
    from sglang.version import __version__

    _require_version(__version__, settings)
    require_options(arguments)
    if not settings.model:
        require_files(arguments)


def require_files(arguments: Any) -> None:
    """Raises EngineRefused where the checkpoint's files do not say which weights the engine will have."""
    for name, values in READ_WHEN_LOADED.items():
        if (given := getattr(arguments, name, values[0])) not in values:
            raise EngineRefused(
                f"{_flag(name)} is {given!r}: the weights may be others than the files of the checkpoint hold, by "
                f'which engines share; name them, revision included, by "model" in {VARIABLE}'
            )


def require_options(arguments: Any) -> None:
    """Raises EngineRefused for the first of SGLang's options that cannot be served."""
    if not PAGE_TOKENS[0] <= arguments.page_size <= PAGE_TOKENS[1]:
        raise EngineRefused(
            f"--page-size is {arguments.page_size}: the daemon's keys and copies are made for blocks of tokens, and "
            "a small block costs a key of 32 bytes each; take 16 to 128"
        )
    if arguments.max_total_tokens is None:
        raise EngineRefused(
            "--max-total-tokens is not set: the KV pool is the daemon's, and all engines of a model name its size; "
            "take what fits in --device-pool"
        )
    for name, why in SINGLE.items():
        if getattr(arguments, name, 1) != 1:
            raise EngineRefused(
                f"{_flag(name)} is {getattr(arguments, name)}, and only 1 is supported: {why}; leave it out"
            )
    if getattr(arguments, "schedule_policy", "") == POLICY_OF_TREE:
        raise EngineRefused(
            "--schedule-policy dfs-weight walks SGLang's own tree of prefixes, and the daemon has the index here; take "
            "lpm or fcfs"
        )
    if getattr(arguments, "enable_dp_attention", False):
        raise EngineRefused(
            "--enable-dp-attention is not supported with --radix-cache-backend cachesvc: its ranks serve different "
            "requests, and a daemon's ranks have the same pages; leave it out, and start an engine for each GPU or "
            "for each --tp-size GPUs instead"
        )
    if getattr(arguments, "enable_memory_saver", False):
        raise EngineRefused(
            "--enable-memory-saver is not supported with --radix-cache-backend cachesvc: KV memory is the daemon's, "
            "other engines use it, and nothing would be freed; leave it out, and stop the engine to free its "
            "weights: its blocks stay, and it finds them when it is started again"
        )
    for name, (value, why) in CHANGED.items():
        if (given := getattr(arguments, name, value)) not in (value, None):
            raise EngineRefused(f"{_flag(name)} is {given!r}, and {why}; leave it out")
    if os.environ.get("SGLANG_RADIX_FORCE_MISS", "").lower() in ("1", "true", "yes", "y"):
        raise EngineRefused("SGLANG_RADIX_FORCE_MISS is set: use --disable-radix-cache to run without hits")
    for name in OFF:
        if getattr(arguments, name, None):
            raise EngineRefused(f"{_flag(name)} is not supported with --radix-cache-backend cachesvc: leave it out")
    if getattr(arguments, "disaggregation_mode", "null") != "null":
        raise EngineRefused("--disaggregation-mode is not supported with --radix-cache-backend cachesvc: leave it out")


def require_patched(
    registered: Mapping[str, Sequence[tuple[object, object, object]]], patched: Collection[str]
) -> None:
    """Raises EngineRefused for the hooks of this plugin that SGLang could not apply: without them layers would not wait
    for their loads, and tokens of a lost lease would leave the engine."""
    missing = sorted(
        target
        for target, hooks in registered.items()
        if target not in patched
        and any(getattr(hook, "__module__", "").startswith("cachesvc_") for _, hook, _ in hooks)
    )
    if missing:
        raise EngineRefused(
            f"SGLang has no {', '.join(missing)} that a hook fits: the plugin cannot keep its promises on this "
            "release; install a tested one"
        )


def require_pool(pool: Any) -> None:
    """Raises EngineRefused for a KV pool whose pages are neither K and V nor latents, token by token."""
    kind, layout = type(pool).__name__, getattr(pool, "kv_cache_layout", "nhd")
    is_plain = layout == "nhd" and not getattr(pool, "is_quantized_kv_cache", False)
    if kind in (FULL_POOL, LATENT_POOL, WINDOW_PART) and is_plain:
        return
    raise EngineRefused(
        f"the KV pool is a {kind} of layout {layout}: full attention over whole pages of K and V or of latents is "
        "supported, unquantized or in fp8; leave out --radix-cache-backend cachesvc for this model"
    )


def require_parts(kind: type) -> None:
    """Raises EngineRefused for parts of a pool with windows that are not K and V, token by token."""
    if kind.__name__ != FULL_POOL:
        raise EngineRefused(
            f"the KV pool has windows, and parts of a {kind.__name__}: {FULL_POOL} is supported; leave out "
            "--radix-cache-backend cachesvc for this model"
        )


def require_window_pool(pool: Any) -> None:
    """Raises EngineRefused for a pool of windows without whole sequences, and for parts as ``require_pool``."""
    _require_sized(pool)
    if not pool.full_layer_nums:
        raise EngineRefused(
            "no layer of this model keeps whole sequences, and the daemon finds prompts by one that does; leave out "
            "--radix-cache-backend cachesvc for this model"
        )
    for name in PARTS:
        require_pool(getattr(pool, name))


def require_cache(context: Any) -> None:
    """Raises EngineRefused for a model whose KV memory the plugin did not provide."""
    kind = type(context.params.token_to_kv_pool_allocator).__name__
    if context.is_hybrid_ssm:
        raise EngineRefused(
            "this model keeps recurrent states (Mamba, gated delta networks), which SGLang has in slots of requests: "
            "leave out --radix-cache-backend cachesvc for this one, or serve it with vLLM's connector"
        )
    if kind not in ("PageAllocator", "WindowAllocator"):
        raise EngineRefused(
            f"this model's KV cache has a {kind}: full attention and windows beside it are supported, at page sizes "
            "above 1; leave out --radix-cache-backend cachesvc for this one"
        )
    if getattr(context.tp_worker.model_runner, "prefill_aware_swa", False):
        raise EngineRefused(
            "this model's windows keep all of a prompt (prefill-aware windows), and the daemon's slide over it: leave "
            "out --radix-cache-backend cachesvc for this one"
        )
    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    _require_sized(pool)
    if not hasattr(pool, "cachesvc"):
        parts = [type(each).__name__ for name in PARTS if (each := getattr(pool, name, None)) is not None]
        raise EngineRefused(
            f"this model's KV pool is a {' of '.join([type(pool).__name__, *parts[:1]])}, and {FULL_POOL}, "
            f"{LATENT_POOL} and a {WINDOW_POOL} of {FULL_POOL} are supported: leave out --radix-cache-backend cachesvc "
            "for this one"
        )


def _require_sized(pool: Any) -> None:
    if getattr(pool, "post_capture_active", False):
        raise EngineRefused(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set: SGLang would size the KV pool after its graphs, and the pool "
            "is the daemon's; unset it, and size the pool by --max-total-tokens"
        )


def _require_version(version: str, settings: EngineSettings) -> None:
    if version in TESTED or settings.allow_untested_sglang:
        return
    known = " and ".join(TESTED)
    raise EngineRefused(
        f"cachesvc_sglang works with SGLang {known}, and this is {version}: install one of these, or try it at your "
        f'own risk with "allow_untested_sglang": true in {VARIABLE}'
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
