"""Parts of vLLM's configuration that decide the bytes of a page: all of it, but for a written list of what does not.

So an option that a later release adds keeps engines apart until someone has looked at it. A value without fields is
its type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cachesvc_client.plugins.facts import canonical, digest_of, fields_of

SHOWN_CHARACTERS = 48
"""Operators see longer values as digests."""

WHOLE = frozenset(
    {
        # logs, metrics, messages and process starts
        *("observability_config", "logging_config", "profiler_config", "kv_transfer_config", "kv_events_config"),
        *("ec_transfer_config", "ec_manager_config", "aux_output_config", "instance_id", "shutdown_timeout"),
        # what is sampled, or how answers are shaped
        *("structured_outputs_config", "reasoning_config", "watermark_config"),
        # where weights lie, and how new ones come: ``weights`` says which they are
        *("offload_config", "weight_transfer_config"),
        # batching
        *("performance_mode", "optimization_level"),
    }
)
"""Parts of ``VllmConfig`` that decide no byte."""

HARMLESS: Mapping[str, frozenset[str]] = {
    "ModelConfig": frozenset(
        {
            # the checkpoint by its name: ``weights`` has its bytes, ``hf_config`` what it says
            *("model", "model_weights", "revision", "hf_config_path", "config_format", "hf_token", "served_model_name"),
            *("allow_deprecated_quantization", "seed"),
            # ``remote_code`` says it where a checkpoint brings code
            "trust_remote_code",
            # tokens are in the keys
            *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "enable_prompt_embeds"),
            # sampling and answers
            *("max_logprobs", "logprobs_mode", "use_fp64_gumbel", "generation_config", "override_generation_config"),
            *("return_sampling_mask", "logits_processors", "io_processor_plugin", "pooler_config"),
            # limits, memory, processes; ``max_model_len`` is a fact of its own where it decides bytes
            *("max_model_len", "spec_target_max_model_len", "enable_sleep_mode", "sleep_preserve_parameter_names"),
            *("sleep_mode_backend", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"),
            *("enable_cumem_allocator", "renderer_num_workers", "enable_trace_replay"),
            *("allowed_local_media_path", "allowed_media_domains"),
            # graphs: last bits, as batching changes them too
            "enforce_eager",
        }
    ),
    "CacheConfig": frozenset(
        {
            # sizes of the pool; ``kv_specs`` has the blocks
            *("gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks", "num_cpu_blocks"),
            *("kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_cache_max_concurrency", "user_specified_block_size"),
            *("kv_offloading_size", "kv_offloading_backend", "_block_size_resolved"),
            # which blocks are kept or found
            *("enable_prefix_caching", "prefix_cache_retention_interval", "prefix_match_unit"),
            *("cache_hit_alignment_tokens", "hash_block_size", "effective_attention_block_size"),
            # a fact of its own, with its root
            "prefix_caching_hash_algo",
        }
    ),
    "ParallelConfig": frozenset(
        {
            # which of several engines this is, and where
            *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_rank_local"),
            *("data_parallel_index", "data_parallel_master_ip", "data_parallel_rpc_port", "data_parallel_master_port"),
            *("_data_parallel_master_port_list", "_coord_store_port", "data_parallel_backend"),
            *("data_parallel_external_lb", "data_parallel_hybrid_lb", "dp_sync_interval", "_api_process_count"),
            *("_api_process_rank", "master_addr", "master_port", "node_rank", "nnodes", "world_size", "rank"),
            *("distributed_executor_backend", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
            *("placement_group", "ray_workers_use_nsight", "ray_runtime_env", "assigned_physical_gpu_ids"),
            *("numa_bind", "numa_bind_nodes", "numa_bind_cpus", "max_parallel_loading_workers"),
            *("disable_nccl_for_dp_synchronization", "enable_elastic_ep", "elastic_ep_max_dp_size"),
            *("enable_fault_tolerance", "fault_tolerance_config", "enable_ep_weight_filter"),
            # how batches are cut
            *("enable_dbo", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
            "enable_batch_sharded_sampling",
        }
    ),
    "SchedulerConfig": frozenset(
        {
            # what runs when, and how much of it
            *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_num_active_seqs"),
            *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_queued_reqs"),
            *("max_num_queued_tokens", "enable_chunked_prefill", "max_num_encoder_input_tokens", "encoder_cache_size"),
            *("policy", "disable_chunked_mm_input", "scheduler_cls", "disable_hybrid_kv_cache_manager", "watermark"),
            *("scheduler_reserve_full_isl", "prefill_schedule_interval", "async_scheduling", "stream_interval"),
        }
    ),
    "DeviceConfig": frozenset({"device"}),
    "LoadConfig": frozenset(
        {
            # how weights are read; ``weights`` says which they are. ``load_format`` decides which files of a folder are
            *("download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads"),
            *("safetensors_prefetch_block_size", "device", "use_tqdm_on_load", "pt_load_map_location"),
        }
    ),
    "LoRAConfig": frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora"}),
    "SpeculativeConfig": frozenset(
        {
            # the target, named already; the drafter by its name: ``drafter`` has its bytes
            *("target_model_config", "target_parallel_config", "model", "revision"),
            # how much is drafted and accepted: ``draft_lookahead`` says what of it pages depend on
            *("num_speculative_tokens", "num_speculative_tokens_per_batch_size", "max_model_len", "enforce_eager"),
            *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
            *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
            *("suffix_decoding_min_token_prob", "rejection_sample_method", "synthetic_acceptance_rates"),
            *("synthetic_acceptance_length", "enable_adaptive_verification", "draft_sample_method"),
            *("disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes"),
        }
    ),
    "MultiModalConfig": frozenset(
        {
            # how much of it comes, and where it is kept on its way
            *("limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "skip_mm_profiling"),
            *("mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "interleave_mm_strings"),
            *("allow_missing_mm_embeddings", "enable_mm_embeds", "mm_encoder_fp8_scale_save_path"),
            "mm_encoder_fp8_scale_save_margin",
        }
    ),
    "KernelConfig": frozenset({"enable_jit_warmup", "enable_cutedsl_warmup"}),
    "CompilationConfig": frozenset(
        {
            # how kernels are fused and captured: last bits, as batching changes them too
            *("mode", "debug_dump_path", "cache_dir", "compile_cache_save_format", "backend", "custom_ops"),
            *("ir_enable_torch_wrap", "splitting_ops", "compile_mm_encoder", "cudagraph_mm_encoder"),
            *("encoder_cudagraph_token_budgets", "encoder_cudagraph_max_vision_items_per_batch"),
            *("encoder_cudagraph_max_frames_per_batch", "cudagraph_decoder_replay", "compile_sizes"),
            *("decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "compile_ranges_endpoints"),
            *("inductor_compile_config", "inductor_passes", "cudagraph_mode", "cudagraph_num_of_warmups"),
            *("cudagraph_capture_sizes", "cudagraph_copy_inputs", "cudagraph_specialize_lora"),
            *("use_inductor_graph_partition", "pass_config", "max_cudagraph_capture_size", "dynamic_shapes_config"),
            *("local_cache_dir", "fast_moe_cold_start", "enabled_custom_ops", "disabled_custom_ops", "traced_files"),
            *("compilation_time", "encoder_compilation_time", "static_forward_context", "static_all_moe_layers"),
        }
    ),
}
"""Fields of each class of vLLM's configuration that decide no byte, in 0.32 and 0.33."""

