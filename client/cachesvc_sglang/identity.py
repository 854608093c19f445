"""The facts behind the name under which SGLang engines share: all that decides the bytes of a page.

Options of SGLang that choose weights, kernels or sizes count, but for a written list of what decides no byte: an option
that a later release adds keeps engines apart until it has been looked at.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from cachesvc_client.plugins.facts import (
    LoadedCheckpoints,
    canonical,
    checkpoint_digest,
    digest_of,
    length_fact,
    process_began_s,
    without_notes,
)

from cachesvc.model.layout import Layout
from cachesvc_sglang.plain import EngineRefused
from cachesvc_sglang.settings import VARIABLE

PACKAGES = (
    "sglang",
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn",
    "flash-attn-4",
    "sglang-kernel",
    "sgl-kernel",
)
"""Packages that attention and matrix products come from."""

NAMESPACES = ("model", "exec_", "parallel", "lora", "mm", "spec")
"""Groups of SGLang's options that decide bytes. Others: memory and batches, processes, answers, logs."""

HARMLESS = frozenset(
    {
        # the checkpoint by its name, and how it is read: ``weights`` has its bytes, ``config`` what it says
        *("model_path", "revision", "download_dir", "load_format", "model_loader_extra_config", "trust_remote_code"),
        *("startup_weight_load_mode", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load", "model_checksum"),
        *("delete_ckpt_after_loading", "checkpoint_engine_wait_weights_before_ready", "weight_cache_mode"),
        *("weight_cache_socket", "weight_cache_timeout", "engine_info_bootstrap_port", "modelexpress_config"),
        # ``context_length`` is a fact of its own where it decides bytes
        *("context_length", "is_embedding"),
        # what is sampled or answered
        *("sampling_backend", "grammar_backend", "enable_custom_logit_processor", "enable_watermark"),
        *("watermark_config", "watermark_key", "watermark_key_b", "watermark_context_window"),
        *("watermark_mixing_probability", "watermark_max_probability", "watermark_default_enabled"),
        *("watermark_enforce_all", "enable_return_hidden_states", "return_hidden_states_mode"),
        *("sampling_mask_max_tokens", "disable_outlines_disk_cache"),
        # graphs: last bits, as batching changes them too
        *("cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_max_bs_decode"),
        *("cuda_graph_max_bs_prefill", "cuda_graph_max_seq_len_prefill", "cuda_graph_bs_decode"),
        *("cuda_graph_bs_prefill", "cuda_graph_prefill_max_context", "disable_prefill_cuda_graph"),
        *("disable_decode_cuda_graph", "disable_cuda_graph", "disable_cuda_graph_padding"),
        *("enable_profile_cuda_graph", "enable_cudagraph_gc", "debug_cuda_graph", "enable_layerwise_nvtx_marker"),
        # which of several engines this is, and where
        *("nccl_port", "dist_timeout", "dist_init_addr", "gated_launch_port", "node_rank", "dp_size"),
        *("load_balance_method", "pp_max_micro_batch_size", "pp_async_batch_depth", "pre_warm_nccl"),
        # which adapters there are: keys have the request's
        *("lora_paths", "max_loaded_loras", "max_loras_per_batch", "lora_eviction_policy"),
    }
)

HARMLESS_VARIABLES = frozenset(
    {VARIABLE, "SGLANG_PLUGINS", "SGLANG_RUN_ID", "SGLANG_CACHE_DIR", "SGLANG_TORCH_PROFILER_DIR"}
)


def engine_facts(arguments: Any, model_config: Any, layout: Layout, weights: str | None) -> dict[str, str]:
    """Return what the name stands for. ``weights``: the operator's own word for them. Raises EngineRefused."""
    facts = {
        "weights": weights or _weights(arguments, model_config),
        "remote_code": str(arguments.trust_remote_code) if getattr(model_config.hf_config, "auto_map", None) else "",
        "config": digest_of(canonical(without_notes(model_config.hf_config.to_dict()))),
        "context_length": length_fact(model_config.hf_text_config, model_config.context_len, dict),
        "kv": repr(layout.planes[:2]),
        "options": digest_of(canonical(deciding_options(arguments))),
        "packages": ", ".join(f"{name} {release}" for name, release in _releases()),
        "processor": _processor(),
        "environment": digest_of(_environment(os.environ)),
    }
    return {name: fact for name, fact in facts.items() if fact}


def look_at_weights(arguments: Any) -> None:
    """Look at the checkpoint's files: this process is about to load them."""
    _loaded().look(arguments.model_path)


def replaced_weights(arguments: Any, weights: str | None) -> str:
    """Return why the digest of the facts may be of other weights than this process has loaded; empty where it is not.
    ``weights``: the operator's own word for them. Comes right after ``engine_facts``, once in each rank."""
    is_read = not weights and arguments.load_format != "dummy"
    return _loaded().replaced(arguments.model_path) if is_read else ""


@cache
def _loaded() -> LoadedCheckpoints:
    return LoadedCheckpoints(process_began_s())


def deciding_options(arguments: Any) -> dict[str, object]:
    """Options of an engine that decide bytes, by name."""
    from importlib import import_module

    found: dict[str, object] = {}
    for each in NAMESPACES:
        module = import_module(f"sglang.srt.arg_groups.fields.{each}")
        for group in vars(module).values():
            if isinstance(group, type) and getattr(group, "_NS_PATH", None) is not None:
                found |= {name: getattr(arguments, name, None) for name in getattr(group, "__struct_fields__", ())}
    return {name: found[name] for name in sorted(found.keys() - HARMLESS)}


def _weights(arguments: Any, model_config: Any) -> str:
    if arguments.load_format == "dummy":
        return f"dummy, seed {arguments.random_seed}"
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    try:
        return checkpoint_digest(
            arguments.model_path, arguments.revision, download_dir=arguments.download_dir, commit=commit
        )
    except OSError as error:
        raise EngineRefused(
            f"the weights of {arguments.model_path} cannot be told from others ({error}): name them, revision "
            f'included, by "model" in {VARIABLE}'
        ) from error


def _releases() -> list[tuple[str, str]]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    if not torch.cuda.is_available():
        return platform.machine()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    names = sorted(name for name in variables if name.startswith(("SGLANG_", "SGL_")))
    return {name: variables[name] for name in names if name not in HARMLESS_VARIABLES}
