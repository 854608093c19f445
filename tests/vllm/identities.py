"""Prints under which names engines of the installed vLLM would share, by its real configurations; starts none.

python -m tests.vllm.identities FOLDER OTHER_FOLDER     # of one checkpoint, under two names
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs
from cachesvc_vllm.media import Runtime, model_facts, model_name
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

TRANSFER = {"kv_connector": "CachesvcConnector", "kv_connector_module_path": "cachesvc_vllm", "kv_role": "kv_both"}
PER_TENSOR = {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 512,
    },
    "original_max_position_embeddings": 512,
}

SAME: dict[str, dict[str, Any]] = {
    "again": {},
    "length": {"max_model_len": 512},
    "memory": {"gpu_memory_utilization": 0.1},
    "blocks": {"num_gpu_blocks_override": 77},
    "batch": {"max_num_batched_tokens": 4096, "max_num_seqs": 3},
    "graphs": {"enforce_eager": False},
    "engine_id": {"kv_transfer_config": {**TRANSFER, "engine_id": "another"}},
    "shown as": {"served_model_name": ["another"]},
    "statistics": {"disable_log_stats": True},
    "sampling": {"override_generation_config": {"temperature": 0.5}},
    "seed": {"seed": 5},
    "trust without code": {"trust_remote_code": True},
    "prompt embeddings": {"enable_prompt_embeds": True},
}
"""Options that decide no byte."""

OTHER: dict[str, dict[str, Any]] = {
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "dtype": {"dtype": "float32"},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}},
    "model_impl": {"model_impl": "transformers"},
    "load_format": {"load_format": "pt"},
    "fp8": {"quantization": "fp8"},
    "online": PER_TENSOR,
    "online, per block": {**PER_TENSOR, "quantization_config": {"linear": "fp8_per_block"}},
    "online, less": {**PER_TENSOR, "quantization_config": {"linear": "fp8_per_tensor", "ignore": ["re:.*down_proj"]}},
    "longrope": {"hf_overrides": LONGROPE},
    "longrope, longer": {"hf_overrides": LONGROPE, "max_model_len": 2000},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    },
}
"""Options each of which decides bytes, apart from all others too."""


@dataclass
class FutureModelConfig(ModelConfig):  # type: ignore[misc]  # vLLM is not installed beside mypy
    """A release's that adds an option."""

    an_option_of_the_next_release: bool = False


def name(folder: str, **options: Any) -> str:
    """Name of an engine's model with these options."""
    return _name(_config(folder, **options))


def future_names(folder: str) -> list[str]:
    """With the new option off, and on."""
    names = []
    for is_on in (False, True):
        config = _config(folder)
        values = dict(vars(config.model_config))
        config.model_config = FutureModelConfig.__new__(FutureModelConfig)
        vars(config.model_config).update(values, an_option_of_the_next_release=is_on)
        names.append(_name(config))
    return names


def _config(folder: str, **options: Any) -> Any:
    settings = {"skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, **options}
    return EngineArgs(model=folder, **{"kv_transfer_config": TRANSFER, **settings}).create_engine_config()


def _name(config: Any) -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    layers = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    runtime = Runtime("0", "3", "", ("X",), environment=vllm.envs.compile_factors())
    return model_name(model_facts(config, layers, None, runtime))


def main() -> None:
    """Print one line of JSON."""
    folder, other = sys.argv[1:]
    told = {
        "first": name(folder),
        "same": {"folder": name(other), **{each: name(folder, **SAME[each]) for each in SAME}},
        "other": {each: name(folder, **OTHER[each]) for each in OTHER},
        "future": future_names(folder),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