HARMLESS_ENVIRONMENT = frozenset(
    {
        # which of several engines this is, how its processes are bound and started
        *("VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_CI_ENV"),
        *("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_PP_LAYER_PARTITION", "VLLM_ENABLE_V1_MULTIPROCESSING"),
        *("VLLM_LOOPBACK_IP", "VLLM_PROCESS_NAME_PREFIX", "VLLM_INSTANCE_ID", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
        *("VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_DP_PLACEMENT_NODE_IPS", "VLLM_RAY_PER_WORKER_GPUS"),
        # ports, addresses and waits of other transfers, which each engine of a node has its own of
        *("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_EC_SIDE_CHANNEL_HOST", "VLLM_EC_SIDE_CHANNEL_PORT"),
        *("VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT", "VLLM_P2P_HANDSHAKE_TIMEOUT_S"),
        *("VLLM_P2P_IDLE_TIMEOUT_S", "VLLM_P2P_MAX_PEERS", "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
        *("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "MOONCAKE_PREFERRED_SEGMENT"),
        *("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_ENGINE_READY_TIMEOUT_S"),
        # files and folders
        *("VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_TORCH_PROFILER_DIR", "VLLM_CUSTOM_SCOPES_FOR_PROFILING"),
        *("VLLM_XGRAMMAR_CACHE_MB", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_NVTX_SCOPES_FOR_PROFILING"),
    }
)
"""Variables that decide no byte, of those that vLLM counts among what decides compiled code."""


def config_facts(vllm_config: object) -> dict[str, str]:
    """Return a digest of each part of a configuration that decides bytes, by its name."""
    return {name: digest_of(part) for name, part in _deciding_parts(vllm_config).items()}


def config_details(vllm_config: object, factors: Mapping[str, object]) -> dict[str, str]:
    """Return the values behind ``config_facts`` and ``environment_fact`` that are set, for operators to compare."""
    parts = {**_deciding_parts(vllm_config), "environment": _deciding_factors(factors)}
    named = {f"{part}.{name}": each for part, value in parts.items() for name, each in _fields_of(value).items()}
    return {name: _shown(each) for name, each in sorted(named.items()) if each not in (None, False, "", [], {})}


def environment_fact(factors: Mapping[str, object]) -> str:
    """Return a digest of the variables that may change kernels. ``factors``: vLLM's ``envs.compile_factors()``."""
    return digest_of(_deciding_factors(factors))


def _deciding_parts(vllm_config: object) -> dict[str, object]:
    parts = {name: part for name, part in fields_of(vllm_config).items() if name not in WHOLE and part is not None}
    return {name: canonical(part, HARMLESS) for name, part in parts.items()}


def _deciding_factors(factors: Mapping[str, object]) -> object:
    return canonical({name: factors[name] for name in factors if name not in HARMLESS_ENVIRONMENT}, HARMLESS)


def _fields_of(value: object) -> dict[str, object]:
    """Return the fields of what ``canonical`` made, by their names; anything without names is one field."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict):
        return dict(value[1])
    return dict(value) if isinstance(value, dict) else {"value": value}


def _shown(value: object) -> str:
    """A short value; the digest of a long one, and of one with names in it, some of which may be secrets."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
    return text if len(text) <= SHOWN_CHARACTERS and "{" not in text else digest_of(value)
