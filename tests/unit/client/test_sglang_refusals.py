"""SGLang's options that the plugin refuses, each by its name and with what works instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_sglang.plain import EngineRefused
from cachesvc_sglang.refusals import (
    require_cache,
    require_files,
    require_options,
    require_parts,
    require_pool,
    require_window_pool,
)


def options(**given: object) -> Any:
    """Options of an engine that is served, but for those given."""
    return SimpleNamespace(**{"page_size": 64, "max_total_tokens": 4096, "tp_size": 1, **given})


def context(pool: object) -> Any:
    """The context in which SGLang makes a cache over ``pool``."""

    class PageAllocator:
        def get_kvcache(self) -> object:
            return pool

    params = SimpleNamespace(token_to_kv_pool_allocator=PageAllocator())
    runner = SimpleNamespace(prefill_aware_swa=False)
    return SimpleNamespace(params=params, is_hybrid_ssm=False, tp_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"page_size": 1}, "--page-size is 1"),
        ({"max_total_tokens": None}, "--max-total-tokens is not set"),
        ({"enable_memory_saver": True}, "stop the engine to free its weights: its blocks stay"),
        ({"pp_size": 2}, "--pp-size is 2, and only 1 is supported: stages of a pipeline have other layers"),
        ({"attn_cp_size": 2}, "--attn-cp-size is 2, and only 1 is supported: ranks would have parts of a prompt"),
        ({"dcp_size": 2}, "--dcp-size is 2, and only 1 is supported: ranks would have parts of a block"),
        ({"attn_dp_size": 2}, "--attn-dp-size is 2, and only 1 is supported: its ranks would serve different"),
        ({"dwdp_size": 2}, "--dwdp-size is 2, and only 1 is supported: its ranks would serve different"),
        ({"nnodes": 2}, "--nnodes is 2, and only 1 is supported: all ranks of an engine are on one daemon"),
        ({"enable_dp_attention": True}, "--enable-dp-attention is not supported .* serve different requests"),
        ({"enable_pdmux": True}, "--enable-pdmux is not supported"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache is not supported"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm is not supported"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache is not supported"),
        ({"prefill_only_disable_kv_cache": True}, "--prefill-only-disable-kv-cache is not supported"),
        ({"kv_canary": "raise"}, "--kv-canary is 'raise', and pages that other engines have written"),
        ({"radix_eviction_policy_config": {"threshold": 1}}, "--radix-eviction-policy-config is .* the daemon evicts"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode is not supported"),
    ],
)
def test_an_option_that_cannot_be_served_is_refused_by_its_name(given: dict[str, object], reason: str) -> None:
    require_options(options(tp_size=2))
    with pytest.raises(EngineRefused, match=reason):
        require_options(options(**given))


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"load_format": "remote_instance"}, "--load-format"),
        ({"load_format": "a later release's"}, "--load-format"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode"),
        ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode"),
    ],
)
def test_weights_that_the_checkpoint_s_files_do_not_tell_want_a_name(given: dict[str, object], flag: str) -> None:
    require_files(options(load_format="safetensors", weight_cache_mode="off", startup_weight_load_mode="serial"))
    with pytest.raises(EngineRefused, match=f'{flag} is .* by "model" in CACHESVC_SGLANG'):
        require_files(options(**given))


def test_a_pool_that_is_sized_after_the_graphs_is_refused_by_its_variable() -> None:
    require_cache(context(SimpleNamespace(cachesvc=object(), post_capture_active=False)))
    with pytest.raises(EngineRefused, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set"):
        require_cache(context(SimpleNamespace(post_capture_active=True)))


class MLATokenToKVPool:
    """The part of SGLang's pool of latents that is looked at."""


class DSATokenToKVPool(MLATokenToKVPool):
    """One with an indexer."""


def test_a_pool_whose_memory_the_daemon_does_not_have_is_refused_with_its_kind() -> None:
    with pytest.raises(EngineRefused, match="this model's KV pool is a DSATokenToKVPool"):
        require_cache(context(DSATokenToKVPool()))
    with pytest.raises(EngineRefused, match=r"KV pool is a SimpleNamespace of MLATokenToKVPool, .* SWAKVPool of MHA"):
        require_cache(context(SimpleNamespace(full_kv_pool=MLATokenToKVPool(), swa_kv_pool=MLATokenToKVPool())))


def test_latents_are_served_and_those_with_an_indexer_refused() -> None:
    require_pool(MLATokenToKVPool())
    with pytest.raises(EngineRefused, match="DSATokenToKVPool"):
        require_pool(DSATokenToKVPool())


class WindowPoolPart:
    """A part of SGLang's pool with windows, as the plugin makes it."""

    kv_cache_layout = "nhd"
    is_quantized_kv_cache = False


def window_pool(**given: object) -> Any:
    """A pool with windows that is served, but for what is given."""
    parts = {"full_kv_pool": WindowPoolPart(), "swa_kv_pool": WindowPoolPart()}
    return SimpleNamespace(**{**parts, "full_layer_nums": 2, "post_capture_active": False, **given})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"full_layer_nums": 0}, "no layer of this model keeps whole sequences"),
        ({"post_capture_active": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set"),
        ({"swa_kv_pool": DSATokenToKVPool()}, "the KV pool is a DSATokenToKVPool"),
    ],
)
def test_windows_beside_whole_sequences_are_served(given: dict[str, object], reason: str) -> None:
    require_parts(type("MHATokenToKVPool", (), {}))
    require_window_pool(window_pool())
    with pytest.raises(EngineRefused, match=reason):
        require_window_pool(window_pool(**given))


def test_parts_of_a_pool_with_windows_that_are_not_k_and_v_are_refused_with_their_kind() -> None:
    with pytest.raises(EngineRefused, match="the KV pool has windows, and parts of a MHATokenToKVPoolMXFP8"):
        require_parts(type("MHATokenToKVPoolMXFP8", (), {}))


def test_models_whose_windows_or_states_mean_something_else_are_refused_by_that() -> None:
    made = context(SimpleNamespace(cachesvc=object()))
    made.tp_worker.model_runner.prefill_aware_swa = True
    with pytest.raises(EngineRefused, match="prefill-aware windows"):
        require_cache(made)
    made.is_hybrid_ssm = True
    with pytest.raises(EngineRefused, match="this model keeps recurrent states"):
        require_cache(made)
    made.is_hybrid_ssm, made.params.token_to_kv_pool_allocator = False, SimpleNamespace()
    with pytest.raises(EngineRefused, match="this model's KV cache has a SimpleNamespace: full attention and windows"):
        require_cache(made)


def test_a_pool_of_another_layout_is_refused_with_its_kind() -> None:
    pool = SimpleNamespace(kv_cache_layout="hnd", is_quantized_kv_cache=False)
    with pytest.raises(EngineRefused, match="SimpleNamespace of layout hnd"):
        require_pool(pool)
