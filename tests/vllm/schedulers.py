"""vLLM's own scheduler for ``scheduling``, with the connector, and the groups of a shape."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from cachesvc_vllm.settings import Settings
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.rig import MODEL
from tests.vllm.shape import BLOCK_TOKENS, Group, Shape


def _spec(group: Group, drafts: int) -> KVCacheSpec:
    """vLLM's own, with states as large as blocks."""
    if group.is_state:
        shapes, dtypes = ((BLOCK_TOKENS, 8),), (torch.float16,)
        return MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=shapes,
            dtypes=dtypes,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
            num_prefill_checkpoint_blocks=int(group.saves_within),
            prefill_checkpoint_alignment=1 if group.saves_within else None,
        )
    common = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    if group.window_tokens is None:
        return FullAttentionSpec(**common)
    return SlidingWindowSpec(**common, sliding_window=group.window_tokens)


def make_scheduler(name: str, settings: Settings, shape: Shape, longest_tokens: int) -> Any:
    """vLLM's own, with our connector."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        drafting: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": shape.drafts, "prompt_lookup_max": 3}
        if shape.draft_blocks:
            drafter = Path(folder, "drafter")
            drafter.mkdir()
            Path(drafter, "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1}), encoding="utf-8")
            drafting = {
                "method": "eagle",
                "model": str(drafter),
                "num_speculative_tokens": shape.drafts,
                "disable_eagle_block_drop": shape.keeps_last,
            }
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=longest_tokens,
            max_num_seqs=shape.at_a_time,
            max_num_batched_tokens=shape.step_tokens,
            num_gpu_blocks_override=shape.pages,
            gpu_memory_utilization=0.2,
            enforce_eager=True,
            async_scheduling=shape.is_async,
            scheduling_policy="priority" if shape.has_priorities else "fcfs",
            speculative_config=drafting if shape.drafts else None,
            disable_hybrid_kv_cache_manager=len(shape.groups) == 1,
            prefix_caching_hash_algo="sha256_cbor",
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=bool(shape.events), endpoint=f"ipc://{shape.events}/{name}"
            ),
            kv_transfer_config={
                "kv_connector": "CachesvcConnector",
                "kv_connector_module_path": "cachesvc_vllm",
                "kv_role": "kv_producer" if shape.is_async else "kv_both",
                "kv_load_failure_policy": "recompute" if shape.recomputes else "fail",
                "engine_id": name,
                "kv_connector_extra_config": {
                    "socket": settings.socket,
                    "stock_blocks": settings.stock_blocks,
                    "draft_blocks": settings.draft_blocks,
                    "weights_version": settings.weights_version,
                },
            },
        ).create_engine_config()
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.cache_config.num_gpu_blocks = shape.pages
    config.cache_config.block_size = shape.block_tokens
    config.cache_config.mamba_cache_mode = "align"
    init_none_hash(sha256_cbor)
    groups = [KVCacheGroupSpec([f"l{index}"], _spec(each, shape.drafts)) for index, each in enumerate(shape.groups)]
    retained = 0 if len(groups) > 1 else None
    memory = KVCacheConfig(shape.pages, [], groups, prefix_cache_retention_interval=retained)
    kind = AsyncScheduler if shape.is_async else Scheduler
    made = kind(config, memory, StructuredOutputManager(config), shape.block_tokens, shape.hash_tokens)
    assert config.kv_transfer_config.is_kv_consumer  # a producer is served as both, before the scheduler looks
    made.defer_block_free = shape.steps_under_way > 1  # as on a GPU: here vLLM has one step at a time
    return made
